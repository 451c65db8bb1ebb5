"""What a catalogue may remove unasked, files without a proper end, and undoing a run."""

from __future__ import annotations

import gzip

import pytest
from origin import Answer
from tests.kit.waiting import wait_true

from headrace.engines.sql import compile_query
from headrace.fetch.errors import InvalidCustomer, RunNotUndoable, RunUnknown
from headrace.fetch.model import UNDOABLE_RUNS, RunState, SentItem

HEAD = "id,name,price,photos\n"
LIMITS = {"starts_max": 100_000, "window_s": 60, "connections": 50}
ITEMS = compile_query(
    "items",
    "-- Everything that is stored of items, but their versions and runs.\n"
    "SELECT item, is_gone, CASE WHEN is_gone THEN '' ELSE fields END AS fields,"
    " CASE WHEN is_gone THEN '{}' ELSE photos END AS photos,"
    " CASE WHEN is_gone THEN '' ELSE encode(hash, 'hex') END AS hash,"
    " CASE WHEN is_gone THEN '' ELSE encode(raw_hash, 'hex') END AS raw_hash"
    " FROM headrace.fetch_item ORDER BY item",
)
BEFORE = compile_query(
    "before",
    "-- Runs of which the earlier content is kept.\n"
    "SELECT DISTINCT run_id FROM headrace.fetch_before ORDER BY run_id",
)


def rows(count: int, start: int = 0, *, price: int = 5, photo: str = "") -> str:
    return "".join(f"i{n:03},Item {n},{price},{photo}\n" for n in range(start, start + count))


async def state_of(shop) -> dict[str, tuple]:
    """Items that are in the catalogue, with their content."""
    found = await shop.postgres.all(ITEMS)
    return {row["item"]: tuple(row)[2:] for row in found if not row["is_gone"]}


async def test_a_catalogue_that_removes_much_is_held(shop):
    await shop.run(HEAD + rows(300))
    held = await shop.run(HEAD + rows(33))
    assert held.state is RunState.HELD
    assert held.reason == "removed: 267 of 300 published items are in no row"
    assert (await shop.run(HEAD + rows(209))).state is RunState.HELD, "over 30 %"
    at_limit = await shop.run(HEAD + rows(210))
    assert (at_limit.state, at_limit.gone) == (RunState.APPLIED, 90)


async def test_a_small_shop_may_lose_20_items(shop):
    await shop.run(HEAD + rows(40))
    assert (await shop.run(HEAD + rows(19))).state is RunState.HELD
    assert (await shop.run(HEAD + rows(20))).gone == 20


async def test_other_ids_for_everything_are_held(shop):
    await shop.run(HEAD + rows(100))
    held = await shop.run(HEAD + rows(100, 500))
    assert (held.state, held.new, held.gone) == (RunState.HELD, 100, 100)


async def test_the_limits_are_those_of_the_customer_or_of_the_deployment(shop, client, command):
    await shop.run(HEAD + rows(100))
    await shop.fetch.customers.set("shop", **LIMITS, hold_share=0.01, hold_items=0)
    assert (await shop.run(HEAD + rows(98))).state is RunState.HELD
    kept = await shop.fetch.customers.set("shop", **LIMITS)
    assert (kept.hold_share, kept.hold_items) == (0.01, 0), "left out: as it is"
    answer = await client.put("/v1/fetch/customers/shop", json={**LIMITS, "hold_share": 1})
    assert answer.json()["hold_share"] == 1
    assert (await shop.run(HEAD + rows(2))).gone == 98, "1 turns the limits off"
    code, text = await command("customer", "set", "shop", "--hold-share", "default")
    assert (code, "share" in text) == (0, False)
    await shop.fetch.customers.set("shop", **LIMITS, hold_items=None)
    object.__setattr__(shop.fetch.config, "hold_share", 0.0)
    object.__setattr__(shop.fetch.config, "hold_items", 0)
    assert (await shop.run(HEAD + rows(1))).state is RunState.HELD
    assert (await shop.run(HEAD)).reason == "empty: no valid row"


async def test_bad_limits_are_refused(shop, client, command):
    for bad in ({"hold_share": 1.5}, {"hold_share": -1}, {"hold_items": -1}, {"refresh_s": 60}):
        with pytest.raises(InvalidCustomer):
            await shop.fetch.customers.set("shop", **LIMITS, **bad)
        answer = await client.put("/v1/fetch/customers/shop", json={**LIMITS, **bad})
        assert (answer.status_code, answer.json()["code"]) == (422, "fetch.invalid_customer")
    for words in (("--hold-share", "30%"), ("--hold-items", "few"), ("--refresh", "1m")):
        assert (await command("customer", "set", "shop", *words))[0] == "fetch.invalid_customer"
    found = await shop.fetch.customers.get("shop")
    assert (found.hold_share, found.hold_items, found.refresh_s) == (None, None, None)


