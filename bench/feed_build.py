"""How long does the job of `headrace feed rebuild` take, and how much memory does the index need?

The run drops the index, and a job in a separate agent builds it. Measured are the job's time, the
peak memory of its process, its progress reports, and the latency of another client of the same
Valkey meanwhile. Then the index is compared with PostgreSQL. The size of the index is the growth of
Valkey's used memory: first the follows alone are built, then the posts, too.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.kit.processes import descendants

from bench.children import BenchFault, Child
from bench.feed_stage import World, stage_follows, stage_posts
from bench.peers.feed_merges import Merges
from bench.systems import Cell
from headrace import Headrace
from headrace.jobs import JobState
from headrace.kernel.resilience import require_not_cancelled

PING_EVERY_S = 0.01
LOOK_EVERY_S = 0.1
BUILT_S_MAX = 1_200
LONG_S, STEPS_MIN = 5.0, 4
"""Minimum number of progress reports of a long job."""
ENDED = (JobState.DONE, JobState.GONE)


@dataclass
class Built:
    """How an index was built, and what it weighs."""

    seconds: float
    """From the start of the job."""
    memory_mib: float
    stall_ms: float
    """The longest wait of another caller."""
    proved_s: float = 0.0
    post_bytes: float = 0.0
    follow_bytes: float = 0.0
    copied_s: float = 0.0
    """To bring the truth into PostgreSQL."""


@dataclass
class Seen:
    """What was seen of a job that runs."""

    created_s: float = field(default_factory=time.perf_counter)
    began_s: float | None = None
    ratios: list[float] = field(default_factory=list)
    memory_kib: int = 0
    wait_s: float = 0.0


async def build(
    cell: Cell, app: Headrace, merges: Merges, world: World, *, sample: int | None = None
) -> Built:
    """Bring a world into both engines; all is proved, or so many authors and viewers.

    Raises: BenchFault, where the index is not the truth.
    """
    await app.feed.index.rebuild_now(clean=True)
    empty = await merges.used_bytes()
    began_s = time.perf_counter()
    await stage_follows(cell, world)
    copied_s = time.perf_counter() - began_s
    await app.feed.index.rebuild_now(clean=True)
    followed = await merges.used_bytes()
    began_s = time.perf_counter()
    await stage_posts(cell, world)
    copied_s += time.perf_counter() - began_s
    built = await _build_by_job(cell, app, merges)
    built.copied_s = copied_s
    built.follow_bytes = (followed - empty) / sum(len(row) for row in world.follows.values())
    built.post_bytes = (await merges.used_bytes() - followed) / len(world.ids)
    began_s = time.perf_counter()
    proof = await app.feed.index.verify(sample=sample)
    built.proved_s = time.perf_counter() - began_s
    if proof.differences or (sample is None and proof.posts != len(world.ids)):
        raise BenchFault(f"{proof.posts} posts are proved, {proof.differences[:3]} differ")
    return built


async def _build_by_job(cell: Cell, app: Headrace, merges: Merges) -> Built:
    await app.feed.valkey.drop()
    job = await app.feed.index.rebuild()
    seen, agent = Seen(), cell.work()
    pinging = asyncio.create_task(_ping(merges, seen))
    try:
        await _watch(app, job, agent, seen)
        assert seen.began_s is not None, "the job ended unseen"
        took_s = time.perf_counter() - seen.began_s
    finally:
        pinging.cancel()
        with suppress(asyncio.CancelledError):
            await pinging
        await agent.end()
    ratios = seen.ratios
    if ratios != sorted(ratios) or (took_s > LONG_S and len(set(ratios)) < STEPS_MIN):
        raise BenchFault(f"progress was reported as {ratios[:20]}")
    return Built(took_s, seen.memory_kib / 1024, seen.wait_s * 1000)


async def _watch(app: Headrace, job: int, agent: Child, seen: Seen) -> None:
    """Look at the job until it is done. Raises: BenchFault."""
    while True:
        if await _is_over(app, job, agent, seen):
            return
        await asyncio.sleep(LOOK_EVERY_S)


async def _is_over(app: Headrace, job: int, agent: Child, seen: Seen) -> bool:
    now_s = time.perf_counter()
    if not agent.is_running or now_s > seen.created_s + BUILT_S_MAX:
        raise BenchFault(f"not built in {now_s - seen.created_s:.0f} s: {agent.err[-600:]}")
    found = await app.jobs.job(job)
    if found.attempt or found.losses:
        raise BenchFault(f"the job failed: {found.error}")
    if found.state is not JobState.READY and seen.began_s is None:
        seen.began_s = now_s
    if found.progress:
        seen.ratios.append(found.progress.ratio)
    seen.memory_kib = max([seen.memory_kib, *map(_most_kib, descendants(agent.pid))])
    return found.state in ENDED


async def _ping(merges: Merges, seen: Seen) -> None:
    while True:
        # The stock client swallows some cancellations on Python 3.11.
        require_not_cancelled()
        began_s = time.perf_counter()
        await merges.client.ping()
        seen.wait_s = max(seen.wait_s, time.perf_counter() - began_s)
        await asyncio.sleep(PING_EVERY_S)


def _most_kib(pid: int) -> int:
    """The most memory that a process ever had; 0 after its end."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    rows = [row for row in status.splitlines() if row.startswith("VmHWM")]
    return int(rows[0].split()[1]) if rows else 0
