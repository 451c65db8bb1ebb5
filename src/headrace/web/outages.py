"""Outages of engines: how a host records them, and how those of all hosts become marks.

The recorder of each host (`web/recorder.py`) has an `OutageWatch`. It checks PostgreSQL and Valkey
every CHECK_EVERY_S, and the object store every STORE_EVERY_S while it answers. An outage begins
with the first check without an answer and ends with the first one that has an answer; a single
failed check is none. PostgreSQL is down, too, while it takes no writes. Outages wait in memory, up
to WAITING_MAX, until PostgreSQL takes them.

`join_outages` makes one outage of those that overlap in time on several hosts. If one host alone
did not reach an engine while others did, the outage is that of the host.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec

from headrace.engines import Engines
from headrace.engines.commit_wait import find_commit_wait, read_apart
from headrace.engines.postgres import Postgres, from_row
from headrace.engines.sql import load_queries
from headrace.kernel.clock import Clock
from headrace.kernel.errors import TO_DOCTOR, HeadraceError
from headrace.kernel.terminal import pluralize

SQL: Final = load_queries("headrace.web")
CHECK_EVERY_S: Final = 2.0
STORE_EVERY_S: Final = 10.0
"""Each check of a bucket is a paid request."""
CHECK_S: Final = 2.0
"""Longest wait for an engine."""
WAITING_MAX: Final = 200
OUTAGES_KEPT: Final = 500
"""Of each host."""
OUTAGES_READ: Final = 2_000
DELETED_MAX: Final = 500
CAUSES_MAX: Final = 4
CAUSE_CHARACTERS: Final = 120
CHAIN_MAX: Final = 8
HOSTS_NAMED: Final = 3
SECONDS_SHOWN: Final = 600.0
"""Longer outages are stated in minutes."""
SIMILAR_S: Final = 10.0
"""Outages of a host whose lengths differ by more are stated one by one."""
NAMES: Final[Mapping[str, str]] = {
    "postgres": "PostgreSQL",
    "valkey": "Valkey",
    "blobs": "the object store",
}
FULL: Final = "disk space or memory is short"
READ_ONLY: Final = "read-only"
COMMITS_WAIT: Final = "commits waited for a synchronous standby"
NO_WRITES: Final = {FULL, READ_ONLY, COMMITS_WAIT}
"""Causes for which an engine answers, but takes no writes."""
_CAUSES: Final = tuple(
    (re.compile(pattern), text)
    for pattern, text in (
        (r"NoPrimary: (.*)", r"\1"),
        (r"PostgresFull|OOM |No space", FULL),
        (r"read-only|READONLY|ReadOnly", READ_ONLY),
        (r"PostgresRefused|refuses the password|AccessDenied|\b40[13]\b", "login refused"),
        (r"CannotConnectNow|LOADING", "starting, stopping or recovering"),
        (r"TooManyConnections", "too many connections"),
        (r"ConnectionRefused|Connection refused", "connection refused"),
        # An error of a missing file names the file; one of a socket does not.
        (r"\[Errno 2\] No such file or directory(?!:)", "no socket: its server does not run"),
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
    """Two checks in a row failed."""
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
        self._store_from_s = float("-inf")
        self._full = ""
        self.offset_s: float | None = None
        """What PostgreSQL's clock is ahead of the monotonic one."""
        self.takes_writes = True
        """Whether the last check of PostgreSQL succeeded."""

    async def check(self) -> None:
        """Check the engines that are due."""
        began_s = self._clock.monotonic_s()
        engines = self._engines()
        checks: dict[str, Callable[[], Awaitable[Any]]] = {
            "postgres": lambda: self._check_postgres(engines.postgres),
            "valkey": engines.valkey.open,
        }
        if "blobs" in self._open or began_s >= self._store_from_s:
            checks["blobs"] = engines.blobs.open
            self._store_from_s = began_s + STORE_EVERY_S - CHECK_EVERY_S / 2
        causes = await asyncio.gather(*(_failure_of(check) for check in checks.values()))
        found = dict(zip(checks, causes, strict=True))
        self.takes_writes = not found["postgres"]
        if found["postgres"] and found["postgres"] not in NO_WRITES:
            servers = engines.postgres.servers, engines.postgres.direct_servers
            # A check may end before its attempt has tried each server.
            if missing := servers[0].no_primary or servers[1].no_primary:
                found["postgres"] = cause_of(missing)
        found["postgres"] = found["postgres"] or self._full
        for engine, cause in found.items():
            self._note(engine, cause, began_s)

    def note_full(self, *, is_full: bool) -> None:
        """Record that a write failed for lack of space, or that one succeeded."""
        self._full = FULL if is_full else ""

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

    async def _check_postgres(self, postgres: Postgres) -> None:
        """Read the clock; raise a `_TakesNoWrites` while writes are refused or wait."""
        began_s = self._clock.monotonic_s()
        row = await read_apart(postgres, SQL.outage_clock)
        assert row is not None, "it reads no table"
        # Half of the round trip is the best guess of when the clock was read.
        self.offset_s = row["now_s"] - (began_s + self._clock.monotonic_s()) / 2
        if row["is_read_only"]:
            raise _TakesNoWrites(READ_ONLY)
        if await find_commit_wait(postgres) is not None:
            raise _TakesNoWrites(COMMITS_WAIT)

    def _note(self, engine: str, cause: str, began_s: float) -> None:
        """Record the result of a check that began at `began_s`; no cause: the engine answered."""
        now_s, outage = self._clock.monotonic_s(), self._open.get(engine)
        if outage is None:
            if cause:
                self._open[engine] = OpenOutage(engine, began_s, now_s, [cause], began_s)
            return
        outage.until_s = now_s
        if cause:
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


