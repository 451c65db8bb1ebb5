"""Ids of items as sellers write them: accepted once, found everywhere by the same text."""

from __future__ import annotations

import csv
import io
import json
import random
import re
import shlex
import string
import unicodedata
from html import unescape
from urllib.parse import quote

import pytest
from fetch_ways import CommandWay, HttpWay, PythonWay
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.ways_in import Refused

from headrace.fetch.model import SentItem
from headrace.fetch.validation import ITEM_ID_CHARACTERS_MAX, find_item_id

ORDINARY = ("A/1", "A 1", "арт-1", "A(1)", "№5")
SIGNS = (
    ". .. ../../etc/passwd / // a//b /a/ a/../b %2F %00 % -5 --help - =1+1 @x +x ' \" `id` $(id)"
)
WORDS = (
    "a'b\"c \\ \\u0000 a?b#c a&b=c id=1 ; a,b a|b {} <script>alert(1)</script> null None NaN 0 00"
)
LETTERS = "1e3 true é 日本語 नमस्ते JOINED 🇷🇺 ﬁ İ ß".replace("JOINED", "👩\u200d🔧")
HOSTILE = (
    *(*ORDINARY, *SIGNS.split(), *WORDS.split(), *LETTERS.split(), "\u017f", "{{ 7*191 }}"),
    *("\ufffd", "a\u00a0b", "\u2011", "x" * 200, "😀" * 200, "я" * 200),
)
REFUSED = (
    *("", " ", "\t", "\u2003", "x" * 201, "😀" * 201, "x" * 1_000_000),
    *("a\x00b", "a\nb", "a\tb", "a\x7fb", "a\x85b", "a\u2028b", "a\u2029b", "\ud800", "a\udfff"),
    *("\ufeffa", "a\u200bb", "a\u00adb", "a\u202eb", "\u200ea", "a\u2066b", "a\u061cb"),
    "\U000e0041",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_an_id_is_any_text_that_can_be_seen(text):
    found = find_item_id(text)
    assert found == unicodedata.normalize("NFC", text)
    assert find_item_id(found) == found
    assert find_item_id(f" \u00a0{text}\u3000\n") == found, "white space around it is no part of it"


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: ascii(text[:8]))
def test_what_nobody_sees_is_no_id(text):
    assert find_item_id(text) is None


def test_one_letter_has_one_form():
    composed, decomposed = "й", "и\u0306"
    assert find_item_id(decomposed) == find_item_id(composed) == composed
    assert find_item_id("a" + "\u0306" * 1000) is None
    assert len(find_item_id(decomposed * ITEM_ID_CHARACTERS_MAX)) == ITEM_ID_CHARACTERS_MAX


@given(st.text(max_size=220))
def test_an_id_once_accepted_stays_as_it_is(text):
    found = find_item_id(text)
    if found is None:
        return
    assert find_item_id(found) == found
    assert 1 <= len(found) <= ITEM_ID_CHARACTERS_MAX
    assert found == found.strip()
    assert not any(unicodedata.category(c) in ("Cc", "Cs") for c in found)
    found.encode()


def catalogue(ids) -> str:
    out = io.StringIO()
    rows = csv.writer(out)
    rows.writerow(("id", "name", "price", "photos"))
    rows.writerows((one, f"Item {number}", 5, "") for number, one in enumerate(ids))
    return out.getvalue()


@pytest.fixture(params=["python", "http", "commands"])
def way(request, shop, client, tmp_path):
    """Each way into the room in turn."""
    folder = tmp_path / "way"
    folder.mkdir()
    return {
        "python": lambda: PythonWay(shop.fetch, folder),
        "http": lambda: HttpWay(client),
        "commands": lambda: CommandWay(shop.fetch, folder),
    }[request.param]()


