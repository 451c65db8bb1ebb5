"""`before_publish` accepts, changes or holds items; a failing handler stops its item alone."""

from __future__ import annotations

import asyncio
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from room import HEAD, new_room, working
from tests.kit.waiting import wait_true

from headrace.app import ConfiguredTooLate, Headrace
from headrace.fetch import Hold, Item, SentItem
from headrace.fetch.errors import CustomerUnknown, NotHeld, NothingToReplay
from headrace.fetch.model import RunState
from headrace.kernel.errors import InvalidHandler


class Moderation:
    """A `before_publish` handler with a verdict per item: a value, an error or an event."""

    def __init__(self) -> None:
        self.verdicts: dict[str, object] = {}
        self.seen: list[tuple[str, str, int]] = []

    async def __call__(self, item):
        self.seen.append((item.action, item.id, item.version))
        verdict = self.verdicts.get(item.id)
        if isinstance(verdict, BaseException):
            raise verdict
        if isinstance(verdict, asyncio.Event):
            await verdict.wait()
            return None
        return verdict


@pytest.fixture
async def checked(shop, blobs, config):
    """A room whose process has the handler, and a worker on it."""
    check = Moderation()

    async def publish(item) -> None:
        shop.items.append(item)

    quick = replace(config, handler_timeout_s=1.0)
    fetch, jobs = new_room(shop.postgres, blobs, quick, publish, check=(check, ["name", "note"]))
    async with working(shop.postgres, jobs):
        yield check
    await fetch.close()


def rows(*items: str, price: int = 5) -> str:
    return HEAD + "".join(f"{item},Name,{price},\n" for item in items)


async def results(shop) -> list[tuple[str, str, int]]:
    return sorted((r.action, r.id, r.version) for r in await shop.fetch.items.results(after=0))


async def wait_results(shop, count: int):
    async def found():
        await shop.due_now()
        return len(await shop.fetch.items.results(after=0)) >= count

    await wait_true(found, what=f"{count} results")
    return await results(shop)


async def test_items_are_accepted_changed_and_held(shop, checked):
    checked.verdicts = {"b": {"note": "checked", "name": "Better"}, "c": Hold("a phone\nnumber")}
    done = await shop.run_to_end(rows("a", "b", "c"))
    assert done.state is RunState.DONE, "a held item ends its run"
    assert await results(shop) == [("publish", "a", 1), ("publish", "b", 1)]
    fields = {r.id: r.fields for r in await shop.fetch.items.results(after=0)}
    assert (fields["b"]["name"], fields["b"]["note"]) == ("Better", "checked")
    assert (await shop.fetch.items.get("shop", "b")).fields["name"] == "Name"
    [held] = await shop.fetch.held.list()
    assert (held.id, held.version, held.reason) == ("c", 1, "a phone number")
    with pytest.raises(CustomerUnknown):
        await shop.fetch.held.list("other")
    assert await shop.fetch.held.list(after=("\0", "\0")) == [held]
    assert await shop.fetch.held.list(after=("shop", "c")) == []
    await shop.fetch.held.release("shop", "c")
    assert await wait_results(shop, 3) == [(("publish", i, 1)) for i in "abc"]
    assert sorted(checked.seen) == [("publish", item, 1) for item in "abc"]
    for customer, item in (("shop", "c"), ("shop", "a"), ("shop", "\0"), ("\0", "c")):
        with pytest.raises(NotHeld):
            await shop.fetch.held.release(customer, item)


async def test_a_held_item_has_the_values_of_the_supplemental_feed(shop, checked):
    checked.verdicts = {"a": Hold("look")}
    await shop.run_to_end(rows("a"))
    await shop.run_to_end("id,price\na,4\n", is_supplemental=True)
    [held] = await shop.fetch.held.list()
    assert held.fields["price"] == "4", "as the handler saw it"
    await shop.fetch.held.release("shop", "a")
    [published] = await shop.fetch.items.results(after=0)
    assert published.fields["price"] == "4"


