"""Webhooks of customers: where to, how far, and what was wrong last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from headrace.engines.postgres import Runner
from headrace.fetch.model import Result, Webhook
from headrace.fetch.store.results import result_of
from headrace.fetch.store.sql import SQL

WAITING_COUNTED_MAX: Final = 10_000


@dataclass(frozen=True, slots=True)
class Hook:
    """A webhook with what only its sender may know."""

    shown: Webhook
    id: int
    turn: int
    secrets: tuple[str, ...]
    """The newest first; a second one for a while after a rotation."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Which job may send for a webhook."""

    customer: str
    id: int
    turn: int


async def find_webhooks(
    runner: Runner,
    *,
    customer: str | None = None,
    after: str = "",
    rows_max: int = 1,
    is_counted: bool = True,
) -> list[Hook]:
    """Webhooks by customer, or the one of `customer`; `is_counted`: with how many results wait."""
    rows = await runner.all(
        SQL.webhooks,
        customer=customer,
        after=after,
        rows_max=rows_max,
        count_max=WAITING_COUNTED_MAX if is_counted else 0,
    )
    return [
        Hook(
            shown=Webhook(**{name: row[name] for name in Webhook.__struct_fields__}),
            id=row["id"],
            turn=row["turn"],
            secrets=tuple(s for s in (row["secret"], row["old_secret"]) if s),
        )
        for row in rows
    ]


async def set_webhook(runner: Runner, customer: str, *, url: str, secret: str) -> tuple[Turn, bool]:
    """Make or move a webhook; its turn, and whether `secret` is its secret now."""
    row = await runner.one(SQL.set_webhook, customer=customer, url=url, secret=secret)
    assert row is not None, "an upsert returns its row"
    return Turn(customer, row["id"], row["turn"]), row["is_new"]


async def rewind(runner: Runner, customer: str, *, after: int) -> Turn | None:
    """Let results after `after` be sent again; None where the customer has no webhook."""
    row = await runner.one(SQL.rewind_webhook, customer=customer, after=after)
    return None if row is None else Turn(customer, row["id"], row["turn"])


async def lock_turns(runner: Runner, customers: list[str]) -> list[Turn]:
    """The webhooks of these customers that take results; none rests until the transaction ends."""
    rows = await runner.all(SQL.lock_webhooks, customers=customers)
    return [Turn(row["customer"], row["id"], row["turn"]) for row in rows]


async def untold_results(
    runner: Runner, customer: str, *, after: int, rows_max: int, bytes_max: int
) -> list[Result]:
    """Results of a customer after `after`, one at least, within both bounds."""
    rows = await runner.all(
        SQL.unsent_results, customer=customer, after=after, rows_max=rows_max, bytes_max=bytes_max
    )
    return [result_of(row) for row in rows]


async def turns_behind(runner: Runner, *, after: str, rows_max: int) -> list[Turn]:
    """Webhooks with results that they have not taken, by customer."""
    rows = await runner.all(SQL.behind_webhooks, after=after, rows_max=rows_max)
    return [Turn(row["customer"], row["id"], row["turn"]) for row in rows]


async def end_turn(runner: Runner, customer: str, turn: int) -> bool:
    """End a turn that has nothing left to tell; inside a transaction. False: there is more.

    What was published is asked for in a statement after the lock, which sees what committed before it.
    """
    row = await runner.one(SQL.lock_webhook, customer=customer, turn=turn)
    if row is None:
        return True
    after = row["taken_seq"]
    if await runner.value(SQL.has_results_after, customer=customer, after=after):
        return False
    await runner.run(SQL.end_turn, customer=customer, turn=turn)
    return True
