"""What a test asks of the queue: is the job there, and if not, what is.

    await assert_enqueued(app, "mail", payload={"to": "ann"}, lane="customer:42")
    await refute_enqueued(app, "mail")

They look at the real rows, of jobs that wait (for their moment, their lane or a worker). With `tx` they look
through the caller's transaction and see what is not committed yet: so they serve where a framework wraps
each test in a transaction of its own. From sync code: `app.sync(assert_enqueued)(app, "mail")`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final, Protocol

import msgspec

from headrace.engines import Engines
from headrace.engines.borrowed import Transaction, borrow
from headrace.engines.postgres import Row
from headrace.engines.sql import load_queries
from headrace.jobs import Jobs

SQL: Final = load_queries("headrace.testing")
AT_WITHIN_S: Final = 1.0
JOBS_TOLD_MAX: Final = 20
PAYLOAD_CHARACTERS_TOLD_MAX: Final = 200
_ANY: Final[Any] = object()


class App(Protocol):
    """What is needed of a `Headrace` app."""

    @property
    def engines(self) -> Engines:
        """Its engines."""

    @property
    def jobs(self) -> Jobs:
        """Its queue."""


async def assert_enqueued(
    app: App,
    queue: str,
    *,
    payload: Any = _ANY,
    at: datetime | None = None,
    lane: str | None = None,
    unique: str | None = None,
    priority: int | None = None,
    count: int = 1,
    tx: Transaction | None = None,
) -> list[int]:
    """Check that exactly `count` waiting jobs of `queue` are as described; return their ids.

    What is left out may be anything. An object as `payload` matches where its fields are among the job's;
    `at` matches within a second.
    Raises: AssertionError that lists what is there.
    """
    runner = app.engines.postgres if tx is None else borrow(tx)
    wanted: dict[str, Any] = {} if payload is _ANY else {"payload": _as_stored(payload)}
    given = {"at": at, "lane": lane, "unique": unique, "priority": priority}
    wanted |= {name: value for name, value in given.items() if value is not None}
    there = await runner.all(SQL.waiting_jobs, queue=None)
    mine = [row for row in there if row["queue"] == queue]
    found = [row["id"] for row in mine if _fits(row, wanted)]
    if len(found) == count:
        return found
    asked = ", ".join(f"{name}={value!r}" for name, value in wanted.items())
    others = Counter(row["queue"] for row in there if row["queue"] != queue)
    raise AssertionError(
        f"queue {queue!r}: expected {count} waiting {'job' if count == 1 else 'jobs'}"
        f"{f' with {asked}' if asked else ''}, found {len(found)}\n"
        + "\n".join(_told(queue, mine, others))
    )


async def refute_enqueued(app: App, queue: str, **described: Any) -> None:
    """Check that no waiting job of `queue` is as described, in the words of `assert_enqueued`.

    Raises: AssertionError that lists what is there.
    """
    await assert_enqueued(app, queue, **described, count=0)


def _as_stored(payload: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(payload))


def _fits(row: Row, wanted: dict[str, Any]) -> bool:
    payload = msgspec.json.decode(row["payload"])
    checks: dict[str, Callable[[Any], bool]] = {
        "payload": lambda value: _holds(payload, value),
        "at": lambda value: abs((row["run_at"] - value).total_seconds()) <= AT_WITHIN_S,
        "lane": lambda value: row["lane"] == value,
        "unique": lambda value: row["unique_key"] == value,
        "priority": lambda value: row["priority"] == value,
    }
    return all(checks[name](value) for name, value in wanted.items())


def _holds(payload: Any, wanted: Any) -> bool:
    if isinstance(payload, dict) and isinstance(wanted, dict):
        return all(name in payload and payload[name] == wanted[name] for name in wanted)
    return bool(payload == wanted)


def _told(queue: str, mine: list[Row], others: Counter[str]) -> list[str]:
    """What is there, in lines."""
    lines = [f"waiting in {queue!r}:" if mine else f"nothing waits in {queue!r}"]
    for row in mine[:JOBS_TOLD_MAX]:
        payload = row["payload"].decode()
        if len(payload) > PAYLOAD_CHARACTERS_TOLD_MAX:
            payload = payload[:PAYLOAD_CHARACTERS_TOLD_MAX] + " ..."
        named = {"lane": row["lane"], "unique": row["unique_key"]}
        rest = "".join(f", {name}={value!r}" for name, value in named.items() if value is not None)
        moment = row["run_at"].isoformat(timespec="seconds")
        lines.append(f"  {row['id']}: {payload}, at={moment}, priority={row['priority']}{rest}")
    if len(mine) > JOBS_TOLD_MAX:
        lines.append(f"  and {len(mine) - JOBS_TOLD_MAX} more")
    if others:
        lines.append("in other queues: " + ", ".join(f"{n} in {q!r}" for q, n in others.items()))
    return lines
