"""The child processes that make variants: killed at work, while they start, and hanging."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from raw_clients import serving, wait_until
from test_media_variants import KEY, SIZES, ask, make, picture, seen, variant_url
from tests.kit.waiting import wait_true

from headrace.engines.blobs import Blobs


def children() -> list[int]:
    """The processes that make variants."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"variant_child.py" in path.read_bytes() and parent_of(path.parent) == os.getpid():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def parent_of(process: Path) -> int:
    return int((process / "stat").read_text().rpartition(")")[2].split()[1])


def is_requesting() -> bool:
    """Whether a thread of a node waits for the answer of a child."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        frame = frames.get(thread.ident) if thread.name.startswith("variants") else None
        while frame is not None:
            if frame.f_code.co_name == "request":
                return True
            frame = frame.f_back
    return False


@asynccontextmanager
async def fresh_node(blobs: Blobs, **settings):
    """A node with a child of its own, and that child's process id."""
    before = set(children())
    async with serving(blobs, variants=SIZES, **settings) as served:
        await make(served, picture(), KEY, w=31)
        [child] = set(children()) - before
        yield served, child


async def test_a_child_killed_at_work_is_replaced_and_its_work_repeated(blobs):
    async with fresh_node(blobs) as (served, child):
        os.kill(child, signal.SIGSTOP)
        asking = asyncio.create_task(ask(served, variant_url(served, w=32)))
        await wait_until(is_requesting)
        os.kill(child, signal.SIGKILL)
        assert seen((await asking).body).size == (32, 16)
        assert child not in children()


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGSEGV, (422, "media.variant_refused")),
        (signal.SIGKILL, (503, "media.variants_busy")),
    ],
    ids=["crashed", "killed"],
)
async def test_an_original_is_blamed_for_crashes_and_not_for_kills(blobs, number, told):
    before = set(children())
    async with fresh_node(blobs) as (served, _):
        # Long enough to be killed in the middle.
        await served.blobs.put(KEY, picture(2400, 2400))
        url = variant_url(served, w=2400, fm="avif")
        asking = asyncio.create_task(ask(served, url))
        while not asking.done():
            await wait_until(lambda: is_requesting() or asking.done())
            for child in set(children()) - before:
                os.kill(child, number)
        answer = await asking
        assert (answer.status, answer.code) == told
        assert ("retry-after" in answer.fields) == (number == signal.SIGKILL)
        if number == signal.SIGKILL:  # Nothing is remembered against the original.
            assert seen((await ask(served, url)).body).size == (2400, 2400)
        else:
            assert (await ask(served, url)).status == 422
        assert (await make(served, picture(), KEY, w=34)).size == (34, 17)


async def test_a_child_killed_while_it_starts_is_replaced(blobs):
    before = set(children())
    async with serving(blobs, variants=SIZES) as served:
        await served.blobs.put(KEY, picture())
        asking = asyncio.create_task(ask(served, variant_url(served, w=33)))
        await wait_until(lambda: set(children()) - before)
        [child] = set(children()) - before
        os.kill(child, signal.SIGKILL)
        assert seen((await asking).body).size == (33, 17)
        assert child not in children()


async def test_a_hanging_child_delays_nobody_for_long(blobs):
    async with fresh_node(blobs, origin_timeout_s=1.0) as (served, child):
        os.kill(child, signal.SIGSTOP)
        target = variant_url(served, w=32)
        try:
            answer = await ask(served, target)
            assert (answer.status, answer.code) == (503, "media.variants_busy")
            assert answer.fields["retry-after"] == "1"
        finally:
            os.kill(child, signal.SIGCONT)

        async def is_made() -> bool:
            return (await ask(served, target)).status == 200

        await wait_true(is_made)