@pytest.mark.usefixtures("worker")
async def test_hostile_ids_go_through_each_way(way, shop):
    stored = {find_item_id(one): number for number, one in enumerate(HOSTILE)}
    run = await way.do("run", {"customer": "shop", "text": catalogue(HOSTILE)})
    assert (run["invalid"], run["new"]) == (0, len(stored)) == (0, len(HOSTILE))
    changes = await way.do("changes", {"run": run["run"]})
    assert {change["item"] for change in changes} == stored.keys()
    for one, number in stored.items():
        found = await way.do("item", {"customer": "shop", "item": one})
        assert (found["id"], found["fields"]["name"]) == (one, f"Item {number}")
    await shop.wait_done(await shop.fetch.runs.get(run["run"]))
    results = await way.do("results", {"limit": 1000})
    assert {result["id"] for result in results} == stored.keys()
    assert {item.id for item in shop.items} == stored.keys()
    gone = [{"customer": "shop", "item": one, "gone": True} for one in HOSTILE]
    [sent] = await way.do("send_items", {"items": gone})
    assert sent["gone"] == len(HOSTILE)
    assert (await way.do("item", {"customer": "shop", "item": HOSTILE[0]}))["is_gone"]


async def test_refused_ids_are_unknown_and_never_an_error_of_ours(way):
    for text in REFUSED:
        if text and len(text) < 1000 and text.isprintable():
            with pytest.raises(Refused, match="404"):
                await way.do("item", {"customer": "shop", "item": text})


async def test_pages_of_changes_go_on_behind_any_id(shop, client, command):
    run = await shop.run(catalogue(HOSTILE))
    seen, after = [], ""
    while True:
        params = {"after": after, "limit": 7}
        page = (await client.get(f"/v1/fetch/runs/{run.run}/changes", params=params)).json()
        seen += [change["item"] for change in page["changes"]]
        if page["next_after"] is None:
            break
        after = page["next_after"]
    assert sorted(seen) == sorted(map(find_item_id, HOSTILE))
    shown, words = [], ["catalogue", "diff", str(run.run), "--limit", "7"]
    for _ in range(len(HOSTILE)):
        code, text = await command(*words)
        assert code == 0
        shown += re.findall(r"^  new      (.*)$", text, re.MULTILINE)
        more = re.search(r"^more: `headrace fetch (.*)`$", text, re.MULTILINE | re.DOTALL)
        if more is None:
            break
        words = [*shlex.split(more[1]), "--limit", "7"]
    assert sorted(shown) == sorted(map(find_item_id, HOSTILE))


async def test_reports_show_any_id(shop, client):
    text = catalogue(HOSTILE).replace(",5,", ",five,")
    run = await shop.run(f'{text}\n"ok",Good,5,')
    assert run.invalid == len(HOSTILE)
    told = [p.item for _, p in await shop.fetch.reports.problems(run.run)]
    assert told == [find_item_id(one) for one in HOSTILE]
    answer = (await client.get(f"/v1/fetch/runs/{run.run}/errors", params={"limit": 1000})).json()
    assert [p["item"] for p in answer["problems"]] == told
    sheet = (await client.get(f"/v1/fetch/runs/{run.run}/errors?format=csv")).content
    cells = [
        row["item"] for row in csv.DictReader(io.StringIO(sheet.decode("utf-8-sig"), newline=""))
    ]
    assert [cell.removeprefix("'") if cell != "'" else cell for cell in cells] == [
        one.removeprefix("'") if one != "'" else one for one in told
    ]
    page = (await client.get(f"/v1/fetch/runs/{run.run}/report")).text
    assert "<script>alert" not in page
    assert all(f"<td>{one}</td>" in unescape(page) for one in told)


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


@pytest.mark.usefixtures("worker")
async def test_photos_of_any_id_are_asked_and_published(shop):
    link = shop.origin.url("/photo/1")
    rows = [{"id": one, "name": "A", "price": 5, "photos": [link]} for one in HOSTILE]
    run = await shop.run_to_end(json.dumps(rows), name="shop.json")
    assert run.photos_by_outcome.keys() <= {"stored", "known"}
    assert sum(run.photos_by_outcome.values()) == len(HOSTILE)
    assert all(item.photos[0].key for item in shop.items)
    assert {item.id for item in shop.items} == set(map(find_item_id, HOSTILE))


async def test_the_address_of_an_item_takes_its_id_percent_encoded(client, shop):
    await shop.run(catalogue(HOSTILE))
    for one in HOSTILE:
        answer = await client.get(f"/v1/fetch/customers/shop/item?id={quote(one, safe='')}")
        assert answer.json()["id"] == find_item_id(one)
