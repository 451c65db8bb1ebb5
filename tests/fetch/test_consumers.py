"""Consumers: an absence loses no item, and no consumer receives an old version."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest
from room import HEAD, LIMITS
from tests.kit.waiting import wait_true

from headrace.fetch.consumers import Consumers, deliveries
from headrace.fetch.errors import ConsumerUnknown, CustomerUnknown
from headrace.fetch.model import RunState
from headrace.fetch.publishing import absent_wait_s


class Consumer:
    """An `on_item` handler that records items; its name is the consumer's name."""

    def __init__(self, name: str = "publish") -> None:
        self.__module__ = "site"
        self.__qualname__ = name
        self.poison: dict[str, BaseException] = {}
        self.stuck: dict[str, asyncio.Event] = {}
        self.got: list[tuple[str, str, int]] = []

    async def __call__(self, item) -> None:
        if item.id in self.poison:
            raise self.poison[item.id]
        if item.id in self.stuck:
            await self.stuck[item.id].wait()
        self.got.append((item.action, item.id, item.version))


async def publish(shop, *items: str) -> None:
    """Run a catalogue of these items until it is published."""
    run = await shop.run(HEAD + "".join(f"{item[0]},{item},5,\n" for item in items))

    async def is_published() -> bool:
        return (await shop.fetch.runs.get(run.run)).state is RunState.DONE

    await wait_true(is_published, what="the run is published")


async def wait_waiting(shop, count: int) -> None:
    """Wait until so many deliveries wait for a later try, and none is in progress."""

    async def is_quiet() -> bool:
        found = await shop.jobs.queues.get("fetch.item")
        return (found.ready, found.leased, found.scheduled) == (0, 0, count)

    await wait_true(is_quiet, what=f"{count} deliveries wait")


async def deliver(shop, waiting: int = 0) -> None:
    await shop.due_now()
    await wait_waiting(shop, waiting)


async def test_an_absent_consumer_receives_the_newest_version_once(shop, process):
    site = Consumer()
    await process(site).fetch.declare_consumers()
    async with process():
        await publish(shop, "a1", "b1")
        await publish(shop, "a2", "b1")
        await wait_waiting(shop, 3)
    async with process(site):
        await deliver(shop)
        assert sorted(site.got) == [("publish", "a", 2), ("publish", "b", 1)]
        first = (await shop.fetch.items.results(after=0))[0]
        ids = await Consumers(shop.postgres, shop.jobs).ids()
        await shop.jobs.enqueue_many(deliveries([(first.seq, first.customer)], ids))
        await wait_waiting(shop, 0)
    assert len(site.got) == 2, "an old delivery has no effect"


@pytest.mark.slow
async def test_a_consumer_that_returns_is_served_at_once(shop, process):
    site = Consumer()
    await process(site).fetch.declare_consumers()
    async with process():
        await publish(shop, "a1", "b1")
        await wait_waiting(shop, 2)
    await shop.sql("UPDATE #job_ready SET run_at = now() + interval '1 hour'")
    back = process(site)
    async with back:
        await back.fetch.declare_consumers()
        await wait_true(lambda: len(site.got) == 2, what="it is delivered without waiting")
        await deliver(shop)
    assert sorted(site.got) == [("publish", "a", 1), ("publish", "b", 1)]
    assert await shop.count("fetch_absent") == 0


async def test_plain_functions_are_called_once_in_a_thread(shop, process):
    """A `def` blocks no other call, and its exception retries its own delivery alone."""
    calls, others = [], threading.Barrier(2, timeout=60)
    faults = {"b": ValueError("until it is removed")}

    def publish_blocking(item) -> None:
        assert threading.current_thread() is not threading.main_thread()
        calls.append(item.id)
        if item.id in "cd":
            others.wait()
        if item.id in faults:
            raise faults[item.id]

    async with process(publish_blocking):
        await publish(shop, "a1", "b1", "c1", "d1")
        await wait_waiting(shop, 1)
        faults.clear()
        await deliver(shop)
    assert sorted(calls.count(name) for name in "acd") == [1, 1, 1]
    assert calls.count("b") >= 2


