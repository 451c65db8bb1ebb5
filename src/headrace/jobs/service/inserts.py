"""`Inserts`: the statements that enqueue jobs, and the notifications that follow them.

Single jobs that are enqueued at the same time share a statement and its commit. A lone one is sent
at once; those that arrive while a statement runs go together into the next one. Only jobs that wait
for no lock share: a unique key, a chain or a group can be locked by another transaction, even by
one that its own caller holds open, and would delay its neighbours until that ends.

In a slot such jobs go to the agent, where those of all slots share statements.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from headrace.engines.postgres import Postgres, Runner
from headrace.engines.remote import RemoteStatements
from headrace.jobs import store
from headrace.jobs.columns import JobColumns
from headrace.jobs.errors import GroupClosed
from headrace.jobs.model import jobs_enqueued
from headrace.jobs.store.jobs import Notifier
from headrace.kernel import spans
from headrace.kernel.batching import BATCH_MAX, Batcher
from headrace.kernel.errors import Unavailable
from headrace.kernel.logs import child_traceparent, current_traceparent


class AgentStatements(RemoteStatements, Protocol):
    """A slot's agent, which runs statements and inserts for it."""

    def takes_insert(self, rows: JobColumns) -> bool:
        """Whether the agent inserts these jobs."""

    async def insert(
        self, rows: JobColumns, queue_ids: list[int], headers: list[str], *, timeout_s: float
    ) -> list[int]:
        """Insert jobs; return their ids in order. Raises: errors of the statement."""


class _Part(NamedTuple):
    """Jobs that share a statement with others: a single one, or those of one slot."""

    rows: JobColumns
    queue_ids: list[int]
    headers: list[str]


class Inserts:
    """The inserts of one process."""

    def __init__(self, postgres: Postgres) -> None:
        self._postgres = postgres
        self._notifier = Notifier(postgres)
        self.agent: AgentStatements | None = None
        """In a slot."""
        self._shared: WeakKeyDictionary[asyncio.AbstractEventLoop, Batcher[_Part, list[int]]] = (
            WeakKeyDictionary()
        )

    async def close(self) -> None:
        """Send the notifications that are still pending."""
        await self._notifier.close()

    async def insert(
        self, rows: JobColumns, queue_ids: list[int], *, tx: Runner | None
    ) -> list[int]:
        """Insert `rows` in one round trip, all or none; return their ids in order."""
        if spans.active is None:
            headers = rows.headers(child_traceparent(current_traceparent.get()))
            return await self._insert(rows, queue_ids, headers, tx=tx)
        with spans.producing(rows.queues) as traceparent:
            return await self._insert(rows, queue_ids, rows.headers(traceparent), tx=tx)

    async def _insert(
        self, rows: JobColumns, queue_ids: list[int], headers: list[str], *, tx: Runner | None
    ) -> list[int]:
        if tx is None and len(rows) == 1 and rows.keys[0] is None and rows.chains is None:
            return await self.insert_shared(rows, queue_ids, headers)
        return await self._add(rows, queue_ids, headers, tx=tx)

    async def insert_shared(
        self, rows: JobColumns, queue_ids: list[int], headers: list[str]
    ) -> list[int]:
        """Insert jobs that wait for no lock; a few share a statement with others of that time."""
        if len(rows) > BATCH_MAX:
            return await self._add(rows, queue_ids, headers)
        loop = asyncio.get_running_loop()
        shared = self._shared.get(loop)
        if shared is None:
            # By event loop, since connections belong to one.
            shared = self._shared[loop] = Batcher(self._add_parts, wait_s=0, runs_at_once=1)
        return await shared.submit(_Part(rows, queue_ids, headers))

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
        with spans.producing(rows.queues) as traceparent:
            headers = rows.headers(traceparent)
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
        agent = self.agent if tx is None and group_ids is None else None
        if agent is not None and agent.takes_insert(rows):
            timeout_s = self._postgres.remote_timeout_s
            return await agent.insert(rows, queue_ids, headers, timeout_s=timeout_s)
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

    async def _add_parts(self, parts: list[_Part]) -> Sequence[list[int] | Exception]:
        """Insert jobs in one statement; return the ids or the error of each part."""
        if len(parts) == 1:
            return [await self._add(*parts[0])]
        rows = JobColumns.joined([part.rows for part in parts])
        queue_ids = [queue_id for part in parts for queue_id in part.queue_ids]
        headers = [
            one for part in parts for one in part.headers * (len(part.rows) // len(part.headers))
        ]
        try:
            ids = iter(await self._add(rows, queue_ids, headers))
        except Unavailable:
            # A lost connection may have committed: nobody repeats the statement here.
            raise
        except Exception:  # noqa: BLE001 - each part finds out its own
            # PostgreSQL refused one of the rows, so the statement had no effect. Find out which.
            return [await self._add_alone(part) for part in parts]
        return [list(islice(ids, len(part.rows))) for part in parts]

    async def _add_alone(self, part: _Part) -> list[int] | Exception:
        try:
            return await self._add(*part)
        except Exception as error:  # noqa: BLE001 - raised again to its caller
            return error
