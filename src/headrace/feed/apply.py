"""How a change that is committed gets into the index: in order of its versions, once, whoever brings it.

    transaction: truth, version + 1, outbox row --commit--> the index takes version + 1 alone
                                                              ok    it was the next one
                                                              old   it is there already
                                                              gap   an earlier one is missing: bring those from the outbox,
                                                                    or, where they are forgotten, the whole from the truth

Two processes that commit follow and unfollow may come here the other way round; then the first one finds a gap and brings
both, and the second one finds its own there. A process that dies between commit and this leaves its row in the outbox,
and the sweep (`worker.py`) brings it within a second or two. Bringing a change again never does harm.

A process that could not bring what it committed knows that the index lacks it: it takes no page from there until all is
brought, which it tries by itself from then on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from headrace.engines.postgres import Postgres
from headrace.engines.valkey import ValkeyDown
from headrace.feed import store
from headrace.feed.hot import Hot
from headrace.feed.model import Change
from headrace.feed.settings import changes_made
from headrace.kernel.errors import Unavailable
from headrace.kernel.logs import SparseLogger, logger
from headrace.kernel.resilience import crash_point

TRIES: Final = 8
CHANGES_PER_STEP: Final = 500
_log: Final = logger(__name__)
_often: Final = SparseLogger(_log)
_APPLIED: Final = changes_made.labels(outcome="applied")
_REPLAYED: Final = changes_made.labels(outcome="replayed")
_LEFT: Final = changes_made.labels(outcome="left")


class Swept(NamedTuple):
    """What a sweep found."""

    missing: int
    last: int
    """The last change that it brought; 0: there was none."""


class Applier:
    """Brings changes into the index. `on_left` is called where one could not be brought."""

    def __init__(
        self, postgres: Postgres, hot: Hot, on_left: Callable[[], None] = lambda: None
    ) -> None:
        self._postgres = postgres
        self._hot = hot
        self._on_left = on_left
        self._left = 0

    @property
    def has_left(self) -> bool:
        """Whether the index may lack something that was committed here."""
        return self._left > 0

    async def bring(self, changes: Sequence[Change]) -> bool:
        """Bring committed changes; False where an engine is away, and they are left for later."""
        crash_point("feed.committed")
        try:
            await self.bring_now(changes)
        except Unavailable as error:
            _LEFT.inc(len(changes))
            _often.warning("feed_change_left", error=error.text, changes=len(changes))
            self._left += 1
            self._on_left()
            return False
        except BaseException:
            # Cancelled in the middle: its caller was told nothing, and whoever reads here next must see it.
            self._left += 1
            raise
        return True

    async def bring_left(self) -> None:
        """Bring what was left here, with whatever else was not swept. Raises: ValkeyDown, PostgresDown."""
        while left := self._left:
            await self.sweep(older_s=0.0)
            if self._left == left:
                self._left = 0

    async def sweep(self, *, older_s: float) -> Swept:
        """Bring again what was made so long ago and not swept yet. Raises: ValkeyDown, PostgresDown."""
        missing = last = 0
        is_full = True
        while is_full:
            changes = await store.changes.unswept(
                self._postgres, older_s=older_s, rows_max=CHANGES_PER_STEP
            )
            if changes:
                missing += await self.bring_now(changes)
                await store.changes.mark_swept(self._postgres, [change.id for change in changes])
                last = max(last, changes[-1].id)
            is_full = len(changes) == CHANGES_PER_STEP
        return Swept(missing, last)

    async def bring_now(self, changes: Sequence[Change]) -> int:
        """Bring changes; how many of them were missing. Raises: ValkeyDown, PostgresDown."""
        parts = [part for change in changes for part in self._hot.parts(change)]
        if len(parts) == 1:
            return await self._bring_part(*parts[0])
        return sum(await asyncio.gather(*[self._bring_part(*part) for part in parts]))

    async def put(self, whole: Change) -> bool:
        """Replace a viewer or author by the truth, as of whatever moment from now on; False: not built.

        Raises: ValkeyDown, PostgresDown.
        """
        for shard, part in self._hot.parts(whole):
            if not await self._put_part(shard, part):
                return False
        return True

    async def _bring_part(self, shard: int, change: Change) -> int:
        state, version = await self._hot.bring(shard, change)
        if state == "ok":
            _APPLIED.inc()
            return 1
        if state != "gap":
            return 0
        _REPLAYED.inc()
        if not await self._replay(shard, change, version):
            await self._put_part(shard, change)
        return 1

    async def _replay(self, shard: int, change: Change, version: int) -> bool:
        """Bring what comes after `version` from the outbox; False where that is not enough."""
        missing = await store.changes.changes_after(
            self._postgres, change.kind, change.entity, version=version
        )
        for earlier in missing:
            for other, part in self._hot.parts(earlier):
                if other == shard and (await self._hot.bring(shard, part))[0] == "gap":
                    return False
        return bool(missing)

    async def _put_part(self, shard: int, change: Change) -> bool:
        """Replace one shard's part by the truth; again where a later version came in between."""
        for _ in range(TRIES):
            floor = (await self._hot.look(shard)).floor
            [whole] = await store.changes.whole(
                self._postgres, change.kind, [change.entity], floor=floor
            )
            part = dict(self._hot.parts(whole))[shard]
            state, _ = await self._hot.put(shard, part)
            if state != "old":
                return state == "ok"
        raise ValkeyDown(
            f"{change.kind.name.lower()} of {change.entity} change faster than they can be read:"
            " try again",
            retry_after_s=1,
        )
