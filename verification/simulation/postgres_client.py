"""Connections of simulated processes to the model of PostgreSQL: requests and replies get lost.

`SimulatedPostgres` has the methods of `headrace.engines.postgres.Postgres`. Each call crosses the
network twice: the request may be lost before the effect and the reply after it, and the caller then
receives PostgresDown, which means that the outcome is unknown.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from headrace.engines.postgres import Runner, Tx
from headrace.engines.postgres_errors import PostgresBusy, PostgresDown
from headrace.engines.sql import Query
from verification.simulation.loop import CURRENT
from verification.simulation.postgres import PostgresModel, Session, Waits
from verification.simulation.world import Unreachable

STATEMENT_TIMEOUT_S: Final = 10.0
ANSWER_GRACE_S: Final = 2.0
LOCK_WAIT_S: Final = 0.002


class _InSession(Runner):
    """Statements over the network, in one session or each in its own."""

    def __init__(self, model: PostgresModel, session: Session | None, epoch: int | None) -> None:
        self._model = model
        self.session_held = session
        """Of a transaction or session; None: each statement has its own."""
        self._epoch = epoch

    async def call(self, method: str, query: Query, parameters: dict[str, Any]) -> Any:
        """As `Runner.call`. Raises: PostgresDown if it was cut off, PostgresBusy."""
        session = self.session_held or self._model.open_session()
        try:
            result = await self._reach(
                lambda: self._model.execute(session, query, parameters), session
            )
        finally:
            if self.session_held is None:
                self._model.close_session(session)
        return as_driver(method, result)

    async def _reach(self, act: Callable[[], Any], session: Session) -> Any:
        """Send a request to the server, act there, and return its reply."""
        exchange = _Exchange(self._model, act, session, self._epoch)
        try:
            return await exchange.response
        except Unreachable as error:
            raise PostgresDown(
                "PostgreSQL of the simulation does not respond: wait for the end of the fault",
                retry_after_s=2,
            ) from error


class _Exchange:
    """A request on its way to the server and its reply; no task waits on the server's side.

    Both ways are timers, since a simulation spends most of its time here.
    """

    __slots__ = ("_act", "_client", "_deadline_s", "_epoch", "_model", "_session", "response")

    def __init__(
        self,
        model: PostgresModel,
        act: Callable[[], Any],
        session: Session,
        epoch: int | None,
    ) -> None:
        self._model, self._act, self._session = model, act, session
        self._epoch = epoch
        self._client = CURRENT.get().name
        self._deadline_s = model.world.now_s + STATEMENT_TIMEOUT_S
        self.response: asyncio.Future[Any] = model.world.loop.create_future()
        if model.pauses and model.holds(self._client):
            # The statement is sent when the process runs again.
            model.world.in_process(CURRENT.get(), 0.0, self._send)
        else:
            self._send()

    def _send(self) -> None:
        self._travel(self._client, self._model.name, self._arrive)

    def _travel(self, sender: str, receiver: str, arrive: Callable[..., None], *args: Any) -> None:
        latency_s = self._model.world.network.delay_s(sender, receiver)
        if latency_s is None:
            self._later(STATEMENT_TIMEOUT_S + ANSWER_GRACE_S, self._fail)
        else:
            self._later(latency_s, arrive, *args)

    def _later(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        self._model.world.loop.call_later(delay_s, call, *args, context=self._model.context)

    def _arrive(self) -> None:
        """Act on the server; wait for rows that other transactions hold."""
        model = self._model
        if self._is_frozen(self._arrive):
            return
        if self._epoch is None:
            self._epoch = model.epoch
        if self._session.has_ended or not model.is_up or model.epoch != self._epoch:
            self._fail()
            return
        try:
            result, error = self._act(), None
        except Waits:
            if model.world.now_s < self._deadline_s:
                self._later(LOCK_WAIT_S, self._arrive)
                return
            text = "PostgreSQL of the simulation stopped a statement that waited for a lock"
            result, error = None, PostgresBusy(text, retry_after_s=1)
        except Exception as raised:  # noqa: BLE001 - raised in the caller's task
            result, error = None, raised  # type: ignore[assignment]
        self._travel(model.name, self._client, self._deliver, result, error)

    def _deliver(self, result: Any, error: Exception | None) -> None:
        """Give the reply to the caller, unless the connection has ended meanwhile."""
        if self._is_frozen(self._deliver, result, error):
            return
        if not self._model.is_up or self._model.epoch != self._epoch:
            self._fail()
        elif not self.response.done():
            if error is None:
                self.response.set_result(result)
            else:
                self.response.set_exception(error)

    def _is_frozen(self, again: Callable[..., None], *args: Any) -> bool:
        """Whether the server is frozen: try again later, for as long as a caller waits."""
        if not self._model.process.is_paused:
            return False
        if self._model.world.now_s > self._deadline_s + ANSWER_GRACE_S:
            self._fail()
        else:
            self._later(0.05, again, *args)
        return True

    def _fail(self) -> None:
        if not self.response.done():
            self.response.set_exception(Unreachable(self._model.name))


def as_driver(method: str, result: Any) -> Any:
    """The result of a statement in the words of asyncpg."""
    if method == "execute":
        return f"DONE {result if isinstance(result, int) else len(result or ())}"
    rows = [] if isinstance(result, int) else result or []
    if method == "fetch":
        return rows
    if method == "fetchrow":
        return rows[0] if rows else None
    return next(iter(rows[0].values())) if rows else None


class SimulatedTx(_InSession, Tx):
    """An open transaction or session; see `headrace.engines.postgres.Tx`."""

    async def allow_long_statements(self, longest_s: float) -> None:
        """Statements of the model take no time."""

    async def end(self, *, commits: bool) -> None:
        """Commit or roll back. Raises: PostgresDown: it may have been committed."""
        session = self.session_held
        assert session is not None, "a transaction has a session"
        act = self._model.commit if commits else self._model.rollback
        await self._reach(lambda: act(session), session)


class SimulatedConnection:
    """A connection of its own, for LISTEN and for locks of a session."""

    def __init__(self, model: PostgresModel) -> None:
        self.process = CURRENT.get()
        self._model = model
        self._in_session = _InSession(model, model.open_session(), model.epoch)
        self._channels: dict[str, list[Callable[..., Any]]] = {}
        self._on_end: list[Callable[..., Any]] = []
        model.add_listener(self)

    def add_termination_listener(self, note: Callable[..., Any]) -> None:
        """As asyncpg's."""
        self._on_end.append(note)

    async def add_listener(self, channel: str, note: Callable[..., Any]) -> None:
        """As asyncpg's."""
        await asyncio.sleep(0)
        self._channels.setdefault(channel, []).append(note)

    async def fetchval(self, text: str, *arguments: Any, timeout: float | None) -> Any:
        """As asyncpg's, for statements whose parameters are sent as they are."""
        return await self._call("fetchval", text, arguments)

    async def fetchrow(self, text: str, *arguments: Any, timeout: float | None) -> Any:
        """The same for `fetchrow`."""
        return await self._call("fetchrow", text, arguments)

    async def execute(self, text: str, *arguments: Any, timeout: float | None) -> Any:
        """The same for `execute`."""
        return await self._call("execute", text, arguments)

    async def _call(self, method: str, text: str, arguments: tuple[Any, ...]) -> Any:
        query = self._model.query_of(text)
        parameters = dict(zip(query.parameters, arguments, strict=True))
        return await self._in_session.call(method, query, parameters)

    def terminate(self) -> None:
        """As asyncpg's; the server detects it at once."""
        session = self._in_session.session_held
        assert session is not None, "opened with the connection"
        self._model.close_session(session)
        self._model.remove_listener(self)

    async def close(self, **_options: Any) -> None:
        """As asyncpg's."""
        self.terminate()

    def deliver(self, channel: str, payload: str) -> None:
        """Send a notification over the network; a cut link loses it."""
        for note in self._channels.get(channel, ()):
            self._run_later(note, self, 0, channel, payload)

    def lose(self) -> None:
        """The server ended the connection."""
        self.terminate()
        for note in self._on_end:
            self._run_later(note, self)

    def _run_later(self, note: Callable[..., Any], *args: Any) -> None:
        world = self._model.world
        if not world.network.is_cut(self._model.name, self.process.name):
            world.in_process(self.process, 0.001, note, *args)


