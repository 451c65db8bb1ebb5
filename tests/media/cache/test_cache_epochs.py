"""The filler waits for every epoch in which a frame could have been found, and for no other."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.media.cache.epochs import STUCK_S, FillerEpochs, WorkerEpochs, started_at
from headrace.media.cache.linux import barrier, register_for_barriers, remove_shared

HOLDER = """
import sys
from pathlib import Path
from headrace.media.cache.epochs import WorkerEpochs
epochs = WorkerEpochs(Path(sys.argv[1]), int(sys.argv[2]))
epochs.enter()
print("inside", flush=True)
sys.stdin.readline()
epochs.leave()
print("left", flush=True)
sys.stdin.readline()
"""
"""A process that stays in an epoch until it reads a line."""


@contextmanager
def worker_inside(run: Path, worker: int):
    """A process inside an epoch."""
    command = [sys.executable, "-c", HOLDER, str(run), str(worker)]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        assert child.stdout.readline() == "inside\n"
        yield child
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


@pytest.fixture
def turns(tmp_path):
    found = FillerEpochs(tmp_path)
    yield found
    found.close()
    remove_shared(tmp_path)


async def test_nobody_inside_is_no_wait(turns, tmp_path):
    workers = [WorkerEpochs(tmp_path, worker) for worker in range(3)]
    for worker in workers:
        worker.enter()
        worker.leave()
    assert await turns.wait_for_workers()
    assert turns.workers() == 3
    for worker in workers:
        worker.close()
    assert turns.workers() == 0


async def test_the_wait_ends_with_the_turn_and_not_before(turns, tmp_path):
    worker = WorkerEpochs(tmp_path, 0)
    worker.enter()
    waiting = asyncio.create_task(turns.wait_for_workers())
    for _ in range(50):
        await asyncio.sleep(0)
    assert not waiting.done()
    worker.leave()
    # The next epoch cannot find what was hidden before it.
    worker.enter()
    assert await waiting
    worker.close()


@pytest.mark.slow
async def test_a_stuck_turn_is_given_up_once_and_then_at_once(turns, tmp_path):
    worker = WorkerEpochs(tmp_path, 0)
    worker.enter()
    began_s = time.monotonic()
    assert not await turns.wait_for_workers()
    assert time.monotonic() - began_s >= STUCK_S
    took_s = []
    for _ in range(5):
        began_s = time.monotonic()
        assert not await turns.wait_for_workers()
        took_s.append(time.monotonic() - began_s)
    assert min(took_s) < STUCK_S
    worker.leave()
    assert await turns.wait_for_workers()
    worker.close()


@pytest.mark.slow
async def test_a_worker_that_died_inside_is_not_waited_for(turns, tmp_path):
    with worker_inside(tmp_path, 0) as child:
        assert not await turns.wait_for_workers()
        child.kill()
        child.wait()
        assert await turns.wait_for_workers()
    # Its successor has the same cell, and another epoch than the unfinished one.
    successor = WorkerEpochs(tmp_path, 0)
    assert await turns.wait_for_workers()
    successor.enter()
    assert not await turns.wait_for_workers()
    successor.close()


@pytest.mark.slow
async def test_a_worker_that_is_stopped_inside_is_never_passed_over(turns, tmp_path):
    with worker_inside(tmp_path, 0) as child:
        os.kill(child.pid, signal.SIGSTOP)
        assert not await turns.wait_for_workers()
        assert not await turns.wait_for_workers()
        os.kill(child.pid, signal.SIGCONT)
        child.stdin.write("\n")
        assert child.stdout.readline() == "left\n"
        assert await turns.wait_for_workers()


async def test_where_barriers_do_not_reach_the_wait_is_longer_than_a_store_buffer(turns, tmp_path):
    worker = WorkerEpochs(tmp_path, 0)
    worker._words[worker._cell + 3] = 0
    began_s = time.monotonic()
    assert await turns.wait_for_workers()
    assert time.monotonic() - began_s >= 0.001
    worker.close()


async def test_a_revision_is_seen_by_all(turns, tmp_path):
    worker = WorkerEpochs(tmp_path, 7)
    turns.publish_revision(41)
    assert worker.revision == turns.revision == 41
    worker.close()


def test_a_process_is_known_by_when_it_began():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    began = started_at(child.pid)
    assert began > 0
    assert began == started_at(child.pid)
    child.kill()
    child.wait()
    child.stdin.close()
    assert started_at(child.pid) == 0


def test_this_kernel_passes_barriers():
    if not register_for_barriers():
        pytest.skip("membarrier is refused here; the filler waits a millisecond instead")
    assert barrier()
