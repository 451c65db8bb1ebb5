"""Groups that are filled while they are open."""

from __future__ import annotations

from headrace.engines.postgres import Runner
from headrace.jobs.intake import Rows
from headrace.jobs.store.sql import SQL


async def add_members(
    runner: Runner,
    rows: Rows,
    queue_ids: list[int],
    group_ids: list[int],
    *,
    traceparent: str,
    is_hinted: bool,
) -> list[int] | None:
    """Insert `rows`, each as a member of its group; ids in order, None where a group is not there.

    For a unique key that is taken the id is that of a job which is no member.
    """
    ids = await runner.value(
        SQL.add_members,
        groups=group_ids,
        queues=queue_ids,
        priorities=rows.priorities,
        run_ats=rows.run_ats,
        delays_s=rows.delays_s,
        lanes=rows.lanes,
        keys=rows.keys,
        payloads=rows.payloads,
        versions=rows.versions,
        traceparent=traceparent,
        is_hinted=is_hinted,
    )
    return None if ids is None else list(ids)


async def seal_groups(runner: Runner, group_ids: list[int]) -> None:
    """Let open groups end with their members; those whose members ended already call back now."""
    await runner.run(SQL.seal_groups, groups=group_ids)


async def drop_group(runner: Runner, group_id: int) -> None:
    """Forget a group with its callback."""
    await runner.run(SQL.drop_group, group=group_id)


async def mark_open(runner: Runner, group_id: int) -> None:
    """Note that the group's block is open from now on."""
    await runner.run(SQL.mark_group_open, group=group_id)


async def mark_closed(runner: Runner, group_id: int) -> bool:
    """Whether the group is still there; its block has ended."""
    return await runner.one(SQL.mark_group_closed, group=group_id) is not None


async def drop_left_open(runner: Runner, *, open_s: float, groups_max: int) -> int:
    """Forget groups whose block has been open for so long, since its process died in it; how many."""
    return await runner.run(SQL.drop_groups_left_open, open_s=open_s, groups_max=groups_max)
