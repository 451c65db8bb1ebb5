"""Groups that are filled while they are open.

    async with app.group(on_done=report.job(day="today")) as group:
        for shop in shops:
            await walk.enqueue(shop, group=group)

An open group counts one member more than it has, so members may end before the block does; its end takes that
one away, and whoever takes the last one away enqueues the callback in the same transaction. A block that
raises leaves no callback: members that were enqueued run on alone. So it is where its process dies: what is left of
such a group is forgotten after OPEN_S_MAX, which is how long a block may take. A unique key that is taken gives the id
of the unfinished job that has it, which is no member.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from headrace.engines.postgres import Runner
from headrace.jobs import store
from headrace.jobs.errors import GroupClosed
from headrace.jobs.intake import Rows
from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import logger

OPEN_S_MAX: Final = 7 * 86_400.0
_log: Final = logger(__name__)


class Group:
    """An open group, into which jobs can be enqueued until its block ends."""

    def __init__(self, group_id: int) -> None:
        self.id = group_id
        self.is_open = True

    def require_open(self) -> None:
        """Raises: GroupClosed."""
        if not self.is_open:
            raise GroupClosed(self.id)

    def __repr__(self) -> str:
        return f"Group(id={self.id}, is_open={self.is_open})"


@asynccontextmanager
async def open_group(
    runner: Runner, callback: Rows, queue_ids: list[int], traceparent: str
) -> AsyncIterator[Group]:
    """An open group for the time of the block, sealed at its end; `runner` has the caller's transaction, if any.

    Raises: GroupClosed at the end of a block that took longer than OPEN_S_MAX.
    """
    ids = await store.backlog.add_groups(
        runner, [1], callback, queue_ids=queue_ids, traceparent=traceparent
    )
    group = Group(ids[0])
    try:
        await store.groups.mark_open(runner, group.id)
        yield group
    except BaseException:
        group.is_open = False
        await _abandon(runner, group.id)
        raise
    group.is_open = False
    if not await store.groups.mark_closed(runner, group.id):
        raise GroupClosed(group.id)
    await store.groups.seal_groups(runner, ids)


async def _abandon(runner: Runner, group_id: int) -> None:
    """Take the group away; where that fails it stays without its callback, which comes to the same."""
    try:
        await store.groups.drop_group(runner, group_id)
    except HeadraceError as error:
        _log.warning("group_left_behind", group_id=group_id, error=error.text)
