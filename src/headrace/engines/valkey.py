"""Valkey through valkey-py with libvalkey: data that may be lost.

Hot paths use one pipelined connection instead (`multiplex`). With Sentinels in the URL, each new
connection requests the address of the primary from them.

Every key carries a hash tag (`{...}`), so that everything runs on Valkey Cluster. The first
call that needs it sends `CLUSTER SLOTS`, which only a cluster accepts. A cluster has one pool per
primary here. The cluster client of valkey-py is not used: it repeats a command whose reply was
lost, which may have been run, and drops its list of nodes while some are down.

A hash slot is one of the 16,384 parts of a cluster's key space.
"""

from __future__ import annotations

import asyncio
import re
import time
from binascii import crc_hqx
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from valkey.asyncio import ConnectionPool
from valkey.asyncio import Valkey as Client
from valkey.asyncio.sentinel import (
    MasterNotFoundError,
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
)
from valkey.exceptions import AuthenticationError, ResponseError, ValkeyError
from valkey.exceptions import ConnectionError as ClientConnectionError

from headrace.engines.endpoints import (
    SentinelUrls,
    parse_valkey_url,
    seeds_of,
    server_of,
    split_sentinels,
)
from headrace.engines.valkey_url import TlsConnection, is_tls, options_of, refused_certificate
from headrace.kernel.config import parse_duration_s, parse_text, setting
from headrace.kernel.errors import Unavailable
from headrace.kernel.resilience import preserve_cancellation

SLOTS: Final = 16_384
NO_OWNER: Final = ""
"""The owner of a hash slot without a primary."""
_NO_HOST: Final = ("", "?")


@dataclass(frozen=True, slots=True)
class ClusterMap:
    """The owner of each hash slot as `host:port`; a `MOVED` reply updates an entry."""

    owners: list[str]
    epoch: int = 0

    @property
    def primaries(self) -> list[str]:
        """The owners of hash slots, ordered by their first slot."""
        return [owner for owner in dict.fromkeys(self.owners) if owner != NO_OWNER]


def hash_slot(key: str | bytes | float) -> int:
    """The hash slot of a key: CRC-16 of its hash tag, or of the whole key without one."""
    data = key if isinstance(key, bytes) else str(key).encode()
    start = data.find(b"{") + 1
    if start:
        end = data.find(b"}", start)
        if end > start:
            data = data[start:end]
    return crc_hqx(data, 0) % SLOTS


def parse_cluster_map(slots: Any, info: Any, *, host: str) -> ClusterMap:
    """The map from replies to CLUSTER SLOTS and CLUSTER INFO; a node without a name is at `host`.

    Nodes disagree during a failover. Of several maps the one with the highest epoch is current.
    """
    owners = [NO_OWNER] * SLOTS
    for first, last, primary, *_ in slots:
        address = f"{_host_or(primary[0], host)}:{int(primary[1])}"
        owners[first : last + 1] = [address] * (last + 1 - first)
    found = _text(info).partition("cluster_current_epoch:")[2].split("\r\n", 1)[0]
    return ClusterMap(owners, int(found or 0))


def node_address(address: str, *, host: str) -> tuple[str, int]:
    """Host and port of a node's `host:port`, whose host may be empty."""
    name, _, port = address.rpartition(":")
    return _host_or(name, host), int(port)


def _host_or(name: Any, host: str) -> str:
    text = _text(name or "")
    return host if text in _NO_HOST else text


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


class ValkeyDown(Unavailable):
    """Valkey does not respond or is not ready; the outcome of a running command is unknown."""

    code = "valkey.unavailable"
    public = "Valkey does not respond: check it with `headrace doctor`, then try again"


def refused_password(server: str, reason: str) -> ValkeyDown:
    """The error for a missing or wrong password."""
    return ValkeyDown(
        f"Valkey at {server} refuses the password ({reason[:100]}): set user and password in"
        " valkey.url (HEADRACE_VALKEY_URL), valkey://:PASSWORD@HOST:PORT",
        retry_after_s=5,
    )


