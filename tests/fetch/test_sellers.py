"""Pages of sellers behind signed links, and uploads that wait for a review."""

from __future__ import annotations

import re
from html import unescape

import pytest
from room import HEAD, LIMITS, Process, rows, seller_key

from headrace.fetch import FieldRule, Mapping, RunState, Schema
from headrace.fetch.errors import (
    CatalogueBroken,
    CatalogueTooLarge,
    InvalidCustomer,
    InvalidSource,
    NotACatalogue,
    RunNotHeld,
)
from headrace.fetch.i18n import languages
from headrace.fetch.model import SentItem
from headrace.fetch.seller_page import POLICY
from headrace.fetch.service.sellers import BURST_S, PATH, SELLER_USE
from headrace.kernel.signing import sign_cursor

PAGE = {"accept": "text/html"}
EVIL = "<script>alert(1)</script>\"'&"


def token_of(link) -> str:
    """The signed part of a link."""
    return link.url.partition(PATH)[2]


def forged(*position) -> str:
    """A link that is signed correctly."""
    return sign_cursor(seller_key(), SELLER_USE, {}, list(position))


def plain(page: str) -> str:
    """The text of a page."""
    return unescape(re.sub(r"<[^>]+>", " ", page))


async def test_a_link_shows_its_own_customer_and_nothing_else(shop, client):
    await shop.fetch.customers.set("rival", **LIMITS)
    await shop.run(HEAD + rows(3) + "bad,Bad,cheap,\n", name="mine.csv")
    secret = await shop.run(HEAD + "r1,Rival's lamp,5,\nr2,Rival's,dear,\n", customer="rival")
    link = await shop.fetch.sellers.link("shop", days=1)
    client.headers.pop("authorization")
    found = await client.get(f"{link.url}?fbclid=added", headers=PAGE)
    assert found.status_code == 200
    assert {name: found.headers[name] for name in ("cache-control", "x-robots-tag")} == {
        "cache-control": "private, no-store",
        "x-robots-tag": "noindex, nofollow",
    }
    assert found.headers["content-security-policy"] == POLICY
    assert found.headers["referrer-policy"] == "no-referrer"
    text = plain(found.text)
    assert "mine.csv" in text
    assert "the field price is cheap: write a number such as 1990.50" in text
    assert "rival" not in text.lower()
    other = await client.get(f"{link.url}?run={secret.run}", headers=PAGE)
    assert (other.status_code, "rival" in other.text.lower()) == (404, False)
    assert (await client.get(f"{link.url}?run=x")).status_code == 422
    rival = await client.get((await shop.fetch.sellers.link("rival")).url)
    assert "mine.csv" not in rival.text
    for method in ("POST", "PUT", "DELETE"):
        assert (await client.request(method, link.url)).status_code == 405
    for path in ("/v1/fetch/runs", "/v1/fetch/customers/shop"):
        answer = await client.get(path, headers={"authorization": f"Bearer {token_of(link)}"})
        assert answer.status_code == 401


async def test_a_changed_expired_or_revoked_link_is_refused_calmly(shop, client):
    good = token_of(await shop.fetch.sellers.link("shop"))
    tampered = [
        good[:n] + ("A" if good[n] != "A" else "B") + good[n + 1 :] for n in range(len(good))
    ]
    unknown = [*tampered[:-1], good[:-4], good + "AAAA", "x", "%00", "é", "a" * 5000, "a/b"]
    for token in unknown:
        answer = await client.get(PATH + token, headers=PAGE)
        assert answer.status_code == 404, token
    assert "not valid" in answer.text or answer.headers["content-type"].startswith("application")
    assert (await client.get(PATH + forged("shop", 0, 2**33))).status_code == 200
    await shop.fetch.sellers.revoke("shop")
    for token in (forged("shop", 1, 1), forged("nobody", 0, 2**33), good):
        answer = await client.get(PATH + token, headers={**PAGE, "accept-language": "ru"})
        assert (answer.status_code, '<html lang="ru">' in answer.text) == (410, True)
        assert answer.headers["content-security-policy"] == POLICY
        problem = (await client.get(PATH + token)).json()
        assert problem["code"] == "fetch.seller_link_ended"
    fresh = await shop.fetch.sellers.link("shop")
    assert (await client.get(fresh.url)).status_code == 200
    for days in (0, 367):
        with pytest.raises(InvalidCustomer):
            await shop.fetch.sellers.link("shop", days=days)


