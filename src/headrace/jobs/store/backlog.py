"""Jobs on their way in: one round trip whatever a call carries."""

from __future__ import annotations

from typing import Any

from headrace.engines.postgres import Runner
from headrace.jobs.intake import Rows
from headrace.jobs.store.sql import SQL


async def enqueue(
    runner: Runner,
    rows: Rows,
    queue_ids: list[int],
    *,
    group_ids: list[int] | None,
    traceparent: str,
    is_hinted: bool,
) -> list[int]:
    """Insert `rows` in one round trip; return their ids in order."""
    if group_ids is None and _are_alike(rows, queue_ids):
        return await _enqueue_alike(runner, rows, queue_ids[0], traceparent, is_hinted=is_hinted)
    ids = await runner.value(
        SQL.enqueue,
        queues=queue_ids,
        priorities=rows.priorities,
        run_ats=_said(rows.run_ats),
        delays_s=_said(rows.delays_s),
        lanes=_said(rows.lanes),
        keys=_said(rows.keys),
        groups=group_ids,
        payloads=rows.payloads,
        versions=None if rows.versions.count(1) == len(rows) else rows.versions,
        traceparent=traceparent,
        is_hinted=is_hinted,
    )
    return list(ids)


def _are_alike(rows: Rows, queue_ids: list[int]) -> bool:
    """Whether they differ in their payloads alone, and nothing hangs on them."""
    if len(rows) == 1:
        return rows.lanes[0] is None and rows.keys[0] is None
    alike: tuple[list[Any], ...] = (
        queue_ids, rows.priorities, rows.run_ats, rows.delays_s, rows.versions,
    )  # fmt: skip
    return all(column.count(None) == len(rows) for column in (rows.lanes, rows.keys)) and all(
        column.count(column[0]) == len(rows) for column in alike
    )


async def _enqueue_alike(
    runner: Runner, rows: Rows, queue_id: int, traceparent: str, *, is_hinted: bool
) -> list[int]:
    """Two statements of their own, for most calls are such: a job costs a half to three quarters of the function's time.

    The function looks at eleven arrays, and the driver at each element of those that it sends, 0.2 us each.
    """
    alike = {
        "queue": queue_id,
        "priority": rows.priorities[0],
        # As arrays, which every caller's driver passes alike.
        "run_ats": _said(rows.run_ats[:1]),
        "delays_s": _said(rows.delays_s[:1]),
        "version": rows.versions[0],
        "traceparent": traceparent,
        "is_hinted": is_hinted,
    }
    if len(rows) == 1:
        return [await runner.value(SQL.enqueue_one, payload=rows.payloads[0], **alike)]
    return list(await runner.value(SQL.enqueue_alike, payloads=rows.payloads, **alike))


def _said(column: list[Any]) -> list[Any] | None:
    """The column, or None where it says nothing: the driver looks at every element, 0.2 us each."""
    return None if column.count(None) == len(column) else column


async def add_groups(
    tx: Runner, pending: list[int], callbacks: Rows, *, queue_ids: list[int], traceparent: str
) -> list[int]:
    """Insert groups with `pending` members each; return their ids in order."""
    ids = await tx.value(
        SQL.add_groups,
        pending=pending,
        queues=queue_ids,
        priorities=callbacks.priorities,
        run_ats=callbacks.run_ats,
        delays_s=callbacks.delays_s,
        lanes=callbacks.lanes,
        keys=callbacks.keys,
        payloads=callbacks.payloads,
        versions=callbacks.versions,
        traceparent=traceparent,
    )
    return list(ids)


async def move_due(runner: Runner, *, jobs_max: int) -> int:
    """Move due jobs of lanes into their lanes; how many."""
    return int(await runner.value(SQL.move_due, jobs_max=jobs_max))
