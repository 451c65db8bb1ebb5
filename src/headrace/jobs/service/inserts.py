"""`Inserts`: the statements that enqueue jobs, and the notifications that follow them.

Single jobs that are enqueued at the same time share a statement and its commit. A lone one is sent
at once; those that arrive while a statement runs go together into the next one. Only jobs that wait
for no lock share: a unique key, a chain or a group can be locked by another transaction, even by
one that its own caller holds open, and would delay its neighbours until that ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from headrace.engines.postgres import Postgres, Runner
from headrace.jobs import store
from headrace.jobs.errors import GroupClosed
from headrace.jobs.model import JobColumns, jobs_enqueued
from headrace.jobs.store.jobs import Notifier
from headrace.kernel.batching import Batcher
from headrace.kernel.errors import Unavailable
from headrace.kernel.logs import child_traceparent, current_traceparent


class _Single(NamedTuple):
    """A single job that shares a statement."""

    rows: JobColumns
    queue_id: int
    headers: str


class Inserts:
    """The inserts of one process."""

    def __init__(self, postgres: Postgres) -> None:
        self._postgres = postgres
        self._notifier = Notifier(postgres)
        self._singles: WeakKeyDictionary[asyncio.AbstractEventLoop, Batcher[_Single, int]] = (
            WeakKeyDictionary()
        )

    async def close(self) -> None:
        """Send the notifications that are still pending."""
        await self._notifier.close()

    async def insert(
        self, rows: JobColumns, queue_ids: list[int], *, tx: Runner | None
    ) -> list[int]:
        """Insert `rows` in one round trip, all or none; return their ids in order."""
        headers = rows.headers(child_traceparent(current_traceparent.get()))
        if tx is None and len(rows) == 1 and rows.keys[0] is None and rows.chains is None:
            return [await self._shared().submit(_Single(rows, queue_ids[0], headers[0]))]
        return await self._add(rows, queue_ids, headers, tx=tx)

    async def insert_members(
        self,
        rows: JobColumns,
        queue_ids: list[int],
        group_ids: list[int],
        *,
        tx: Runner | None,
        is_counted: bool,
    ) -> list[int]:
        """Insert `rows` as members of groups; `is_counted` adds them to the groups' counts.

        Raises: GroupClosed.
        """
        headers = rows.headers(child_traceparent(current_traceparent.get()))
        if not is_counted:
            return await self._add(rows, queue_ids, headers, tx=tx, group_ids=group_ids)
        is_hinted = self._is_hinted(tx, queue_ids)
        ids = await store.jobs.add_members(
            tx or self._postgres,
            rows,
            queue_ids,
            group_ids,
            headers=headers,
            is_hinted=is_hinted,
        )
        if ids is None:
            raise GroupClosed(group_ids[0])
        self._inserted(ids, queue_ids, is_hinted=is_hinted)
        return ids

    async def _add(
        self,
        rows: JobColumns,
        queue_ids: list[int],
        headers: list[str],
        *,
        tx: Runner | None = None,
        group_ids: list[int] | None = None,
    ) -> list[int]:
        is_hinted = self._is_hinted(tx, queue_ids)
        ids = await store.jobs.enqueue(
            tx or self._postgres,
            rows,
            queue_ids,
            group_ids=group_ids,
            headers=headers,
            is_hinted=is_hinted,
        )
        self._inserted(ids, queue_ids, is_hinted=is_hinted)
        return ids

    def _is_hinted(self, tx: Runner | None, queue_ids: list[int]) -> bool:
        """Whether the statement notifies.

        In a transaction PostgreSQL itself sends one notification per queue, at commit.
        """
        return tx is not None or self._notifier.is_due(set(queue_ids))

    def _inserted(self, ids: list[int], queue_ids: list[int], *, is_hinted: bool) -> None:
        if not is_hinted:
            self._notifier.notify_later(set(queue_ids))
        jobs_enqueued.inc(len(ids))

    def _shared(self) -> Batcher[_Single, int]:
        """The single jobs of this event loop: connections belong to one loop."""
        loop = asyncio.get_running_loop()
        singles = self._singles.get(loop)
        if singles is None:
            singles = Batcher(self._add_singles, wait_s=0, runs_at_once=1)
            self._singles[loop] = singles
        return singles

    async def _add_singles(self, singles: list[_Single]) -> Sequence[int | Exception]:
        """Insert single jobs in one statement; return the id or the error of each."""
        if len(singles) == 1:
            [(only, queue_id, headers)] = singles
            return await self._add(only, [queue_id], [headers])
        rows = JobColumns.joined([single.rows for single in singles])
        queue_ids = [single.queue_id for single in singles]
        try:
            return await self._add(rows, queue_ids, [single.headers for single in singles])
        except Unavailable:
            # A lost connection may have committed: nobody repeats the statement here.
            raise
        except Exception:  # noqa: BLE001 - each job finds out its own
            # PostgreSQL refused one of the rows, so the statement had no effect. Find out which.
            return [await self._add_alone(single) for single in singles]

    async def _add_alone(self, single: _Single) -> int | Exception:
        try:
            ids = await self._add(single.rows, [single.queue_id], [single.headers])
        except Exception as error:  # noqa: BLE001 - raised again to its caller
            return error
        return ids[0]