async def test_one_customers_page_has_a_rate_limit_of_its_own(shop, client):
    await shop.fetch.customers.set("rival", **LIMITS)
    url = (await shop.fetch.sellers.link("shop")).url
    states = [(await client.get(url, headers=PAGE)).status_code for _ in range(int(BURST_S) + 2)]
    assert (states[0], states[-1]) == (200, 429)
    assert (await client.get(url)).headers["retry-after"]
    assert (await client.get((await shop.fetch.sellers.link("rival")).url)).status_code == 200


async def test_nothing_of_a_file_becomes_markup_of_the_page(shop, client):
    quoted = EVIL.replace('"', '""')
    text = f'id,name,price,photos\n"{quoted}","{quoted}","{quoted}","javascript:alert(1)"\n'
    address = "/v1/fetch/customers/shop/catalogues"
    sent = await client.post(address, params={"file_name": f"{EVIL}.csv"}, content=text)
    assert sent.status_code == 202
    url = (await shop.fetch.sellers.link("shop")).url
    for lang in languages():
        page = (await client.get(f"{url}?lang={lang}")).text
        assert f'<html lang="{lang}">' in page
        assert "<script" not in page
        assert EVIL in unescape(page)
        links = re.findall(r'href="([^"]*)"', page)
        assert links
        assert all(re.fullmatch(r"\?lang=\w+&amp;run=\d+", one) for one in links)
    assert '<html lang="en">' in (await client.get(f"{url}?lang=<b>")).text


async def test_the_problems_are_grouped_with_line_value_and_fix(shop, client, worker):
    bad = "".join(f"b{n},Bad,cheap{n},\n" for n in range(30))
    gone = shop.origin.url("/status/404")
    run = await shop.run_to_end(f"{HEAD}{bad}g1,Good,5,{gone}\n,No id,5,\n")
    assert run.photos_by_outcome
    text = plain((await client.get((await shop.fetch.sellers.link("shop")).url)).text)
    assert "price: 30" in text
    assert "id: 1" in text
    assert text.count("write a number such as 1990.50") == 20, "the first rows of a long group"
    assert gone in text
    assert "there is no photo at this link (404): correct the link: 1" in text


async def test_feeds_and_undos_are_no_catalogues_and_hide_no_problems(shop, client):
    await shop.run(HEAD + rows(2), name="first.csv")
    await shop.run(HEAD + rows(3) + "bad,Bad,cheap,\n", name="mine.csv")
    for name, text in (("p1.csv", "id,price\ni000,4\ni001,4\n"), ("p2.csv", "id,price\nzz,4\n")):
        feed = await shop.run(text, name=name, is_supplemental=True)
    assert feed.gone == 2
    url = (await shop.fetch.sellers.link("shop")).url
    page = (await client.get(url)).text
    text = plain(page)
    assert "p2.csv Prices and stock only." in " ".join(text.split())
    assert "items back at the values of the catalogue: 2" in text
    assert "removed: 2" not in text
    assert "the field price is cheap" in text, "the problems of the seller's own file"
    shown = plain((await client.get(f"{url}?run={feed.run}&lang=ru")).text)
    assert "Дополнительный фид от" in shown
    assert "снятых: 2" not in shown
    [mine] = [run for run in await shop.fetch.runs.newest("shop") if run.file_name == "mine.csv"]
    undo = await shop.fetch.runs.undo(mine.run)
    text = plain((await client.get(url)).text)
    assert (f"run {mine.run}" in text, "Undone by the site" in text) == (False, True)
    assert "the field price is cheap" in text
    assert (await client.get(f"{url}?run={undo.run}")).status_code == 404
    good = await shop.run(HEAD + rows(3))
    assert "No problems were found." in plain((await client.get(url)).text), good.state