async def test_a_later_version_takes_the_place_of_a_held_one(shop, checked):
    checked.verdicts = {"a": Hold("first"), "b": Hold("first"), "c": Hold("first")}
    await shop.run_to_end(rows("a", "b", "c"))
    checked.verdicts = {"b": Hold("second")}
    await shop.run_to_end(rows("a", "b", price=6))
    assert await results(shop) == [("publish", "a", 2)]
    [held] = await shop.fetch.held.list()
    assert (held.id, held.version, held.reason) == ("b", 2, "second"), "c was removed"
    checked.verdicts = {"a": Hold("third")}
    await shop.run_to_end(rows("a", "b", price=7))
    assert await results(shop) == [("publish", "a", 2), ("publish", "b", 3)]
    await shop.run_to_end(rows("b", price=7))
    assert await results(shop) == [("publish", "a", 2), ("publish", "b", 3), ("unpublish", "a", 4)]
    assert all(action != "unpublish" for action, _, _ in checked.seen)
    assert await shop.fetch.held.list() == []


async def test_a_handler_that_fails_or_hangs_stops_its_item_alone(shop, checked):
    stuck = asyncio.Event()
    checked.verdicts = {
        "a": ValueError("no connection"),
        "b": stuck,
        "c": SystemExit(3),
        "d": {"price": 1},
        "e": "yes",
        "f": {"note": object()},
        "g": {"note": "x" * 300_000},
    }
    run = await shop.run(rows(*"abcdefgh"))
    assert await wait_results(shop, 1) == [("publish", "h", 1)]
    jobs = {}

    async def has_errors():
        for job in (await shop.jobs.find(queue="fetch.publish", jobs_max=50)).jobs:
            found = await shop.jobs.job(job.id)
            if found.error:
                jobs[found.payload["item"]] = found.error
        return jobs.keys() >= set("abcdefg")

    await wait_true(has_errors, what="each failure is on its job")
    for item, text in {
        "a": "ValueError: no connection",
        "b": "handler_timeout",
        "d": "changed price",
        "e": "returned str",
        "f": "no JSON",
        "g": "the limit is",
    }.items():
        assert text in jobs[item], jobs
    stuck.set()
    checked.verdicts.clear()
    assert await wait_results(shop, 8) == [("publish", item, 1) for item in "abcdefgh"]
    await shop.wait_done(run, hurries=True)


async def test_a_process_without_the_handler_publishes_nothing(shop, process, checked, capsys):
    checked.verdicts = {"a": Hold("wait")}
    await shop.run_to_end(rows("a"))
    assert "before_publish" in [c.name for c in await shop.fetch.consumers.all()]
    with pytest.raises(NothingToReplay):
        await shop.fetch.consumers.replay("before_publish")


async def test_without_a_worker_that_has_it_items_wait_until_it_is_removed(
    shop, blobs, config, process
):
    gone, _ = new_room(shop.postgres, blobs, config, check=(Moderation(), []))
    await gone.declare_consumers()
    await gone.close()
    async with process():
        run = await shop.run(rows("a", "b"))

        async def waits():
            queue = await shop.jobs.queues.get("fetch.publish")
            return (queue.ready, queue.leased, queue.scheduled) == (0, 0, 2)

        await wait_true(waits, what="publications wait")
        assert await results(shop) == []
        await shop.fetch.consumers.remove("before_publish")
        await shop.wait_done(run, hurries=True)
    assert await results(shop) == [("publish", "a", 1), ("publish", "b", 1)]


