"""Views in Valkey: the streams of hits and the cached totals; the only caller of `lua/views_v1.lua`.

Everything here is rebuilt from PostgreSQL, with these exceptions: hits that were not flushed yet (seconds of them while
all is well; all since PostgreSQL went away, while it is away), event ids of the last 24 hours, and viewers of the last
three days, whose numbers stay. Valkey may lose of them: nothing with `appendfsync always` or when its process is killed, a
second or two (more on a slow disk) with `everysec` and a power cut, what a replica had not received at a failover.

Functions are loaded again where the server has lost them, since an unknown function did nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from headrace.engines.functions import Functions
from headrace.engines.multiplex import Keys, Multiplexer, ValkeyPartlyDown, scan, scan_all
from headrace.engines.valkey import Valkey
from headrace.views.model import TOMBSTONE_S
from headrace.views.settings import SHARDS_MAX

PACKAGE: Final = "headrace.views"
DELETED: Final = b"x"


@dataclass(frozen=True, slots=True)
class Counted:
    """The answer to a call of hits."""

    entry: str | None
    """The id of its entry; None: the shard is not set up, nothing was counted. Empty: nothing was new."""
    totals: list[str]
    """For each hit its total, `-` if that is not cached, `x` if the entity is deleted."""
    unwritten_on: str = ""
    """The run id of the server that has not written the hits to its append-only file yet; empty once it has."""


@dataclass(frozen=True, slots=True)
class FileState:
    """The append-only file of a server, in bytes that count from its last rewrite."""

    run: str
    """The run id of the server: another one after each start."""
    is_syncing: bool
    """Whether a background sync runs, so that writes may be postponed."""
    rewrites: str
    """How often the file was rewritten; sizes of different rewrites do not compare."""
    written: int
    end: int
    """`written`, and what waits to be written."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A part of a stream after the offset."""

    has_anchor: bool
    """Whether the offset's own entry is there, so that nothing after it is missing."""
    last: str
    """The id of the last entry of all; empty where there is none."""
    is_cut: bool
    """Whether there may be more, as far as was asked for."""
    rows: list[tuple[str, str]]
    """Id and hits of each entry, in order."""


