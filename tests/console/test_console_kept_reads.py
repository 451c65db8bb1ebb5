"""Slow reads of pages: the last answer, and its age while a newer one is read."""

from __future__ import annotations

import asyncio

from headrace.console.kept_reads import KEPT_WAIT_S, KeptReads
from headrace.console.screens import health_rooms
from headrace.console.screens.health_rooms import stale_issues
from headrace.console.views import attempt


async def old():
    return "old"


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
    assert "newer probes have not ended" not in page.text
