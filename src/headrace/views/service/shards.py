"""Which shards there are, and the least id that the next entry of each may have.

Ids of a stream grow with the server's clock and never go back on one server. A server that lost the end of a stream and
whose clock is behind would give ids that PostgreSQL counted already, and skips. So every call says the latest moment it
knows of the shard, from its own calls and from PostgreSQL, and the entry comes after it.
"""

from __future__ import annotations

import asyncio
from typing import Final

from headrace.engines.postgres import Postgres
from headrace.kernel.errors import HeadraceError, Unavailable
from headrace.views import store
from headrace.views.errors import NotCounting, ShardsFixed
from headrace.views.hot import Hot
from headrace.views.model import id_key
from headrace.views.service.patience import Patience

ANSWER_S: Final = 2.0
"""Longest wait for PostgreSQL while hits wait."""


class Shards:
    """Known after the first `ready`; opens nothing before."""

    def __init__(self, postgres: Postgres, hot: Hot, shards: int, patience: Patience) -> None:
        self.count = shards
        self.floors_ms = ["0"] * shards
        self.is_ready = False
        self._postgres = postgres
        self._hot = hot
        self._patience = patience
        self._opening: asyncio.Task[None] | None = None

    async def ready(self) -> None:
        """Make sure that the number of shards is the one the counts were begun with.

        Raises: ShardsFixed, PostgresDown where neither engine can say.
        """
        if self.is_ready:
            return
        if self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(self._open())
        await asyncio.shield(self._opening)

    async def set_up(self, shard: int) -> None:
        """Tell Valkey where a shard goes on: it is new there, or came back empty. Raises: NotCounting."""
        try:
            state = await self._patience.ask(
                lambda: store.shards.find_shard(self._postgres, shard), wait_s=ANSWER_S
            )
        except Unavailable as error:
            raise NotCounting from error
        await self._hot.init(
            shard, through=state.through, corrections=state.corrections, shards=self.count
        )
        self._note(shard, state.through)

    def note_entry(self, shard: int, entry_id: str) -> None:
        """An entry of ours has this id."""
        ms = entry_id.partition("-")[0]
        self.floors_ms[shard] = max(self.floors_ms[shard], ms)

    async def _open(self) -> None:
        try:
            stored = await self._patience.ask(
                lambda: store.shards.ensure_shards(self._postgres, self.count), wait_s=ANSWER_S
            )
        except Unavailable as error:
            await self._open_without_postgres(error)
            return
        if stored != self.count:
            raise ShardsFixed(self.count, stored)
        for state in await store.shards.all_shards(self._postgres):
            self._note(state.shard, state.through)
        await self._hot.note_shards(self.count)
        self.is_ready = True

    async def _open_without_postgres(self, error: HeadraceError) -> None:
        """Hits go on while PostgreSQL is away, also in a process that starts then: Valkey has the number, too."""
        stored = await self._hot.stored_shards()
        if stored is None:
            raise error
        if stored != self.count:
            raise ShardsFixed(self.count, stored)
        self.is_ready = True

    def _note(self, shard: int, through: str) -> None:
        ms = id_key(through)[0]
        if ms > int(self.floors_ms[shard]):
            self.floors_ms[shard] = str(ms)
