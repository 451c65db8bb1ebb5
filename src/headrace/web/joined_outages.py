"""Outages of all hosts, joined to those that the console lists.

Outages of one engine that overlap in time on several hosts are one. If one host alone did not
reach an engine while others did, the outage is that of the host. Each host records its own
(`web/outages.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

import msgspec

from headrace.engines.postgres import Postgres, from_row
from headrace.kernel.terminal import pluralize
from headrace.web.outages import NO_WRITES, SQL

OUTAGES_READ: Final = 2_000
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
    engines: Sequence[str]
    hosts: Sequence[str]
    cause: str
    is_open: bool
    """Some host recorded no end: it lasts, or that host ended."""
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
    # In one order, whatever else was read: a part of an outage has the causes of the first of them.
    found = sorted(found, key=lambda one: (_place(one), one.began_at, one.host))
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
        engines=sorted({one.engine for one in group}, key=list(NAMES).index),
        hosts=_hosts(group),
        cause=shown,
        is_open=_is_open(group),
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
    return f"{'at least' if _is_open(group) else 'about'} {shown}"


def _is_open(group: Iterable[EngineOutage]) -> bool:
    return not all(one.is_over for one in group)


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
