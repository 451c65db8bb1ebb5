"""The application of fleets under test: handlers that record, wait, raise, hang, fork and die.

Events go to the history in the folder HISTORY. `gated`, `locking` and `held` wait until the file
`go` lies beside it. Each handler records its start first.
"""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.kit.history import Recorder
from tests.kit.storm.fleet import QUEUES
from tests.kit.waiting import wait_true

from headrace import Headrace
from headrace.engines.postgres import Tx
from headrace.engines.sql import compile_query
from headrace.jobs import Batch, JobContext

app = Headrace()
HISTORY = Path(os.environ["HISTORY"])
GO = HISTORY.parent / "go"
SKIPS = "skip" in os.environ.get("PLANTED_FAULT", "")
"""Every second job of `noted` is acknowledged and not done: torture must report it as lost."""
recorder = Recorder(HISTORY)
ADD_EFFECT = compile_query("add_effect", "-- One effect.\nINSERT INTO effect VALUES (:job, :lease)")
kept: list[bytearray] = []


class Raised(Exception):
    """The error of handlers whose payload requests one."""


def task(queue: str, **options):
    """Declare a handler of `queue` with its options in QUEUES."""
    return app.task(queue, **QUEUES[queue], **options)


def note(word: str, job_id: int, pid: int | None = None) -> None:
    recorder.note(word, "step", pid=pid, job=job_id)


def take(seconds: float) -> None:
    threading.Event().wait(seconds)


def hang() -> None:
    """Run C code that lets no other thread run, for ever."""
    re.match(r"(a+)+$", "a" * 64 + "b")


def kill_self() -> None:
    """Die as a segmentation fault does."""
    os.kill(os.getpid(), signal.SIGKILL)


# Handlers that record runs and effects


async def _work(queue: str, job: JobContext[dict]) -> None:
    facts = {"job": job.id, "lane": job.lane, "lease": job.lease_id, "wall_s": time.time()}
    with recorder.running(queue, **facts, **job.payload):
        if job.payload.get("hold_s"):
            await asyncio.wait([asyncio.create_task(_never())], timeout=job.payload["hold_s"])


async def _never() -> None:
    await asyncio.Event().wait()


@task("noted", concurrency=5)
async def noted(job: JobContext[dict]) -> None:
    if SKIPS and job.id % 2:
        return
    await _work("noted", job)


@task("laned", concurrency=20)
async def laned(job: JobContext[dict]) -> None:
    await _work("laned", job)


@task("called_back")
async def called_back(job: JobContext[dict]) -> None:
    group = job.payload["group"]
    counts = {name: group[name] for name in ("done", "failed", "cancelled", "quarantined")}
    with recorder.running("called_back", job=job.id, group=group["id"], **counts):
        pass


@task("gated")
async def gated(batch: Batch[dict]) -> None:
    """Wait for `go`, then write a row per job, which commits only while the lease is held."""
    with recorder.running("gated", job=[job.id for job in batch], lease=batch.lease_id):
        await wait_go()
        with recorded_effects(batch):
            async with app.engines.postgres.transaction() as tx:
                await write_effects(tx, batch)


@task("locking")
async def locking(job: JobContext[dict]) -> None:
    """The same with the lease locked first: the transaction stays open until `go`."""
    with recorder.running("locking", job=job.id, lease=job.lease_id), recorded_effects([job]):
        async with app.engines.postgres.transaction() as tx:
            await app.jobs.lock_lease(tx, job.lease_id)
            note("locked", job.id)
            await wait_go()
            await write_effects(tx, [job])


@task("fenced")
async def fenced(job: JobContext[dict]) -> None:
    """Write a row that commits only while the lease is held."""
    with recorder.running("fenced", job=job.id, lease=job.lease_id), recorded_effects([job]):
        async with app.engines.postgres.transaction() as tx:
            await write_effects(tx, [job])


@task("batched")
def batched(batch: Batch[dict]) -> None:
    """Batches; some jobs raise at first, and one kills its process at every run."""
    with recorder.running("batched", job=[job.id for job in batch], lease=batch.lease_id):
        if any(job.payload.get("dies") for job in batch):
            kill_self()
        take(sum(job.payload.get("hold_s", 0) for job in batch))
        if any(job.attempt <= job.payload.get("raises", 0) for job in batch):
            raise Raised("this run fails")


