"""An index that came back with its server: whole, and perhaps without what was changed last.

    Valkey dies --- writes go on in PostgreSQL --- it is back, with the data of its file, or of an old copy
        page: the run noted in `m` is not the server's: not ready, so pages come from PostgreSQL
        SETTLE_S later: what it may have lost is swept again, and the run is noted --- pages come from it

A server that was killed lacks what was changed while it was away, and what it had not written to its file: up to 2 s beside a
slow disk. After a power cut it lacks the last seconds of its file.
Shown from it, what was deleted, blocked or unfollowed would be seen again. So the page function compares the run, one
comparison of two texts, and any process that finds it another one does what is needed: no flusher has to run.

**What is swept again**: `swept` in `m` names a change up to which all was there when that was written, and as the file is
written in order, what is left of it has all of these, too. Changes get their number before they commit, so it begins
LATE_S before that one. An index whose `swept` is before what the outbox still has is an old copy, and is built anew.

**Why it waits**: a writer whose connection is being made anew commits without reaching the index and goes on. That is for 1 s at
most, or 2 where the attempt under way was lost on the network (`multiplex/line.py`). After SETTLE_S every one of them is
connected, and what it committed before that is found by the sweep. So it is in a cluster, whose map is asked for every second
(`multiplex/cluster.py`); a shard whose hash slot moved to another primary came back, too.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from headrace.engines.postgres import Postgres
from headrace.feed import store
from headrace.feed.apply import Applier
from headrace.feed.hot import Hot, Look
from headrace.feed.settings import changes_repaired
from headrace.kernel.logs import logger

SETTLE_S: Final = 2.5
LATE_S: Final = 60.0
"""So long after it got its number a change may commit."""
_log: Final = logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How the index stood, and what was done about it."""

    is_missing: bool = False
    """A shard is not there, or not built to the end."""
    is_old: bool = False
    """A shard is an old copy: no sweep can make it right."""
    is_waiting: bool = False
    """It came back a moment ago."""
    missing: int = 0
    """Changes that were swept again and had been lost."""

    @property
    def is_ready(self) -> bool:
        """Whether pages may be taken from it."""
        return not (self.is_missing or self.is_old or self.is_waiting)


class Returning:
    """Makes what came back ready again. Any number may work at it."""

    def __init__(self, postgres: Postgres, hot: Hot, applier: Applier) -> None:
        self._postgres = postgres
        self._hot = hot
        self._applier = applier
        self._seen_s: dict[str, float] = {}
        """Since when each run of a server is known here."""

    async def run_once(self, *, settle_s: float = SETTLE_S) -> Standing:
        """Look at every shard, and bring those back that came back so long ago. Raises: ValkeyDown, PostgresDown."""
        looks = [await self._hot.look(shard) for shard in range(self._hot.shards)]
        is_missing = any(look.state != "ready" for look in looks)
        back = {shard: look for shard, look in enumerate(looks) if look.came_back}
        if not self._is_settled(back, settle_s):
            return Standing(is_missing=is_missing, is_waiting=True)
        if not back:
            return Standing(is_missing=is_missing)
        forgotten = await store.changes.forgotten(self._postgres)
        if any(look.swept < forgotten for look in back.values()):
            _log.warning("feed_index_is_old", shards=list(back), forgotten=forgotten)
            return Standing(is_missing=is_missing, is_old=True)
        return Standing(is_missing=is_missing, missing=await self._bring_back(back, forgotten))

    def _is_settled(self, back: dict[int, Look], settle_s: float) -> bool:
        now_s = time.monotonic()
        runs = {look.server_run for look in back.values()}
        self._seen_s = {run: self._seen_s.get(run, now_s) for run in runs}
        return all(now_s - seen_s >= settle_s for seen_s in self._seen_s.values())

    async def _bring_back(self, back: dict[int, Look], forgotten: int) -> int:
        """Sweep again what they may have lost; how many changes were."""
        unswept = [look.swept for look in back.values() if look.returned != look.server_run]
        if unswept:
            again = await store.changes.unsweep(self._postgres, swept=min(unswept), late_s=LATE_S)
            _log.info("feed_swept_again", shards=list(back), changes=again)
            for shard, look in back.items():
                await self._hot.note_returned(shard, run=look.server_run, swept=look.swept)
        swept = await self._applier.sweep(older_s=0.0)
        changes_repaired.inc(swept.missing)
        for shard, look in back.items():
            through = max(look.swept, swept.last, forgotten)
            await self._hot.note_swept(shard, run=look.server_run, swept=through)
        return swept.missing
