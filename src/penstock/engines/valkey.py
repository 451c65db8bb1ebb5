"""Valkey through valkey-py with libvalkey: the hot side, which may be lost.

The stock client is enough for everything but the counters' hot path, which brings its own multiplexed
connection with the room that needs it. Every key carries a hash tag (`{...}`), so that all of it runs on
Valkey Cluster. Errors leave this file in our words.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from valkey.asyncio import Valkey as Client
from valkey.exceptions import ConnectionError as ClientConnectionError
from valkey.exceptions import ValkeyError

from penstock.engines.endpoints import server_of
from penstock.kernel.config import parse_duration_s, parse_text, parse_url, setting
from penstock.kernel.errors import Unavailable


class ValkeyDown(Unavailable):
    """Valkey does not answer or is not ready; nothing is known of a command that was under way."""

    code = "valkey.unavailable"

    @property
    def public_text(self) -> str:
        """Without the server's address, which is no caller's business."""
        return "Valkey does not answer: check that it runs with `penstock doctor`, then try again"


@dataclass(frozen=True, slots=True, kw_only=True)
class ValkeyConfig:
    """Section `valkey`."""

    url: str | None = setting(
        None,
        "Where Valkey answers; unset: the embedded one in the data folder.",
        parse_url("valkey", "valkeys", "redis", "rediss", "unix"),
        secret=True,
    )
    timeout_s: float = setting("2s", "Longest wait for a reply.", parse_duration_s)
    prefix: str = setting("penstock", "First part of every key, to share a server.", parse_text)


class Valkey:
    """A pool of connections to one Valkey."""

    def __init__(self, url: str, config: ValkeyConfig) -> None:
        self.prefix = config.prefix
        self._server = server_of(url, port=6379, socket="valkey.sock")
        self._client: Any = Client.from_url(
            url,
            socket_timeout=config.timeout_s,
            socket_connect_timeout=config.timeout_s,
        )

    async def open(self) -> None:
        """Check that it answers. Raises: ValkeyDown."""
        await self.command("PING")

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    async def command(self, *words: str | bytes | float) -> Any:
        """Send one command as it is; replies are bytes, ints and lists. Raises: ValkeyDown."""
        with translated_errors(self._server):
            return await self._client.execute_command(*words)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """One connection for several commands, such as WAIT, which speaks of what its own connection wrote."""
        client = self._client.client()
        try:
            yield Session(client, self._server)
        except BaseException:
            # A reply that was not awaited must not meet the next user of the connection.
            if client.connection is not None:
                await client.connection.disconnect(nowait=True)
            raise
        finally:
            await client.aclose(close_connection_pool=False)

    async def call(
        self, function: str, keys: list[str], arguments: list[str | bytes | float]
    ) -> Any:
        """Call one function of a library that `functions` loaded. Raises: ValkeyDown."""
        return await self.command("FCALL", function, len(keys), *keys, *arguments)


class Session:
    """One connection; ends with the `async with` block that made it."""

    def __init__(self, client: Any, server: str) -> None:
        self._client = client
        self._server = server

    async def command(self, *words: str | bytes | float) -> Any:
        """As `Valkey.command`. Raises: ValkeyDown."""
        with translated_errors(self._server):
            return await self._client.execute_command(*words)


@contextmanager
def translated_errors(server: str) -> Iterator[None]:
    """Raise a client's error as ours, naming `server`."""
    try:
        yield
    except (ValkeyError, OSError, TimeoutError) as error:
        lost = isinstance(error, ClientConnectionError | OSError | TimeoutError)
        reason = type(error).__name__ if lost else str(error).split(" ", 1)[0]
        raise ValkeyDown(
            f"Valkey at {server} failed ({reason}): check that it runs with `penstock doctor`, then"
            " try again",
            retry_after_s=2,
        ) from error
