"""Slow reads of pages: the last answer, its age while a newer one is read, and the timeout."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from headrace.console import kept_reads
from headrace.console.kept_reads import KEPT_WAIT_S, KeptReads
from headrace.console.screens import health_rooms
from headrace.console.screens.health_rooms import stale_issues
from headrace.console.views import attempt


async def old():
    return "old"


async def new():
    return "new"


async def test_a_slow_read_shows_the_last_answer_with_its_age():
    reads, answer = KeptReads(), asyncio.Event()

    async def slow():
        await answer.wait()
        return "new"

    assert await reads.kept("nodes", 10.0, old) == "old"
    found = await attempt(reads.kept, "nodes", 0.0, slow)
    assert (found.value, found.error) == ("old", None)
    assert reads.age_s("nodes") > 0
    answer.set()
    assert await reads.kept("nodes", 0.0, slow) == "new", "the same read continued"
    assert reads.age_s("nodes") == 0, "no read is in progress"
    assert [one.tone for one in stale_issues(31.0)] == ["warn"]
    assert not [*stale_issues(29.0)]


async def test_an_outdated_answer_waits_for_the_probe_of_a_dead_node():
    """Such a probe takes over KEPT_WAIT_S, and the last answer may be from before it died."""
    reads, answer = KeptReads(), asyncio.Event()

    async def probe():
        await answer.wait()
        return "new"

    assert await reads.kept("nodes", 0.0, old) == "old"
    asyncio.get_running_loop().call_later(KEPT_WAIT_S + 0.1, answer.set)
    assert await reads.kept("nodes", 0.0, probe) == "new"


async def test_nodes_that_no_page_reads_are_not_reported_as_old(at, monkeypatch):
    """The page of the cluster reads them, and without a cluster the overview does not."""
    assert at.app.media.config.node is None
    monkeypatch.setattr(health_rooms, "NODES_AGE_S", 0.0)
    assert (await at.get("/console/media/cluster")).status_code == 200
    page = await at.get("/console")
    assert page.status_code == 200
    assert "the next check has not ended" not in page.text


async def test_a_read_without_an_end_times_out_and_the_next_page_starts_another(monkeypatch):
    monkeypatch.setattr(kept_reads, "LOAD_S_MAX", 0.05)
    reads = KeptReads()
    with capture_logs() as lines:
        async with asyncio.timeout(60):
            for _ in range(2):
                with pytest.raises(TimeoutError):
                    await reads.kept("nodes", 0.0, asyncio.Event().wait)
    assert [(line["event"], line["name"]) for line in lines] == [
        ("page_data_not_read", "nodes")
    ] * 2
    assert await reads.kept("nodes", 0.0, new) == "new"


async def test_a_page_that_waits_while_a_read_times_out_shows_an_error(monkeypatch):
    monkeypatch.setattr(kept_reads, "LOAD_S_MAX", 0.05)
    reads = KeptReads()
    await reads.kept("nodes", 0.0, old)
    found = await attempt(reads.kept, "nodes", 0.0, asyncio.Event().wait)
    assert (found.value, found.is_slow) == (None, True)
    assert (await attempt(reads.kept, "nodes", 0.0, new)).value == "new"
