"""A host that takes its time, can be jammed, breaks kept connections, and logs when each request
came.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress

from origin import Answer, Origin

LOOK_S = 0.01


class PacedOrigin(Origin):
    """Answers a path after `delays_s[path]` (or of its longest prefix there), nothing while it is
    jammed.

    `dies_after[path]`: the request for it is read, and the connection closed without an answer, so
    often.
    """

    def __init__(self) -> None:
        super().__init__()
        self.came: list[tuple[float, str]] = []
        self.delays_s: dict[str, float] = {}
        self.dies_after: dict[str, int] = {}
        self.refusal: Answer | None = None
        """What everything is answered while it is set."""
        self.open_now = 0
        self.open_most = 0
        self.late_s = 0.0
        """By how much its clock was late at most: a request may arrive that long before it was
        noted.
        """
        self._looking: asyncio.TimerHandle | None = None
        self.held_now = 0
        """Requests that `hold` keeps."""
        self._held: str | None = None
        self._closing = asyncio.Event()
        self._free = asyncio.Event()
        self._free.set()
        self._released = asyncio.Event()

    async def start(self, *addresses: str) -> None:
        await super().start(*addresses)
        self._look(time.monotonic())

    def _look(self, due_s: float) -> None:
        """Its loop is also the one of those who ask, on a machine that may have more to do."""
        now_s = time.monotonic()
        self.late_s = max(self.late_s, now_s - due_s + LOOK_S)
        loop = asyncio.get_running_loop()
        self._looking = loop.call_later(LOOK_S, self._look, now_s + LOOK_S)

    def jam(self) -> None:
        """Stop responding."""
        self._free.clear()

    def hold(self, prefix: str) -> None:
        """Requests for paths that begin so are not answered before `release`."""
        self._held = prefix

    def release(self) -> None:
        """All that waits is answered at once."""
        self._free.set()
        self._released.set()

    async def close(self) -> None:
        self._closing.set()
        self.release()
        if self._looking is not None:
            self._looking.cancel()
        await super().close()

    def most_in_window(self, window_s: float) -> int:
        """The most requests in any window, by its own clock."""
        return most_in_window(self.times(), window_s - self.late_s)

    def times(self, prefix: str = "") -> list[float]:
        """When requests came."""
        return [at for at, path in self.came if path.startswith(prefix)]

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        peeked = await reader.readuntil(b"\r\n\r\n")
        path = peeked.split(b" ", 2)[1].decode()
        self.came.append((time.monotonic(), path))
        if self.dies_after.get(path, 0) > 0:
            self.dies_after[path] -= 1
            self.log.append((path, 0))
            return False
        again = asyncio.StreamReader()
        again.feed_data(peeked)
        self.open_now += 1
        self.open_most = max(self.open_most, self.open_now)
        try:
            await self._free.wait()
            if self._held is not None and path.startswith(self._held):
                await self._wait_released()
            delay_s = self._delay_s(path)
            if delay_s:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), delay_s)
            return await super()._answer(again, writer)
        finally:
            self.open_now -= 1

    async def _wait_released(self) -> None:
        self.held_now += 1
        try:
            await self._released.wait()
        finally:
            self.held_now -= 1

    def _answer_of(self, path: str, headers: dict[str, str]) -> Answer:
        return self.refusal or super()._answer_of(path, headers)

    def _delay_s(self, path: str) -> float:
        found = [prefix for prefix in self.delays_s if path.startswith(prefix)]
        return self.delays_s[max(found, key=len)] if found else 0.0


def most_in_window(times: Sequence[float], window_s: float) -> int:
    """The most of `times` in any window of that length."""
    ordered, first, most = sorted(times), 0, 0
    for last, at in enumerate(ordered):
        while ordered[first] <= at - window_s:
            first += 1
        most = max(most, last - first + 1)
    return most
