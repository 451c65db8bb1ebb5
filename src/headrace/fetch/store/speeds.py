"""What was measured of hosts, and what their robots.txt asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from headrace.engines.postgres import Row, Runner
from headrace.fetch.routing import RECENT
from headrace.fetch.store.sql import SQL

FORGOTTEN_AT_ONCE: Final = 1000
READING_S: Final = 0.5
"""How long a host is left alone whose robots.txt somebody is reading."""


@dataclass(slots=True)
class Noted:
    """What a slot measured of a host since it last told."""

    requests: int = 0
    photos: int = 0
    seconds: float = 0.0
    pause_s: float = 0.0
    needed: Counter[float] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn at a host: whether it was taken, how long until it or the next one, and the host's delay."""

    is_taken: bool
    wait_s: float
    delay_s: float


async def note_hosts(
    runner: Runner, noted: Mapping[tuple[str, str], Noted], *, half_life_s: float
) -> None:
    """Add what was measured, by (customer, host). One statement."""
    speeds = [(*key, s, n) for key, one in noted.items() for s, n in one.needed.items()]
    outcomes = [(*key, o, n) for key, one in noted.items() for o, n in one.outcomes.items()]
    await runner.run(
        SQL.note_hosts,
        customers=[customer for customer, _ in noted],
        hosts=[host for _, host in noted],
        requests=[one.requests for one in noted.values()],
        photos=[one.photos for one in noted.values()],
        seconds=[one.seconds for one in noted.values()],
        pauses_s=[one.pause_s for one in noted.values()],
        speed_customers=[row[0] for row in speeds],
        speed_hosts=[row[1] for row in speeds],
        speed_classes_s=[row[2] for row in speeds],
        speed_photos=[row[3] for row in speeds],
        outcome_customers=[row[0] for row in outcomes],
        outcome_hosts=[row[1] for row in outcomes],
        outcomes=[row[2] for row in outcomes],
        outcome_photos=[row[3] for row in outcomes],
        half_life_s=half_life_s,
        recent=float(RECENT),
    )


async def host_states(runner: Runner, keys: Sequence[tuple[str, str]]) -> dict[int, Row]:
    """What is known of each (customer, host), by its place in `keys`; unknown ones are left out."""
    rows = await runner.all(
        SQL.host_states, customers=[key[0] for key in keys], hosts=[key[1] for key in keys]
    )
    return {int(row["position"]) - 1: row for row in rows}


async def hosts(
    runner: Runner,
    *,
    customer: str | None,
    host: str | None,
    after: tuple[str, str],
    rows_max: int,
    half_life_s: float,
) -> list[tuple[Row, dict[str, int]]]:
    """A page of hosts behind (host, customer), each with its photos by outcome."""
    rows = await runner.all(
        SQL.hosts,
        customer=customer,
        host=host,
        after_host=after[0],
        after_customer=after[1],
        rows_max=rows_max,
        half_life_s=half_life_s,
    )
    decoded = [msgspec.json.decode(row["by_outcome"] or "{}", type=dict[str, int]) for row in rows]
    return list(zip(rows, decoded, strict=True))


async def forget_hosts(runner: Runner, *, kept_s: float) -> int:
    """Drop some hosts that were not asked for so long; how many."""
    rows: list[Any] = await runner.all(SQL.forget_hosts, kept_s=kept_s, rows_max=FORGOTTEN_AT_ONCE)
    return len(rows)


async def begin_robots(runner: Runner, host: str, *, kept_s: float) -> bool:
    """Whether the caller is to read a host's robots.txt now; nobody else does for a while."""
    return await runner.one(SQL.begin_robots, host=host, kept_s=kept_s) is not None


async def leave_robots(runner: Runner, host: str) -> None:
    """Let another read it at once."""
    await runner.run(SQL.leave_robots, host=host)


async def note_robots(runner: Runner, host: str, crawl_delay_s: float | None) -> None:
    """Keep what the file asks."""
    await runner.run(SQL.note_robots, host=host, crawl_delay_s=crawl_delay_s)


async def take_turn(runner: Runner, host: str, *, wait_max_s: float) -> Turn:
    """Take the next turn at a host with a crawl delay, where it is at most `wait_max_s` away."""
    row = await runner.one(SQL.take_turn_of_host, host=host, wait_max_s=wait_max_s)
    if row is not None:
        return Turn(True, row["wait_s"], 0.0)
    known = await runner.one(SQL.find_robots, host=host)
    if known is not None and not known["is_read"]:
        return Turn(False, READING_S, READING_S)
    if known is None or not known["crawl_delay_s"]:
        return Turn(True, 0.0, 0.0)
    return Turn(False, max(0.0, known["wait_s"]), known["crawl_delay_s"])