async def _failure_of(check: Callable[[], Awaitable[Any]]) -> str:
    """The cause why a check failed; empty if it did not."""
    try:
        await asyncio.wait_for(check(), CHECK_S)
    except _TakesNoWrites as error:
        return str(error)
    except (HeadraceError, TimeoutError) as error:
        return cause_of(error)
    return ""


class EngineOutage(msgspec.Struct, frozen=True, kw_only=True):
    """An outage of an engine as one host saw it."""

    host: str
    engine: str
    causes: list[str]
    began_at: datetime
    until_at: datetime
    is_over: bool = True

    def overlap(self, other: EngineOutage) -> timedelta:
        """The time that both share; not positive if they are apart."""
        return min(self.until_at, other.until_at) - max(self.began_at, other.began_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedOutage:
    """An outage of one engine for its hosts, or of one host for its engines."""

    began_at: datetime
    until_at: datetime
    hosts: Sequence[str]
    text: str


async def read_outages(
    postgres: Postgres, *, from_at: datetime, to_at: datetime
) -> list[EngineOutage]:
    """The newest outages in a span, of all hosts. Raises: PostgresDown."""
    rows = await postgres.all(
        SQL.read_outages, from_at=from_at, to_at=to_at, outages_max=OUTAGES_READ
    )
    return [from_row(EngineOutage, row, causes=list(row["causes"])) for row in rows]


def join_outages(
    found: Sequence[EngineOutage], is_reached: Callable[[EngineOutage], bool]
) -> list[JoinedOutage]:
    """One outage per engine and time, and one per host that alone did not reach its engines.

    `is_reached`: another host ran during the outage and recorded none of this engine.
    """
    own = [
        group[0] for group in _by_engine(found) if len(_hosts(group)) == 1 and is_reached(group[0])
    ]
    of_host: list[EngineOutage] = []
    rest: list[EngineOutage] = []
    for one in found:
        inside, outside = _split(one, [lone for lone in own if lone.host == one.host], found)
        of_host += inside
        rest += outside
    by_host: defaultdict[str, list[EngineOutage]] = defaultdict(list)
    for one in of_host:
        by_host[one.host].append(one)
    groups = [group for ones in by_host.values() for group in _overlapping(ones)]
    return [
        *(_joined(group, _of_host(group)) for group in groups),
        *(_joined(group, _of_engine(group)) for group in _by_engine(rest)),
    ]


def _split(
    one: EngineOutage, own: Sequence[EngineOutage], found: Sequence[EngineOutage]
) -> tuple[list[EngineOutage], list[EngineOutage]]:
    """The parts of `one` that belong to outages `own` of its host, and the others.

    A host that is cut off misses all engines. An engine may fail for all hosts before or after
    that, without an answer to this host in between.
    """
    replace = msgspec.structs.replace
    inside: list[EngineOutage] = []
    outside = [one]
    others = [other for other in found if other.engine == one.engine and other.host != one.host]
    for lone in own:
        for part in [part for part in outside if part.overlap(lone) > timedelta(0)]:
            outside.remove(part)
            before = replace(part, until_at=max(part.began_at, lone.began_at), is_over=True)
            after = replace(part, began_at=min(part.until_at, lone.until_at))
            apart = [
                piece
                for piece in (before, after)
                if any(piece.overlap(other) > timedelta(0) for other in others)
            ]
            # Its causes have no times; the other outages of this time have the right ones.
            outside += [replace(piece, causes=[]) for piece in apart]
            inside.append(
                replace(
                    part,
                    began_at=before.until_at if before in apart else part.began_at,
                    until_at=after.began_at if after in apart else part.until_at,
                    is_over=part.is_over or after in apart,
                    causes=lone.causes if apart else part.causes,
                )
            )
    return inside, outside


def _by_engine(found: Iterable[EngineOutage]) -> list[list[EngineOutage]]:
    engines: defaultdict[str, list[EngineOutage]] = defaultdict(list)
    for one in found:
        engines[one.engine].append(one)
    return [group for ones in engines.values() for group in _overlapping(ones)]


def _overlapping(found: Iterable[EngineOutage]) -> list[list[EngineOutage]]:
    """Groups whose members follow each other without a time between them."""
    groups: list[list[EngineOutage]] = []
    for one in sorted(found, key=lambda one: one.began_at):
        if groups and one.began_at < max(other.until_at for other in groups[-1]):
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


def _hosts(group: Iterable[EngineOutage]) -> list[str]:
    return sorted({one.host for one in group})


def _joined(group: Sequence[EngineOutage], text: str) -> JoinedOutage:
    by_engine: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for one in sorted(group, key=_place):
        by_engine[NAMES[one.engine]] |= dict.fromkeys(one.causes)
    causes = {name: ", then ".join(found) for name, found in by_engine.items()}
    if len(set(causes.values())) == 1:
        shown = next(iter(causes.values()))
    else:
        shown = "; ".join(f"{name}: {cause}" for name, cause in causes.items())
    return JoinedOutage(
        began_at=min(one.began_at for one in group),
        until_at=max(one.until_at for one in group),
        hosts=_hosts(group),
        text=f"{text}: {shown}",
    )


def _place(one: EngineOutage) -> int:
    return list(NAMES).index(one.engine)


def _of_engine(group: Sequence[EngineOutage]) -> str:
    hosts = _hosts(group)
    shown, others = ", ".join(hosts[:HOSTS_NAMED]), len(hosts) - HOSTS_NAMED
    if others > 0:
        shown += f" and {pluralize(others, 'other host')}"
    only_writes = {cause for one in group for cause in one.causes} <= NO_WRITES
    verb = "took no writes of" if only_writes else "did not answer"
    name = NAMES[group[0].engine]
    return f"{name[:1].upper()}{name[1:]} {verb} {shown} for {_length(group)}"


def _of_host(group: Sequence[EngineOutage]) -> str:
    engines: defaultdict[str, list[EngineOutage]] = defaultdict(list)
    for one in sorted(group, key=_place):
        engines[NAMES[one.engine]].append(one)
    lengths = [_span(ones).total_seconds() for ones in engines.values()]
    if max(lengths) - min(lengths) <= SIMILAR_S:
        missed = f"{_listed(list(engines))} for {_length(group)}"
    else:
        missed = _listed([f"{name} for {_length(ones)}" for name, ones in engines.items()])
    return f"host {group[0].host} did not reach {missed}"


def _span(group: Sequence[EngineOutage]) -> timedelta:
    return max(one.until_at for one in group) - min(one.began_at for one in group)


def _length(group: Sequence[EngineOutage]) -> str:
    """How long it lasted: checks have intervals, and a host that ended reported no end."""
    seconds = _span(group).total_seconds()
    shown = f"{seconds:.0f} s" if seconds < SECONDS_SHOWN else f"{seconds / 60:.0f} min"
    return f"{'about' if all(one.is_over for one in group) else 'at least'} {shown}"


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
