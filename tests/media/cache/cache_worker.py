"""A worker that serves itself: `python cache_worker.py SETTINGS_JSON`. It checks every byte.

It plays both ends of several connections: it looks blocks up, sends them by sendfile in one or
several epochs, and leaves some unread for a while, as stalled clients do, while the filler
overwrites their frames. It prints one JSON line at the end: {"reads": .., "hits": .., "wrong": ..,
"failed": ..}.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import select
import socket
import sys
import time
from collections import Counter, deque
from pathlib import Path

from cache_lab import block_data

from headrace.kernel.errors import HeadraceError
from headrace.media.cache import BlockCache, BlockKey, Frame
from headrace.media.model import BLOCK_BYTES, Shape

UNREAD_MAX = 6


class Client:
    """Both ends of one connection; `expected` was sent and is still unread."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.reader = socket.create_connection(listener.getsockname())
            self.sender, _ = listener.accept()
        self.sender.setblocking(False)
        self.expected = bytearray()

    def read(self) -> bool:
        """Read all sent bytes. Return whether they are correct."""
        got = bytearray()
        while len(got) < len(self.expected):
            got += self.reader.recv(len(self.expected) - len(got))
        is_right = got == self.expected
        self.expected.clear()
        return is_right


class SelfServing:
    """The loop over random blocks."""

    def __init__(self, settings: dict) -> None:
        self.settings = settings
        self.dice = random.Random(settings["worker"])
        run = Path(settings["run"])
        self.store = BlockCache(run, worker=settings["worker"], boot=settings["boot"], timeout_s=20)
        self.shapes = {name: Shape(*shape) for name, shape in settings["shapes"].items()}
        self.names = list(self.shapes)
        self.counts = Counter()
        self.idle = [Client() for _ in range(UNREAD_MAX + 2)]
        self.unread: deque[Client] = deque()

    async def run(self) -> None:
        """Read until the count or the time is reached."""
        ends_s = time.monotonic() + self.settings["run_s"]
        while self.counts["reads"] < self.settings["reads"] and time.monotonic() < ends_s:
            await self.serve_one()
            await asyncio.sleep(0)
        while self.unread:
            self.settle(self.unread.popleft())
        await self.store.close()

    async def serve_one(self) -> None:
        """Send one block to one client."""
        name = self.names[min(int(self.dice.expovariate(0.15)), len(self.names) - 1)]
        shape = self.shapes[name]
        number = self.dice.randrange(-(-shape.size_bytes // BLOCK_BYTES))
        key = self.store.key(name, shape, number)
        length = min(BLOCK_BYTES, shape.size_bytes - number * BLOCK_BYTES)
        client = self.idle.pop()
        steps = 4 if self.dice.random() < 0.2 else 1
        try:
            await self.send(client, key, block_data(name, number, length), steps)
        except HeadraceError:
            self.counts["failed"] += 1
        self.counts["reads"] += 1
        if self.dice.random() < 0.2:
            self.unread.append(client)
        else:
            self.settle(client)
        if len(self.unread) > UNREAD_MAX:
            self.settle(self.unread.popleft())

    async def send(self, client: Client, key: BlockKey, data: bytes, steps: int) -> None:
        """Send the block over this many epochs, looking it up by key in each."""
        step_bytes = -(-len(data) // steps)
        sent, misses = 0, 0
        while sent < len(data):
            count = self.send_in_turn(client, key, sent, min(step_bytes, len(data) - sent))
            if count is None:
                misses += 1
                ready = await self.store.block(key, is_copy=misses > 2)
                count = 0
                if not isinstance(ready, Frame):
                    client.sender.setblocking(True)
                    self.settle(client, keep=True)
                    assert len(ready) == len(data)
                    self.counts["wrong"] += ready[sent:] != data[sent:]
                    return
            elif count == 0:
                self.settle(client, keep=True)
            client.expected += data[sent : sent + count]
            sent += count
            if steps > 1:
                await asyncio.sleep(0)

    def send_in_turn(self, client: Client, key: BlockKey, start: int, count: int) -> int | None:
        """One epoch: find and send; None: not stored, 0: the socket is full."""
        store = self.store
        store.enter_epoch()
        try:
            frame = store.find(key)
            if frame is None:
                return None
            self.counts["hits"] += 1
            if self.settings.get("nap_s") and self.dice.random() < 0.02:
                select.select([], [], [], self.settings["nap_s"])
            if self.settings.get("is_cold"):
                os.posix_fadvise(frame.fd, frame.offset, BLOCK_BYTES, os.POSIX_FADV_DONTNEED)
            return os.sendfile(client.sender.fileno(), frame.fd, frame.offset + start, count)
        except BlockingIOError:
            return 0
        finally:
            store.leave_epoch()

    def settle(self, client: Client, *, keep: bool = False) -> None:
        """Let the client read the sent bytes."""
        client.sender.setblocking(False)
        if client.expected and not client.read():
            self.counts["wrong"] += 1
        if not keep:
            self.idle.append(client)


async def main(settings: dict) -> None:
    """Serve, then print the result."""
    # Exit when the parent, which holds the other end of the standard input, has ended.
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), lambda: os._exit(1))
    serving = SelfServing(settings)
    await serving.run()
    print(json.dumps({name: serving.counts[name] for name in ("reads", "hits", "wrong", "failed")}))


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
