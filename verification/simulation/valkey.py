"""A model of a Valkey server, and connections to it over the simulated network.

The product's own `Multiplexer` connects to it (`SimulatedLoop.create_connection`), so pipelining,
time limits and reconnecting are its real code. Bytes arrive in order, each batch after a latency;
a lost batch is sent again as TCP does, until its connection ends. `SimulatedValkey` has the methods
of `headrace.engines.valkey.Valkey`.

The server writes each command or function call to its append-only file at once, or later while its
disk is slow, and a replica receives it after a lag. So a crash, a power cut, an old copy or a
failover loses the newest of these writes, and nothing else. Clusters are left out.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from libvalkey import Reader

from headrace.engines.valkey import ValkeyDown
from verification.simulation.loop import CURRENT, Process
from verification.simulation.valkey_data import Data
from verification.simulation.valkey_lua import Libraries, encode, encode_error
from verification.simulation.valkey_values import ErrorReply, Reply, Status
from verification.simulation.world import BEGIN, World

TIMEOUT_S: Final = 2.0
RETRANSMIT_S: Final = 0.2
UNITS_PER_COPY: Final = 4_000
"""Writes between two copies of the data, from which older states are replayed."""
INFO: Final = """\
run_id:{run}\r
aof_enabled:1\r
aof_rewrites:0\r
aof_pending_bio_fsync:{syncing}\r
aof_current_size:{written}\r
aof_buffer_length:{unwritten}\r
connected_slaves:{replicas}\r
master_replid2:0000000000000000000000000000000000000000\r
"""


class ValkeyModel:
    """The server. `policy` is its appendfsync; `replicas` 0 or 1."""

    def __init__(
        self,
        world: World,
        name: str = "valkey",
        *,
        policy: str = "everysec",
        replicas: int = 0,
    ) -> None:
        self.world, self.name, self.policy, self.replicas = world, name, policy, replicas
        self.process = Process(name)
        """For its clock, and to be paused."""
        world.processes[name] = self.process
        self.url = f"valkey://{name}:6379"
        self.is_up = True
        self.write_lag_s = self.replica_lag_s = 0.0
        """How long a write waits for the file or the replica."""
        self.on_loss: list[Callable[[], Any]] = []
        """Called after the data became older."""
        self._chance = world.stream(name)
        self._connections: dict[SimulatedTransport, None] = {}
        self._copies: list[tuple[int, Data]] = []
        self._units: list[tuple[float, list[tuple[bytes, ...]]]] = []
        """Time and effects of the writes since the first copy."""
        self._written = self._replicated = 0
        self.data = Data(self.now_ms, self._chance)
        self._start()
        self._copy()
        world.loop.listen(name, self.connect)
        world.on_death(self._end_connections_of)

    def now_ms(self) -> int:
        """The server's clock."""
        off_s = self.process.clock_off_s
        return int((BEGIN.timestamp() + self.world.now_s + off_s) * 1000)

    def execute(self, words: list[bytes]) -> Reply:
        """Run one command. Raises: ErrorReply."""
        name = words[0].upper()
        if name in (b"FCALL", b"FCALL_RO"):
            count = int(words[2])
            keys, rest = words[3 : 3 + count], words[3 + count :]
            try:
                return self.libraries.run(words[1], keys, rest, reads=name == b"FCALL_RO")
            finally:
                self._end_unit()
        own = _OWN.get(name)
        if own is not None:
            return own(self, words)
        try:
            return self.data.execute(words)
        finally:
            self._end_unit()

    # Commands of the server

    def _info(self, _words: list[bytes]) -> bytes:
        written = self.written()
        text = INFO.format(
            run=self.run_id,
            syncing=int(self.write_lag_s > 0),
            written=written,
            unwritten=self.units_end - written,
            replicas=self.replicas,
        )
        return text.encode()

    def _time(self, _words: list[bytes]) -> Reply:
        ms = self.now_ms()
        return [b"%d" % (ms // 1000), b"%d" % (ms % 1000 * 1000)]

    def _config(self, words: list[bytes]) -> Reply:
        return [words[2], self.policy.encode()]

    def _cluster(self, _words: list[bytes]) -> Reply:
        raise ErrorReply("ERR This instance has cluster support disabled")

    def _function(self, words: list[bytes]) -> Reply:
        if words[1].upper() == b"LOAD":
            return self.libraries.load(words[-1])
        code = self.libraries.codes.get(words[3].decode())
        return [] if code is None else [[b"library_name", words[3], b"library_code", code]]

    # Copies and writes

    @property
    def units_end(self) -> int:
        """The number of writes so far."""
        return self._copies[0][0] + len(self._units)

    def written(self) -> int:
        """The number of writes in the file."""
        self._written = max(self._written, self._count_until(self.write_lag_s))
        return self._written

    def replicated(self) -> int:
        """The number of writes that the replica has."""
        self._replicated = max(self._replicated, self._count_until(self.replica_lag_s))
        return self._replicated

    def synced(self, *, age_s: float) -> int:
        """The number of writes that are older than `age_s`."""
        return self._count_until(age_s)

    def _count_until(self, age_s: float) -> int:
        until_s = self.world.now_s - age_s
        if not self._units or self._units[-1][0] <= until_s:
            return self.units_end
        return self._copies[0][0] + bisect_right(self._units, until_s, key=lambda unit: unit[0])

    def _end_unit(self) -> None:
        effects = self.data.effects
        if effects:
            self._units.append((self.world.now_s, effects))
            self.data.effects = []
            if self.units_end - self._copies[-1][0] >= UNITS_PER_COPY:
                self._copy()

    def _copy(self) -> None:
        end = self.units_end if self._copies else 0
        self._copies.append((end, self.data.copy()))
        while len(self._copies) > 2:
            first, _ = self._copies.pop(0)
            del self._units[: self._copies[0][0] - first]

    def _state_at(self, end: int) -> Data:
        """The data after the first `end` writes, which are in the copies."""
        first, data = next(copy for copy in reversed(self._copies) if copy[0] <= end)
        data, begin = data.copy(), self._copies[0][0]
        for _, effects in self._units[first - begin : end - begin]:
            for effect in effects:
                data.replay(effect)
        data.effects = []
        return data

    # Faults

    def restart(self, *, end: int | None, down_s: float, keeps_functions: bool = True) -> None:
        """End the server and start it with the first `end` writes; None: with no data."""
        self.world.trace("valkey restart", end)
        codes = list(self.libraries.codes.values()) if keeps_functions else []
        is_older = end is None or end < self.units_end
        if end is None:
            self.data = Data(self.now_ms, self._chance)
        elif is_older:
            self.data = self._state_at(max(end, self._copies[0][0]))
        begin = self.units_end
        self._copies, self._units = [(begin, self.data.copy())], []
        self._written = self._replicated = begin
        self._start()
        for code in codes:
            self.libraries.load(code)
        self.is_up = False
        for connection in list(self._connections):
            connection.lose()
        if is_older:
            for note in self.on_loss:
                note()
        self.world.loop.call_later(down_s, self._serve)

    def _serve(self) -> None:
        self.is_up = True

    def _start(self) -> None:
        self.run_id = f"{self._chance.getrandbits(160):040x}"
        self.libraries = Libraries(self._in_function)

    def _in_function(self, words: list[bytes]) -> Reply:
        own = _IN_FUNCTION.get(words[0].upper())
        return own(self, words) if own is not None else self.data.execute(words)

    # Connections

    async def connect(self, make: Callable[[], Any]) -> SimulatedTransport:
        """A connection of the current process. Raises: OSError."""
        client = CURRENT.get()
        network = self.world.network
        there_s, back_s = (
            network.delay_s(client.name, self.name),
            network.delay_s(self.name, client.name),
        )
        if there_s is None or back_s is None:
            await asyncio.sleep(3600)
            raise TimeoutError
        await asyncio.sleep(there_s + back_s)
        if not self.is_up:
            raise ConnectionRefusedError
        transport = SimulatedTransport(self, make(), client)
        self._connections[transport] = None
        return transport

    def forget(self, transport: SimulatedTransport) -> None:
        """A connection has ended."""
        self._connections.pop(transport, None)

    def _end_connections_of(self, process: Process) -> None:
        for connection in [one for one in self._connections if one.client is process]:
            connection.is_closed = True
            self.forget(connection)


_OWN_NAMES: Final = ("info", "time", "config", "cluster", "function")
_OWN: Final[dict[bytes, Callable[[ValkeyModel, list[bytes]], Reply]]] = {
    name.upper().encode(): getattr(ValkeyModel, f"_{name}") for name in _OWN_NAMES
}
_IN_FUNCTION: Final = {name: _OWN[name] for name in (b"INFO", b"TIME")}


class SimulatedTransport:
    """One connection between a process and the server: two streams of bytes in order."""

    def __init__(self, server: ValkeyModel, protocol: Any, client: Process) -> None:
        self.client, self.protocol, self.is_closed = client, protocol, False
        self._run_id = server.run_id
        self.server, self._reader = server, Reader()
        self._to_server = _OneWay(self, client.name, server.name, server.process, self._arrive)
        self._to_client = _OneWay(self, server.name, client.name, client, self._reply_arrives)
        protocol.connection_made(self)

    def write(self, data: bytes) -> None:
        """As asyncio's."""
        if not self.is_closed:
            self._to_server.send(data)

    def abort(self) -> None:
        """As asyncio's: what was not sent yet is dropped."""
        self.is_closed = True
        self.server.forget(self)

    close = abort

    def lose(self) -> None:
        """The server has ended; the client notices if a packet reaches it."""
        self.server.forget(self)
        self._to_client.send(b"")

    def _arrive(self, data: bytes) -> None:
        server = self.server
        if not server.is_up or server.run_id != self._run_id:
            return
        self._reader.feed(data)
        replies = []
        while (words := self._reader.gets()) is not False:
            try:
                replies.append(encode(server.execute(words)))
            except ErrorReply as error:
                replies.append(encode_error(error))
        if replies and not self.is_closed:
            self._to_client.send(b"".join(replies))

    def _reply_arrives(self, data: bytes) -> None:
        if self.is_closed:
            return
        if data:
            self.protocol.data_received(data)
        else:
            self.is_closed = True
            self.protocol.connection_lost(None)


class _OneWay:
    """One direction of a connection."""

    __slots__ = ("_arrived_s", "_deliver", "_link", "_process", "_stalled", "_transport")

    def __init__(
        self,
        transport: SimulatedTransport,
        sender: str,
        receiver: str,
        process: Process,
        deliver: Callable[[bytes], None],
    ) -> None:
        self._transport, self._link, self._process = transport, (sender, receiver), process
        self._deliver, self._arrived_s = deliver, 0.0
        self._stalled: list[bytes] = []

    def send(self, data: bytes) -> None:
        """Send bytes; they wait behind lost ones."""
        self._stalled.append(data)
        if len(self._stalled) == 1:
            self._try(1)

    def _try(self, attempt: int) -> None:
        world = self._transport.server.world
        delay_s = world.network.delay_s(*self._link)
        if delay_s is None:
            if not self._transport.is_closed:
                world.loop.call_later(RETRANSMIT_S * 2 ** min(attempt, 4), self._try, attempt + 1)
            return
        self._arrived_s = max(world.now_s + delay_s, self._arrived_s)
        later_s = self._arrived_s - world.now_s
        for data in self._stalled:
            world.in_process(self._process, later_s, self._deliver, data)
        self._stalled = []


class SimulatedValkey:
    """Has the methods of `headrace.engines.valkey.Valkey` that views and the feed call."""

    def __init__(self, model: ValkeyModel, prefix: str = "headrace") -> None:
        self.prefix = prefix
        self._model = model

    async def open(self) -> None:
        """As `Valkey.open`."""
        await self.command("PING")

    async def is_cluster(self) -> bool:
        """As `Valkey.is_cluster`."""
        return False

    async def primaries(self) -> list[SimulatedValkey]:
        """As `Valkey.primaries`: one node, which this is, too."""
        return [self]

    async def command(self, *words: str | bytes | float, near: str | None = None) -> Any:
        """As `Valkey.command` and `Node.command`. Raises: ValkeyDown."""
        return _as_client(words, await self._reach(lambda: self._model.execute(_packed(words))))

    @asynccontextmanager
    async def session(self, near: str) -> AsyncIterator[SimulatedSession]:
        """As `Valkey.session`."""
        yield SimulatedSession(self._model, self)

    async def _reach(self, act: Callable[[], Reply]) -> Reply:
        model, client = self._model, CURRENT.get().name
        run_id = model.run_id
        there_s = model.world.network.delay_s(client, model.name)
        if there_s is None:
            await asyncio.sleep(TIMEOUT_S)
            raise _no_answer()
        await asyncio.sleep(there_s)
        if not model.is_up:
            raise _no_answer()
        deadline_s = model.world.now_s + TIMEOUT_S
        while model.process.is_paused:
            if model.world.now_s > deadline_s:
                raise _no_answer()
            await asyncio.sleep(0.05)
        try:
            reply = act()
        except ErrorReply as error:
            raise ValkeyDown(f"Valkey of the simulation refused: {error}") from error
        back_s = model.world.network.delay_s(model.name, client)
        if back_s is None or model.run_id != run_id:
            await asyncio.sleep(TIMEOUT_S)
            raise _no_answer()
        await asyncio.sleep(back_s)
        return reply


class SimulatedSession:
    """Has the methods of `headrace.engines.valkey.Session`."""

    def __init__(self, model: ValkeyModel, valkey: SimulatedValkey) -> None:
        self._model, self._valkey = model, valkey
        self._run_id, self._end = model.run_id, 0

    async def command(self, *words: str | bytes | float) -> Any:
        """As `Session.command`. Raises: ValkeyDown."""
        if self._model.run_id != self._run_id:
            raise _no_answer()
        if words[0] == "WAIT":
            return await self._wait(self._model.replicated, int(words[2]))
        if words[0] == "WAITAOF":
            return [await self._wait(self._model.written, int(words[3])), 0]
        reply = await self._valkey.command(*words)
        self._end = self._model.units_end
        return reply

    async def _wait(self, reached: Callable[[], int], timeout_ms: int) -> int:
        """The number of copies with the last write of this session: 0 or 1."""
        model, is_replica = self._model, reached == self._model.replicated
        if is_replica and not model.replicas:
            return 0
        await self._valkey.command("PING")
        ends_s = model.world.now_s + timeout_ms / 1000
        while reached() < self._end and model.world.now_s < ends_s:
            await asyncio.sleep(0.005)
        await self._valkey.command("PING")
        if model.run_id != self._run_id:
            raise _no_answer()
        return int(reached() >= self._end)


def _no_answer() -> ValkeyDown:
    return ValkeyDown("Valkey of the simulation does not respond", retry_after_s=2)


def _packed(words: tuple[str | bytes | float, ...]) -> list[bytes]:
    return [word if isinstance(word, bytes) else str(word).encode() for word in words]


def _as_client(words: tuple[str | bytes | float, ...], reply: Reply) -> Any:
    """A reply as valkey-py parses it: INFO is a dict."""
    if words[0] == "INFO":
        rows = [row.partition(":") for row in reply.decode().splitlines()]
        return {name: int(value) if value.isdigit() else value for name, _, value in rows}
    return str(reply) if isinstance(reply, Status) else reply