class SimulatedPostgres(_InSession):
    """Has the methods of `headrace.engines.postgres.Postgres`, of the current process."""

    def __init__(self, model: PostgresModel) -> None:
        super().__init__(model, None, None)
        self.remote: Any = None
        self.replica: Any = None
        self.reads = self
        self.remote_timeout_s = 4 * STATEMENT_TIMEOUT_S
        self.failed_s = float("-inf")

    async def open(self) -> None:
        """As `Postgres.open`."""
        await self._connect()

    async def close(self) -> None:
        """As `Postgres.close`."""

    async def call(self, method: str, query: Query, parameters: dict[str, Any]) -> Any:
        """As `Postgres.call`: by the agent of a slot if it takes the statement."""
        if self.remote is not None and self.remote.takes(query, parameters):
            timeout_s = self.remote_timeout_s
            return await self.remote.call(method, query, parameters, timeout_s=timeout_s)
        try:
            return await super().call(method, query, parameters)
        except PostgresDown:
            self.failed_s = time.monotonic()
            raise

    def with_own_pool(self, _connections_max: int) -> SimulatedPostgres:
        """As `Postgres.with_own_pool`."""
        return SimulatedPostgres(self._model)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[SimulatedTx]:
        """As `Postgres.transaction`."""
        async with self.session() as tx:
            session = tx.session_held
            assert session is not None, "opened by session"
            session.is_open = True
            try:
                yield tx
            except (PostgresDown, asyncio.CancelledError):
                raise
            except BaseException:
                await tx.end(commits=False)
                raise
            await tx.end(commits=True)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[SimulatedTx]:
        """As `Postgres.session`."""
        epoch = await self._connect()
        session = self._model.open_session()
        try:
            yield SimulatedTx(self._model, session, epoch)
        finally:
            self._model.close_session(session)

    async def connect_unpooled(self, **_options: Any) -> SimulatedConnection:
        """As `Postgres.connect_unpooled`."""
        await self._connect()
        return SimulatedConnection(self._model)

    async def _connect(self) -> int:
        """Reach the server once; return its epoch."""
        session = self._model.open_session()
        try:
            epoch: int = await self._reach(lambda: self._model.epoch, session)
            return epoch
        finally:
            self._model.close_session(session)
