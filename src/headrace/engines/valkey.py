"""Valkey through valkey-py with libvalkey: the hot side, which may be lost.

The stock client is enough for everything but the hot path, which has its own multiplexed connection (`multiplex`).

**Cluster.** Every key carries a hash tag (`{...}`), so that all of it runs on Valkey Cluster. Whether the URL leads to one
is asked once, where it matters (`primaries`, `primary_of`); then each primary has a pool of its own here. The cluster client
of valkey-py is not used: it sends a command again whose reply was lost, which may have been run, and gives up its list of
nodes while some are away.

Errors leave this file in our words. A cancellation always ends a call: the client swallows some on Python 3.11.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from valkey.asyncio import ConnectionPool
from valkey.asyncio import Valkey as Client
from valkey.asyncio.connection import parse_url as parse_options
from valkey.exceptions import ConnectionError as ClientConnectionError
from valkey.exceptions import ResponseError, ValkeyError

from headrace.engines.endpoints import parse_valkey_url, seeds_of, server_of
from headrace.engines.slots import NOBODY, SlotMap, place_of, read_map, slot_of
from headrace.kernel.cancels import kept_cancellation
from headrace.kernel.config import parse_duration_s, parse_text, setting
from headrace.kernel.errors import Unavailable


class ValkeyDown(Unavailable):
    """Valkey does not answer or is not ready; nothing is known of a command that was under way."""

    code = "valkey.unavailable"

    @property
    def public_text(self) -> str:
        """Without the server's address, which is no caller's business."""
        return "Valkey does not answer: check that it runs with `headrace doctor`, then try again"


class ValkeyMoved(ValkeyDown):
    """Another node of the cluster has the key; the command was not run. Followed, unless nodes send one round and round."""

    code = "valkey.moved"

    def __init__(self, slot: int, address: str, *, is_ask: bool) -> None:
        super().__init__(
            f"hash slot {slot} is at {address or 'another node'}: a cluster is at the address of valkey.url; if this"
            " stays, look at `CLUSTER SLOTS` there",
            retry_after_s=1,
        )
        self.slot, self.address, self.is_ask = slot, address, is_ask

    @property
    def public_text(self) -> str:
        """Without the node's address."""
        return "Valkey's keys are on their way to another server: try again in a moment"


