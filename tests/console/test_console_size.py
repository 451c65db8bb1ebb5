"""Jobs screens with 150 queues and 40 hosts take at most 200 ms of server time.

The test compares CPU time with a reference task on the same machine, as machines differ.
"""

from __future__ import annotations

import re
import statistics
import time

import pytest
from served import app_of, serving, visiting
from tests.kit.queue_counts import add_counts

from headrace.console.live import BYTES_PER_S
from headrace.engines.endpoints import Endpoints
from headrace.jobs import store
from headrace.jobs.fleet.plan import Move

QUEUES, HOSTS, SLOTS, TRIES = 150, 40, 32, 5
YARDSTICK_STEPS, YARDSTICKS_MAX = 80_000, 6.0
"""Half of the promised time; PostgreSQL uses the other half."""
WATCHED_S = 3.0
PAGES = ("/console/jobs", "/console/jobs/hosts", "/console", "/console/jobs/queues/queue-7")
pytestmark = pytest.mark.slow


async def fill(app):
    """Create a fleet of this size with load, plan and decisions."""
    for number in range(QUEUES):
        app.queue(f"queue-{number}")
    queue_ids = {
        name: row.id
        for name, row in (await app.jobs.queues.declare()).items()
        if name.startswith("queue-")
    }
    postgres, names = app.engines.postgres, list(queue_ids)
    for number in range(HOSTS):
        host_id = await store.leases.add_host(
            postgres, f"host-{number}", list(queue_ids.values()), 300, cores=8
        )
        slots = [
            {"queue": names[(number * 7 + slot // 4) % QUEUES], "pid": slot, "busy_s": slot % 3}
            for slot in range(SLOTS)
        ]
        await store.fleet.report_host(
            postgres, host_id, capacity=64, load_per_core=0.7, slots=slots
        )
    for _ in range(3):
        for one in queue_ids.values():
            counts = {"done": 50, "failed": 1, "claimed": 51, "run_s": 20.0, "wait_s": 9.0}
            await add_counts(postgres, one, **counts, slot_s=60.0)
    await app.jobs.enqueue_many([app.registry.find(name).job({"n": 1}) for name in names * 4])
    # Names that are ambiguous when joined.
    for host, queue in (("aa", "bb:cc"), ("aa:bb", "cc")):
        host_id = await store.leases.add_host(postgres, host, [queue_ids[names[0]]], 300, cores=1)
        slots = [{"queue": queue, "pid": 1, "busy_s": 0}]
        await store.fleet.report_host(postgres, host_id, capacity=1, load_per_core=0.1, slots=slots)
    term = await store.fleet.lead_fleet(postgres, "me", lead_s=300)
    moves = [
        Move(queue=name, host="host-1", before=0, after=2, code="below_need", why="it needs 2")
        for name in names
    ]
    planned = {
        f"host-{number}": {names[(number * 7 + turn) % QUEUES]: 4 for turn in range(8)}
        for number in range(HOSTS)
    }
    await store.fleet.write_plan(
        postgres, "me", term, slots=planned, queue_ids=queue_ids, moves=moves
    )


async def move_all(app):
    """Change every figure of every queue."""
    rows = await app.jobs.queues.declare()
    for number, row in enumerate(rows.values(), 1):
        counts = {"done": number, "claimed": number, "run_s": 1.3 * number, "wait_s": 0.7 * number}
        await add_counts(app.engines.postgres, row.id, **counts)


def yardstick_s():
    """CPU time of a fixed task similar to rendering a page."""
    began_s = time.process_time()
    found: dict[str, int] = {}
    for number in range(YARDSTICK_STEPS):
        found[f"name-{number % 997}"] = found.get(f"name-{number % 991}", 0) + number
    return time.process_time() - began_s


async def test_pages_of_a_large_fleet_are_fast(tmp_path, database_url, running_engines):
    endpoints = Endpoints(
        database_url, running_engines.endpoints.valkey_url, (tmp_path / "blobs").as_uri()
    )
    app = app_of(tmp_path, endpoints, console__live_every="500ms")
    async with serving(app) as address, visiting(app, address) as at:
        await fill(app)
        for path in PAGES:
            cpus_s, yards_s = [], []
            for _ in range(TRIES):
                yards_s.append(yardstick_s())
                cpu_s = time.process_time()
                answer = await at.client.get(path)
                cpus_s.append(time.process_time() - cpu_s)
                assert answer.status_code == 200
            cpu_s, yard_s = statistics.median(cpus_s), statistics.median(yards_s)
            assert cpu_s <= YARDSTICKS_MAX * yard_s, path
        await watch(at)


async def watch(at):
    """Check that a page with constant changes receives at most 5 KB/s."""
    page = await at.client.get("/console/jobs")
    page_id = re.search(r'data-page="([^"]+)"', page.text)[1]
    layout = re.search(r'data-layout="([^"]+)"', page.text)[1]
    params = {"url": "/console/jobs", "page": page_id, "layout": layout}
    headers = {"accept": "text/event-stream"}
    began_s, sent_bytes, events = time.perf_counter(), 0, 0
    async with at.client.stream("GET", "/console/live", params=params, headers=headers) as answer:
        async for chunk in answer.aiter_bytes():
            sent_bytes += len(chunk)
            events += chunk.count(b"event: changes")
            assert b"event: stale" not in chunk, "no row came or went"
            taken_s = time.perf_counter() - began_s
            if taken_s > WATCHED_S and events > 3:
                break
            await move_all(at.app)
    # Add the saved-up budget and the overhead of the event format.
    assert sent_bytes <= 1.1 * BYTES_PER_S * (taken_s + 2)