class ValkeyMoved(ValkeyDown):
    """Another cluster node has the key; the command was not run.

    The client follows the redirect. Callers see this error only after too many redirects.
    """

    code = "valkey.moved"
    public = "Valkey moves keys to another server: try again in a moment"

    def __init__(self, slot: int, address: str, *, is_ask: bool) -> None:
        super().__init__(
            f"hash slot {slot} is at {address or 'another node'} of the cluster in valkey.url: if"
            " this persists, check `CLUSTER SLOTS` there",
            retry_after_s=1,
        )
        self.slot, self.address, self.is_ask = slot, address, is_ask


_MOVED: Final = re.compile(r"(MOVED|ASK) (\d{1,5}) (\S*:\d{1,5})")
MAP_MAX_AGE_S: Final = 1.0
"""An older map of the cluster is refreshed before use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValkeyConfig:
    """Section `valkey`."""

    url: str | None = setting(
        None,
        "URL of Valkey or Redis: one server, valkey://a:6379; cluster nodes,"
        " valkey://a:6379,b:6379; or Sentinels, valkey://a:26379,b:26379?sentinel=NAME;"
        " unset: the embedded server in the data folder.",
        parse_valkey_url,
        secret=True,
    )
    timeout_s: float = setting("2s", "Longest wait for a reply.", parse_duration_s)
    prefix: str = setting("headrace", "Prefix of every key, to share a server.", parse_text)
    bin: str | None = setting(
        None,
        "Program of the embedded Valkey, such as /usr/bin/valkey-server or redis-server, or"
        " its folder; unset: that of the Python package.",
        parse_text,
    )


class Valkey:
    """Pools of connections to one Valkey, or to each primary of a cluster."""

    def __init__(self, url: str, config: ValkeyConfig) -> None:
        self.prefix = config.prefix
        timeouts: dict[str, Any] = {
            "socket_timeout": config.timeout_s,
            "socket_connect_timeout": config.timeout_s,
        }
        rest, sentinel_urls = split_sentinels(url)
        seeds = seeds_of(rest)
        self._options: dict[str, Any] = {**options_of(seeds[0]), **timeouts}
        self.sentinels: SentinelGroup | None = None
        if sentinel_urls is not None:
            seeds = seeds[:1]
            self.sentinels = SentinelGroup(sentinel_urls)
            self._seeds = [Node(self.sentinels.client(self._options), sentinel_urls.server)]
        else:
            self._seeds = [
                Node(
                    client_of({**options_of(seed), **timeouts}),
                    server_of(seed, port=6379, socket="valkey.sock"),
                )
                for seed in seeds
            ]
        self._first = self._seeds[0]
        """The node of the URL that responded last."""
        self._host = _host_of(seeds[0])
        self._hosts = [_host_of(seed) for seed in seeds]
        self._nodes: dict[str, Node] = {}
        self._map: ClusterMap | None = None
        self._is_single = False
        self._refreshed_s = float("-inf")

    async def open(self) -> None:
        """Check that the server, or any primary of a cluster, responds. Raises: ValkeyDown."""
        pings = [node.command("PING") for node in await self.primaries()]
        results = await asyncio.gather(*pings, return_exceptions=True)
        failures = [one for one in results if isinstance(one, BaseException)]
        if len(failures) == len(results):
            raise failures[0]

    async def close(self) -> None:
        """Close every connection."""
        for node in (*self._seeds, *self._nodes.values()):
            await node.close()
        if self.sentinels is not None:
            await self.sentinels.close()

    async def command(self, *words: str | bytes | float, near: str | None = None) -> Any:
        """Send one command; replies are bytes, ints and lists. Raises: ValkeyDown.

        In a cluster the primary of the key `near` receives it, or the first node for None.
        """
        if near is None:
            if len(self._seeds) > 1:
                await self._refresh_map()
            return await self._first.command(*words)
        try:
            return await (await self.primary_of(near)).command(*words)
        except ValkeyMoved:
            self._refreshed_s = float("-inf")
            return await (await self.primary_of(near)).command(*words)

    @asynccontextmanager
    async def session(self, near: str) -> AsyncIterator[Session]:
        """A connection for several commands, such as WAIT, to the primary of the key `near`."""
        node = await self.primary_of(near)
        try:
            with preserve_cancellation():
                async with node.session() as session:
                    yield session
        except ValkeyDown:
            self._refreshed_s = float("-inf")
            raise

    async def call(
        self, function: str, keys: list[str], arguments: list[str | bytes | float]
    ) -> Any:
        """Call one function of a library that `functions` loaded. Raises: ValkeyDown."""
        return await self.command("FCALL", function, len(keys), *keys, *arguments, near=keys[0])

    async def is_cluster(self) -> bool:
        """Whether the URL leads to a cluster. Raises: ValkeyDown while this is unknown."""
        await self._refresh_map()
        return not self._is_single

    async def primaries(self) -> list[Node]:
        """Every primary of the cluster, also if down, or the single server. Raises: ValkeyDown."""
        await self._refresh_map()
        if self._map is None:
            return [self._first]
        addresses = self._map.primaries
        if not addresses:
            raise self._no_owner()
        return [self._node_at(address) for address in addresses]

    async def primary_of(self, key: str) -> Node:
        """The primary of a key. Raises: ValkeyDown."""
        await self._refresh_map()
        if self._map is None:
            return self._first
        owner = self._map.owners[hash_slot(key)]
        if owner == NO_OWNER:
            raise self._no_owner()
        return self._node_at(owner)

    async def _refresh_map(self) -> None:
        """Refresh the map of a cluster if it is older than MAP_MAX_AGE_S."""
        if self._is_single or time.monotonic() - self._refreshed_s < MAP_MAX_AGE_S:
            return
        known = [self._node_at(address) for address in self._map.primaries] if self._map else []
        requests = [node.cluster_map(self._host) for node in known]
        results = await asyncio.gather(*requests, return_exceptions=True)
        maps = [one for one in results if isinstance(one, ClusterMap)]
        if not maps:
            try:
                found = await self._map_of_any_seed()
            except ValkeyDown:
                if self._map is None:
                    raise
                return
            if found is None:
                self._is_single = self._map is None
                return
            maps = [found]
        self._map = max(maps, key=lambda one: one.epoch)
        self._refreshed_s = time.monotonic()

    async def _map_of_any_seed(self) -> ClusterMap | None:
        """The map of the first node of the URL that responds, starting with the last good one.

        Raises: ValkeyDown.
        """
        failure: ValkeyDown | None = None
        for seed in sorted(self._seeds, key=lambda one: one is not self._first):
            host = self._hosts[self._seeds.index(seed)]
            try:
                found = await seed.cluster_map(host)
            except ValkeyDown as error:
                failure = error
                continue
            self._first, self._host = seed, host
            if found is None and len(self._seeds) > 1:
                raise no_cluster(seed.server)
            return found
        assert failure is not None, "a URL has at least one node"
        raise failure

    def _node_at(self, address: str) -> Node:
        node = self._nodes.get(address)
        if node is None:
            host, port = node_address(address, host=self._host)
            options = {**self._options, "host": host, "port": port}
            if options.pop("path", None):
                del options["connection_class"]
            node = self._nodes[address] = Node(client_of(options), address)
        return node

    def _no_owner(self) -> ValkeyDown:
        return ValkeyDown(
            f"no primary of the cluster at {self._first.server} has the hash slot: check"
            " `CLUSTER SLOTS` there",
            retry_after_s=2,
        )


def client_of(options: dict[str, Any]) -> Any:
    """The stock client with a pool of connections with these options."""
    make: Any = ConnectionPool
    return Client.from_pool(make(**options))


def _host_of(seed: str) -> str:
    return options_of(seed).get("host") or "localhost"


def no_cluster(server: str) -> ValkeyDown:
    """The error for several nodes in the URL of which one is not in a cluster."""
    return ValkeyDown(
        f"Valkey at {server} is not in a cluster: list several nodes in valkey.url only for a"
        " cluster, otherwise the one server",
        retry_after_s=5,
    )


SENTINEL_TIMEOUT_S: Final = 0.5
"""Longest wait for one Sentinel to connect, and for its reply; the next one follows."""


class _Sentinels(Sentinel):
    async def discover_master(self, service_name: str) -> Any:
        """As the base class, which lets the error of a server that is no Sentinel pass."""
        try:
            return await super().discover_master(service_name)
        except ResponseError as error:
            raise MasterNotFoundError from error


class _ManagedTlsConnection(SentinelManagedConnection, TlsConnection):
    """A TLS connection to the primary that Sentinels report."""


class SentinelGroup:
    """Connections to the Sentinels of a URL, which report the address of its primary."""

    def __init__(self, found: SentinelUrls) -> None:
        self.name, self.server = found.name, found.server
        limits: Any = dict.fromkeys(
            ("socket_timeout", "socket_connect_timeout"), SENTINEL_TIMEOUT_S
        )
        make: Any = _Sentinels
        self._manager = make([])
        self._manager.sentinels = [client_of({**options_of(url), **limits}) for url in found.urls]

    def client(self, options: dict[str, Any]) -> Any:
        """A client of the primary; each of its connections begins with a request for it."""
        own = {name: options[name] for name in options.keys() - {"host", "port"}}
        kind = _ManagedTlsConnection if is_tls(own) else SentinelManagedConnection
        own.pop("connection_class", None)
        make: Any = SentinelConnectionPool
        return Client.from_pool(make(self.name, self._manager, connection_class=kind, **own))

    async def primary(self) -> tuple[str, int]:
        """Host and port of the primary. Raises: ValkeyDown."""
        with translated_errors(self.server):
            host, port = await self._manager.discover_master(self.name)
        return str(host), int(port)

    async def state(self) -> dict[str, Any]:
        """The fields of SENTINEL MASTER for the primary. Raises: ValkeyDown."""
        await self.primary()
        # The one that responded is the first now.
        with translated_errors(self.server):
            return dict(await self._manager.sentinels[0].sentinel_master(self.name))

    async def close(self) -> None:
        """Close every connection."""
        for sentinel in self._manager.sentinels:
            await sentinel.aclose()


class Node:
    """A pool of connections to one server."""

    def __init__(self, client: Any, server: str) -> None:
        self.server = server
        self._client = client

    async def command(self, *words: str | bytes | float) -> Any:
        """As `Valkey.command`, to this server. Raises: ValkeyDown."""
        with translated_errors(self.server):
            return await self._client.execute_command(*words)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """One connection for several commands."""
        client = self._client.client()
        try:
            yield Session(client, self.server)
        except BaseException:
            # A pending reply must not reach the next user of the connection.
            if client.connection is not None:
                await client.connection.disconnect(nowait=True)
            raise
        finally:
            await client.aclose(close_connection_pool=False)

    async def cluster_map(self, host: str) -> ClusterMap | None:
        """The map of the cluster, or None if the server is in no cluster. Raises: ValkeyDown."""
        with translated_errors(self.server):
            try:
                slots = await self._client.execute_command("CLUSTER", "SLOTS")
            except ResponseError:
                return None
            info = await self._client.execute_command("CLUSTER", "INFO")
        return parse_cluster_map(slots, info, host=host)

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()


class Session:
    """One connection, until the end of its `async with` block."""

    def __init__(self, client: Any, server: str) -> None:
        self._client = client
        self._server = server

    async def command(self, *words: str | bytes | float) -> Any:
        """As `Valkey.command`. Raises: ValkeyDown."""
        with translated_errors(self._server):
            return await self._client.execute_command(*words)


def moved_of(reply: str) -> ValkeyMoved | None:
    """The redirect in an error reply, or None for any other error."""
    found = _MOVED.fullmatch(reply)
    return ValkeyMoved(int(found[2]), found[3], is_ask=found[1] == "ASK") if found else None


@contextmanager
def translated_errors(server: str) -> Iterator[None]:
    """Translate the client's errors and restore cancellations that it swallowed."""
    try:
        with preserve_cancellation():
            yield
    except (ValkeyError, OSError, TimeoutError) as error:
        moved = moved_of(str(error))
        if moved is not None:
            raise moved from error
        if isinstance(error, MasterNotFoundError):
            is_other = isinstance(error.__cause__, ResponseError)
            errors = "none is reported as up", *re.findall(r"\w+Error(?=\()", str(error))
            reason = "a server of the URL is no Sentinel" if is_other else ", ".join(errors)
            raise ValkeyDown(
                f"no primary was found for {server} ({reason}): check `SENTINEL MASTERS` there",
                retry_after_s=2,
            ) from error
        if isinstance(error, AuthenticationError):
            raise refused_password(server, str(error)) from error
        lost = isinstance(error, ClientConnectionError | OSError | TimeoutError)
        reason = type(error).__name__ if lost else str(error).split(" ", 1)[0]
        reason = refused_certificate(error) or reason
        raise ValkeyDown(
            f"Valkey at {server} failed ({reason}): check it with `headrace doctor`, then try"
            " again",
            retry_after_s=2,
        ) from error
