"""A model of PostgreSQL: tables, transactions with row locks, crashes and failovers.

A room registers one Python function per named query (`PostgresModel.on`): the contract of the SQL
statement. A function reads and writes `Table`s. Its effect is atomic. Until a transaction commits,
other sessions read the old rows, and a write to a row that it changed waits for its end (READ
COMMITTED). A function may therefore run again, and must have no effect but on tables and `notify`.

Processes reach it by `postgres_client`. Tests compare these functions with the real statements.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from contextvars import copy_context
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar

from headrace.engines.sql import Query
from verification.simulation.loop import CURRENT, OUTSIDE, Process
from verification.simulation.world import BEGIN, World

if TYPE_CHECKING:
    from verification.simulation.postgres_client import SimulatedConnection

Row: TypeAlias = dict[str, Any]
Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
COMMITS_KEPT: Final = 2_000
"""Commits that a failover to an asynchronous standby may lose."""
_MISSING: Final = object()


class Waits(Exception):
    """The statement needs a row or an advisory lock that another transaction holds."""


class Session:
    """A connection: what its open transaction changed and locked."""

    __slots__ = (
        "acted_s",
        "has_ended",
        "idle_max_s",
        "is_open",
        "locked",
        "notes",
        "process",
        "undo",
    )

    def __init__(self, process: Process) -> None:
        self.process = process
        self.is_open = False
        """A transaction is open."""
        self.has_ended = False
        self.acted_s = 0.0
        """When its last statement ended."""
        self.idle_max_s: float | None = None
        """The server ends its open transaction after this time without a statement."""
        self.undo: list[tuple[Table[Any, Any], Any, Any]] = []
        """Table, key and former value of each change."""
        self.locked: list[tuple[Table[Any, Any] | None, Hashable]] = []
        self.notes: dict[tuple[str, str], None] = {}


class Table(Generic[Key, Value]):
    """Rows by key. Values are replaced, never changed in place."""

    def __init__(self, model: PostgresModel) -> None:
        self._model = model
        self._rows: dict[Key, Value] = {}
        self._locks: dict[Key, tuple[Session, Any]] = {}
        """Session and committed value of rows that open transactions changed or locked."""

    def get(self, key: Key) -> Value | None:
        """The row as the current session sees it."""
        lock = self._locks.get(key)
        if lock is not None and lock[0] is not self._model.session:
            value = lock[1]
            return None if value is _MISSING else value  # type: ignore[no-any-return]
        return self._rows.get(key)

    def __contains__(self, key: Key) -> bool:
        return self.get(key) is not None

    def __len__(self) -> int:
        return sum(1 for _ in self.items()) if self._locks else len(self._rows)

    def items(self) -> Iterator[tuple[Key, Value]]:
        """All rows that the current session sees, in order of insertion."""
        if not self._locks:
            yield from list(self._rows.items())
            return
        for key in list(dict.fromkeys((*self._rows, *self._locks))):
            value = self.get(key)
            if value is not None:
                yield key, value

    def values(self) -> Iterator[Value]:
        """The values of `items`."""
        return (value for _, value in self.items())

    def put(self, key: Key, value: Value) -> None:
        """Insert or replace a row."""
        self.lock(key)
        self._change(key, value)

    def pop(self, key: Key) -> Value | None:
        """Delete a row and return it."""
        self.lock(key)
        before = self._rows.get(key)
        if before is not None:
            self._change(key, _MISSING)
        return before

    def note_change(self, key: Key, before: Value | None, after: Value | None) -> None:
        """Called at each change of a row, also by a rollback: for indexes."""

    def is_locked(self, key: Key) -> bool:
        """Whether another transaction holds the row: SKIP LOCKED leaves it out."""
        lock = self._locks.get(key)
        return lock is not None and lock[0] is not self._model.session

    def lock(self, key: Key) -> None:
        """Lock a row until the transaction ends (FOR UPDATE); waits for other transactions."""
        if self.is_locked(key):
            raise Waits
        session = self._model.session
        assert session is not None, "tables are changed by statements only"
        if session.is_open and key not in self._locks:
            self._locks[key] = (session, self._rows.get(key, _MISSING))
            session.locked.append((self, key))

    def unlock(self, key: Key) -> None:
        """Called at the end of a transaction."""
        self._locks.pop(key, None)

    def _change(self, key: Key, after: Any) -> None:
        session = self._model.session
        assert session is not None, "tables are changed by statements only"
        session.undo.append((self, key, self._set(key, after)))

    def _set(self, key: Key, after: Any) -> Any:
        """Set or delete a row without its lock. Return its former value."""
        rows = self._rows
        before: Any = rows.get(key, _MISSING)
        if after is _MISSING:
            rows.pop(key, None)
        else:
            rows[key] = after
        self.note_change(
            key,
            None if before is _MISSING else before,
            None if after is _MISSING else after,
        )
        return before

    def undo(self, key: Key, before: Any) -> None:
        """Called by a rollback."""
        self._set(key, before)


Statement: TypeAlias = Callable[..., Any]


class PostgresModel:
    """The server. Rooms add tables and statements; faults crash, freeze and fail it over."""

    def __init__(self, world: World, name: str = "postgres") -> None:
        self.world = world
        self.name = name
        self.process = Process(name)
        """Only for its clock, and to be paused: the server itself runs no tasks."""
        world.processes[name] = self.process
        self.session: Session | None = None
        """The session whose statement runs."""
        self.is_up = True
        self.epoch = 0
        """Grows with each crash: connections of earlier epochs are lost."""
        self.timeline = 1
        """Grows with each failover that loses commits."""
        self._statements: dict[int, Statement] = {}
        self._queries: list[Query] = []
        self.session_helds: set[Session] = set()
        self._advisory: dict[Hashable, Session] = {}
        self._commits: deque[list[tuple[Table[Any, Any], Any, Any]]] = deque(maxlen=COMMITS_KEPT)
        self._listeners: list[SimulatedConnection] = []
        self._sequences: dict[str, int] = {}
        self._now = (0.0, BEGIN)
        self.pauses: dict[str, tuple[int, bool]] = {}
        """Processes to pause at a statement: how many statements from now, and whether after it."""
        self.context = copy_context()
        self.context.run(CURRENT.set, OUTSIDE)
        world.on_death(self._end_sessions_of)

    # What rooms register and call

    def on(self, query: Query) -> Callable[[Statement], Statement]:
        """Register the function of a query; it receives the query's parameters by name.

        It returns rows as dicts, or for `run` the number of rows.
        """

        def register(statement: Statement) -> Statement:
            self._statements[id(query)] = statement
            self._queries.append(query)
            return statement

        return register

    def table(self) -> Table[Any, Any]:
        """A new empty table."""
        return Table(self)

    def now(self) -> datetime:
        """The server's clock, which alone decides what is due."""
        now_s = self.world.now_s + self.process.clock_off_s
        if now_s != self._now[0]:
            self._now = now_s, BEGIN + timedelta(seconds=now_s)
        return self._now[1]

    def next_id(self, sequence: str) -> int:
        """The next value of a sequence; no rollback returns it."""
        value = self._sequences.get(sequence, 0) + 1
        self._sequences[sequence] = value
        return value

    def last_id(self, sequence: str) -> int:
        """The last value of a sequence; 0 before the first."""
        return self._sequences.get(sequence, 0)

    def notify(self, channel: str, payload: str) -> None:
        """NOTIFY: delivered when the statement or transaction commits."""
        assert self.session is not None, "only statements notify"
        self.session.notes[channel, payload] = None

    def lock_advisory(self, key: Hashable, *, waits: bool = True) -> bool:
        """Take a transaction's advisory lock; False if it is held and `waits` is false."""
        session = self.session
        assert session is not None, "only statements take locks"
        holder = self._advisory.get(key)
        if holder not in (None, session):
            if waits:
                raise Waits
            return False
        if session.is_open and holder is None:
            self._advisory[key] = session
            session.locked.append((None, key))
        return True

    def lock_session(self, key: Hashable) -> bool:
        """Take an advisory lock until the session ends; False if another session holds it."""
        session = self.session
        assert session is not None, "only statements take locks"
        return self._advisory.setdefault(("session", key), session) is session

    def unlock_session(self, key: Hashable) -> bool:
        """Release a lock of `lock_session`. Return whether this session held it."""
        if self._advisory.get(("session", key)) is not self.session:
            return False
        del self._advisory["session", key]
        return True

    def limit_idle(self, idle_max_s: float) -> None:
        """Set idle_in_transaction_session_timeout until the transaction ends."""
        session = self.session
        assert session is not None, "only statements set limits"
        if session.is_open and session.idle_max_s is None:
            session.idle_max_s = idle_max_s
            self._check_idle_later(session, idle_max_s)

    def _check_idle_later(self, session: Session, after_s: float) -> None:
        self.world.loop.call_later(after_s, self._check_idle, session, context=self.context)

    def _check_idle(self, session: Session) -> None:
        if session.idle_max_s is None or not session.is_open or session.has_ended:
            return
        left_s = session.acted_s + session.idle_max_s - self.world.now_s
        if left_s > 0 or self.process.is_paused:
            self._check_idle_later(session, max(left_s, 1.0))
        else:
            self.world.trace("idle session ended", session.process.name)
            self.close_session(session)

    # What sessions call

    def query_of(self, text: str) -> Query:
        """The registered query with this text."""
        return next(query for query in self._queries if query.text == text)

    def open_session(self) -> Session:
        """A session of the current process."""
        session = Session(CURRENT.get())
        self.session_helds.add(session)
        return session

    def close_session(self, session: Session) -> None:
        """End a session; its open transaction rolls back."""
        if not session.has_ended:
            session.has_ended = True
            self.session_helds.discard(session)
            self.rollback(session)
            for key in [key for key, one in self._advisory.items() if one is session]:
                del self._advisory[key]

    def execute(self, session: Session, query: Query, parameters: dict[str, Any]) -> Any:
        """Run a statement; without an open transaction it commits. Raises: Waits."""
        statement = self._statements.get(id(query))
        assert statement is not None, f"the model has no statement {query.name}: {query.purpose}"
        query.arguments(parameters)  # the parameters are complete, as the driver requires
        first_undo, notes = len(session.undo), dict(session.notes)
        before, self.session = self.session, session
        try:
            result = statement(**parameters)
        except BaseException:
            self._undo(session, first_undo)
            session.notes = notes
            raise
        finally:
            self.session = before
        if session.is_open:
            session.acted_s = self.world.now_s
        else:
            self.commit(session)
        return result

    def commit(self, session: Session) -> None:
        """Make the changes of a session durable, release its locks and deliver its notes."""
        if session.undo:
            self._commits.append(session.undo)
            session.undo = []
        self._release(session)
        for channel, payload in session.notes:
            for listener in list(self._listeners):
                listener.deliver(channel, payload)
        session.notes = {}

    def rollback(self, session: Session) -> None:
        """Undo the open transaction of a session."""
        self._undo(session, 0)
        self._release(session)
        session.notes = {}

    def add_listener(self, connection: SimulatedConnection) -> None:
        """Deliver notifications to a connection."""
        self._listeners.append(connection)

    def remove_listener(self, connection: SimulatedConnection) -> None:
        """Stop delivering."""
        with suppress(ValueError):
            self._listeners.remove(connection)

    # Faults

    def crash(self, *, down_s: float, lost_commits: int = 0) -> None:
        """Kill the server: open transactions roll back, connections end; it returns later.

        `lost_commits` of the newest commits are lost, as by a failover to a standby that lags.
        """
        self.world.trace("postgres crash", down_s, lost_commits)
        self.is_up = False
        self.epoch += 1
        self.timeline += lost_commits > 0
        for session in list(self.session_helds):
            self.close_session(session)
        for _ in range(min(lost_commits, len(self._commits))):
            for table, key, before in reversed(self._commits.pop()):
                table.undo(key, before)
        for connection in list(self._listeners):
            connection.lose()
        self.world.loop.call_later(down_s, self._start)

    def _start(self) -> None:
        self.is_up = True

    def _end_sessions_of(self, process: Process) -> None:
        for session in [one for one in self.session_helds if one.process is process]:
            self.close_session(session)
        for connection in [one for one in self._listeners if one.process is process]:
            self.remove_listener(connection)

    def pause_in_call(self, name: str, *, statements: int, is_sent: bool) -> Callable[[], None]:
        """Pause a process at a later statement, before or after it is sent; the result ends it."""
        self.pauses[name] = (statements, is_sent)

        def heal() -> None:
            self.pauses.pop(name, None)
            process = self.world.processes.get(name)
            if process is not None and process.is_paused:
                self.world.loop.resume(process)

        return heal

    def holds(self, name: str) -> bool:
        """Count a statement of a process. Return whether it pauses before it sends this one."""
        if name not in self.pauses:
            return False
        statements, is_sent = self.pauses.pop(name)
        if statements > 1:
            self.pauses[name] = (statements - 1, is_sent)
            return False
        self.world.pause(name)
        return not is_sent

    def _undo(self, session: Session, first: int) -> None:
        while len(session.undo) > first:
            table, key, before = session.undo.pop()
            table.undo(key, before)

    def _release(self, session: Session) -> None:
        session.is_open = False
        session.idle_max_s = None
        for table, key in session.locked:
            if table is not None:
                table.unlock(key)
            else:
                self._advisory.pop(key, None)
        session.locked = []