SCHEMA = Schema(
    fields={
        "year": FieldRule(type="integer", required=True, least=1990, most=2026),
        "state": FieldRule(type="one_of", values=["new", "used"], required=True),
        "made": FieldRule(type="date", least="2027-02-03"),
        "tags": FieldRule(type="list", length_least=3),
        "note": FieldRule(length_least=40),
        "vin": FieldRule(pattern="[A-Z]{3}[0-9]{4}"),
        "is_open": FieldRule(type="boolean"),
        "photos": FieldRule(required=True, length_least=2),
    }
)


@pytest.mark.parametrize("is_mapped", [False, True])
async def test_the_example_is_a_row_that_is_accepted(shop, client, is_mapped):
    """The table on the page is sent back as a catalogue, unchanged."""
    await shop.fetch.schemas.set("default", SCHEMA)
    mapping = None
    if is_mapped:
        mapping = "theirs"
        names = {name: f"Их {name}" for name in SCHEMA.fields if name != "photos"}
        given = Mapping(id="Код", name=["Имя", "b"], photos="Фото", fields=names, delimiter=";")
        await shop.fetch.mappings.set(mapping, given)
        await shop.fetch.sources.set(
            "shop", url=shop.origin.url("/a.csv"), cron="0 4 * * *", mapping=mapping
        )
    page = (await client.get((await shop.fetch.sellers.link("shop")).url)).text
    example = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td>", page.rpartition("<h2>")[2])
    table = "\n".join(";".join(cells) for cells in zip(*example, strict=True))
    assert "required; a whole number such as 12; at least 1990; at most 2026" in plain(page)
    assert "[A-Z]{3}[0-9]{4}" in plain(page)
    assert "required; links to photos, separated by |; at least 2 characters or values" in plain(
        page
    )
    sent = unescape(table).replace("https://shop.example/", shop.origin.url("/"))
    run = await shop.run(sent, mapping=mapping)
    assert (await shop.problems(run), run.new) == ([], 1)


async def test_links_by_command_and_over_http(shop, client, command):
    code, text = await command("seller-link", "shop", "--days", "2")
    assert (code, PATH in text) == (0, True)
    address = "/v1/fetch/customers/shop/seller-link"
    made = (await client.post(address, json={"days": 3})).json()
    assert made["url"].startswith(f"http://127.0.0.1{PATH}")
    assert (await client.get(made["url"])).status_code == 200
    assert (await client.post(address, json={"days": 0})).status_code == 422
    assert (await client.post(address.replace("shop", "nobody"), json={})).status_code == 404
    assert (await command("seller-link", "nobody"))[0] == "fetch.customer_unknown"
    assert (await command("seller-link", "shop", "--revoke"))[0] == 0
    assert (await client.get(made["url"])).status_code == 410
    assert (await client.delete(address)).status_code == 204


# Uploads for review


async def test_an_upload_for_review_shows_its_changes_and_applies_them(shop, blobs, config, client):
    """The upload survives the process that received it."""
    await shop.run(HEAD + rows(3))
    file = HEAD + rows(1) + "i001,Other <name>,7,\nnew,New one,9,\nbad,Bad,cheap,\n"
    address = "/v1/fetch/customers/shop/catalogues"
    held = (await client.post(address, params={"review": True}, content=file)).json()
    assert (held["state"], held["reason"][:6]) == ("held", "review")
    assert (held["new"], held["changed"], held["gone"], held["invalid"]) == (1, 1, 1, 1)
    page = await client.get(f"/v1/fetch/runs/{held['run']}/changes")
    found = {one["item"]: (one["kind"], one["values"]) for one in page.json()["changes"]}
    assert found == {
        "i001": ("changed", {"name": ["Item 1", "Other <name>"], "price": ["5", "7"]}),
        "i002": ("gone", {"name": ["Item 2", None], "price": ["5", None]}),
        "new": ("new", {"name": [None, "New one"], "price": [None, "9"]}),
    }
    assert (await shop.fetch.items.get("shop", "i001")).fields["name"] == "Item 1"
    other = Process(shop, blobs, config)
    applied = await other.fetch.runs.confirm(held["run"])
    await other.fetch.close()
    assert (applied.new, applied.changed, applied.gone, applied.reason) == (1, 1, 1, None)
    assert (await shop.fetch.items.get("shop", "i001")).fields["name"] == "Other <name>"
    after = await shop.fetch.runs.changes(held["run"])
    assert {one.item: (one.kind, one.values) for one in after} == found


