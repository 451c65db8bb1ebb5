"""Outages of engines, as each host records them.

The recorder of each host (`web/recorder.py`) has an `OutageWatch`. It checks PostgreSQL and Valkey
every CHECK_EVERY_S, and the object store every STORE_EVERY_S while it answers. An outage begins
with the first check without an answer and ends with the first one that has an answer. A single
failed check is an outage if the engine answered before and the cause shows that no server runs, as
in CERTAIN. So is a server that was started again between two checks, from the one to the other. One
without an answer in time is none, as a busy host may cause it. PostgreSQL is down, too, while it
takes no writes. Outages wait in memory, up to WAITING_MAX, until PostgreSQL takes them.
`web/joined_outages.py` joins those of all hosts.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from headrace.engines import Engines
from headrace.engines.commit_wait import find_commit_wait, read_apart
from headrace.engines.postgres import Postgres
from headrace.engines.sql import load_queries
from headrace.engines.valkey import Valkey
from headrace.kernel.clock import Clock
from headrace.kernel.errors import TO_DOCTOR, HeadraceError
from headrace.kernel.single_flight import SingleFlight

SQL: Final = load_queries("headrace.web")
CHECK_EVERY_S: Final = 2.0
STORE_EVERY_S: Final = 10.0
"""Each check of a bucket is a paid request."""
CHECK_S: Final = 2.0
"""Longest wait for an engine."""
FIRST_CHECK_S: Final = 10.0
"""The same for the first check of an engine, as a busy host may start slowly."""
WAITING_MAX: Final = 200
OUTAGES_KEPT: Final = 500
"""Of each host."""
DELETED_MAX: Final = 500
CAUSES_MAX: Final = 4
CAUSE_CHARACTERS: Final = 120
CHAIN_MAX: Final = 8
FULL: Final = "disk space or memory is short"
READ_ONLY: Final = "read-only"
COMMITS_WAIT: Final = "commits waited for a synchronous standby"
REFUSED: Final = "connection refused"
STARTING: Final = "starting, stopping or recovering"
NO_SOCKET: Final = "no socket: its server does not run"
RESTARTED: Final = "its server was started again or replaced"
CERTAIN: Final = {REFUSED, STARTING, NO_SOCKET}
"""Causes that one check proves. Health reports the engine as down at once."""
NO_WRITES: Final = {FULL, READ_ONLY, COMMITS_WAIT}
"""Causes for which an engine answers, but takes no writes."""
_CAUSES: Final = tuple(
    (re.compile(pattern), text)
    for pattern, text in (
        (r"NoPrimary: (.*)", r"\1"),
        (r"PostgresFull|OOM |No space", FULL),
        (r"read-only|READONLY|ReadOnly", READ_ONLY),
        (r"PostgresRefused|refuses the password|AccessDenied|\b40[13]\b", "login refused"),
        (r"CannotConnectNow|LOADING", STARTING),
        (r"TooManyConnections", "too many connections"),
        (r"ConnectionRefused|Connection refused", REFUSED),
        # An error of a missing file names the file; one of a socket does not.
        (r"\[Errno 2\] No such file or directory(?!:)", NO_SOCKET),
        (r"unreachable|No route to host", "host unreachable"),
        (r"Timeout|did not respond within|timed out", "no answer in time"),
        (r"Connection\w*Error|ConnectionDoesNotExist|Shutdown", "connection lost"),
    )
)
"""Kinds of causes by a pattern in the error or in an error that led to it, most specific first."""


def cause_of(error: BaseException) -> str:
    """The cause of an outage in a few words, without addresses."""
    chain: list[str] = []
    one: BaseException | None = error
    while one is not None and len(chain) < CHAIN_MAX:
        chain.append(f"{type(one).__name__}: {one}")
        one = one.__cause__ or one.__context__
    text = "\n".join(chain)
    for pattern, cause in _CAUSES:
        if found := pattern.search(text):
            return shorten_cause(found.expand(cause))
    return shorten_cause(TO_DOCTOR.sub("", str(error)))


def shorten_cause(text: str) -> str:
    """The text up to CAUSE_CHARACTERS, cut after a word."""
    if len(text) <= CAUSE_CHARACTERS:
        return text
    begin = text[: CAUSE_CHARACTERS - 3]
    return f"{begin.rpartition(' ')[0] or begin} ..."


@dataclass(slots=True)
class OpenOutage:
    """An outage that this host records; times are monotonic."""

    engine: str
    began_s: float
    until_s: float
    causes: list[str]
    counted_s: float
    """Up to when `take_down_s` has its time."""
    is_confirmed: bool = False
    """Two checks in a row failed, or one with a cause of CERTAIN after an answer."""
    is_over: bool = False
    id: int = field(default_factory=lambda: random.getrandbits(62))


class OutageWatch:
    """Checks the engines of one host and records their outages.

    `engines` may raise a HeadraceError while there are none.
    """

    def __init__(self, engines: Callable[[], Engines], clock: Clock) -> None:
        self._engines, self._clock = engines, clock
        self._open: dict[str, OpenOutage] = {}
        self._changed: dict[int, OpenOutage] = {}
        self._down_s: defaultdict[str, float] = defaultdict(float)
        self._answered_s: dict[str, float] = {}
        """When each engine answered last. Before that, a single failed check is part of a start."""
        self._runs: dict[str, object] = {}
        """What identifies the process of each engine's server."""
        self._store_from_s = float("-inf")
        self._full = ""
        self._checking: SingleFlight[str, None] = SingleFlight()
        self.offset_s: float | None = None
        """What PostgreSQL's clock is ahead of the monotonic one."""
        self.takes_writes = True
        """Whether the last check of PostgreSQL succeeded."""

    async def check(self) -> None:
        """Check the engines that are due. Concurrent calls share one check."""
        await self._checking.join("engines", self._check)

    async def _check(self) -> None:
        began_s = self._clock.monotonic_s()
        engines = self._engines()
        checks: dict[str, Callable[[], Awaitable[Any]]] = {
            "postgres": lambda: self._check_postgres(engines.postgres),
            "valkey": lambda: self._check_valkey(engines.valkey),
        }
        if "blobs" in self._open or began_s >= self._store_from_s:
            checks["blobs"] = engines.blobs.open
            self._store_from_s = began_s + STORE_EVERY_S - CHECK_EVERY_S / 2
        runs = dict(self._runs)
        causes = await asyncio.gather(
            *(_failure_of(check, self._wait_s(engine)) for engine, check in checks.items())
        )
        found = dict(zip(checks, causes, strict=True))
        self.takes_writes = not found["postgres"]
        if found["postgres"] and found["postgres"] not in NO_WRITES:
            servers = engines.postgres.servers, engines.postgres.direct_servers
            # A check may end before its attempt has tried each server.
            if missing := servers[0].no_primary or servers[1].no_primary:
                found["postgres"] = cause_of(missing)
        found["postgres"] = found["postgres"] or self._full
        for engine, cause in found.items():
            is_restarted = bool(runs.get(engine)) and runs[engine] != self._runs[engine]
            self._note(engine, cause, began_s, is_restarted=is_restarted)

    def note_full(self, *, is_full: bool) -> None:
        """Record that a write failed for lack of space, or that one succeeded."""
        self._full = FULL if is_full else ""

    def cause_of(self, engine: str) -> str:
        """The newest cause of the engine's outage; empty if it has none now."""
        outage = self._open.get(engine)
        return outage.causes[-1] if outage is not None and outage.is_confirmed else ""

    def take_down_s(self) -> dict[str, float]:
        """The time of outages by engine since the last call."""
        taken, self._down_s = self._down_s, defaultdict(float)
        return dict(taken)

    async def write(self, host: str, *, kept_s: float) -> None:
        """Store outages that changed. Raises: PostgresDown."""
        if self.offset_s is None:
            return
        over = list(self._changed.values())
        stored = [*over, *(one for one in self._open.values() if one.is_confirmed)]
        if not stored:
            return
        async with self._engines().postgres.transaction() as tx:
            for one in stored:
                await tx.run(
                    SQL.store_outage,
                    id=one.id,
                    host=host,
                    engine=one.engine,
                    causes=one.causes,
                    began_s=one.began_s + self.offset_s,
                    until_s=one.until_s + self.offset_s,
                    is_over=one.is_over,
                )
            await tx.run(
                SQL.delete_old_outages,
                host=host,
                kept_s=kept_s,
                outages_kept=OUTAGES_KEPT,
                rows_max=DELETED_MAX,
            )
        # A check may have ended others meanwhile, after they were stored as open.
        for one in over:
            self._changed.pop(one.id, None)

    def _wait_s(self, engine: str) -> float:
        is_first = engine not in self._answered_s and engine not in self._open
        return FIRST_CHECK_S if is_first else CHECK_S

    async def _check_postgres(self, postgres: Postgres) -> None:
        """Read the clock; raise a `_TakesNoWrites` while writes are refused or wait."""
        began_s = self._clock.monotonic_s()
        row = await read_apart(postgres, SQL.outage_clock)
        assert row is not None, "it reads no table"
        # Half of the round trip is the best guess of when the clock was read.
        self.offset_s = row["now_s"] - (began_s + self._clock.monotonic_s()) / 2
        self._runs["postgres"] = row["started_s"]
        if row["is_read_only"]:
            raise _TakesNoWrites(READ_ONLY)
        if await find_commit_wait(postgres) is not None:
            raise _TakesNoWrites(COMMITS_WAIT)

    async def _check_valkey(self, valkey: Valkey) -> None:
        """Check that it answers; read the id of a single server's process."""
        await valkey.open()
        # A login may lack the right to read it.
        with suppress(HeadraceError):
            nodes = await valkey.primaries()
            if len(nodes) == 1:
                info = await nodes[0].command("INFO", "server")
                self._runs["valkey"] = info.get("run_id", self._runs.get("valkey"))

    def _note_restart(self, engine: str, now_s: float) -> None:
        """Record an outage since the last answer, or confirm the open one."""
        from_s = self._answered_s[engine]
        outage = self._open.setdefault(engine, OpenOutage(engine, from_s, now_s, [], from_s))
        if not outage.is_confirmed:
            outage.causes.append(RESTARTED)
            outage.is_confirmed = True

    def _note(self, engine: str, cause: str, began_s: float, *, is_restarted: bool) -> None:
        """Record the result of a check that began at `began_s`; no cause: the engine answered."""
        now_s = self._clock.monotonic_s()
        if not cause:
            if is_restarted:
                self._note_restart(engine, now_s)
            self._answered_s[engine] = now_s
        outage = self._open.get(engine)
        if outage is None:
            if cause:
                self._open[engine] = OpenOutage(
                    engine,
                    began_s,
                    now_s,
                    [cause],
                    began_s,
                    is_confirmed=cause in CERTAIN and engine in self._answered_s,
                )
            return
        outage.until_s = now_s
        if cause:
            # The second failure in a row.
            outage.is_confirmed = True
            if cause not in outage.causes and len(outage.causes) < CAUSES_MAX:
                outage.causes.append(cause)
        else:
            del self._open[engine]
            outage.is_over = True
        if not outage.is_confirmed:
            return
        self._down_s[engine] += now_s - outage.counted_s
        outage.counted_s = now_s
        if outage.is_over:
            self._changed[outage.id] = outage
            while len(self._changed) > WAITING_MAX:
                del self._changed[next(iter(self._changed))]


class _TakesNoWrites(Exception):
    """PostgreSQL answers and takes no writes; the text is the cause."""


async def _failure_of(check: Callable[[], Awaitable[Any]], wait_s: float) -> str:
    """The cause why a check failed; empty if it did not."""
    try:
        await asyncio.wait_for(check(), wait_s)
    except _TakesNoWrites as error:
        return str(error)
    except (HeadraceError, TimeoutError) as error:
        return cause_of(error)
    return ""
