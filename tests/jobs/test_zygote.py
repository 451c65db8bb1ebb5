"""A zygote and its slots as their agent knows them: real processes, spoken to over their sockets, without a database."""

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

from headrace.jobs.agent import control
from headrace.jobs.agent.board import Board
from headrace.jobs.agent.keeper import ZygoteKeeper
from headrace.jobs.agent.links import SlotLink
from headrace.jobs.errors import ApplicationBroken
from headrace.jobs.slots.messages import Left, Ready, Settled, Work

pytestmark = pytest.mark.slow
APPLICATION = """
import os
from headrace import Headrace
from headrace.jobs import Batch, JobInHand

app = Headrace()

@app.task("sizes", batch=10, importance=2, timeout="3s")
def sizes(batch: Batch[dict]) -> None:
    for job in batch:
        if job.payload["bytes"] < 0:
            job.fail("too small")

@app.task("each", concurrency=7, limiter="shared")
async def each(job: JobInHand[dict]) -> None: ...

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
async def keeper(tmp_path, monkeypatch):
    """A keeper whose zygote imports APPLICATION in a folder of its own."""
    (tmp_path / "small_app.py").write_text(APPLICATION)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADRACE_POSTGRES_URL", "postgresql://nobody@127.0.0.1:9/none")
    monkeypatch.setenv("HEADRACE_VALKEY_URL", "valkey://127.0.0.1:9")
    monkeypatch.setenv("HEADRACE_JOBS_RETRY_FIRST", "7s")
    board = Board.make()
    lock = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)

    def command(options):
        return [sys.executable, "-m", "headrace", "zygote", *options, "small_app:app"]

    keeper = ZygoteKeeper(command, board, lock)
    keeper.board = board
    running = asyncio.create_task(keeper.run())
    keeper.running = running
    yield keeper
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError, ApplicationBroken):
        await running
    os.close(lock)
    board.close()


class Talk:
    """A slot at the other end of a socket."""

    def __init__(self, keeper, number):
        self.heard = []
        self.is_lost = False
        self.exits = []
        self.pid = 0
        self.link = SlotLink(self.heard.append, self._lose)
        self._keeper = keeper
        self._number = number

    async def start(self):
        """Fork it and wait until it is ready."""
        self._keeper.on_forked = self._note_forked
        self._keeper.on_exited = self.exits.append
        ours, theirs = socket.socketpair()
        with theirs:
            assert self._keeper.fork(self._number, theirs)
        await self.link.connect(ours)
        ready = await self.wait(Ready)
        assert ready.pid == self.pid
        return self

    async def wait(self, kind, count=1):
        """The newest message of a kind, once there are `count`."""
        of_kind = lambda: [m for m in self.heard if isinstance(m, kind)]  # noqa: E731
        await wait_true(lambda: len(of_kind()) >= count)
        return of_kind()[-1]

    def _note_forked(self, told, pidfd):
        self.pid = told.pid
        os.close(pidfd)

    def _lose(self):
        self.is_lost = True


def work(queue, payloads):
    """Work under lease 1, jobs from 1."""
    count = len(payloads)
    return Work(
        queue=queue,
        lease_id=1,
        ids=list(range(1, count + 1)),
        payloads=payloads,
        attempts=[0] * count,
        losses=[0] * count,
        lanes=[None] * count,
        traceparents=[None] * count,
        versions=[1] * count,
        retries=3,
    )


async def test_it_says_what_an_agent_must_know_of_the_application(keeper):
    loaded = await asyncio.wait_for(keeper.wait_loaded(), 60)
    facts = {task.queue: task for task in loaded.tasks}
    assert (facts["sizes"].batch, facts["sizes"].importance, facts["sizes"].timeout_s) == (10, 2, 3)
    assert (facts["each"].concurrency, facts["each"].limiter) == (7, "shared")
    assert facts["each"].is_async
    assert not facts["sizes"].is_async
    assert loaded.settings["jobs.retry_first"] == "7s"
    assert "jobs.poll" not in loaded.settings, "defaults are everyone's own"
    assert (loaded.threads, loaded.sockets) == ([], []), "an app with all rooms leaves nothing open"


async def test_a_slot_works_and_leaves_in_order(keeper, tmp_path):
    await asyncio.wait_for(keeper.wait_loaded(), 60)
    slot = await Talk(keeper, 4).start()
    slot.link.give(work("sizes", [b'{"bytes": 1}'] * 3))
    settled = await slot.wait(Settled)
    assert (settled.lease_id, settled.ids, settled.calls) == (1, None, 1)
    slot.link.give(work("sizes", [b'{"bytes": 1}', b'{"bytes": -1}']))
    settled = await slot.wait(Settled, 2)
    assert dict(zip(settled.ids, settled.words, strict=True)) == {1: "done", 2: "fail"}
    assert keeper.board.read(4).jobs == 0
    assert keeper.board.read(4).is_whole
    slot.link.stop(1.0)
    await slot.wait(Left)
    await wait_true(lambda: slot.exits)
    assert (slot.exits[0].slot, slot.exits[0].pid, slot.exits[0].status) == (4, slot.pid, 0)
    hooks = (tmp_path / "hooks.txt").read_text().split()
    assert hooks == ["start", str(slot.pid), "stop", str(slot.pid)]


async def test_a_slot_whose_agent_is_gone_leaves(keeper):
    await asyncio.wait_for(keeper.wait_loaded(), 60)
    slot = await Talk(keeper, 0).start()
    slot.link.close()
    await wait_true(lambda: slot.exits)
    assert slot.exits[0].status == 0


async def test_a_killed_slot_is_reaped_and_told(keeper):
    await asyncio.wait_for(keeper.wait_loaded(), 60)
    slot = await Talk(keeper, 0).start()
    os.kill(slot.pid, signal.SIGKILL)
    await wait_true(lambda: slot.exits)
    assert slot.exits[0].status == -signal.SIGKILL
    assert not Path(f"/proc/{slot.pid}").exists()


async def test_slots_share_nothing_but_what_they_must(keeper):
    """No descriptor of one slot is open in another."""
    await asyncio.wait_for(keeper.wait_loaded(), 60)
    first = await Talk(keeper, 0).start()
    second = await Talk(keeper, 1).start()
    sockets = [
        {
            str(entry.readlink())
            for entry in Path(f"/proc/{slot.pid}/fd").iterdir()
            if entry.readlink().name.startswith("socket:")
        }
        for slot in (first, second)
    ]
    assert sockets[0].isdisjoint(sockets[1])


async def test_a_dead_zygote_is_replaced(keeper):
    loaded = await asyncio.wait_for(keeper.wait_loaded(), 60)
    slot = await Talk(keeper, 0).start()
    os.kill(loaded.pid, signal.SIGKILL)
    await wait_true(lambda: keeper.loaded.pid != loaded.pid)
    assert is_alive(slot.pid)
    slot.link.give(work("sizes", [b'{"bytes": 1}']))
    await slot.wait(Settled)
    slot.link.stop(0.1)
    await wait_true(lambda: slot.is_lost)
    await Talk(keeper, 1).start()


async def test_an_import_that_fails_ends_the_agent(keeper, tmp_path, monkeypatch):
    await asyncio.wait_for(keeper.wait_loaded(), 60)
    (tmp_path / "small_app.py").write_text("1 / 0\n")
    keeper.loaded = None
    os.kill(keeper.pid, signal.SIGKILL)
    with pytest.raises(ApplicationBroken, match="ZeroDivisionError") as caught:
        await asyncio.wait_for(asyncio.shield(keeper.running), 60)
    assert caught.value.exit_code == 2


def test_packets_carry_descriptors_that_no_program_inherits():
    ours, theirs = control.make_pair()
    with ours, theirs, socket.socket() as passed:
        control.send(ours, control.Fork(3), [passed.fileno()])
        order, link = control.receive_fork(theirs)
        assert order == control.Fork(3)
        assert not link.get_inheritable()
        link.close()
        text = "x" * control.TEXT_CHARACTERS_MAX
        control.send(theirs, control.Broken(text, 2))
        assert control.receive_from_zygote(ours)[0].text == text
        theirs.close()
        assert control.receive_from_zygote(ours) is None
