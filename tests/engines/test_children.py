"""Child processes: stopped with their sessions, restarted later and later, orphans reaped.

Each check runs in a process of its own, because adopting orphans cannot be undone.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.kit.waiting import wait_true

from headrace.engines import children
from headrace.engines.children import (
    HEALTHY_S,
    ChildProcess,
    MainThreadRequired,
    RestartDelay,
    adopt_orphans,
    child_pids,
    launcher_command,
)
from headrace.kernel.resilience import Backoff

FAMILY = """
import os, signal, sys, threading
for begin in (lambda: os.setpgid(0, 0), os.setsid):
    if os.fork() == 0:
        begin()
        threading.Event().wait(float(sys.argv[1]))
        os._exit(0)
print("started", flush=True)
signal.pause()
"""
"""A process with a child in its session and a child that leads a session."""
STUBBORN = """
import signal
signal.signal(signal.SIGTERM, lambda *_: None)
print("started", flush=True)
while True:
    signal.pause()
"""


def states() -> dict[int, str]:
    """The children of this process with their states."""
    found = {}
    for pid in child_pids():
        found[pid] = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return found


async def started(program: str, *arguments: str, **options) -> ChildProcess:
    """A child that has printed a line."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as source, os.fdopen(writing, "wb") as output:
        command = [sys.executable, "-c", program, *arguments]
        child = await ChildProcess.start(command, output=output, **options)
        await asyncio.to_thread(source.readline)
    return child


async def orphans_are_reaped() -> list[object]:
    """Kill the parent of two processes that end later; wait until they are zombies, then reap."""
    adopt_orphans()
    child = await started(FAMILY, "0.3")
    os.kill(child.pid, signal.SIGKILL)
    exit_code = await child.wait()
    adopted = len(child_pids())
    await wait_true(lambda: list(states().values()) == ["Z", "Z"])
    ChildProcess.reap_orphans()
    return [exit_code, adopted, child_pids()]


async def no_status_is_taken() -> list[object]:
    """Reap without a pause while children start and end."""
    adopt_orphans()

    async def reap() -> None:
        while True:
            ChildProcess.reap_orphans()
            await asyncio.sleep(0)

    async def run(code: int, *, leads_session: bool) -> int:
        command = ["/bin/sh", "-c", f"exit {code}"]
        child = await ChildProcess.start(command, leads_session=leads_session)
        return await child.wait()

    reaping = asyncio.create_task(reap())
    codes = await asyncio.gather(*[run(n, leads_session=n % 2 == 0) for n in range(1, 41)])
    plain = await asyncio.create_subprocess_exec("/bin/sh", "-c", "exit 41")
    codes.append(await plain.wait())
    reaping.cancel()
    return [codes == list(range(1, 42))]


async def a_stop_kills_what_hangs() -> list[object]:
    """Stop a child that ignores SIGTERM, one with children, and one in a hurry."""
    adopt_orphans()
    stubborn = await started(STUBBORN, leads_session=False)
    answers: list[object] = [await stubborn.stop([(signal.SIGTERM, 0.1)]), await stubborn.wait()]
    polite = await started(FAMILY, "600")
    answers += [await polite.stop([(signal.SIGTERM, 60.0)]), await polite.wait()]
    answers.append(len(states()) == 2 and "Z" not in states().values())
    for pid in child_pids():
        os.kill(pid, signal.SIGKILL)
    hanging, hurry = await started(STUBBORN), asyncio.Event()
    began_s = time.monotonic()
    asyncio.get_running_loop().call_later(0.1, hurry.set)
    answers += [
        await hanging.stop([(signal.SIGTERM, 600.0)], hurry),
        time.monotonic() - began_s < 60,
    ]
    return answers


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        (orphans_are_reaped, [-signal.SIGKILL, 2, []]),
        (no_status_is_taken, [True]),
        (a_stop_kills_what_hangs, [False, -9, True, -15, True, False, True]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_children(check, expected):
    program = "import asyncio, json\nfrom tests.engines import test_children as t\n"
    program += f"print(json.dumps(asyncio.run(t.{check.__name__}())))"
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == expected


def test_the_delay_grows_until_a_process_was_healthy(monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(children.time, "monotonic", lambda: now_s)
    delay = RestartDelay(Backoff(1.0, 8.0))
    for deaths, least_s in ((1, 0.5), (2, 1.0), (3, 2.0), (4, 4.0), (5, 4.0)):
        delay.note_start()
        assert least_s <= delay.next_s() <= 2 * least_s
        assert delay.deaths == deaths
    now_s += 2 * HEALTHY_S
    delay.next_s()
    assert delay.deaths == 6, "a failed start is no healthy time"
    delay.note_start()
    now_s += 2 * HEALTHY_S
    assert delay.next_s() <= 1.0
    assert delay.deaths == 1


async def test_a_child_is_started_in_the_main_thread_only():
    with pytest.raises(MainThreadRequired, match="main thread"):
        await asyncio.to_thread(launcher_command, signal.SIGTERM, "same")
