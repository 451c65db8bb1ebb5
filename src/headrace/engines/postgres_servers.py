"""Connects to the right server of a URL, and notices within seconds that its host is silent.

    servers = Servers("postgresql://headrace@db1,db2,db3/site", role="read-write")
    connection = await servers.connect(timeout=5)

It also trusts the authorities of the operating system for `sslrootcert=system`, as libpq does since
version 16, and names a file of the URL that cannot be used.

The driver alone is unfit for failover in three ways:

- It tries the servers of a URL in order within one timeout, so a first server without network uses
  all of it. Here each server has its share. The one that accepted last is tried first, and one
  that did not answer last.
- A connection to a host that lost its network stays open: an idle one for ever, one with a
  statement for its timeout. Here the kernel probes it and closes it (`TCP_USER_TIMEOUT`).
- After a timeout or a cancellation it cancels the statement on the server. That also ends the
  wait of a commit for its synchronous standby: others then read, and acknowledge, a commit that
  a failover loses. Here it closes the connection, and the server itself ends the statement.

Sources: tcp(7); PostgreSQL's documentation of `synchronous_commit`, `SyncRepWaitForLSN`
and libpq, "SSL Support".
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import asyncpg

from headrace.engines.endpoints import seeds_of
from headrace.engines.postgres_pool import DOWN

_IDLE_S: Final = 2
"""Silence after which the kernel probes the server's host."""
_PROBE_EVERY_S: Final = 1
_SERVER_SIDE: Final = """
SELECT set_config('client_connection_check_interval', '500ms', false),
    set_config('tcp_keepalives_idle', '5', false),
    set_config('tcp_keepalives_interval', '5', false),
    set_config('tcp_user_timeout', '15s', false)
"""
"""The server ends statements of closed connections, and drops the locks of hosts without network.

Not start-up settings, which PgBouncer refuses. They last as long as the server's connection. Behind
a pooler in transaction mode that is shared with other clients, so they are not set there.
"""


class Connection(asyncpg.Connection):  # type: ignore[misc]
    """A connection that never cancels a statement on the server."""

    def _cancel_current_command(self, *_waiters: Any) -> None:
        """Close the connection, after the driver has handled the timeout or cancellation."""
        self._loop.call_soon(self.terminate)


class NoPrimary(ConnectionError):
    """Servers of a URL answer, all as standbys; the others do not respond in time.

    `text` has their numbers, `advice` what to do, and `str()` is `text` with the word failover if
    a majority answered: a host that reaches a minority may be cut off itself.
    """

    def __init__(self, standbys: int, servers: int) -> None:
        silent, self.advice = servers - standbys, CUT_ADVICE
        if servers == 1:
            # A balancer or a virtual address may have any number of servers behind it.
            self.text, self.advice = "the server at this address answers as a standby", WAIT
        else:
            verb = "answers, as a standby" if standbys == 1 else "answer, as standbys"
            self.text = f"{standbys} of {servers} servers {verb}"
            if silent:
                self.text += f"; {silent} {'does' if silent == 1 else 'do'} not respond in time"
        is_failover = servers > 1 and standbys * 2 > servers
        if is_failover:
            self.advice = f"A failover may be under way: {WAIT[:1].lower()}{WAIT[1:]}"
        super().__init__(f"{self.text} (failover)" if is_failover else self.text)


WAIT: Final = "Wait, or check with `patronictl list`"
CUT_ADVICE: Final = (
    "This host may be cut off from the primary: check its network, and `patronictl list`"
)


SILENT_SHARE: Final = 0.1
"""Share of its time after which a server without an answer is tried last."""
NO_PRIMARY_S: Final = 10.0
"""For how long the result of an attempt without a primary is reported."""


