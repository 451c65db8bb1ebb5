"""Views in Valkey: streams of hits and cached totals. Only this module calls `lua/views_v1.lua`.

Everything here can be rebuilt from PostgreSQL, except: hits not flushed yet (some seconds; more
while PostgreSQL is down), event ids of the last 24 hours, and viewers of the last three days. Of
these Valkey loses nothing with `appendfsync always` or when its process is killed; one or two
seconds (more on a slow disk) with `everysec` and a power cut; at a failover what the replica had
not received.

A missing function is loaded and called again, because an unknown function has no effect.

`CircuitBreaker` is for calls to PostgreSQL by callers that can answer from Valkey alone. It opens
for REST_S after a timeout or an error: calls fail at once. Then one caller tries while the others
still fail. Otherwise every caller would wait its full timeout for a stopped
server, because the system still accepts its connections.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from headrace.engines.functions import Functions
from headrace.engines.multiplex import Keys, Multiplexer, ValkeyPartlyDown, scan, scan_all
from headrace.engines.postgres_errors import PostgresDown
from headrace.engines.valkey import Valkey
from headrace.kernel.errors import Unavailable
from headrace.views.model import TOMBSTONE_S, Correction
from headrace.views.settings import SHARDS_MAX

REST_S: Final = 2.0
"""How long the breaker stays open after a failure."""
Answer = TypeVar("Answer")


class CircuitBreaker:
    """State shared by all callers that can answer without PostgreSQL."""

    def __init__(self) -> None:
        self._open_until_s = float("-inf")
        self._has_failed = False

    def require_closed(self) -> None:
        """Raise PostgresDown while the breaker is open."""
        if time.monotonic() < self._open_until_s:
            raise _no_answer()

    async def call(self, query: Callable[[], Awaitable[Answer]], *, wait_s: float) -> Answer:
        """The answer of `query` within `wait_s`. Raises: PostgresDown, and errors of `query`."""
        self.require_closed()
        if self._has_failed:
            # This caller tries. Concurrent callers fail until it has finished.
            self._open_until_s = time.monotonic() + wait_s
        try:
            async with asyncio.timeout(wait_s):
                answer = await query()
        except (Unavailable, TimeoutError) as error:
            self._has_failed = True
            self._open_until_s = time.monotonic() + REST_S
            if isinstance(error, Unavailable):
                raise
            raise _no_answer() from error
        self._has_failed = False
        self._open_until_s = float("-inf")
        return answer


def _no_answer() -> PostgresDown:
    return PostgresDown(
        "PostgreSQL did not answer in time, and further queries are skipped for 2 s: check it with"
        " `headrace doctor`, then try again",
        retry_after_s=REST_S,
    )


PACKAGE: Final = "headrace.views"
DELETED: Final = b"x"


@dataclass(frozen=True, slots=True)
class Counted:
    """Reply to a call with hits."""

    entry: str | None
    """Id of the new entry; empty: only known events; None: not set up since Valkey started."""
    totals: list[str]
    """The total of each hit; `-`: not cached; `x`: the entity is deleted."""
    unwritten_on: str = ""
    """Run id of the server while the hits are not in its append-only file yet; empty afterwards."""


@dataclass(frozen=True, slots=True)
class FileState:
    """Progress of a server's append-only file, in bytes since its last rewrite."""

    run: str
    """Run id of the server, new at each start."""
    is_syncing: bool
    """Whether a background sync may be delaying writes."""
    rewrites: str
    """Number of rewrites; sizes of different rewrites are not comparable."""
    written: int
    end: int
    """`written` plus the bytes waiting to be written."""


@dataclass(frozen=True, slots=True)
class Pending:
    """Stream entries after an offset."""

    has_anchor: bool
    """Whether the entry at the offset exists, so that no later entry is missing.

    Also false until the shard is set up after a start of Valkey, and repaired after a loss.
    """
    last: str
    """Id of the last entry of the stream; empty for an empty stream."""
    is_cut: bool
    """Whether more entries may follow within the requested range."""
    rows: list[tuple[str, str]]
    """Id and hits of each entry, in order."""


@dataclass(frozen=True, slots=True)
class IdleTotals:
    """Unused cached totals of a shard."""

    shard: int
    last: str
    """Id of the last entry of the stream when they were found: later hits change the values."""
    values: list[bytes]
    """Id and value of each, alternating."""


