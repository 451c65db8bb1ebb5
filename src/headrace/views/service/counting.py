"""Hits: what came in one tick of the loop goes to each shard as one call, and each caller gets its totals.

A call costs Valkey about 5 us, a hit in it 2 us more, so gathering is worth more the busier it gets; it costs a lone hit
nothing. A call that was sent and not answered is never sent again: whoever needs that uses an event id.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from typing import Final
from zoneinfo import ZoneInfo

from headrace.views.errors import NotCounting
from headrace.views.fence import Fence, FileWait
from headrace.views.hot import Counted, Hot
from headrace.views.model import HITS_PER_CALL_MAX, Hit, Total, require_hits, shard_of
from headrace.views.service.filling import Filling
from headrace.views.service.shards import Shards
from headrace.views.settings import hits_counted

ZONE_EVERY_S: Final = 60.0
KNOWN_MAX: Final = 100_000
"""Ids of which the shard is remembered, about 15 MB; then it begins anew."""
NOT_CACHED: Final = "-"
DELETED: Final = "x"
_COUNTED: Final = hits_counted.labels(outcome="counted")
_REFUSED: Final = hits_counted.labels(outcome="refused")


class _Call:
    """One caller's hits, and what is known of them so far."""

    __slots__ = ("done", "left", "totals")

    def __init__(self, hits: int, loop: asyncio.AbstractEventLoop) -> None:
        self.totals: list[str] = [""] * hits
        self.left = hits
        self.done: asyncio.Future[None] = loop.create_future()


class _Batch:
    """What a shard is told in one call."""

    __slots__ = ("calls", "lines", "places", "shard")

    def __init__(self, shard: int) -> None:
        self.shard = shard
        self.lines: list[str] = []
        self.calls: list[_Call] = []
        self.places: list[int] = []


class Counting:
    """Gathers hits and hands totals out."""

    def __init__(self, hot: Hot, shards: Shards, filling: Filling, *, time_zone: str) -> None:
        self.fence: Fence | None = None
        """Passed before an answer, where hits are to be durable."""
        self._hot = hot
        self._file_wait = FileWait(hot)
        self._shards = shards
        self._filling = filling
        self._zone = ZoneInfo(time_zone)
        self._zone_s = float("-inf")
        self._offset_s = 0
        self._known: dict[str, int] = {}
        self._batches: dict[int, _Batch] = {}
        self._running: set[asyncio.Task[None]] = set()

    async def hits(self, hits: Iterable[Hit | str]) -> list[Total]:
        """Count all or none of each shard's; the total of each entity after it. Raises: InvalidHit, ValkeyDown."""
        names, lines, shards = self._placed(hits)
        if not lines:
            return []
        if not self._shards.is_ready:
            await self._shards.ready()
        call = _Call(len(lines), asyncio.get_running_loop())
        self._gather(lines, shards, call)
        await call.done
        totals, filled = call.totals, dict[str, Total]()
        if NOT_CACHED in totals:
            pairs = zip(names, totals, strict=True)
            filled = await self._filling.fill(
                list({name for name, told in pairs if told == NOT_CACHED})
            )
        return [
            filled[name]
            if told == NOT_CACHED
            else Total(id=name, total=0 if told == DELETED else int(told))
            for name, told in zip(names, totals, strict=True)
        ]

    def _placed(self, hits: Iterable[Hit | str]) -> tuple[list[str], list[str], list[int]]:
        """Entities, lines and shards. An id is judged and its shard found when it first comes."""
        known = self._known
        if type(hits) is list and len(hits) <= HITS_PER_CALL_MAX:
            # The caller may change its list meanwhile.
            names = list(hits)
            with suppress(KeyError, TypeError):
                return names, names, [known[name] for name in names]
        pairs = require_hits(hits)
        names, lines = [name for name, _ in pairs], [line for _, line in pairs]
        shards = [shard_of(name, self._shards.count) for name in names]
        if len(known) > KNOWN_MAX:
            known.clear()
        known.update(
            [
                (name, shard)
                for name, line, shard in zip(names, lines, shards, strict=True)
                if line is name
            ]
        )
        return names, lines, shards

    def _gather(self, lines: list[str], shards: list[int], call: _Call) -> None:
        batches = self._batches
        if not batches:
            asyncio.get_running_loop().call_soon(self._send_all)
        for place, shard in enumerate(shards):
            batch = batches.get(shard)
            if batch is None:
                batch = batches[shard] = _Batch(shard)
            elif len(batch.lines) >= HITS_PER_CALL_MAX:
                self._start(batch)
                batch = batches[shard] = _Batch(shard)
            batch.lines.append(lines[place])
            batch.calls.append(call)
            batch.places.append(place)

    def _send_all(self) -> None:
        batches, self._batches = self._batches, {}
        for batch in batches.values():
            self._start(batch)

    def _start(self, batch: _Batch) -> None:
        task = asyncio.create_task(self._send(batch))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _send(self, batch: _Batch) -> None:
        try:
            counted = await self._count(batch)
            if counted.unwritten_on:
                await self._file_wait.passed(batch.shard, counted.unwritten_on)
            if self.fence is not None:
                await self.fence.passed(batch.shard)
        except BaseException as error:
            _REFUSED.inc(len(batch.lines))
            for call in batch.calls:
                if not call.done.done():
                    call.done.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        _COUNTED.inc(len(batch.lines))
        for call, place, total in zip(batch.calls, batch.places, counted.totals, strict=True):
            call.totals[place] = total
            call.left -= 1
            if not call.left and not call.done.done():
                call.done.set_result(None)

    async def _count(self, batch: _Batch) -> Counted:
        for _ in range(2):
            counted = await self._hot.hit(
                batch.shard,
                batch.lines,
                floor_ms=self._shards.floors_ms[batch.shard],
                offset_s=self._zone_offset_s(),
            )
            if counted.entry is not None:
                if counted.entry:
                    self._shards.note_entry(batch.shard, counted.entry)
                return counted
            await self._shards.set_up(batch.shard)
        raise NotCounting

    def _zone_offset_s(self) -> int:
        """Seconds by which the deployment's time zone is ahead of UTC now."""
        now_s = time.monotonic()
        if now_s - self._zone_s > ZONE_EVERY_S:
            self._zone_s = now_s
            offset = datetime.now(self._zone).utcoffset()
            assert offset is not None
            self._offset_s = int(offset.total_seconds())
        return self._offset_s