class Servers:
    """The servers of one URL, of which the first with `role` is used."""

    def __init__(self, url: str, *, role: str, is_shared: bool = False) -> None:
        """`is_shared`: a pooler gives each transaction another connection of the server."""
        self._is_shared, self._needs_primary = is_shared, role == "read-write"
        urls = seeds_of(url)
        named = "target_session_attrs" in url
        self._urls = urls
        self._no_primary: tuple[float, NoPrimary] | None = None
        self._silent_s: dict[str, float] = {}
        """When each server was silent last."""
        self._options = {} if named or len(urls) == 1 else {"target_session_attrs": role}

    async def connect(self, *_url: str, **options: Any) -> Any:
        """Open a connection, as the driver's function does; a URL is ignored."""
        timeout_s = options.pop("timeout")
        each_s = timeout_s / len(self._urls)
        options = {**options, **self._options, "connection_class": Connection}
        failed: BaseException | None = None
        standbys = 0
        for place, url in enumerate(urls := list(self._urls), 1):
            began_s = time.monotonic()
            try:
                own = {**options, **tls_options(url)}
                connection = await asyncpg.connect(url, timeout=each_s, **own)
                await self._prepare(connection, timeout_s)
            except asyncio.CancelledError:
                # The caller has a shorter limit, such as a check: its next one begins elsewhere.
                if time.monotonic() - began_s > each_s * SILENT_SHARE:
                    self._try_last(url)
                    if self._are_silent(urls[place:]):
                        self._note_no_primary(standbys, failed)
                raise
            except DOWN as error:
                if unusable := unusable_file(error):
                    raise asyncpg.ClientConfigurationError(unusable) from error
                if isinstance(error, TimeoutError):
                    self._try_last(url)
                standbys += isinstance(error, asyncpg.TargetServerAttributeNotMatched)
                if failed is None or _rank(error) >= _rank(failed):
                    failed = error
                continue
            self._urls = [url, *(other for other in self._urls if other != url)]
            self._no_primary = None
            self._silent_s.pop(url, None)
            return connection
        assert failed is not None
        if missing := self._note_no_primary(standbys, failed):
            raise missing from failed
        raise failed

    def _note_no_primary(self, standbys: int, failed: BaseException | None) -> NoPrimary | None:
        """Record that all servers which answered are standbys; None if that is not so."""
        if (
            not standbys
            or not self._needs_primary
            or not isinstance(failed, OSError | asyncpg.TargetServerAttributeNotMatched)
        ):
            return None
        missing = NoPrimary(standbys, len(self._urls))
        self._no_primary = time.monotonic(), missing
        return missing

    def _try_last(self, url: str) -> None:
        self._urls = [*(other for other in self._urls if other != url), url]
        self._silent_s[url] = time.monotonic()

    def _are_silent(self, untried: list[str]) -> bool:
        """Whether servers that an attempt did not reach were all silent lately."""
        since_s = time.monotonic() - NO_PRIMARY_S
        return all(self._silent_s.get(url, 0.0) > since_s for url in untried)

    @property
    def no_primary(self) -> NoPrimary | None:
        """That the servers which answered lately are all standbys; None otherwise.

        A check with a time limit may end before its own attempt has tried each server.
        """
        at_s, found = self._no_primary or (0.0, None)
        return found if found and time.monotonic() - at_s < NO_PRIMARY_S else None

    async def _prepare(self, connection: Any, silent_max_s: float) -> None:
        """Set both sides up to notice a lost host. A connection that fails here is closed."""
        try:
            watch_host(connection, silent_max_s)
            if not self._is_shared:
                await connection.execute(_SERVER_SIDE)
        except BaseException:
            connection.terminate()
            raise


def _rank(error: BaseException) -> int:
    """How much an error explains: a server's own answer most, that one is a standby least."""
    if isinstance(error, asyncpg.PostgresError):
        return 2
    return 0 if isinstance(error, asyncpg.InternalClientError) else 1


def watch_host(connection: Any, silent_max_s: float) -> None:
    """Have the kernel close the connection if the server's host does not respond for so long."""
    link = connection._transport.get_extra_info("socket")  # noqa: SLF001 - the driver has no option
    if link.family == socket.AF_UNIX:
        return
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silent_max_s * 1000))


_FILES: Final = ("sslrootcert", "sslcert", "sslkey", "sslcrl")
SYSTEM: Final = "system"


def tls_options(url: str) -> dict[str, Any]:
    """Options of the driver for a connection to the server of `url`.

    Raises: asyncpg.ClientConfigurationError.
    """
    found = {name: values[-1] for name, values in parse_qs(urlsplit(url).query).items()}
    is_system = found.get("sslrootcert") == SYSTEM
    for name in _FILES:
        path = found.get(name)
        if path and not (is_system and name == "sslrootcert") and not os.access(path, os.R_OK):
            raise asyncpg.ClientConfigurationError(
                f"{name} is {path!r}, a file that does not exist or cannot be read"
            )
    if not is_system:
        return {}
    if found.get("sslmode", "verify-full") != "verify-full":
        raise asyncpg.ClientConfigurationError("sslrootcert=system requires sslmode=verify-full")
    context = ssl.create_default_context()
    if "sslcert" in found:
        password = found.get("sslpassword", "")
        context.load_cert_chain(found["sslcert"], found.get("sslkey"), lambda: password)
    return {"ssl": context}


def unusable_file(error: BaseException) -> str:
    """Why OpenSSL cannot use a file that the URL names; empty for other errors."""
    if isinstance(error, ssl.SSLError) and error.library in ("X509", "PEM"):
        return f"a certificate or key of the URL cannot be used: {error.reason}"
    return ""