class ValkeyStore:
    """Functions and keys of views in Valkey."""

    def __init__(self, valkey: Valkey, multiplexer: Multiplexer) -> None:
        self._connection = multiplexer
        self._functions = Functions(multiplexer, PACKAGE)
        self._prefix = valkey.prefix
        self._starts = [self._key(shard, "c:") for shard in range(SHARDS_MAX)]

    async def hit(
        self, shard: int, lines: Sequence[str], *, floor_ms: str, offset_s: int
    ) -> Counted:
        """Count hits, given as lines, in one stream entry with an id after `floor_ms`."""
        arguments: list[Any] = [",".join(lines), floor_ms, offset_s]
        entry, totals, unwritten_on = await self._call(
            "headrace_views_hit_v1", shard, arguments, keys="q"
        )
        found = totals.decode().split(",") if totals else []
        return Counted(None if entry is None else entry.decode(), found, unwritten_on.decode())

    async def file_state(self, shard: int) -> FileState:
        """Progress of the append-only file of a shard's server. Raises: ValkeyDown."""
        reply = await self._connection.command(
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
    ) -> list[str] | None:
        """Cache the totals of one snapshot. Return them with pending hits, in order.

        `x`: deleted; `-`: not cached, too many entries are pending to search. None: the snapshot
        is too old.
        """
        arguments: list[Any] = [through, corrections]
        for entity, total in totals:
            arguments += (entity, total)
        state, filled = await self._call("headrace_views_fill_v1", shard, arguments)
        return filled.decode().split(",") if state == b"ok" else None

    async def unflushed(self, shard: int, entities: Sequence[str]) -> list[str]:
        """Which entities without a cached total may have hits that PostgreSQL lacks."""
        reply = await self._call("headrace_views_unflushed_v1", shard, entities, reads=True)
        return [word.decode() for word in reply]

    async def start(self, shard: int) -> str:
        """The start or promotion of the shard's server, to be read before `init`'s offset."""
        reply = await self._call("headrace_views_start_v1", shard, [], keys="q", reads=True)
        return str(reply.decode())

    async def init(
        self, shard: int, *, start: str, through: str, corrections: int, shards: int
    ) -> str:
        """Set up a shard at PostgreSQL's offset: `ok`, `raised` or `gap`. Idempotent.

        `restarted`: nothing was done, because the server started or was promoted after `start`.
        `raised` and `gap` are returned until `note_repaired`, except of an empty server.
        """
        arguments = [through, corrections, shards, start]
        return str((await self._call("headrace_views_init_v1", shard, arguments)).decode())

    async def note_repaired(self, shard: int) -> None:
        """Record that the cached totals were dropped after the stream lost its end."""
        await self._connection.command("HDEL", self._key(shard, "m"), "broken")

    async def pending(
        self, shard: int, *, through: str, upto: str = "+", entries_max: int
    ) -> Pending:
        """Entries after `through` up to `upto`, oldest first."""
        arguments = [through, upto, entries_max]
        reply = await self._call(
            "headrace_views_pending_v1", shard, arguments, keys="q", reads=True
        )
        ids = [word.decode() for word in reply[3::2]]
        # Another program may have written invalid UTF-8; the flush skips such hits.
        hits = [word.decode(errors="replace") for word in reply[4::2]]
        rows = list(zip(ids, hits, strict=True))
        return Pending(bool(reply[0]), reply[1].decode(), bool(reply[2]), rows)

    async def note_flushed(self, shard: int, *, through: str, trim_to: str | None) -> None:
        """Record the offset and trim entries before `trim_to`."""
        await self._call("headrace_views_flushed_v1", shard, [through, trim_to or ""])

    async def mark_deleted(self, shard: int, entities: Sequence[str]) -> None:
        """Stop counting hits of deleted entities."""
        arguments = [TOMBSTONE_S, *entities]
        await self._call("headrace_views_mark_deleted_v1", shard, arguments, keys="q")

    async def correct(self, shard: int, corrections: Sequence[Correction], *, after: int) -> None:
        """Apply the corrections that follow number `after`.

        Cached totals are dropped and deleted entities marked. Snapshots before the last correction
        are refused from here on.
        """
        arguments: list[Any] = [after, corrections[-1].number, TOMBSTONE_S]
        for each in corrections:
            arguments += (each.id, int(each.is_deleted))
        await self._call("headrace_views_correct_v1", shard, arguments)

    async def corrections(self, shard: int) -> tuple[int, int]:
        """The highest number of a correction, and the number up to which all are applied."""
        found = await self._connection.command(
            "HMGET", self._key(shard, "m"), "corrections", "applied"
        )
        return int(found[0] or 0), int(found[1] or 0)

    async def reset_corrections(self, shard: int, *, found: int, stored: int) -> None:
        """Replace the highest number by PostgreSQL's if it is still `found`: all are applied."""
        await self._call("headrace_views_reset_corrections_v1", shard, [found, stored])

    async def uniques(
        self, shard: int, written: Sequence[str], *, rows_max: int
    ) -> list[tuple[str, int, bytes]]:
        """Some `day:id` with changed viewers and their sketches, without those `written`."""
        arguments = [rows_max, *written]
        reply = await self._call("headrace_views_uniques_v1", shard, arguments, keys="q")
        names = [word.decode() for word in reply[::3]]
        return list(zip(names, reply[1::3], reply[2::3], strict=True))

    async def sketches(
        self, entities: Sequence[str], shards: Sequence[int], *, day: int
    ) -> list[bytes]:
        """The sketches of a day counted since 1970 that exist. Raises: ValkeyDown."""
        keys = [
            self._key(shard, f"u:{day}:{entity}")
            for entity, shard in zip(entities, shards, strict=True)
        ]
        return [sketch for sketch in await self._connection.values(keys) if sketch]

    async def viewers(self, shard: int, entities: Sequence[str], *, day: int) -> dict[str, int]:
        """Viewers so far on a day counted since 1970, of entities with named viewers."""
        arguments = [day, *entities]
        reply = await self._call("headrace_views_viewers_v1", shard, arguments, keys="q")
        return {entity: count for entity, count in zip(entities, reply, strict=True) if count >= 0}

    def total_keys(self, entities: Sequence[str], shards: Sequence[int]) -> list[str]:
        """Keys of the cached totals of entities."""
        starts = self._starts
        return [starts[shard] + entity for entity, shard in zip(entities, shards, strict=True)]

    async def totals(self, keys: Sequence[str]) -> list[int | None]:
        """Cached totals; 0: deleted; None: not cached. One command, in a cluster one per shard.

        Raises: ValkeyDown, ValkeyPartlyDown.
        """
        try:
            kept = await self._connection.values(keys)
        except ValkeyPartlyDown as error:
            error.found = _totals_of(error.found)
            raise
        return _totals_of(kept)

    async def lag(self, shard: int, through: str) -> tuple[int, int]:
        """Number of entries after `through`, counted to 10,000; milliseconds of the first or 0."""
        count, first_ms = await self._call(
            "headrace_views_lag_v1", shard, [through], keys="q", reads=True
        )
        return count, first_ms

    async def now_s(self, shard: int) -> float:
        """The clock of a shard's server, which dates hits."""
        seconds, micros = await self._connection.command("TIME", near=self._key(shard, "m"))
        return int(seconds) + int(micros) / 1e6

    async def stored_shards(self) -> int | None:
        """The recorded number of shards."""
        found = await self._connection.command("GET", f"{self._prefix}:views:shards")
        return None if found is None else int(found)

    async def note_shards(self, shards: int) -> None:
        """Record the number of shards for processes that start while PostgreSQL is down.

        The hit function checks ids against it. An unreachable primary of a cluster receives it when
        its shards are set up. Raises: ValkeyDown if no primary answers.
        """
        replies = await asyncio.gather(
            self._connection.command("SET", f"{self._prefix}:views:shards", shards),
            *[
                self._connection.command("HSET", self._key(shard, "m"), "shards", shards)
                for shard in range(shards)
            ],
            return_exceptions=True,
        )
        failures = [one for one in replies if isinstance(one, BaseException)]
        if failures and (len(failures) == len(replies) or not await self._connection.is_cluster()):
            raise failures[0]

    async def drop_totals(self, shards: Sequence[int]) -> int:
        """Delete all cached totals of these shards. Return their number."""
        dropped = 0
        async for keys in scan_all(self._connection, self._total_keys(shards)):
            for shard, names in self._by_shard(keys, shards).items():
                dropped += await self._call("headrace_views_drop_v1", shard, names)
        return dropped

    async def find_idle(
        self, cursor: bytes, shards: Sequence[int], *, idle_s: int
    ) -> tuple[bytes, list[IdleTotals]]:
        """Unused totals among some keys, and the next cursor; `0`: pass complete."""
        cursor, keys = await scan(self._connection, self._total_keys(shards), cursor)
        found = []
        for shard, names in self._by_shard(keys, shards).items():
            last, *values = await self._call(
                "headrace_views_idle_v1", shard, [idle_s, *names], keys="q", reads=True
            )
            if values:
                found.append(IdleTotals(shard, last.decode(), values))
        return cursor, found

    async def sweep(self, idle: IdleTotals) -> int:
        """Delete the totals that have not changed since. Return their number."""
        return int(await self._call("headrace_views_sweep_v1", idle.shard, idle.values, keys="q"))

    def _total_keys(self, shards: Sequence[int]) -> Keys:
        pattern = f"{self._prefix}:{{v:*}}:c:*"
        return Keys(pattern, [self._starts[shard] for shard in shards])

    def _by_shard(self, keys: Iterable[str], shards: Sequence[int]) -> dict[int, list[str]]:
        """Group keys of cached totals by these shards, as entity ids."""
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
