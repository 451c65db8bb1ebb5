"""A zygote and its slots: real processes driven over their sockets, without a database."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

import pytest
from tests.kit.processes import is_alive
from tests.kit.waiting import wait_true

from headrace.jobs.agent import zygote_protocol
from headrace.jobs.agent.zygote_client import ZygoteClient
from headrace.jobs.errors import ApplicationBroken
from headrace.jobs.messages import (
    TEXT_CHARACTERS_MAX,
    Ack,
    Broken,
    Left,
    Ready,
    Stop,
    Work,
    decode_from_slot,
)
from headrace.jobs.slots.status_board import StatusBoard
from headrace.kernel.ipc import MessageConnection

pytestmark = pytest.mark.slow
APPLICATION = """
import os
from headrace import Headrace
from headrace.jobs import Batch, JobContext

app = Headrace()

@app.task("sizes", batch=10, importance=2, timeout="3s")
def sizes(batch: Batch[dict]) -> None:
    for job in batch:
        if job.payload["bytes"] < 0:
            job.fail("too small")

@app.task("each", concurrency=7, limiter="shared")
async def each(job: JobContext[dict]) -> None: ...

@app.on_slot_start
async def opened() -> None:
    with open("hooks.txt", "a") as file:
        file.write(f"start {os.getpid()}\\n")

@app.on_slot_stop
def closed() -> None:
    with open("hooks.txt", "a") as file:
        file.write(f"stop {os.getpid()}\\n")
