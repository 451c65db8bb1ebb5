"""The connection of one event loop: made on first use, made anew when it ends, with growing waits while it fails."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from libvalkey import pack_command

from headrace.engines.multiplex.address import Address
from headrace.engines.multiplex.errors import ValkeyBusy
from headrace.engines.multiplex.link import Bounds, Link, count_failure, down
from headrace.engines.valkey import ValkeyDown
from headrace.kernel.backoff import Backoff

BACKOFF: Final = Backoff(first_s=0.02, max_s=1.0)
SHORT_LIFE_S: Final = 1.0
"""A connection that ends sooner counts as a failed attempt, or a server that hangs up at once would be hammered."""


class Line:
    """Keeps `link`, the connection in use, or None while there is none."""

    def __init__(self, seeds: tuple[Address, ...], server: str, bounds: Bounds) -> None:
        self.link: Link | None = None
        self.seeds, self.address = seeds, seeds[0]
        """`address` is the seed that was connected last; each attempt begins there and tries all."""
        self._server, self._bounds = server, bounds
        self._loop = asyncio.get_running_loop()
        self._failure: str | None = None
        """Why the last attempt failed; None while the first one after a good connection is under way."""
        self._decided = self._loop.create_future()
        self._waiting = 0
        self._keeper = self._start_keeper()

    async def wait_up(self) -> Link:
        """The connection, if the first attempt at it brings one. Raises: ValkeyDown, ValkeyBusy."""
        if self._keeper.done():
            self._keeper = self._start_keeper()
        if self._failure is None:
            if self._waiting >= self._bounds.waiting_max:
                count_failure("busy")
                raise ValkeyBusy(
                    f"{self._waiting} commands wait for a connection to Valkey at {self._server}: try again"
                    " in a moment",
                    retry_after_s=1,
                )
            self._waiting += 1
            try:
                await asyncio.shield(self._decided)
            finally:
                self._waiting -= 1
        link = self.link
        if link is None:
            raise down(self._server, self._failure or "the connection just ended")
        return link

    async def close(self) -> None:
        """End it for good."""
        self._keeper.cancel()
        with suppress(asyncio.CancelledError):
            await self._keeper
        self._settle("it was closed here")
        if self.link is not None:
            self.link.end("it was closed here")

    def _start_keeper(self) -> asyncio.Task[None]:
        keeper = self._loop.create_task(self._keep())
        # Whatever it failed of, nobody waits for ever; the next caller starts it again.
        keeper.add_done_callback(lambda _: self._settle("it could not be connected to"))
        return keeper

    async def _keep(self) -> None:
        attempts = 0
        while True:
            ended = asyncio.Event()
            try:
                link = await self._connect_any(ended)
            except (OSError, TimeoutError, ValkeyDown) as error:
                self._settle(_told(error))
                attempts += 1
                await asyncio.sleep(BACKOFF.delay_s(attempts))
                continue
            began_s = self._loop.time()
            self.link = link
            self._settle(None)
            await ended.wait()
            if self._loop.time() - began_s >= SHORT_LIFE_S:
                attempts = 0
                continue
            self._settle("the connection ended at once")
            attempts += 1
            await asyncio.sleep(BACKOFF.delay_s(attempts))

    async def _connect_any(self, ended: asyncio.Event) -> Link:
        """A connection to one of the seeds. Raises: as `_connect`, the last one's error."""
        at = self.seeds.index(self.address)
        *others, last = (*self.seeds[at:], *self.seeds[:at])
        for seed in others:
            with suppress(OSError, TimeoutError, ValkeyDown):
                return await self._connect(seed, ended)
        return await self._connect(last, ended)

    async def _connect(self, address: Address, ended: asyncio.Event) -> Link:
        """A connection on which the greeting was answered well. Raises: OSError, TimeoutError, ValkeyDown."""

        def over() -> None:
            if self.link is link:
                self.link = None
                self._failure, self._decided = None, self._loop.create_future()
            ended.set()

        link = Link(self._server, self._bounds, over)
        try:
            async with asyncio.timeout(self._bounds.timeout_s):
                await address.connect(lambda: link)
                for words in address.greeting:
                    await link.send(pack_command(words))
        except BaseException:
            link.end("it was not opened")
            raise
        self.address = address
        return link

    def _settle(self, failure: str | None) -> None:
        """Say how the attempt went to all who wait for it."""
        self._failure = failure
        if not self._decided.done():
            self._decided.set_result(None)


def _told(error: Exception) -> str:
    return error.text if isinstance(error, ValkeyDown) else type(error).__name__