@task("fails")
async def fails(job: JobContext[dict]) -> None:
    with recorder.running("fails", job=job.id, lease=job.lease_id):
        raise Raised("every run fails")


@task("narrow")
def narrow(job: JobContext[dict]) -> None:
    """At most two slots of the fleet."""
    with recorder.running("narrow", job=job.id, lane="narrow", lease=job.lease_id):
        take(job.payload.get("hold_s", 0))


@task("stopped")
def stopped(job: JobContext[dict]) -> None:
    """No slot."""
    note("started", job.id)


async def wait_go() -> None:
    await wait_true(GO.exists, deadline_s=120)


async def write_effects(tx: Tx, jobs: Sequence[JobContext[dict]]) -> None:
    for job in jobs:
        await tx.run(ADD_EFFECT, job=job.id, lease=job.lease_id)
    await app.jobs.lock_lease(tx, jobs[0].lease_id)


@contextmanager
def recorded_effects(jobs: Sequence[JobContext[dict]]) -> Iterator[None]:
    with ExitStack() as stack:
        tried = [
            stack.enter_context(recorder.asking("effect", job=job.id, lease=job.lease_id))
            for job in jobs
        ]
        yield
        for operation in tried:
            operation.ok()


# Handlers that harm their slot


@task("held")
def held(batch: Batch[dict]) -> None:
    for job in batch:
        note("started", job.id)
    while not GO.exists():
        take(0.01)
    for job in batch:
        note("effect", job.id)


@task("poison")
def poison(batch: Batch[dict]) -> None:
    for job in batch:
        if job.payload.get("dies"):
            note("dies", job.id)
            kill_self()
    for job in batch:
        note("effect", job.id)


@task("concurrent", concurrency=20)
async def concurrent(job: JobContext[dict]) -> None:
    if job.payload.get("dies"):
        note("dies", job.id)
        kill_self()
    note("effect", job.id)


@task("hangs", timeout="500ms")
def hangs(job: JobContext[dict]) -> None:
    note("started", job.id)
    hang()


@task("sleeps", timeout="500ms")
def sleeps(job: JobContext[dict]) -> None:
    note("started", job.id)
    take(60)


@task("blocks", timeout="500ms")
async def blocks(job: JobContext[dict]) -> None:
    note("started", job.id)
    hang()


@task("forks")
def forks(batch: Batch[dict]) -> None:
    """Leave children that live on, one forked and one spawned, then wait."""
    if os.fork() == 0:
        take(20)
        os._exit(0)
    subprocess.Popen(["sleep", "20"])
    for job in batch:
        note("started", job.id)
    while not GO.exists():
        take(0.01)


@task("quick")
def quick(batch: Batch[dict]) -> None:
    for job in batch:
        take(0.002)
        note("effect", job.id)


@task("grows")
def grows(batch: Batch[dict]) -> None:
    """Never release memory."""
    kept.append(bytearray(batch[0].payload.get("bytes", 0)))
    note("effect", batch[0].id)


@task("splits")
def splits(job: JobContext[dict]) -> int:
    child = os.fork()
    note("child" if child == 0 else "effect", job.id)
    return child


@task("splits_async", concurrency=5)
async def splits_async(job: JobContext[dict]) -> int:
    """The same in the event loop; where the payload requests it, the child awaits first."""
    child = os.fork()
    note("child" if child == 0 else "effect", job.id)
    if job.payload.get("awaits"):
        await asyncio.to_thread(os.getpid)
        note("after", job.id)
    return child


@task("leaves", timeout="500ms")
def leaves(job: JobContext[dict]) -> None:
    """Leave one child forked, one spawned and one in its own session, then perhaps hang."""
    if os.fork() == 0:
        note("child", job.id)
        take(60)
        os._exit(0)
    for is_detached in (False, True):
        spawned = subprocess.Popen(["sleep", "60"], start_new_session=is_detached)
        note("detached" if is_detached else "child", job.id, spawned.pid)
    note("started", job.id)
    if job.payload.get("hangs"):
        hang()


@task("starves")
def starves(job: JobContext[dict]) -> None:
    note("started", job.id)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    Path(os.devnull).read_bytes()
