"""The index made from the truth, while everything goes on; and the proof that it is the truth.

Each viewer and author is put as a whole, with the version that this is. Changes that come meanwhile are made in order as
always: one that finds no version yet brings the whole. So when every entity was put, the index is right, and it is
marked ready, unless it was lost again since it was begun, or its server was started again: then it is begun again. Pages
come from PostgreSQL until then. An index that is ready stays so while it is repaired.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from secrets import token_hex
from typing import Final

from headrace.engines.postgres import Postgres
from headrace.engines.valkey import ValkeyDown
from headrace.feed import store
from headrace.feed.apply import Applier
from headrace.feed.hot import Hot
from headrace.feed.model import FINE_FOR_MS, FINE_MS, TICKS, Change, Kind
from headrace.kernel.logs import logger
from headrace.kernel.resilience import Backoff

ENTITIES_PER_STEP: Final = 200
ITEMS_PER_STEP: Final = 100_000
"""About so many posts or follows are read at once: 15 MB here. One author may have more."""
ITEMS_AT_ONCE: Final = 5_000
"""So many posts or follows are on their way at once: 30 ms of Valkey's time, in which nobody is served."""
TRIES: Final = 5
BEFORE_ALL: Final = -(2**63)
BEHIND_S_MAX: Final = 3.0
"""So long a change may be under way before the proof calls it missing."""
PATIENCE_S: Final = 15.0
"""So long a Valkey that does not answer is asked again while it is built."""
RETRY: Final = Backoff(0.02, 0.5)
Progress = Callable[[float, str], None]
_log: Final = logger(__name__)


@dataclass(frozen=True, slots=True)
class Marks:
    """Where an index begins, as scores; both are beginnings of buckets of level 1."""

    floor: int
    fine: int


@dataclass(frozen=True, slots=True)
class Difference:
    """A viewer or author whose index is not its truth."""

    kind: Kind
    entity: int
    missing: int
    extra: int


@dataclass(slots=True)
class Proof:
    """What was compared, and what differs."""

    viewers: int = 0
    authors: int = 0
    follows: int = 0
    posts: int = 0


def marks_at(now_ms: int, *, index_for_s: float) -> Marks:
    """The marks of an index that holds posts of the last `index_for_s`."""
    floor_ms = max(0, now_ms - int(index_for_s * 1000)) // FINE_MS * FINE_MS
    fine_ms = max(0, now_ms - FINE_FOR_MS) // FINE_MS * FINE_MS
    return Marks(floor_ms * TICKS, max(floor_ms, fine_ms) * TICKS)


