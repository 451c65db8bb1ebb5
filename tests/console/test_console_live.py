"""Live updates: one sampler for all subscribers, only changes, within a byte budget."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from markupsafe import Markup

from headrace.console.live import (
    BYTES_PER_S,
    Budget,
    ClientState,
    Sample,
    Sampler,
    Subscriber,
    WatchedPage,
)
from headrace.console.model import TooManyViewers
from headrace.console.rendering import LiveFragments
from headrace.kernel.errors import Unavailable

PAGE = WatchedPage("/console/jobs", frozenset({"*"}))
NEW = ClientState("", "layout", "")


def parts(count, text="x"):
    return {f"q{n}": f"{text}{n}" for n in range(count)}


def sample(found, page_bytes=1_000, *, layout="layout"):
    return Sample(found, layout, page_bytes)


def viewer_of(known, layout="layout"):
    return Subscriber(known, layout, Budget())


async def always():
    return True


def changes_of(reported):
    return {
        name: html
        for one in reported
        if one.event == "changes"
        for name, html in msgspec.json.decode(one.data).items()
    }


def test_fragments_of_the_page_are_not_resent():
    viewer = viewer_of(parts(3))
    assert viewer.next_events(sample(parts(3)), 0.0) == []
    reported = viewer.next_events(sample({**parts(3), "q1": "new"}), 2.0)
    assert changes_of(reported) == {"q1": "new"}
    assert viewer.next_events(sample({**parts(3), "q1": "new"}), 4.0) == []


def test_constant_changes_stay_within_the_budget_without_starvation():
    count, sent, seen = 1_350, 0, set()
    viewer = viewer_of(parts(count))
    for step in range(1, 61):
        reported = viewer.next_events(sample(parts(count, f"value {step} ")), step * 2.0)
        sent += sum(len(one.data) for one in reported)
        seen |= changes_of(reported).keys()
    assert sent <= BYTES_PER_S * 120 + 2 * BYTES_PER_S
    assert sent > BYTES_PER_S * 100, "the budget is used"
    assert len(seen) == count


def test_a_large_fragment_waits_for_enough_budget():
    viewer = viewer_of({"big": "", "small": ""})
    big = "x" * 40_000
    reported = viewer.next_events(sample({"big": big, "small": "1"}), 2.0)
    assert changes_of(reported) == {"small": "1"}
    reported = viewer.next_events(sample({"big": big, "small": "1"}), 4.0)
    assert changes_of(reported) == {"big": big}
    assert changes_of(viewer.next_events(sample({"big": big, "small": "2"}), 6.0)) == {}
    assert changes_of(viewer.next_events(sample({"big": big, "small": "3"}), 32.0)) == {
        "small": "3"
    }


def test_figures_of_one_sample_are_not_separated_by_its_charts():
    first = {"tile": "1", "chart": "old", "row": "1"}
    viewer = viewer_of(first)
    big = {"tile": "2", "chart": "x" * 20_000, "row": "2"}
    assert {"tile", "row"} <= set(changes_of(viewer.next_events(sample(big), 0.0)))


def test_a_new_layout_causes_a_reload_charged_to_the_tab():
    budget = Budget()
    [reported] = Subscriber(parts(2), "a", budget).next_events(
        sample(parts(3), 20_000, layout="b"), 0.0
    )
    assert reported.event == "stale"
    again = Subscriber(parts(3), "b", budget)
    assert again.next_events(sample(parts(3, "new"), 20_000, layout="c"), 2.0) == []
    [reported] = again.next_events(sample(parts(3, "new"), 20_000, layout="c"), 12.0)
    assert reported.event == "stale"


def test_an_error_and_its_end_are_sent_once():
    viewer = viewer_of(parts(1))
    broken = Sample({}, "", 0, "PostgreSQL does not answer")
    [reported] = viewer.next_events(broken, 0.0)
    assert (reported.event, "PostgreSQL" in reported.data) == ("unavailable", True)
    assert viewer.next_events(broken, 2.0) == []
    [reported] = viewer.next_events(sample(parts(1)), 4.0)
    assert (reported.event, msgspec.json.decode(reported.data)["text"]) == ("unavailable", "")


async def next_event(events):
    async with asyncio.timeout(60):
        while (reported := await anext(events)).event == "heartbeat":
            pass
        return reported


async def test_one_sample_serves_all_subscribers():
    looks = []

    async def look(watched):
        looks.append(watched)
        return sample({"n": str(len(looks))})

    sampler = Sampler(look, every_s=0.01)
    sampler.remember("page", {"n": "0"})
    viewers = [sampler.watch(PAGE, ClientState("page", "layout", "tab"), always) for _ in range(3)]
    assert not sampler.is_running
    tasks = [asyncio.create_task(next_event(one)) for one in viewers]
    reported = await asyncio.gather(*tasks)
    assert {one.event for one in reported} == {"changes"}
    assert len(looks) < 3 * len(viewers)
    for one in viewers[1:]:
        await one.aclose()
    assert sampler.is_running
    await viewers[0].aclose()
    assert not sampler.is_running


async def test_a_failing_page_does_not_stop_the_others():
    good = WatchedPage("/console/good", frozenset())

    async def look(watched):
        if watched is PAGE:
            raise RuntimeError("a mistake of ours")
        return sample({"n": "1"})

    sampler = Sampler(look, every_s=0.01)
    bad, fine = sampler.watch(PAGE, NEW, always), sampler.watch(good, NEW, always)
    reported = await asyncio.gather(next_event(bad), next_event(fine))
    assert [one.event for one in reported] == ["unavailable", "changes"]
    assert "internal error" in reported[0].data
    await bad.aclose()
    await fine.aclose()


async def test_a_refusal_is_sent_as_text():
    async def look(watched):
        raise Unavailable("Valkey does not answer")

    sampler = Sampler(look, every_s=0.01)
    events = sampler.watch(PAGE, NEW, always)
    assert "Valkey" in (await next_event(events)).data
    await sampler.close()
    await events.aclose()


async def test_subscribers_are_limited(monkeypatch):
    monkeypatch.setattr("headrace.console.live.SUBSCRIBERS_MAX", 1)

    async def look(watched):
        return sample({})

    sampler = Sampler(look, every_s=1)
    first = sampler.watch(PAGE, NEW, always)
    sampler.require_room()
    await anext(first)
    with pytest.raises(TooManyViewers):
        sampler.require_room()
    await first.aclose()


async def test_a_reconnect_receives_everything():
    now = sample({"n": "1"})

    async def look(watched):
        return now

    sampler, seen = Sampler(look, every_s=0.01), ClientState("page", "layout", "tab")
    sampler.remember("page", {"n": "0"})
    first = sampler.watch(PAGE, seen, always)
    assert changes_of([await next_event(first)]) == {"n": "1"}
    await first.aclose()
    second = sampler.watch(PAGE, seen, always)
    assert changes_of([await next_event(second)]) == {"n": "1"}, "it may have missed what was sent"
    await second.aclose()
    now = sample({"n": "1", "new": "row"}, layout="with a row more")
    third = sampler.watch(PAGE, seen, always)
    assert (await next_event(third)).event == "stale"
    await third.aclose()


async def test_a_quiet_page_gets_heartbeats_until_logout(monkeypatch):
    monkeypatch.setattr("headrace.console.live.HEARTBEAT_S", 0.05)
    monkeypatch.setattr("headrace.console.live.CHECK_S", 0.05)
    is_in = True

    async def look(watched):
        return sample({"n": "1"})

    async def is_welcome():
        return is_in

    sampler = Sampler(look, every_s=0.01)
    sampler.remember("page", {"n": "1"})
    events = sampler.watch(PAGE, ClientState("page", "layout", "tab"), is_welcome)
    async with asyncio.timeout(60):
        reported = [await anext(events) for _ in range(4)]
    assert {one.event for one in reported} == {"heartbeat"}, "though it is sampled all the time"
    assert reported[-1].at, "it has a time"
    is_in = False
    assert (await next_event(events)).event == "logged_out"
    assert [one async for one in events] == []
    assert not sampler.is_running


def rendered(rows, *, shown, fallback="drawn by the script"):
    live = LiveFragments()
    main = Markup("").join(
        live(name, caller=lambda name=name: Markup(f"<b>{shown}</b>")) for name in rows
    )
    apart = live.unwatched(caller=lambda: Markup(fallback))
    page, layout = live.finish(f"<top>{live.layout}{live.edge}{main}{apart}{live.edge}<end>")
    assert layout in page.decode()
    return page.decode(), layout, live.parts


def test_the_layout_excludes_fragments():
    page, layout, found = rendered(["a", "b"], shown=1)
    assert '<span data-live="a"><b>1</b></span>' in page
    assert found == {"a": "<b>1</b>", "b": "<b>1</b>"}
    assert rendered(["a", "b"], shown=2, fallback="another")[1] == layout
    assert rendered(["a", "b", "c"], shown=1)[1] != layout