"""


@pytest.fixture
async def zygote(tmp_path, monkeypatch):
    """A client whose zygote imports APPLICATION in its own folder."""
    (tmp_path / "small_app.py").write_text(APPLICATION)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADRACE_POSTGRES_URL", "postgresql://nobody@127.0.0.1:9/none")
    monkeypatch.setenv("HEADRACE_VALKEY_URL", "valkey://127.0.0.1:9")
    monkeypatch.setenv("HEADRACE_JOBS_RETRY_FIRST", "7s")
    board = StatusBoard.make()
    lock = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)

    def command(options):
        return [sys.executable, "-m", "headrace", "zygote", *options, "small_app:app"]

    zygote = ZygoteClient(command, board, lock)
    zygote.board = board
    running = asyncio.create_task(zygote.run())
    zygote.running = running
    yield zygote
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError, ApplicationBroken):
        await running
    os.close(lock)
    os.close(board.descriptor)


class Talk:
    """A slot driven over its socket."""

    def __init__(self, zygote, number):
        self.received = []
        self.is_lost = False
        self.exits = []
        self.pid = 0
        self.link = MessageConnection(decode_from_slot, self.received.append, self._lose)
        self._zygote = zygote
        self._number = number

    async def start(self):
        """Fork it and wait until it is ready."""
        self._zygote.on_forked = self._note_forked
        self._zygote.on_exited = self.exits.append
        ours, theirs = socket.socketpair()
        with theirs:
            assert self._zygote.fork(self._number, theirs)
        await self.link.connect(ours)
        ready = await self.wait(Ready)
        # The fork is reported on another socket, which may be read later.
        await wait_true(lambda: self.pid != 0)
        assert ready.pid == self.pid
        return self

    async def wait(self, kind, count=1):
        """Wait for `count` messages of a kind. Return the newest."""
        of_kind = lambda: [m for m in self.received if isinstance(m, kind)]  # noqa: E731
        await wait_true(lambda: len(of_kind()) >= count)
        return of_kind()[-1]

    def _note_forked(self, forked, pidfd):
        self.pid = forked.pid
        os.close(pidfd)

    def _lose(self):
        self.is_lost = True


def work(queue, payloads):
    """Work of lease 1 with jobs from id 1."""
    count = len(payloads)
    return Work(
        queue=queue,
        lease_id=1,
        ids=list(range(1, count + 1)),
        payloads=payloads,
        attempts=[0] * count,
        losses=[0] * count,
        lanes=[None] * count,
        headers=[None] * count,
        versions=[1] * count,
        retries=3,
    )


async def test_slots_work_leave_and_die_while_their_zygote_runs(zygote, tmp_path):
    loaded = await asyncio.wait_for(zygote.wait_loaded(), 60)
    facts = {task.queue: task for task in loaded.tasks}
    assert (facts["sizes"].batch, facts["sizes"].importance, facts["sizes"].timeout_s) == (10, 2, 3)
    assert (facts["each"].concurrency, facts["each"].limiter) == (7, "shared")
    assert (facts["each"].is_async, facts["sizes"].is_async) == (True, False)
    assert loaded.settings["jobs.retry_first"] == "7s"
    assert "jobs.poll" not in loaded.settings, "defaults are not sent"
    assert (loaded.threads, loaded.sockets) == ([], []), "an app with all rooms leaves nothing open"
    slot = await Talk(zygote, 4).start()
    slot.link.send(work("sizes", [b'{"bytes": 1}'] * 3))
    ack = await slot.wait(Ack)
    assert (ack.lease_id, ack.outcomes, ack.calls) == (1, None, 1)
    slot.link.send(work("sizes", [b'{"bytes": 1}', b'{"bytes": -1}']))
    ack = await slot.wait(Ack, 2)
    assert {job: one.kind for job, one in ack.outcomes.items()} == {1: "done", 2: "fail"}
    assert zygote.board.read(4).jobs == 0
    assert zygote.board.read(4).is_whole
    slot.link.send(Stop(1.0))
    await slot.wait(Left)
    await wait_true(lambda: slot.exits)
    assert (slot.exits[0].slot, slot.exits[0].pid, slot.exits[0].status) == (4, slot.pid, 0)
    hooks = (tmp_path / "hooks.txt").read_text().split()
    assert hooks == ["start", str(slot.pid), "stop", str(slot.pid)]
    orphan = await Talk(zygote, 0).start()
    killed = await Talk(zygote, 1).start()
    assert open_sockets(orphan.pid).isdisjoint(open_sockets(killed.pid))
    zygote.on_exited = (exits := []).append
    orphan.link.close()
    await wait_true(lambda: exits)
    os.kill(killed.pid, signal.SIGKILL)
    await wait_true(lambda: len(exits) == 2)
    assert [(ended.pid, ended.status) for ended in exits] == [
        (orphan.pid, 0),
        (killed.pid, -signal.SIGKILL),
    ]
    assert not Path(f"/proc/{killed.pid}").exists()


def open_sockets(pid):
    """The sockets that a process has open."""
    entries = (entry.readlink() for entry in Path(f"/proc/{pid}/fd").iterdir())
    return {str(entry) for entry in entries if entry.name.startswith("socket:")}


async def test_a_dead_zygote_is_replaced_until_its_import_fails(zygote, tmp_path):
    loaded = await asyncio.wait_for(zygote.wait_loaded(), 60)
    slot = await Talk(zygote, 0).start()
    os.kill(loaded.pid, signal.SIGKILL)
    await wait_true(lambda: zygote.loaded.pid != loaded.pid)
    assert is_alive(slot.pid)
    slot.link.send(work("sizes", [b'{"bytes": 1}']))
    await slot.wait(Ack)
    slot.link.send(Stop(0.1))
    await wait_true(lambda: slot.is_lost)
    await Talk(zygote, 1).start()
    (tmp_path / "small_app.py").write_text("1 / 0\n")
    zygote.loaded = None
    os.kill(zygote.pid, signal.SIGKILL)
    with pytest.raises(ApplicationBroken, match="ZeroDivisionError") as caught:
        await asyncio.wait_for(asyncio.shield(zygote.running), 60)
    assert caught.value.exit_code == 2


def test_packets_carry_descriptors_that_no_program_inherits():
    ours, theirs = zygote_protocol.make_pair()
    with ours, theirs, socket.socket() as passed:
        zygote_protocol.send(ours, zygote_protocol.Fork(3), [passed.fileno()])
        order, link = zygote_protocol.receive_fork(theirs)
        assert order == zygote_protocol.Fork(3)
        assert not link.get_inheritable()
        link.close()
        text = "x" * TEXT_CHARACTERS_MAX
        zygote_protocol.send(theirs, Broken(text, 2))
        assert zygote_protocol.receive_from_zygote(ours)[0].text == text
        theirs.close()
        assert zygote_protocol.receive_from_zygote(ours) is None