class Rebuild:
    """Builds and proves."""

    def __init__(
        self, postgres: Postgres, hot: Hot, applier: Applier, *, index_for_s: float
    ) -> None:
        self._postgres = postgres
        self._hot = hot
        self._applier = applier
        self._index_for_s = index_for_s

    async def build(self, *, clean: bool = False, on_progress: Progress | None = None) -> int:
        """Put every viewer and author; how many there were. `clean`: drop everything first.

        Raises: ValkeyDown, PostgresDown.
        """
        if clean:
            await self._hot.drop()
        for _ in range(TRIES):
            count = await self._build_once(on_progress or (lambda _ratio, _text: None))
            if count is not None:
                return count
            _log.warning("feed_index_lost_while_built")
        raise ValkeyDown(
            "the feed's index is lost again and again while it is built", retry_after_s=5
        )

    async def _build_once(self, tell: Progress) -> int | None:
        """None where the index was lost meanwhile."""
        marks = marks_at(await store.changes.now_ms(self._postgres), index_for_s=self._index_for_s)
        swept = await store.changes.forgotten(self._postgres)
        fresh, tokens = token_hex(8), []
        for shard in range(self._hot.shards):
            _, token = await self._hot.begin(
                shard, fresh, floor=marks.floor, fine=marks.fine, swept=swept
            )
            tokens.append(token)
        floor = min([(await self._hot.look(shard)).floor for shard in range(self._hot.shards)])
        total, done = await store.changes.count_entities(self._postgres), 0
        for kind in Kind:
            async for wholes in self._wholes(kind, floor=floor):
                for part in _portions(wholes):
                    if not all(await asyncio.gather(*[self._put(whole) for whole in part])):
                        return None
                done += len(wholes)
                tell(min(1.0, done / max(1, total)), f"{done} of {total}")
        for shard in range(self._hot.shards):
            await self._hot.split_all(shard)
        finished = [await self._hot.finish(shard, token) for shard, token in enumerate(tokens)]
        return done if all(finished) else None

    async def _put(self, whole: Change) -> bool:
        """False where the index was lost.

        A Valkey that is silent for a moment is asked again: putting again does no harm, and to begin anew may cost minutes.
        """
        ends_s, attempts = time.monotonic() + PATIENCE_S, 0
        while True:
            try:
                return await self._put_once(whole)
            except ValkeyDown:
                if time.monotonic() > ends_s:
                    raise
            attempts += 1
            await asyncio.sleep(RETRY.delay_s(attempts))

    async def _put_once(self, whole: Change) -> bool:
        for shard, part in self._hot.parts(whole):
            state, _ = await self._hot.put(shard, part)
            if state == "unready" or (state == "old" and not await self._applier.put(whole)):
                return False
        return True

    async def verify(
        self, *, sample: int | None = None, on_progress: Progress | None = None
    ) -> tuple[Proof, list[Difference]]:
        """Compare index and truth of all viewers and authors, or of so many of each.

        Raises: ValkeyDown, PostgresDown.
        """
        tell = on_progress or (lambda _ratio, _text: None)
        proof, found = Proof(), list[Difference]()
        total = await store.changes.count_entities(self._postgres)
        for kind in Kind:
            async for wholes in self._wholes(kind, floor=0, sample=sample):
                for part in _portions(wholes):
                    compared = await asyncio.gather(
                        *[self._compare(whole, proof) for whole in part]
                    )
                    found += [difference for difference in compared if difference]
                done = proof.viewers + proof.authors
                tell(min(1.0, done / max(1, total)), f"{done} of {total}")
        return proof, found

    async def _wholes(
        self, kind: Kind, *, floor: int, sample: int | None = None
    ) -> AsyncIterator[list[Change]]:
        """All viewers or authors, or some, in steps of about so many items: the next one is as large as the last one lets hope."""
        chosen = None
        if sample is not None:
            chosen = await store.changes.sample_entities(self._postgres, kind, rows_max=sample)
        after, step = BEFORE_ALL, 1
        while True:
            if chosen is None:
                entities = await store.changes.entities_after(
                    self._postgres, kind, after=after, rows_max=step
                )
            else:
                entities, chosen = chosen[:step], chosen[step:]
            if not entities:
                return
            wholes = await store.changes.whole(self._postgres, kind, entities, floor=floor)
            items = max(1, sum(len(whole.items) for whole in wholes))
            yield wholes
            after = entities[-1]
            step = max(1, min(ENTITIES_PER_STEP, 2 * step, step * ITEMS_PER_STEP // items))

    async def _compare(self, whole: Change, proof: Proof) -> Difference | None:
        """Compare one, again while a change of it is under way."""
        began_s, attempts = time.monotonic(), 0
        while True:
            versions, missing, extra, count = await self._looked(whole)
            if versions == {whole.version} or time.monotonic() - began_s > BEHIND_S_MAX:
                break
            attempts += 1
            await asyncio.sleep(RETRY.delay_s(attempts))
            [whole] = await store.changes.whole(self._postgres, whole.kind, [whole.entity], floor=0)
        if whole.kind is Kind.POSTS:
            proof.authors += 1
            proof.posts += count
        else:
            proof.viewers += 1
            proof.follows += count
        if versions == {whole.version} and not missing and not extra:
            return None
        return Difference(whole.kind, whole.entity, missing, extra)

    async def _looked(self, whole: Change) -> tuple[set[int], int, int, int]:
        """Versions found, how many items are missing, how many too many, how many there should be."""
        if whole.kind is Kind.POSTS:
            floor = (await self._hot.look(self._hot.shard_of(whole.entity))).floor
            version, unhinted, have = await self._hot.posts(whole.entity)
            pairs = zip(whole.items, whole.scores, strict=True)
            want = {(item, score) for item, score in pairs if score >= floor}
            got = set(have.items())
            return {version}, len(want - got) + unhinted, len(got - want), len(want)
        authors: set[str] = set()
        versions: set[int] = set()
        for shard in range(self._hot.shards):
            version, part = await self._hot.follows(shard, whole.entity)
            versions.add(version)
            authors |= part
        wanted = set(whole.items)
        return versions, len(wanted - authors), len(authors - wanted), len(wanted)


def _portions(wholes: Iterable[Change]) -> Iterator[list[Change]]:
    """In parts of about so many items."""
    part, items = list[Change](), 0
    for whole in wholes:
        part.append(whole)
        items += len(whole.items)
        if items >= ITEMS_AT_ONCE:
            yield part
            part, items = [], 0
    if part:
        yield part