async def test_a_review_is_refused_once_its_items_changed(shop, command):
    await shop.run(HEAD + rows(3))
    held = await shop.run(HEAD + rows(2, price=6) + "new,New,1,\n", is_review=True)
    sent = SentItem(customer="shop", item="i001", fields={"name": "Sent", "price": "9"})
    await shop.fetch.send_items([sent])
    for _ in range(2):
        with pytest.raises(RunNotHeld, match="items changed since its comparison"):
            await shop.fetch.runs.confirm(held.run)
    _, text = await command("run", "show", str(held.run))
    assert ("catalogue confirm" in text, "upload the catalogue again" in text) == (False, True)
    assert (await shop.fetch.items.get("shop", "i000")).fields["price"] == "5"
    again = await shop.run(HEAD + rows(2, price=6), is_review=True)
    await shop.run(HEAD + rows(3, price=8))
    with pytest.raises(RunNotHeld, match="was applied since"):
        await shop.fetch.runs.confirm(again.run)


async def test_an_upload_that_nobody_confirms_is_discarded_with_its_rows(shop):
    await shop.run(HEAD + rows(30))
    kept = await shop.run(HEAD + rows(1))
    await shop.fetch.upkeep.enforce_deadlines()
    assert (await shop.fetch.runs.get(kept.run)).state is RunState.HELD, "not for review"
    held = await shop.run(HEAD + rows(29, price=6), is_review=True)
    await shop.fetch.upkeep.enforce_deadlines()
    assert (await shop.fetch.runs.get(held.run)).state is RunState.HELD
    await shop.sql("UPDATE #fetch_run SET review_until = now() WHERE review_until IS NOT NULL")
    await shop.fetch.upkeep.enforce_deadlines()
    expired = await shop.fetch.runs.get(held.run)
    assert (expired.state, expired.reason[:7]) == (RunState.SUPERSEDED, "expired")
    assert await shop.count("fetch_staged") == 0
    with pytest.raises(RunNotHeld):
        await shop.fetch.runs.confirm(held.run)


async def test_a_bad_file_for_review_is_refused_and_a_suspicious_one_says_why(shop, command):
    await shop.run(HEAD + rows(30))
    object.__setattr__(shop.fetch.config, "catalogue_max_bytes", 2**16)
    for body, refusal in (
        (b"", NotACatalogue),
        (b"%PDF-1.7 x", NotACatalogue),
        (b"PK\x03\x04" + bytes(100), NotACatalogue),
        (HEAD.encode() + b"x" * 2**17, CatalogueTooLarge),
        (b"<yml_catalog><shop></offers></shop>", CatalogueBroken),
    ):
        with pytest.raises(refusal):
            await shop.run(body, is_review=True)
    held = await shop.run(HEAD + rows(1), is_review=True)
    assert held.reason.startswith("shrunk")
    with pytest.raises(InvalidSource, match="cannot be combined with dry_run or supplemental"):
        await shop.run(HEAD, is_review=True, is_dry_run=True)
    file = shop.folder / "good.csv"
    file.write_text(HEAD + rows(29))
    words = ("catalogue", "run", str(file), "--customer", "shop", "--review")
    code, text = await command(*words)
    assert (code, "catalogue diff" in text) == (0, True)
    assert (await command("catalogue", "run", "https://a.example/", *words[3:]))[0] == (
        "fetch.invalid_source"
    )