async def test_an_item_at_its_deadline_is_checked_too(shop, blobs, config):
    check = Moderation()
    check.verdicts = {"b": Hold("wait")}
    fetch, jobs = new_room(shop.postgres, blobs, config, check=(check, []))
    await fetch.declare_consumers()
    run = await shop.run(f"{HEAD}a,A,5,{shop.urls('/photo/1')}\nb,B,5,{shop.urls('/photo/2')}\n")
    await shop.sql("UPDATE #fetch_run SET applied_at = applied_at - interval '7 h'")
    await shop.jobs.lanes.pause("fetch", "shop")
    for _ in range(2):
        await shop.fetch.upkeep.publish_late()
    assert await results(shop) == []
    async with working(shop.postgres, jobs):

        async def is_late():
            return await results(shop) == [("publish", "a", 1)] and await shop.fetch.held.list()

        await wait_true(is_late, what="the deadline is over")
        [result] = await shop.fetch.items.results(after=0)
        assert [photo.outcome for photo in result.photos] == ["failed:late"]
        check.verdicts.clear()
        await shop.jobs.lanes.resume("fetch", "shop")
        await shop.wait_done(run, hurries=True)
    assert await results(shop) == [("edit", "a", 2), ("publish", "a", 1), ("publish", "b", 2)]
    assert await shop.fetch.held.list() == []
    await fetch.close()


async def test_a_verdict_holds_for_what_the_handler_saw(shop, checked):
    """The item changes while its handler runs: the new version is checked on its own."""
    stuck = asyncio.Event()
    checked.verdicts = {"a": stuck}
    await shop.run(rows("a"))
    await wait_true(lambda: checked.seen, what="the handler runs")
    sent = SentItem(customer="shop", item="a", fields={"name": "Other", "price": 6})
    await shop.fetch.send_items([sent])
    checked.verdicts = {"a": Hold("another")}
    stuck.set()

    async def is_held():
        await shop.due_now()
        return [one.version for one in await shop.fetch.held.list()] == [2]

    await wait_true(is_held, what="the new version is held")
    assert await results(shop) == []


async def test_the_handler_of_the_guide_changes_a_name():
    guide = Path(__file__).parents[2] / "docs" / "fetch.md"
    found = re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL)
    (snippet,) = [one for one in found if "before_publish" in one]
    names: dict = {}
    exec(compile(snippet, str(guide), "exec"), names)
    values = {"customer": "shop", "id": "a", "version": 1, "action": "publish", "photos": []}
    item = Item(fields={"name": "a@b.example"}, **values)
    assert await names["check"](item) == {"name": "a b.example"}
    assert await names["check"](Item(fields={"name": "A"}, **values)) is None


def test_an_application_has_one_handler():
    app = Headrace()

    @app.before_publish(changes=["name"])
    async def check(item) -> None: ...

    with pytest.raises(ConfiguredTooLate):
        app.before_publish()


def test_handlers_with_other_arguments_are_refused_when_they_are_declared():
    app = Headrace()

    async def publish(item, x): ...

    async def publish_with_default(item, x=1): ...

    for declare, text in (
        (app.on_item, r"@app.on_item: expected a function publish\(item\), got publish\(item, x\)"),
        (app.before_publish(), r"expected a function publish\(item\)"),
        (app.on_post_deleted, r"expected a function publish\(post\)"),
        (app.on_slot_start, r"expected a function publish\(\)"),
        (app.on_slot_stop, r"expected a function publish\(\)"),
    ):
        with pytest.raises(InvalidHandler, match=text):
            declare(publish)
    for declare, names in (
        (app.middleware, "call, next"),
        (app.feed_ranking("a"), "viewer, posts"),
    ):
        with pytest.raises(InvalidHandler, match=rf"expected a function <lambda>\({names}\)"):
            declare(lambda: None)
    with pytest.raises(InvalidHandler, match="got 'x'"):
        app.on_item("x")
    assert app.on_item(publish_with_default) is publish_with_default


async def test_a_plain_function_checks_items_in_a_thread(shop, blobs, config):
    def check(item):
        assert threading.current_thread() is not threading.main_thread()
        return {"name": "checked"} if item.id == "a" else Hold("no")

    fetch, jobs = new_room(shop.postgres, blobs, config, check=(check, ["name"]))
    async with working(shop.postgres, jobs):
        await shop.wait_done(await shop.run(rows("a", "b")))
    await fetch.close()
    [found] = await shop.fetch.items.results(after=0)
    assert (found.id, found.fields["name"]) == ("a", "checked")
    assert [(held.id, held.reason) for held in await shop.fetch.held.list()] == [("b", "no")]
