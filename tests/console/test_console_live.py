"""What keeps pages live: one sampler for all, changes alone, within the budget of a viewer."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from penstock.console.live import BYTES_PER_S, Sample, Sampler, Viewer, Watched
from penstock.console.model import TooManyViewers
from penstock.kernel.errors import Unavailable

PAGE = Watched("/console/jobs", frozenset({"*"}))


def parts(count, text="x"):
    return {f"q{n}": f"{text}{n}" for n in range(count)}


def sample(found, page_bytes=1_000):
    return Sample(found, page_bytes)


def changes_of(told):
    return {
        name: html
        for one in told
        if one.event == "changes"
        for name, html in msgspec.json.decode(one.data).items()
    }


def test_what_a_page_was_sent_with_is_not_sent_again():
    viewer = Viewer(parts(3))
    assert viewer.next_told(sample(parts(3)), 0.0) == []
    told = viewer.next_told(sample({**parts(3), "q1": "new"}), 2.0)
    assert changes_of(told) == {"q1": "new"}
    assert viewer.next_told(sample({**parts(3), "q1": "new"}), 4.0) == []


def test_a_viewer_of_an_unknown_page_is_sent_all_of_it():
    assert changes_of(Viewer(None).next_told(sample(parts(3)), 0.0)) == parts(3)


def test_a_full_page_that_moves_all_the_time_stays_within_the_budget_and_nothing_starves():
    count, sent, seen = 1_350, 0, set()
    viewer = Viewer(parts(count))
    for step in range(1, 61):
        told = viewer.next_told(sample(parts(count, f"value {step} ")), step * 2.0)
        sent += sum(len(one.data) for one in told)
        seen |= changes_of(told).keys()
    assert sent <= BYTES_PER_S * 120 + 2 * BYTES_PER_S
    assert sent > BYTES_PER_S * 100, "the budget is used"
    assert len(seen) == count


def test_a_fragment_over_the_budget_is_sent_once_enough_was_saved_up():
    viewer = Viewer({"big": "", "small": ""})
    big = "x" * 40_000
    told = viewer.next_told(sample({"big": big, "small": "1"}), 2.0)
    assert changes_of(told) == {"big": big}
    assert changes_of(viewer.next_told(sample({"big": big, "small": "2"}), 4.0)) == {}
    assert changes_of(viewer.next_told(sample({"big": big, "small": "3"}), 30.0)) == {"small": "3"}


def test_where_fragments_come_or_go_the_page_is_to_be_fetched_and_that_costs_as_well():
    viewer = Viewer(parts(2))
    [told] = viewer.next_told(sample(parts(3), 20_000), 0.0)
    assert told.event == "stale"
    assert viewer.next_told(sample(parts(4), 20_000), 2.0) == []
    [told] = viewer.next_told(sample(parts(4), 20_000), 12.0)
    assert told.event == "stale"


def test_trouble_is_told_once_and_its_end_too():
    viewer = Viewer(parts(1))
    broken = Sample({}, 0, "PostgreSQL does not answer")
    [told] = viewer.next_told(broken, 0.0)
    assert (told.event, "PostgreSQL" in told.data) == ("trouble", True)
    assert viewer.next_told(broken, 2.0) == []
    [told] = viewer.next_told(sample(parts(1)), 4.0)
    assert (told.event, msgspec.json.decode(told.data)["text"]) == ("trouble", "")


async def next_event(events):
    async with asyncio.timeout(10):
        while not (told := await anext(events)).event:
            pass
        return told


async def test_one_look_serves_all_viewers_and_the_last_one_ends_it():
    looks = []

    async def look(watched):
        looks.append(watched)
        return sample({"n": str(len(looks))})

    sampler = Sampler(look, every_s=0.01)
    sampler.remember("page", {"n": "0"})
    viewers = [sampler.watch(PAGE, "page") for _ in range(3)]
    assert not sampler.is_running
    tasks = [asyncio.create_task(next_event(one)) for one in viewers]
    told = await asyncio.gather(*tasks)
    assert {one.event for one in told} == {"changes"}
    assert len(looks) < 3 * len(viewers)
    for one in viewers[1:]:
        await one.aclose()
    assert sampler.is_running
    await viewers[0].aclose()
    assert not sampler.is_running


async def test_a_page_that_cannot_be_shown_does_not_end_the_others():
    good = Watched("/console/good", frozenset())

    async def look(watched):
        if watched is PAGE:
            raise RuntimeError("a mistake of ours")
        return sample({"n": "1"})

    sampler = Sampler(look, every_s=0.01)
    bad, fine = sampler.watch(PAGE, ""), sampler.watch(good, "")
    told = await asyncio.gather(next_event(bad), next_event(fine))
    assert [one.event for one in told] == ["trouble", "changes"]
    assert "our mistake" in told[0].data
    await bad.aclose()
    await fine.aclose()


async def test_a_refusal_is_told_in_its_words():
    async def look(watched):
        raise Unavailable("Valkey does not answer")

    sampler = Sampler(look, every_s=0.01)
    events = sampler.watch(PAGE, "")
    assert "Valkey" in (await next_event(events)).data
    await sampler.close()
    await events.aclose()


async def test_viewers_are_bounded(monkeypatch):
    monkeypatch.setattr("penstock.console.live.VIEWERS_MAX", 1)

    async def look(watched):
        return sample({})

    sampler = Sampler(look, every_s=1)
    first = sampler.watch(PAGE, "")
    sampler.require_room()
    await anext(first)
    with pytest.raises(TooManyViewers):
        sampler.require_room()
    await first.aclose()