def test_an_absent_consumer_is_tried_ever_more_rarely():
    waits_s = [absent_wait_s(away_s) for away_s in (0, 1, 10, 60, 600, 86_400)]
    assert waits_s == [1.0, 1.0, 5.0, 30.0, 300.0, 300.0]
    away_s = looks = 0
    while away_s < 86_400:
        away_s += absent_wait_s(away_s)
        looks += 1
    assert looks < 310


async def test_deliveries_of_a_renamed_handler_wait_until_it_is_removed(shop, process, capsys):
    old, new = Consumer(), Consumer("publish_item")
    async with process(old):
        await publish(shop, "a1")
        await wait_waiting(shop, 0)
    async with process(new):
        await publish(shop, "a2")
        await wait_waiting(shop, 1)
        assert new.got == [("publish", "a", 2)]
        await shop.fetch.consumers.remove("site.publish")
        await deliver(shop)
    assert [c.name for c in await shop.fetch.consumers.all()] == ["site.publish_item"]
    capsys.readouterr()
    back = process(old)
    await back.fetch.declare_consumers()
    await back.fetch.declare_consumers()
    assert capsys.readouterr().out.count("headrace fetch consumer replay 'site.publish'") == 1
    async with back:
        await deliver(shop)
        assert old.got == [("publish", "a", 1)], "removed deliveries stay dropped"
        assert await shop.fetch.consumers.replay("site.publish") == 1
        await wait_waiting(shop, 0)
    assert old.got == [("publish", "a", 1), ("publish", "a", 2)]


async def test_a_replay_delivers_published_items_again(shop, process):
    await shop.fetch.customers.set("other", **LIMITS)
    site = Consumer()
    replay = shop.fetch.consumers.replay
    async with process(site):
        await publish(shop, "a1", "b1", "c1")
        await publish(shop, "a2", "b1")
        await wait_waiting(shop, 0)
        site.got.clear()
        assert await replay("site.publish", customer="other") == 0
        assert await replay("site.publish", customer="shop") == 2
        await wait_waiting(shop, 0)
        assert sorted(site.got) == [("publish", "a", 2), ("publish", "b", 1)]
        site.got.clear()
        await publish(shop, "a2")
        await wait_waiting(shop, 0)
    assert site.got == [("unpublish", "b", 2)]
    assert (await shop.fetch.consumers.all())[0].items == 3
    for name in ("nobody", "", "\x00", "x" * 500):
        for verb in (replay, shop.fetch.consumers.remove):
            with pytest.raises(ConsumerUnknown):
                await verb(name)
    with pytest.raises(CustomerUnknown):
        await replay("site.publish", customer="nobody")


async def test_whatever_a_handler_raises_costs_only_its_own_job_a_try(shop, process, capsys):
    """Three of 40 items raise: the others are delivered once, their jobs are retried."""
    site = Consumer()
    errors = (SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError())
    site.poison = dict(zip("789", errors, strict=True))
    names = [chr(ord("0") + n) for n in range(40)]
    async with process(site) as other:
        await publish(shop, *(name for name in names if name.isalnum()))
        await wait_waiting(shop, 3)
        delivered = [name for name in names if name.isalnum() and name not in site.poison]
        assert sorted(item for _, item, _ in site.got) == sorted(delivered)
        printed = capsys.readouterr().out
        assert all(f"error={error!r}" in printed for error in errors)
        site.poison.clear()
        await deliver(shop)
        assert other.is_working
    assert sorted(item for _, item, _ in site.got[-3:]) == ["7", "8", "9"]


async def test_calls_that_hang_occupy_their_places_for_a_bounded_time(
    shop, process, config, capsys
):
    site = Consumer()
    site.stuck = {f"i{n}": asyncio.Event() for n in range(5)}
    printed = []

    def are_given_up() -> bool:
        printed.append(capsys.readouterr().out)
        return "".join(printed).count("the handler exceeded fetch.handler_timeout (1 s)") >= 5

    async with process(site, config=replace(config, handler_timeout_s=1.0)):
        await shop.run(HEAD + "".join(f"i{n},A,5,\n" for n in range(120)))
        await wait_true(lambda: len(site.got) == 115, what="all others are delivered")
        await wait_true(are_given_up, what="the calls that hang are given up")
        site.stuck.clear()
        await deliver(shop)
    assert len(site.got) == 120