WHOLE = HEAD + rows(5)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(f'{WHOLE}i005,"Item', id="inside a quote"),
        pytest.param(f"{WHOLE}i005,It", id="a short row"),
        pytest.param(f"{WHOLE}i0", id="an id"),
        pytest.param(WHOLE.replace(",", "\t") + "i005\tIt", id="tsv"),
        pytest.param('[{"id":"a","name":"A"},{"id":"b","na', id="json"),
        pytest.param('[{"id":"a","name":"A"}', id="json between rows"),
        pytest.param('{"id":"a","name":"A"}\n{"id":"b","na', id="ndjson"),
        pytest.param("<yml_catalog><shop><offers><offer id='a'><name>A</name></offer>", id="xml"),
        pytest.param(gzip.compress(WHOLE.encode())[:-9], id="gzip"),
    ],
)
async def test_a_file_without_a_proper_end_is_held(shop, text):
    held = await shop.run(text, name="cut")
    assert (held.state, held.reason.partition(":")[0]) == (RunState.HELD, "truncated")
    assert "truncated" not in await shop.fetch.reports.page(held.run), "said in words"
    assert "ends too early" in await shop.fetch.reports.page(held.run)
    assert await state_of(shop) == {}


@pytest.mark.parametrize("end", ["i005,Item 5,5,", "i005,Item 5,5,\r\n", "i005,Item 5,5,\n\n  "])
async def test_a_file_with_a_whole_last_row_is_not_held(shop, end):
    found = await shop.run(WHOLE + end)
    assert (found.state, found.new) == (RunState.APPLIED, 6)


@pytest.mark.slow
@pytest.mark.usefixtures("worker")
async def test_a_body_shorter_than_its_content_length_changes_nothing(shop):
    body = WHOLE.encode()
    cut = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body[:-20]
    shop.origin.answers["/cut.csv"] = [Answer(raw=cut)]
    run = await shop.fetch.bring_catalogue("shop", shop.origin.url("/cut.csv"))

    async def tried():
        found = await shop.fetch.runs.get(run.run)
        return found if found.reason else None

    found = await wait_true(tried, what="the file was asked for")
    assert found.reason.startswith("failed:truncated")
    assert await state_of(shop) == {}


@pytest.mark.usefixtures("worker")
async def test_undo_puts_items_back_as_new_versions(shop):
    one, two = shop.origin.url("/photo/1"), shop.origin.url("/photo/2")
    await shop.run_to_end(HEAD + rows(30, photo=one))
    before = await state_of(shop)
    shop.told()
    bad = await shop.run_to_end(HEAD + rows(10) + rows(12, 10, price=6, photo=two) + rows(5, 50))
    assert (bad.new, bad.changed, bad.gone) == (5, 22, 8)
    shop.told()
    asked = shop.origin.requests("/photo/1")
    undo = await shop.wait_done(await shop.fetch.runs.undo(bad.run))
    assert await state_of(shop) == before
    assert (undo.format, undo.rows, undo.new, undo.changed, undo.gone) == ("undo", 35, 8, 22, 5)
    told = shop.told()
    assert sorted({action for action, _, _ in told}) == ["edit", "publish", "unpublish"]
    assert len(told) == 35
    assert all(version == 3 for action, _, version in told if action != "unpublish")
    assert (await shop.fetch.items.get("shop", "i000")).photos[0].key is not None
    assert shop.origin.requests("/photo/1") == asked, "no photo that is stored is asked for again"
    assert (await shop.fetch.runs.get(bad.run)).undone_by == undo.run
    same = await shop.run_to_end(HEAD + rows(30, photo=one))
    assert (same.unchanged, same.new, same.changed, same.gone) == (30, 0, 0, 0)


async def test_an_undo_before_the_results_are_out_leaves_nothing_of_the_run(shop, worker):
    await shop.run_to_end(HEAD + rows(30))
    shop.told()
    bad = await shop.run(HEAD + rows(22) + "new,New,5,\n")
    await shop.wait_done(await shop.fetch.runs.undo(bad.run))
    await shop.wait_done(bad)
    newest = {}
    for result in await shop.fetch.items.results(results_max=1000):
        newest[result.id] = result.action
    assert newest.pop("new", "unpublish") == "unpublish"
    assert set(newest.values()) <= {"publish", "edit"}
    assert len(newest) == 30


async def test_items_sent_since_stay_as_they_were_sent(shop):
    await shop.run(HEAD + rows(30))
    bad = await shop.run(HEAD + rows(20, price=6) + rows(1, 50))
    for item in ("i001", "i050", "i029"):
        await shop.fetch.send_items([SentItem(customer="shop", item=item, fields={"name": "Sent"})])
    await shop.fetch.runs.undo(bad.run)
    found = await state_of(shop)
    assert len(found) == 31
    assert [k for k, v in found.items() if "Sent" in v[0]] == ["i001", "i029", "i050"]
    assert all('"5"' in v[0] for k, v in found.items() if k not in ("i001", "i029", "i050"))


