"""An application whose handlers hang, die and fork.

Each notes in the folder NOTES what it did, as `WORD JOB PID`.
"""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import subprocess
import threading
from pathlib import Path

from headrace import Headrace
from headrace.jobs import Batch, JobContext

app = Headrace()
NOTES = Path(os.environ["NOTES"])


def note(word: str, job_id: int) -> None:
    """One line; a line this short is written whole."""
    note_of(word, job_id, os.getpid())


def note_of(word: str, job_id: int, pid: int) -> None:
    """The same of another process."""
    with (NOTES / "notes.txt").open("a") as file:
        file.write(f"{word} {job_id} {pid}\n")


def take(seconds: float) -> None:
    """Take so long, as work would."""
    threading.Event().wait(seconds)


def wait_go() -> None:
    """Until the test makes the file `go`."""
    while not (NOTES / "go").exists():
        take(0.01)


@app.task("held", batch=5, retries=3)
def held(batch: Batch[dict]) -> None:
    """Runs until the test lets it go."""
    for job in batch:
        note("started", job.id)
    wait_go()
    for job in batch:
        note("effect", job.id)


@app.task("poison", batch=10, retries=3)
def poison(batch: Batch[dict]) -> None:
    """Dies at the jobs that say so."""
    for job in batch:
        if job.payload.get("dies"):
            note("dies", job.id)
            os.kill(os.getpid(), signal.SIGKILL)
    for job in batch:
        note("effect", job.id)


@app.task("side_by_side", concurrency=20, retries=3)
async def side_by_side(job: JobContext[dict]) -> None:
    """The same among calls that run at once."""
    if job.payload.get("dies"):
        note("dies", job.id)
        os.kill(os.getpid(), signal.SIGKILL)
    note("effect", job.id)


@app.task("hangs", timeout="500ms", retries=1)
def hangs(job: JobContext[dict]) -> None:
    """Stays in C code that lets no other thread run: a pattern that takes for ever."""
    note("started", job.id)
    re.match(r"(a+)+$", "a" * 64 + "b")


@app.task("blocks", timeout="500ms", retries=1)
async def blocks(job: JobContext[dict]) -> None:
    """The same in the event loop."""
    note("started", job.id)
    re.match(r"(a+)+$", "a" * 64 + "b")


@app.task("forks", batch=5)
def forks(batch: Batch[dict]) -> None:
    """Leaves children that live on, one forked and one spawned, then waits."""
    if os.fork() == 0:
        take(20)
        os._exit(0)
    subprocess.Popen(["sleep", "20"])
    for job in batch:
        note("started", job.id)
    wait_go()


@app.task("quick", batch=10)
def quick(batch: Batch[dict]) -> None:
    """Takes 2 ms a job."""
    for job in batch:
        take(0.002)
        note("effect", job.id)


@app.task("grows", batch=1)
def grows(batch: Batch[dict]) -> None:
    """Never gives its memory back."""
    kept.append(bytearray(batch[0].payload.get("bytes", 0)))
    note("effect", batch[0].id)


@app.task("splits")
def splits(job: JobContext[dict]) -> int:
    """Forks and returns in both processes."""
    child = os.fork()
    note("child" if child == 0 else "effect", job.id)
    return child


@app.task("splits_async", concurrency=5)
async def splits_async(job: JobContext[dict]) -> int:
    """The same in the event loop; where the payload says so, the child awaits before it returns."""
    child = os.fork()
    note("child" if child == 0 else "effect", job.id)
    if job.payload.get("awaits"):
        await asyncio.to_thread(os.getpid)
        note("after", job.id)
    return child


@app.task("leaves", timeout="500ms", retries=0)
def leaves(job: JobContext[dict]) -> None:
    """Leaves one child forked, one spawned and one in a session of its own, and may hang then."""
    if os.fork() == 0:
        note("child", job.id)
        take(60)
        os._exit(0)
    for is_detached in (False, True):
        spawned = subprocess.Popen(["sleep", "60"], start_new_session=is_detached)
        note_of("detached" if is_detached else "child", job.id, spawned.pid)
    note("started", job.id)
    if job.payload.get("hangs"):
        re.match(r"(a+)+$", "a" * 64 + "b")


@app.task("starves", retries=0)
def starves(job: JobContext[dict]) -> None:
    """Lets its process open no file any more."""
    note("started", job.id)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    note("never", job.id)


kept: list[bytearray] = []
