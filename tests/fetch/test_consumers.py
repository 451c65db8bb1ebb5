"""Consumers: an absence loses no item, and no consumer receives an old version."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tests.kit.waiting import wait_true

from headrace.engines.sql import compile_query
from headrace.fetch.errors import ConsumerUnknown, CustomerUnknown
from headrace.fetch.model import RunState
from headrace.fetch.publishing import Consumers, absent_wait_s, deliveries

HEAD = "id,name,price,photos\n"
DUE_NOW = compile_query(
    "due_now",
    "-- What waits for its time is due.\n"
    "UPDATE headrace.job_ready SET run_at = now() WHERE run_at > now()",
)
FAR_AWAY = compile_query(
    "far_away",
    "-- What waits for its time waits for long.\n"
    "UPDATE headrace.job_ready SET run_at = now() + interval '1 hour'",
)
ABSENT = compile_query(
    "absent", "-- Who is waited for.\nSELECT count(*) FROM headrace.fetch_absent"
)


class Consumer:
    """An `on_item` handler that remembers; a renamed one is another consumer."""

    def __init__(self, name: str, *, poison=None, stuck=None) -> None:
        self.__module__ = "site"
        self.__qualname__ = name
        self.poison = poison or {}
        self.stuck = {} if stuck is None else stuck
        self.told: list[tuple[str, str, int]] = []

    async def __call__(self, item) -> None:
        if item.id in self.poison:
            raise self.poison[item.id]
        if item.id in self.stuck:
            await self.stuck[item.id].wait()
        self.told.append((item.action, item.id, item.version))


async def wait_published(shop, run) -> None:
    async def ask() -> bool:
        return (await shop.fetch.runs.get(run.run)).state is RunState.DONE

    await wait_true(ask, what="the run is published")


async def wait_items_waiting(shop, count: int) -> None:
    """Until so many deliveries wait for a later look, and none is under way."""

    async def ask() -> bool:
        found = await shop.jobs.queues.get("fetch.item")
        return (found.ready, found.leased, found.scheduled) == (0, 0, count)

    await wait_true(ask, what=f"{count} deliveries wait")


async def hurry(shop) -> None:
    await shop.postgres.run(DUE_NOW)


async def test_a_worker_without_the_handler_loses_nothing(shop, process):
    site = Consumer("publish")
    await process(site).fetch.declare_consumers()
    async with process():
        run = await shop.run(HEAD + "a,A,5,\nb,B,5,\n")
        await wait_published(shop, run)
        await wait_items_waiting(shop, 2)
    async with process(site):
        await hurry(shop)
        await wait_items_waiting(shop, 0)
    assert sorted(site.told) == [("publish", "a", 1), ("publish", "b", 1)]


async def test_an_old_delivery_brings_the_newest_version_once(shop, process):
    site = Consumer("publish")
    await process(site).fetch.declare_consumers()
    async with process():
        await wait_published(shop, await shop.run(HEAD + "a,A,5,\n"))
        await wait_published(shop, await shop.run(HEAD + "a,A2,5,\n"))
        await wait_items_waiting(shop, 2)
    async with process(site):
        await hurry(shop)
        await wait_items_waiting(shop, 0)
        assert site.told == [("publish", "a", 2)]
        first = (await shop.fetch.items.results(after=0))[0]
        ids = await Consumers(shop.postgres, shop.jobs).ids()
        await shop.jobs.enqueue_many(deliveries([(first.seq, first.customer)], ids))
        await wait_items_waiting(shop, 0)
    assert site.told == [("publish", "a", 2)]


@pytest.mark.slow
async def test_a_worker_that_has_the_consumer_wakes_what_waits_for_it(shop, process):
    site = Consumer("publish")
    await process(site).fetch.declare_consumers()
    async with process():
        await wait_published(shop, await shop.run(HEAD + "a,A,5,\nb,B,5,\n"))
        await wait_items_waiting(shop, 2)
    await shop.postgres.run(FAR_AWAY)
    back = process(site)
    async with back:
        await back.fetch.declare_consumers()
        await wait_true(lambda: len(site.told) == 2, what="it is delivered without waiting")
        await hurry(shop)
        await wait_items_waiting(shop, 0)
    assert sorted(site.told) == [("publish", "a", 1), ("publish", "b", 1)]
    assert await shop.postgres.value(ABSENT) == 0


def test_an_absent_consumer_is_looked_for_ever_more_rarely():
    waits_s = [absent_wait_s(away_s) for away_s in (0, 1, 10, 60, 600, 86_400)]
    assert waits_s == [1.0, 1.0, 5.0, 30.0, 300.0, 300.0]
    away_s = looks = 0
    while away_s < 86_400:
        away_s += absent_wait_s(away_s)
        looks += 1
    assert looks < 310


async def test_a_renamed_handler_leaves_its_deliveries_until_a_person_decides(shop, process):
    old, new = Consumer("publish"), Consumer("publish_item")
    async with process(old):
        await wait_published(shop, await shop.run(HEAD + "a,A,5,\n"))
        await wait_items_waiting(shop, 0)
    async with process(new):
        await wait_published(shop, await shop.run(HEAD + "a,A2,5,\n"))
        await wait_items_waiting(shop, 1)
        assert new.told == [("publish", "a", 2)]
        await shop.fetch.consumers.remove("site.publish")
        await hurry(shop)
        await wait_items_waiting(shop, 0)
    assert [c.name for c in await shop.fetch.consumers.all()] == ["site.publish_item"]
    assert old.told == [("publish", "a", 1)]


async def test_removed_deliveries_stay_dropped_when_the_name_comes_back(shop, process, capsys):
    site = Consumer("publish")
    await process(site).fetch.declare_consumers()
    async with process():
        await wait_published(shop, await shop.run(HEAD + "a,A,5,\n"))
        await wait_items_waiting(shop, 1)
    await shop.fetch.consumers.remove("site.publish")
    capsys.readouterr()
    back = process(site)
    await back.fetch.declare_consumers()
    await back.fetch.declare_consumers()
    assert capsys.readouterr().out.count("headrace fetch consumer replay 'site.publish'") == 1
    async with back:
        await hurry(shop)
        await wait_items_waiting(shop, 0)
        assert site.told == []
        assert await shop.fetch.consumers.replay("site.publish") == 1
        await wait_items_waiting(shop, 0)
    assert site.told == [("publish", "a", 1)]


async def test_items_that_are_to_be_told_again_were_told(shop, process):
    site = Consumer("publish")
    async with process(site):
        await wait_published(shop, await shop.run(HEAD + "a,A,5,\nb,B,5,\n"))
        await wait_items_waiting(shop, 0)
    assert await shop.fetch.consumers.replay("site.publish") == 2
    [found] = await shop.fetch.consumers.all()
    assert found.items == 2


async def test_a_replay_tells_what_is_published_once_more(shop, process):
    await shop.fetch.customers.set("other", starts_max=10, window_s=1, connections=1)
    site = Consumer("publish")
    async with process(site):
        await wait_published(shop, await shop.run(HEAD + "a,A,5,\nb,B,5,\nc,C,5,\n"))
        await wait_published(shop, await shop.run(HEAD + "a,A2,5,\nb,B,5,\n"))
        await wait_items_waiting(shop, 0)
        site.told.clear()
        assert await shop.fetch.consumers.replay("site.publish", customer="other") == 0
        assert await shop.fetch.consumers.replay("site.publish", customer="shop") == 2
        await wait_items_waiting(shop, 0)
        assert sorted(site.told) == [("publish", "a", 2), ("publish", "b", 1)]
        site.told.clear()
        await wait_published(shop, await shop.run(HEAD + "a,A2,5,\n"))
        await wait_items_waiting(shop, 0)
    assert site.told == [("unpublish", "b", 2)]
    assert (await shop.fetch.consumers.all())[0].items == 3


async def test_unknown_names(shop):
    for name in ("nobody", "", "\x00", "x" * 500):
        with pytest.raises(ConsumerUnknown):
            await shop.fetch.consumers.replay(name)
        with pytest.raises(ConsumerUnknown):
            await shop.fetch.consumers.remove(name)
    with pytest.raises(CustomerUnknown):
        await shop.fetch.consumers.replay("site.publish", customer="nobody")


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
async def test_whatever_a_handler_raises_costs_its_own_job_a_try(shop, process, capsys, error):
    """One of 40 items fails its handler: the others are delivered once, its job is retried."""
    site = Consumer("publish", poison={"i7": error})
    async with process(site) as other:
        run = await shop.run(HEAD + "".join(f"i{n},A,5,\n" for n in range(40)))
        await wait_published(shop, run)
        await wait_items_waiting(shop, 1)
        assert sorted(i for _, i, _ in site.told) == sorted(f"i{n}" for n in range(40) if n != 7)
        assert f"error={error!r}" in capsys.readouterr().out
        site.poison.clear()
        await hurry(shop)
        await wait_items_waiting(shop, 0)
        assert other.is_working
    assert site.told[-1] == ("publish", "i7", 1)


async def test_calls_that_hang_hold_their_own_places_for_a_bounded_time(
    shop, process, config, capsys
):
    stuck = {f"i{n}": asyncio.Event() for n in range(5)}
    site = Consumer("publish", stuck=stuck)
    async with process(site, config=replace(config, handler_timeout_s=1.0)):
        run = await shop.run(HEAD + "".join(f"i{n},A,5,\n" for n in range(120)))
        await wait_published(shop, run)
        await wait_true(lambda: len(site.told) == 115, what="all others are delivered")
        printed = []

        def has_given_up() -> bool:
            printed.append(capsys.readouterr().out)
            return "".join(printed).count("the handler exceeded fetch.handler_timeout (1 s)") >= 5

        await wait_true(has_given_up, what="the calls that hang are given up")
        stuck.clear()
        await hurry(shop)
        await wait_items_waiting(shop, 0)
    assert len(site.told) == 120
