"""A connection that reopens itself, and the address it leads to."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from libvalkey import pack_command

from headrace.engines.endpoints import SentinelUrls
from headrace.engines.multiplex.connection import (
    Bounds,
    Connection,
    ValkeyBusy,
    count_failure,
    down,
)
from headrace.engines.valkey import SentinelGroup, ValkeyDown
from headrace.engines.valkey_url import is_tls, options_of, refused_certificate, tls_context
from headrace.kernel.config import InvalidConfig
from headrace.kernel.resilience import Backoff


@dataclass(frozen=True, slots=True, repr=False)
class Address:
    """One node, with its password; never logged."""

    host: str
    port: int
    path: str | None
    """A unix socket, which replaces host and port."""
    tls: ssl.SSLContext | None
    greeting: tuple[tuple[str, ...], ...]
    """Commands that must succeed before any other is sent."""

    async def connect(self, make: Any) -> Any:
        """Open a connection with the protocol of `make()`; return the protocol. Raises: OSError."""
        loop = asyncio.get_running_loop()
        if self.path is not None:
            _, protocol = await loop.create_unix_connection(make, self.path)
        else:
            _, protocol = await loop.create_connection(make, self.host, self.port, ssl=self.tls)
        return protocol


def address_of(url: str) -> Address:
    """The address of `url`, read by the stock client's parser."""
    options = options_of(url)
    words: list[tuple[str, ...]] = []
    if options.get("password"):
        user = (options["username"],) if options.get("username") else ()
        words.append(("AUTH", *user, options["password"]))
    if int(options.get("db") or 0):
        words.append(("SELECT", str(options["db"])))
    return Address(
        host=options.get("host") or "localhost",
        port=int(options.get("port") or 6379),
        path=options.get("path"),
        tls=_tls_of(options) if is_tls(options) else None,
        greeting=(*words, ("PING",)),
    )


def _tls_of(options: dict[str, Any]) -> ssl.SSLContext:
    """The TLS context for the URL's `ssl_...` parameters. Raises: InvalidConfig."""
    try:
        return tls_context(options)
    except OSError as error:
        raise InvalidConfig(
            "valkey.url (HEADRACE_VALKEY_URL): expected certificates and keys in the files of its"
            f" ssl_... parameters, got {error.strerror or type(error).__name__}"
        ) from error


BACKOFF: Final = Backoff(first_s=0.02, max_s=1.0)
_ROLE: Final = ("ROLE",)
SHORT_LIFE_S: Final = 1.0
"""A shorter connection counts as a failed attempt, so that the backoff grows."""