async def test_runs_are_undone_from_the_newest_back(shop):
    texts = [HEAD + rows(20, n, price=n + 1) for n in range(UNDOABLE_RUNS + 2)]
    runs, states = [], []
    for text in texts:
        runs.append((await shop.run(text)).run)
        states.append(await state_of(shop))
    kept = [row["run_id"] for row in await shop.postgres.all(BEFORE)]
    assert kept == runs[-UNDOABLE_RUNS:], "of no others is the earlier content kept"
    with pytest.raises(RunNotUndoable, match=f"run {runs[-1]} was applied since"):
        await shop.fetch.runs.undo(runs[-2])
    for run, state in list(zip(runs, states[:1] + states, strict=False))[: -UNDOABLE_RUNS - 1 : -1]:
        undo = await shop.fetch.runs.undo(run)
        assert await state_of(shop) == state
        with pytest.raises(RunNotUndoable, match=f"run {undo.run} has already undone it"):
            await shop.fetch.runs.undo(run)
    with pytest.raises(RunNotUndoable, match="only the last 5 catalogues"):
        await shop.fetch.runs.undo(runs[1])
    again = await shop.run(texts[-1])
    assert again.state in (RunState.APPLIED, RunState.DONE)
    assert await state_of(shop) == states[-1]


async def test_what_cannot_be_undone_says_why(shop, client, command):
    await shop.run(HEAD + rows(30))
    dry = await shop.run(HEAD + rows(20), is_dry_run=True, is_sampled=False)
    held = await shop.run(HEAD)
    [sent] = await shop.fetch.send_items([SentItem(customer="shop", item="s")])
    for run, why in ((dry, "it is dry"), (held, "it is held"), (sent, "only a run of a whole")):
        with pytest.raises(RunNotUndoable, match=why):
            await shop.fetch.runs.undo(run.run)
        answer = await client.post(f"/v1/fetch/runs/{run.run}/undo")
        assert (answer.status_code, answer.json()["code"]) == (409, "fetch.run_not_undoable")
    with pytest.raises(RunUnknown):
        await shop.fetch.runs.undo(999)
    assert (await client.post("/v1/fetch/runs/99999999999999999999/undo")).status_code == 404
    assert (await command("run", "undo", "999", "--no-wait"))[0] == "fetch.run_unknown"


async def test_an_undo_supersedes_what_was_held(shop):
    await shop.run(HEAD + rows(30))
    bad = await shop.run(HEAD + rows(20))
    held = await shop.run(HEAD + rows(1))
    await shop.fetch.runs.undo(bad.run)
    assert (await shop.fetch.runs.get(held.run)).state is RunState.SUPERSEDED


async def test_undo_over_http_and_as_a_command(shop, client, command):
    await shop.run(HEAD + rows(30))
    before = await state_of(shop)
    bad = await shop.run(HEAD + rows(20))
    answer = await client.post(f"/v1/fetch/runs/{bad.run}/undo")
    assert (answer.status_code, answer.json()["new"]) == (202, 10)
    assert await state_of(shop) == before
    bad = await shop.run(HEAD + rows(20))
    code, text = await command("run", "undo", str(bad.run), "--no-wait")
    assert code == 0
    assert "10 new, 0 changed" in text
    assert await state_of(shop) == before
    assert "undone by run" in (await command("run", "show", str(bad.run)))[1]
    listed = (await command("run", "ls"))[1].splitlines()
    assert [line.partition("  undone by run ")[2] for line in listed] == [
        *("", listed[0].split()[0], "", listed[2].split()[0], "")
    ]
    undo = listed[0].split()[0]
    answer = await client.post(f"/v1/fetch/runs/{undo}/undo")
    assert answer.status_code == 409
    assert "undoes another run; run the catalogue again" in answer.json()["detail"]


@pytest.mark.slow
@pytest.mark.usefixtures("worker")
async def test_a_file_from_a_url_that_was_undone_is_not_applied_again(shop):
    before = HEAD + rows(30)
    await shop.run_to_end(before)
    wanted = await state_of(shop)
    shop.origin.answers["/shop.csv"] = [Answer(200, (HEAD + rows(20)).encode())]
    url = shop.origin.url("/shop.csv")
    await shop.fetch.sources.set("shop", url=url, cron="0 0 1 1 *")

    async def bring():
        tried_at = (await shop.fetch.sources.get("shop")).tried_at
        await shop.fetch.sources.bring("shop")

        async def brought():
            found = await shop.fetch.sources.get("shop")
            return found if found.tried_at != tried_at else None

        return await wait_true(brought, what="the file was asked for")

    bad = await bring()
    assert len(await state_of(shop)) == 20
    await shop.fetch.runs.undo(bad.run)
    assert (await bring()).outcome == "unchanged"
    assert await state_of(shop) == wanted
    shop.origin.answers["/shop.csv"] = [Answer(200, (HEAD + rows(25)).encode())]
    await bring()
    assert len(await state_of(shop)) == 25, "another file is"