class Hot:
    """Functions and keys of the views in one Valkey."""

    def __init__(self, valkey: Valkey, line: Multiplexer) -> None:
        self._line = line
        self._functions = Functions(line, PACKAGE)
        self._prefix = valkey.prefix
        self._starts = [self._key(shard, "c:") for shard in range(SHARDS_MAX)]

    async def hit(
        self, shard: int, lines: Sequence[str], *, floor_ms: str, offset_s: int
    ) -> Counted:
        """Count hits, written as lines, in one entry whose id is later than `floor_ms`."""
        arguments: list[Any] = [",".join(lines), floor_ms, offset_s]
        entry, totals, unwritten_on = await self._call(
            "headrace_views_hit_v1", shard, arguments, keys="q"
        )
        told = totals.decode().split(",") if totals else []
        return Counted(None if entry is None else entry.decode(), told, unwritten_on.decode())

    async def file_state(self, shard: int) -> FileState:
        """How far the server of a shard has written its append-only file. Raises: ValkeyDown."""
        reply = await self._line.command(
            "INFO", "persistence", "server", near=self._key(shard, "q")
        )
        rows = [row.partition(":") for row in reply.decode().splitlines()]
        values = {name: value for name, _, value in rows}
        size = int(values.get("aof_current_size", 0))
        return FileState(
            run=values["run_id"],
            is_syncing=values.get("aof_pending_bio_fsync", "0") != "0",
            rewrites=values.get("aof_rewrites", ""),
            written=size,
            end=size + int(values.get("aof_buffer_length", 0)),
        )

    async def fill(
        self,
        shard: int,
        *,
        through: str,
        corrections: int,
        totals: Sequence[tuple[str, int]],
    ) -> tuple[str, list[str]]:
        """Cache totals of one snapshot: `ok` and each total with what is pending, `retry` or `behind`."""
        arguments: list[Any] = [through, corrections]
        for entity, total in totals:
            arguments += (entity, total)
        state, told = await self._call("headrace_views_fill_v1", shard, arguments)
        return state.decode(), told.decode().split(",") if told else []

    async def init(self, shard: int, *, through: str, corrections: int, shards: int) -> str:
        """Set one of so many shards up at PostgreSQL's offset: `ok`, `raised` or `gap`; again: nothing changes."""
        arguments = [through, corrections, shards]
        return str((await self._call("headrace_views_init_v1", shard, arguments)).decode())

    async def pending(
        self, shard: int, *, through: str, upto: str = "+", entries_max: int
    ) -> Pending:
        """What comes after `through`, oldest first, as far as `upto`."""
        arguments = [through, upto, entries_max]
        reply = await self._call(
            "headrace_views_pending_v1", shard, arguments, keys="q", reads=True
        )
        ids = [word.decode() for word in reply[3::2]]
        # Whatever wrote it: what is no text is left out of the flush, and stops nobody.
        hits = [word.decode(errors="replace") for word in reply[4::2]]
        rows = list(zip(ids, hits, strict=True))
        return Pending(bool(reply[0]), reply[1].decode(), bool(reply[2]), rows)

    async def note_flushed(self, shard: int, *, through: str, trim_to: str | None) -> None:
        """Note the offset, and let entries before `trim_to` go."""
        await self._call("headrace_views_flushed_v1", shard, [through, trim_to or ""])

    async def bury(self, shard: int, entities: Sequence[str]) -> None:
        """Count nothing for these any more."""
        await self._call("headrace_views_bury_v1", shard, [TOMBSTONE_S, *entities], keys="q")

    async def correct(self, shard: int, entity: str, *, corrections: int) -> None:
        """Forget the cached total of an entity, and any snapshot before `corrections`."""
        await self._call("headrace_views_correct_v1", shard, [corrections, entity])

    async def corrections(self, shard: int) -> int:
        """The corrections of a shard, as last told."""
        found = await self._line.command("HGET", self._key(shard, "m"), "corrections")
        return int(found or 0)

    async def uncorrect(self, shard: int, *, found: int, stored: int) -> bool:
        """Take PostgreSQL's lower number of corrections, if ours is still the one found; whether it was."""
        return bool(await self._call("headrace_views_uncorrect_v1", shard, [found, stored]))

    async def uniques(
        self, shard: int, written: Sequence[str], *, rows_max: int
    ) -> list[tuple[str, int]]:
        """Some `day:id` whose number of viewers changed, with it; those `written` down are not told again."""
        arguments = [rows_max, *written]
        reply = await self._call("headrace_views_uniques_v1", shard, arguments, keys="q")
        names = [word.decode() for word in reply[::2]]
        return list(zip(names, reply[1::2], strict=True))

    async def viewers(self, shard: int, entities: Sequence[str], *, day: int) -> dict[str, int]:
        """Viewers so far of a day since 1970, of those entities that had any with a name."""
        arguments = [day, *entities]
        reply = await self._call("headrace_views_viewers_v1", shard, arguments, keys="q")
        return {entity: count for entity, count in zip(entities, reply, strict=True) if count >= 0}

    def total_keys(self, entities: Sequence[str], shards: Sequence[int]) -> list[str]:
        """Where the totals of entities are cached."""
        starts = self._starts
        return [starts[shard] + entity for entity, shard in zip(entities, shards, strict=True)]

    async def totals(self, keys: Sequence[str]) -> list[int | None]:
        """Cached totals (0 of what is deleted), None where there is none; one command for all, or one a shard in a cluster.

        Raises: ValkeyDown, ValkeyPartlyDown.
        """
        try:
            kept = await self._line.values(keys)
        except ValkeyPartlyDown as error:
            error.found = _totals_of(error.found)
            raise
        return _totals_of(kept)

    async def lag(self, shard: int, through: str) -> tuple[int, int]:
        """How many entries come after `through` (10,000: at least), and the milliseconds of the first or 0."""
        count, first_ms = await self._call(
            "headrace_views_lag_v1", shard, [through], keys="q", reads=True
        )
        return count, first_ms

    async def now_s(self, shard: int) -> float:
        """The clock of a shard's server, which says when a hit came."""
        seconds, micros = await self._line.command("TIME", near=self._key(shard, "m"))
        return int(seconds) + int(micros) / 1e6

    async def stored_shards(self) -> int | None:
        """The number of shards, as last noted."""
        found = await self._line.command("GET", f"{self._prefix}:views:shards")
        return None if found is None else int(found)

    async def note_shards(self, shards: int) -> None:
        """Note the number of shards, for whoever starts while PostgreSQL is away, and for the function that counts.

        A primary of a cluster that is away is told when its shards are set up. Raises: ValkeyDown where none answers.
        """
        told = await asyncio.gather(
            self._line.command("SET", f"{self._prefix}:views:shards", shards),
            *[
                self._line.command("HSET", self._key(shard, "m"), "shards", shards)
                for shard in range(shards)
            ],
            return_exceptions=True,
        )
        failures = [one for one in told if isinstance(one, BaseException)]
        if failures and (len(failures) == len(told) or not await self._line.is_cluster()):
            raise failures[0]

    async def drop_totals(self, shards: Sequence[int]) -> int:
        """Forget every cached total of these shards; how many there were."""
        dropped = 0
        async for keys in scan_all(self._line, self._total_keys(shards)):
            for shard, names in self._by_shard(keys, shards).items():
                gone = [self._starts[shard] + name for name in names]
                dropped += await self._line.command("UNLINK", *gone)
        return dropped

    async def sweep(self, cursor: bytes, shards: Sequence[int], *, idle_s: int) -> bytes:
        """Look at some keys, and forget totals nobody asked for so long; where to go on (`0`: all were seen)."""
        cursor, keys = await scan(self._line, self._total_keys(shards), cursor)
        for shard, names in self._by_shard(keys, shards).items():
            await self._call("headrace_views_sweep_v1", shard, [idle_s, *names], keys="q")
        return cursor

    def _total_keys(self, shards: Sequence[int]) -> Keys:
        pattern = f"{self._prefix}:{{v:*}}:c:*"
        return Keys(pattern, [self._starts[shard] for shard in shards])

    def _by_shard(self, keys: Iterable[str], shards: Sequence[int]) -> dict[int, list[str]]:
        """Entities with a cached total, of these shards."""
        found: dict[int, list[str]] = {}
        for key in keys:
            for shard in shards:
                if key.startswith(self._starts[shard]):
                    found.setdefault(shard, []).append(key.removeprefix(self._starts[shard]))
        return found

    def _key(self, shard: int, name: str) -> str:
        return f"{self._prefix}:{{v:{shard}}}:{name}"

    async def _call(
        self,
        function: str,
        shard: int,
        arguments: Sequence[Any],
        *,
        keys: str = "qm",
        reads: bool = False,
    ) -> Any:
        names = [self._key(shard, name) for name in keys]
        return await self._functions.call(function, names, arguments, reads=reads)


def _totals_of(kept: Sequence[bytes | None]) -> list[int | None]:
    return [None if k is None else 0 if k == DELETED else int(k) - 1 for k in kept]