_MOVED: Final = re.compile(r"(MOVED|ASK) (\d{1,5}) (\S*:\d{1,5})")
LOOK_EVERY_S: Final = 1.0
"""A map of the cluster that is older is asked for anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValkeyConfig:
    """Section `valkey`."""

    url: str | None = setting(
        None,
        "Where Valkey answers, or some nodes of a cluster, valkey://a:6379,b:6379; unset: the embedded one in the data folder.",
        parse_valkey_url,
        secret=True,
    )
    timeout_s: float = setting("2s", "Longest wait for a reply.", parse_duration_s)
    prefix: str = setting("headrace", "First part of every key, to share a server.", parse_text)


class Valkey:
    """Pools of connections to one Valkey, or to each primary of a cluster."""

    def __init__(self, url: str, config: ValkeyConfig) -> None:
        self.prefix = config.prefix
        timeouts: dict[str, Any] = {
            "socket_timeout": config.timeout_s,
            "socket_connect_timeout": config.timeout_s,
        }
        seeds = seeds_of(url)
        self._options: dict[str, Any] = {**parse_options(seeds[0]), **timeouts}
        self._seeds = [
            Node(
                Client.from_url(seed, **timeouts), server_of(seed, port=6379, socket="valkey.sock")
            )
            for seed in seeds
        ]
        self._first = self._seeds[0]
        """The node of the URL that answered last."""
        self._host = _host_of(seeds[0])
        self._hosts = [_host_of(seed) for seed in seeds]
        self._nodes: dict[str, Node] = {}
        self._map: SlotMap | None = None
        self._is_single = False
        self._looked_s = float("-inf")

    async def open(self) -> None:
        """Check that it answers, or any primary of a cluster. Raises: ValkeyDown."""
        pings = [node.command("PING") for node in await self.primaries()]
        told = await asyncio.gather(*pings, return_exceptions=True)
        failures = [one for one in told if isinstance(one, BaseException)]
        if len(failures) == len(told):
            raise failures[0]

    async def close(self) -> None:
        """Close every connection."""
        for node in (*self._seeds, *self._nodes.values()):
            await node.close()

    async def command(self, *words: str | bytes | float, near: str | None = None) -> Any:
        """Send one command as it is; replies are bytes, ints and lists. Raises: ValkeyDown.

        In a cluster it goes to the primary of the key `near`; without one to where the URL leads.
        """
        if near is None:
            if len(self._seeds) > 1:
                await self._look()
            return await self._first.command(*words)
        try:
            return await (await self.primary_of(near)).command(*words)
        except ValkeyMoved:
            self._looked_s = float("-inf")
            return await (await self.primary_of(near)).command(*words)

    @asynccontextmanager
    async def session(self, near: str) -> AsyncIterator[Session]:
        """One connection for several commands, such as WAIT, which speaks of what its own connection wrote.

        In a cluster it is to the primary of the key `near`.
        """
        node = await self.primary_of(near)
        try:
            with kept_cancellation():
                async with node.session() as session:
                    yield session
        except ValkeyDown:
            self._looked_s = float("-inf")
            raise

    async def call(
        self, function: str, keys: list[str], arguments: list[str | bytes | float]
    ) -> Any:
        """Call one function of a library that `functions` loaded. Raises: ValkeyDown."""
        return await self.command("FCALL", function, len(keys), *keys, *arguments, near=keys[0])

    async def is_cluster(self) -> bool:
        """Whether the URL leads to a cluster. Raises: ValkeyDown while that is not known."""
        await self._look()
        return not self._is_single

    async def primaries(self) -> list[Node]:
        """Every primary of the cluster, also one that is away; the only server where it is none. Raises: ValkeyDown."""
        await self._look()
        if self._map is None:
            return [self._first]
        addresses = self._map.primaries
        if not addresses:
            raise self._ownerless()
        return [self._node_at(address) for address in addresses]

    async def primary_of(self, key: str) -> Node:
        """The one that has a key. Raises: ValkeyDown."""
        await self._look()
        if self._map is None:
            return self._first
        owner = self._map.owners[slot_of(key)]
        if owner == NOBODY:
            raise self._ownerless()
        return self._node_at(owner)

    async def _look(self) -> None:
        """Ask for the map, if there is one and it is not of this moment."""
        if self._is_single or time.monotonic() - self._looked_s < LOOK_EVERY_S:
            return
        known = [self._node_at(address) for address in self._map.primaries] if self._map else []
        asked = [node.cluster_map(self._host) for node in known]
        told = await asyncio.gather(*asked, return_exceptions=True)
        maps = [one for one in told if isinstance(one, SlotMap)]
        if not maps:
            try:
                found = await self._map_of_a_seed()
            except ValkeyDown:
                if self._map is None:
                    raise
                return
            if found is None:
                self._is_single = self._map is None
                return
            maps = [found]
        self._map = max(maps, key=lambda one: one.epoch)
        self._looked_s = time.monotonic()

    async def _map_of_a_seed(self) -> SlotMap | None:
        """The map of the first node of the URL that answers, the last one that did before the others. Raises: ValkeyDown."""
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
        assert failure is not None, "a URL names one node at least"
        raise failure

    def _node_at(self, address: str) -> Node:
        node = self._nodes.get(address)
        if node is None:
            host, port = place_of(address, host=self._host)
            options = {**self._options, "host": host, "port": port}
            if options.pop("path", None):
                del options["connection_class"]
            pool: Any = ConnectionPool(**options)
            node = self._nodes[address] = Node(Client.from_pool(pool), address)
        return node

    def _ownerless(self) -> ValkeyDown:
        return ValkeyDown(
            f"no primary of the cluster at {self._first.server} has the hash slot: look at `CLUSTER"
            " SLOTS` there",
            retry_after_s=2,
        )


def _host_of(seed: str) -> str:
    return dict(parse_options(seed)).get("host") or "localhost"


def no_cluster(server: str) -> ValkeyDown:
    """Several nodes were given, and one of them is a server by itself: writes would go to one or the other."""
    return ValkeyDown(
        f"Valkey at {server} is in no cluster: name several nodes in valkey.url only for a cluster,"
        " else the one server",
        retry_after_s=5,
    )


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
            # A reply that was not awaited must not meet the next user of the connection.
            if client.connection is not None:
                await client.connection.disconnect(nowait=True)
            raise
        finally:
            await client.aclose(close_connection_pool=False)

    async def cluster_map(self, host: str) -> SlotMap | None:
        """Which primary has what; None where the server is in no cluster, or may not be asked. Raises: ValkeyDown."""
        with translated_errors(self.server):
            try:
                slots = await self._client.execute_command("CLUSTER", "SLOTS")
            except ResponseError:
                return None
            info = await self._client.execute_command("CLUSTER", "INFO")
        return read_map(slots, info, host=host)

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()


class Session:
    """One connection; ends with the `async with` block that made it."""

    def __init__(self, client: Any, server: str) -> None:
        self._client = client
        self._server = server

    async def command(self, *words: str | bytes | float) -> Any:
        """As `Valkey.command`. Raises: ValkeyDown."""
        with translated_errors(self._server):
            return await self._client.execute_command(*words)


def moved_of(reply: str) -> ValkeyMoved | None:
    """Where an error reply says that the key is; None for any other error."""
    found = _MOVED.fullmatch(reply)
    return ValkeyMoved(int(found[2]), found[3], is_ask=found[1] == "ASK") if found else None


@contextmanager
def translated_errors(server: str) -> Iterator[None]:
    """Raise a client's error as ours, naming `server`; a cancellation that the client swallowed is raised again."""
    try:
        with kept_cancellation():
            yield
    except (ValkeyError, OSError, TimeoutError) as error:
        moved = moved_of(str(error))
        if moved is not None:
            raise moved from error
        lost = isinstance(error, ClientConnectionError | OSError | TimeoutError)
        reason = type(error).__name__ if lost else str(error).split(" ", 1)[0]
        raise ValkeyDown(
            f"Valkey at {server} failed ({reason}): check that it runs with `headrace doctor`, then"
            " try again",
            retry_after_s=2,
        ) from error
