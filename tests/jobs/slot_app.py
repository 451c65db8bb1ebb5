"""The application of slots whose handlers enqueue, look up and fail in every way that calls can."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from tests.kit.processes import wait_until
from tests.kit.waiting import wait_true

from headrace import Headrace
from headrace.jobs import NewJob

app = Headrace()
HERE = Path(os.environ.get("SLOT_APP_FOLDER", "."))
"""Handlers write `NAME.txt` here, and wait for `go`."""
HUGE = "x" * 60_000
kept = app.queue("kept")


def note(name, text=""):
    file = HERE / f"{name}.new"
    file.write_text(str(text))
    file.rename(HERE / f"{name}.txt")


@app.task("by_async", retries=0)
async def by_async(n: int) -> None:
    """Enqueue one, with a key, many and in a group; look up; then hold the slot."""
    one = await kept.enqueue(n=n)
    keyed = await kept.enqueue(n=n, unique=f"key {n}", lane="a")
    assert await kept.enqueue(n=n, unique=f"key {n}") == keyed
    many = await kept.enqueue_many([{"n": n}] * 300)
    async with app.group(on_done=kept.job(n=n)) as group:
        await kept.enqueue(n=n, group=group)
    chain = [await kept.enqueue(n=n, chain=f"chain {n}", expires="1h") for _ in range(2)]
    own = await app.jobs.job(await kept.enqueue(n=n, retries=1, timeout="5s"))
    assert (own.retries, own.timeout_s) == (1, 5)
    ends = [await app.jobs.job(job_id) for job_id in chain]
    assert [(job.chain, job.run_at is None) for job in ends] == [
        (f"chain {n}", False),
        (f"chain {n}", True),
    ]
    found = await app.jobs.job(one)
    assert (found.id, found.payload, found.state) == (one, {"n": n}, "ready")
    assert found.run_at.tzinfo is not None
    await many[0].cancel()
    assert (await app.jobs.job(many[0])).state == "cancelled"
    note(f"async-{n}", os.getpid())
    await wait_true((HERE / "go").exists)


@app.task("by_sync", retries=0)
def by_sync(n: int) -> None:
    """The same by sync calls, also in a forked process, which has connections of its own."""
    one = kept.sync.enqueue(n=n)
    assert app.sync.jobs.job(one).payload == {"n": n}
    assert len(set(kept.sync.enqueue_many([{"n": n}] * 3))) == 3
    if n == 0:
        child = os.fork()
        if child == 0:
            kept.sync.enqueue(n=-1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    note(f"sync-{n}", os.getpid())
    wait_until((HERE / "go").exists, what="go")


@app.task("faulty", retries=0)
async def faulty(waiting: int) -> None:
    """Note the error of each call in `faults`."""
    note("faults", "\n".join(await faults(app.jobs, waiting)))


async def faults(jobs, waiting):
    """Class and text of the errors of bad calls."""
    calls = [
        jobs.enqueue(NewJob(queue="kept", priority=10)),
        jobs.enqueue(NewJob(queue="kept", payload="x" * 70_000)),
        jobs.enqueue(NewJob(queue="undeclared")),
        jobs.enqueue(NewJob(queue="kept", payload=13)),
        jobs.enqueue(NewJob(queue="kept", payload=13, unique="a")),
        jobs.enqueue(NewJob(queue="kept", payload=14)),
        jobs.enqueue_many([NewJob(queue="kept", payload=n) for n in range(300)]),
        jobs.job(10**12),
        jobs.cancel(waiting),
        jobs.result(waiting, timeout_s=0.1),
    ]
    answers = [(await asyncio.gather(call, return_exceptions=True))[0] for call in calls]
    return [f"{type(each).__module__}.{type(each).__name__} {each}" for each in answers]


@app.task("blocked", retries=0, concurrency=5)
async def blocked(n: int) -> None:
    """Wait many times for a key that an open transaction holds."""
    note("blocked")
    ids = await asyncio.gather(*[kept.enqueue(n=n, unique="held") for _ in range(30)])
    note("unblocked", len(set(ids)))


@app.task("plain", retries=0)
async def plain(n: int) -> None:
    await asyncio.gather(*[kept.enqueue(n=n) for _ in range(30)])
    note("plain", await app.jobs.job(await kept.enqueue(n=n)))


@app.task("huge", retries=0)
async def huge(n: int) -> None:
    """More than the agent takes in one call: a connection of its own."""
    note("huge", len(await kept.enqueue_many([{"text": HUGE}] * 30)))


@app.task("endless", concurrency=8, retries=50)
async def endless(n: int) -> None:
    """Enqueue numbers, and append each acknowledged one to a file, until `go`."""
    file = os.open(HERE / "acknowledged", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    number = 0
    while not (HERE / "go").exists():
        name = f"{os.getpid()}-{n}-{id(file)}-{number}"
        job_id = await kept.enqueue(name=name)
        os.write(file, f"{job_id} {name}\n".encode())
        number += 1
    os.close(file)
