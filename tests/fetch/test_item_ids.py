"""Ids of items as sellers write them: accepted once, found everywhere by the same text."""

from __future__ import annotations

import csv
import io
import random
import re
import shlex
import string
from html import unescape

import pytest
from fetch_ways import CommandWay, HttpWay, PythonWay
from room import LIMITS
from test_validation import HOSTILE_IDS, REFUSED_IDS
from tests.kit.ways_in import Refused

from headrace.fetch.model import SentItem
from headrace.fetch.validation import ITEM_ID_CHARACTERS_MAX, find_item_id


def catalogue(ids, link: str = "") -> str:
    out = io.StringIO()
    rows = csv.writer(out)
    rows.writerow(("id", "name", "price", "photos"))
    rows.writerows((one, f"Item {number}", 5, link) for number, one in enumerate(ids))
    return out.getvalue()


@pytest.mark.usefixtures("worker")
async def test_hostile_ids_pass_every_surface(shop, client, tmp_path):
    """Photos of each id are downloaded, and the item is the same on each surface."""
    link = shop.origin.url("/photo/1")
    text = catalogue(HOSTILE_IDS, link)
    ways = (PythonWay(shop.fetch, tmp_path), HttpWay(client), CommandWay(shop.fetch, tmp_path))
    stored = {find_item_id(one): number for number, one in enumerate(HOSTILE_IDS)}
    for number, way in enumerate(ways):
        customer = f"c{number}"
        await shop.fetch.customers.set(customer, **LIMITS)
        run = await way.do("run", {"customer": customer, "text": text})
        assert (run["invalid"], run["new"]) == (0, len(stored)) == (0, len(HOSTILE_IDS))
        changes = await way.do("changes", {"run": run["run"]})
        assert {change["item"] for change in changes} == stored.keys()
        done = await shop.wait_done(await shop.fetch.runs.get(run["run"]))
        assert sum(done.photos_by_outcome.values()) == len(HOSTILE_IDS)
        for one, place in stored.items():
            found = await way.do("item", {"customer": customer, "item": one})
            assert (found["id"], found["fields"]["name"]) == (one, f"Item {place}")
            assert found["photos"][0]["key"], one
        results = await way.do("results", {"limit": 1000})
        assert {r["id"] for r in results if r["customer"] == customer} == stored.keys()
        for one in REFUSED_IDS:
            if one and len(one) < 1000 and one.isprintable():
                with pytest.raises(Refused, match="404"):
                    await way.do("item", {"customer": customer, "item": one})
        gone = [{"customer": customer, "item": one, "gone": True} for one in HOSTILE_IDS]
        [sent] = await way.do("send_items", {"items": gone})
        assert sent["gone"] == len(HOSTILE_IDS)
    assert {item.id for item in shop.items} == stored.keys()


async def test_pages_of_changes_continue_after_any_id(shop, client, command):
    run = await shop.run(catalogue(HOSTILE_IDS))
    seen, after = [], ""
    while True:
        params = {"after": after, "limit": 7}
        page = (await client.get(f"/v1/fetch/runs/{run.run}/changes", params=params)).json()
        seen += [change["item"] for change in page["changes"]]
        if page["next_after"] is None:
            break
        after = page["next_after"]
    assert sorted(seen) == sorted(map(find_item_id, HOSTILE_IDS))
    shown, words = [], ["catalogue", "diff", str(run.run), "--limit", "7"]
    for _ in range(len(HOSTILE_IDS)):
        code, text = await command(*words)
        assert code == 0
        shown += re.findall(r"^  new      (.*): name 'Item \d+', price '5'$", text, re.MULTILINE)
        more = re.search(r"^more: `headrace fetch (.*)`$", text, re.MULTILINE | re.DOTALL)
        if more is None:
            break
        words = [*shlex.split(more[1]), "--limit", "7"]
    assert sorted(shown) == sorted(map(find_item_id, HOSTILE_IDS))


async def test_reports_show_any_id(shop, client):
    text = catalogue(HOSTILE_IDS).replace(",5,", ",five,")
    run = await shop.run(f'{text}\n"ok",Good,5,')
    assert run.invalid == len(HOSTILE_IDS)
    items = [p.item for _, p in await shop.fetch.reports.problems(run.run)]
    assert items == [find_item_id(one) for one in HOSTILE_IDS]
    answer = (await client.get(f"/v1/fetch/runs/{run.run}/errors", params={"limit": 1000})).json()
    assert [p["item"] for p in answer["problems"]] == items
    sheet = (await client.get(f"/v1/fetch/runs/{run.run}/errors?format=csv")).content
    cells = [
        row["item"] for row in csv.DictReader(io.StringIO(sheet.decode("utf-8-sig"), newline=""))
    ]
    assert [cell.removeprefix("'") if cell != "'" else cell for cell in cells] == [
        one.removeprefix("'") if one != "'" else one for one in items
    ]
    page = (await client.get(f"/v1/fetch/runs/{run.run}/report")).text
    assert "<script>alert" not in page
    assert all(f"<td>{one}</td>" in unescape(page) for one in items)


async def test_the_longest_id_may_have_the_longest_link(shop):
    """One index entry holds 2,704 bytes; the id alone is 800 of them, and random URLs do not
    compress.
    """
    rng = random.Random(3)
    item = "".join(chr(rng.randrange(0x20000, 0x2A000)) for _ in range(ITEM_ID_CHARACTERS_MAX))
    letters = string.ascii_letters + string.digits
    urls = [shop.origin.url("/photo/") + "".join(rng.choices(letters, k=2000)) for _ in range(2)]
    run = await shop.run(f"id,name,price,photos\n{item},A,5,{'|'.join(urls)}\n")
    assert (run.new, run.photos_pending) == (1, 2)


async def test_ids_that_differ_only_in_form_are_one_item(shop):
    run = await shop.run("id,name,price\nи\u0306,A,5\nй,B,5\n")
    assert (run.new, run.invalid) == (1, 1)
    [(_, problem)] = await shop.fetch.reports.problems(run.run)
    assert problem.code == "duplicate_id"
    again = await shop.run("id,name,price\nй,A,5\n")
    assert again.unchanged == 1
    await shop.fetch.send_items([SentItem(customer="shop", item=" и\u0306 ", fields={"name": "C"})])
    assert (await shop.fetch.items.get("shop", "и\u0306")).fields["name"] == "C"