class ReconnectingConnection:
    """The connection of one event loop to one server, reopened with backoff when it ends.

    `connection` is the open connection, or None.
    """

    def __init__(
        self,
        seeds: tuple[Address, ...],
        server: str,
        bounds: Bounds,
        sentinels: SentinelUrls | None = None,
    ) -> None:
        self.connection: Connection | None = None
        self.seeds, self.address = seeds, seeds[0]
        """The seed that was connected last; each attempt starts there and tries all."""
        self._sentinels = SentinelGroup(sentinels) if sentinels is not None else None
        """They report the address of each attempt, which has all but that of the one seed."""
        self._server, self._bounds = server, bounds
        self._loop = asyncio.get_running_loop()
        self._failure: str | None = None
        """Why the last attempt failed; None during the first attempt after a good connection."""
        self._decided = self._loop.create_future()
        self._waiting = 0
        self._reconnector = self._start_reconnector()

    async def wait_connected(self) -> Connection:
        """The open connection, after the first attempt. Raises: ValkeyDown, ValkeyBusy."""
        if self._reconnector.done():
            self._reconnector = self._start_reconnector()
        if self._failure is None:
            if self._waiting >= self._bounds.waiting_max:
                count_failure("busy")
                raise ValkeyBusy(
                    f"{self._waiting} commands wait for a connection to Valkey at {self._server}:"
                    " try again in a moment",
                    retry_after_s=1,
                )
            self._waiting += 1
            try:
                await asyncio.shield(self._decided)
            finally:
                self._waiting -= 1
        connection = self.connection
        if connection is None:
            raise down(self._server, self._failure or "the connection just closed")
        return connection

    async def close(self) -> None:
        """Close the connection and stop reconnecting."""
        self._reconnector.cancel()
        with suppress(asyncio.CancelledError):
            await self._reconnector
        self._settle("it was closed here")
        if self.connection is not None:
            self.connection.end("it was closed here")
        if self._sentinels is not None:
            await self._sentinels.close()

    def _start_reconnector(self) -> asyncio.Task[None]:
        reconnector = self._loop.create_task(self._reconnect())
        # After an unexpected error waiters fail, and the next caller starts it again.
        reconnector.add_done_callback(lambda _: self._settle("the connection failed"))
        return reconnector

    async def _reconnect(self) -> None:
        attempts = 0
        while True:
            ended = asyncio.Event()
            try:
                connection = await self._connect_any(ended)
            except (OSError, TimeoutError, ValkeyDown) as error:
                self._settle(_reason(error))
                attempts += 1
                await asyncio.sleep(BACKOFF.delay_s(attempts))
                continue
            began_s = self._loop.time()
            self.connection = connection
            self._settle(None)
            await ended.wait()
            if self._loop.time() - began_s >= SHORT_LIFE_S:
                attempts = 0
                continue
            self._settle("the connection closed at once")
            attempts += 1
            await asyncio.sleep(BACKOFF.delay_s(attempts))

    async def _connect_any(self, ended: asyncio.Event) -> Connection:
        """A connection to one of the seeds. Raises: the last seed's error of `_connect`."""
        if self._sentinels is not None:
            return await self._connect_primary(self._sentinels, ended)
        at = self.seeds.index(self.address)
        *others, last = (*self.seeds[at:], *self.seeds[:at])
        for seed in others:
            with suppress(OSError, TimeoutError, ValkeyDown):
                return await self._connect(seed, ended)
        return await self._connect(last, ended)

    async def _connect_primary(self, sentinels: SentinelGroup, ended: asyncio.Event) -> Connection:
        """A connection to the primary of the Sentinels. Raises: as `_connect`."""
        async with asyncio.timeout(self._bounds.timeout_s):
            host, port = await sentinels.primary()
            return await self._connect(replace(self.address, host=host, port=port), ended)

    async def _connect(self, address: Address, ended: asyncio.Event) -> Connection:
        """A connection after its greeting. Raises: OSError, TimeoutError, ValkeyDown."""

        def on_end() -> None:
            if self.connection is connection:
                self.connection = None
                self._failure, self._decided = None, self._loop.create_future()
            ended.set()

        connection = Connection(self._server, self._bounds, on_end)
        try:
            async with asyncio.timeout(self._bounds.timeout_s):
                await address.connect(lambda: connection)
                for words in address.greeting:
                    await connection.send(pack_command(words))
                if self._sentinels is not None:
                    await _require_primary(connection, address)
        except BaseException:
            connection.end("it was not opened")
            raise
        self.address = address
        return connection

    def _settle(self, failure: str | None) -> None:
        """Report the outcome of an attempt to all waiting callers."""
        self._failure = failure
        if not self._decided.done():
            self._decided.set_result(None)


async def _require_primary(connection: Connection, address: Address) -> None:
    """Sentinels may report a replaced primary until all of them know. Raises: ValkeyDown."""
    role, *_ = await connection.send(pack_command(_ROLE))
    if role != b"master":
        raise ValkeyDown(f"{address.host}:{address.port} is a replica", retry_after_s=2)


def _reason(error: Exception) -> str:
    if isinstance(error, ValkeyDown):
        return error.text
    return refused_certificate(error) or type(error).__name__
