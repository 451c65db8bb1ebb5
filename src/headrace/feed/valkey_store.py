"""The feed's index in Valkey. Only this module calls `lua/feed_v1.lua`.

    shard 0: all posts, follows of its viewers     a page reads one shard
    shard 1: all posts, follows of its viewers     a post is written to all shards

So pages per second grow with the shards, and each shard needs memory for all posts.

All of it can be rebuilt from PostgreSQL. A shard without its key `m` is empty or lost: pages come
from PostgreSQL, and changes are not applied, because the later build reads them. A shard that may
lack changes after a server restart is not read either (`index_recovery.py`).

A missing function is loaded and called again, because an unknown function has no effect.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from operator import itemgetter
from typing import Any, Final, Literal, NamedTuple

from headrace.engines.functions import Functions
from headrace.engines.multiplex import Keys, Multiplexer, scan, scan_all
from headrace.engines.valkey import SLOTS, Valkey, hash_slot
from headrace.feed.model import (
    KIND_MARK,
    SCORE_MAX,
    VERSION_SLOTS,
    Change,
    ChangeKind,
    Position,
)

PACKAGE: Final = "headrace.feed"
POSTS_AT_ONCE: Final = 5_000
"""Posts per call; Valkey serves no other client during a call."""
SPLITS_PER_CHANGE: Final = 8
"""Crowded buckets that a writer splits after its change; the sweep splits the others."""


class Found(NamedTuple):
    """A post of a page, with the number of its author."""

    score: int
    id: str
    author: int
    kind: str | None = None


@dataclass(frozen=True, slots=True)
class ShardPage:
    """The page of one shard."""

    floor: int
    """Lowest score in the index."""
    posts: list[Found]


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """State of a shard."""

    state: str | None
    floor: int
    newest: int
    run: str | None
    """Run id of the server on which the shard was last known to be complete."""
    recovering: str | None
    """Run id of the server on which its changes were marked for another sweep."""
    swept: int
    """Id of the last swept change."""
    epoch: int
    """PostgreSQL's epoch when the last build began."""
    server_run: str

    @property
    def is_recovering(self) -> bool:
        """Whether the server was restarted since, so that recent changes may be missing."""
        return self.state == "ready" and self.run != self.server_run


class ValkeyStore:
    """Functions and keys of the feed in Valkey."""

    def __init__(self, valkey: Valkey, multiplexer: Multiplexer, shards: int) -> None:
        self.shards = shards
        self._connection = multiplexer
        self._functions = Functions(multiplexer, PACKAGE)
        self._starts = [f"{valkey.prefix}:{{{tag}}}:" for tag in hash_tags(shards)]

    def shard_of(self, viewer: int) -> int:
        """The shard of a viewer's pages."""
        return viewer % self.shards

    async def page(
        self, viewer: int, *, limit: int, before: Position | None, after: Position | None
    ) -> ShardPage | None:
        """The newest posts between two positions; None: not ready. Raises: ValkeyDown."""
        start = self._starts[self.shard_of(viewer)]
        arguments: list[Any] = [limit, *(before or ("", "")), *(after or ("", ""))]
        keys = [f"{start}f:{viewer}", f"{start}m"]
        reply = await self._functions.call("headrace_feed_page_v1", keys, arguments, reads=True)
        if reply is None:
            return None
        words = iter(reply[1:])
        posts = [
            _found_of(score, word.decode(), int(author))
            for word, score, author in zip(words, words, words, strict=True)
        ]
        return ShardPage(int(reply[0]), posts)

    async def change(self, shard: int, change: Change) -> tuple[str, int]:
        """Apply a change: `ok`, `old`, `gap` or `unready`, and the previous version."""
        if change.kind is ChangeKind.FOLLOWS:
            return await self._send_follows("headrace_feed_change_follows_v1", shard, change)
        arguments: list[Any] = [change.entity, change.version]
        for post, score in zip(change.items, change.scores, strict=True):
            arguments += (score, post)
        return await self._call(
            "headrace_feed_change_posts_v1", shard, f"p:{change.entity}", arguments
        )

    async def apply(self, shard: int, change: Change) -> tuple[str, int]:
        """Apply a change; one without items is put as an empty snapshot. The replies are equal."""
        return await (self.put if change.is_emptying else self.change)(shard, change)

    async def put(self, shard: int, snapshot: Change) -> tuple[str, int]:
        """Replace an entity. Return `ok`, `old` or `unready`, and the previous version.

        An author with many posts takes several calls.
        """
        if snapshot.kind is ChangeKind.FOLLOWS:
            return await self._send_follows("headrace_feed_put_follows_v1", shard, snapshot)
        reply = ("ok", 0)
        for part in parts_of(snapshot):
            arguments: list[Any] = [snapshot.entity, snapshot.version, part.first, part.last]
            arguments.append(int(part.last == SCORE_MAX))
            # Newest first: each insertion into a listpack scans from the oldest, so it is faster.
            for score, post in reversed(part.posts):
                arguments += (score, post)
            reply = await self._call(
                "headrace_feed_put_posts_v1", shard, f"p:{snapshot.entity}", arguments
            )
            if reply[0] != "ok":
                break
        return reply

    def shards_of(self, kind: ChangeKind, entity: int) -> Sequence[int]:
        """The shards with an entity: all for an author's posts, one for a viewer's follows."""
        return range(self.shards) if kind is ChangeKind.POSTS else (self.shard_of(entity),)

    async def begin(
        self, shard: int, token: str, *, floor: int, fine: int, swept: int, epoch: int
    ) -> tuple[str, str]:
        """Start building a missing shard. Return its state and token."""
        keys = [f"{self._starts[shard]}m"]
        state, found = await self._functions.call(
            "headrace_feed_begin_v1", keys, [token, floor, fine, swept, epoch]
        )
        return state.decode(), found.decode()

    async def finish(self, shard: int, token: str, *, epoch: int) -> bool:
        """Mark a shard as ready, as of an epoch. Return False if it was lost during the build."""
        keys = [f"{self._starts[shard]}m"]
        return bool(await self._functions.call("headrace_feed_finish_v1", keys, [token, epoch]))

    async def split_all(self, shard: int) -> None:
        """Split all crowded buckets of a shard. Raises: ValkeyDown."""
        while await self._split(shard):
            pass

    async def status(self, shard: int) -> ShardStatus:
        """The state of a shard."""
        keys = [f"{self._starts[shard]}m"]
        reply = await self._functions.call("headrace_feed_status_v1", keys, [], reads=True)
        words = [None if word is None else word.decode() for word in reply]
        state, floor, newest, run, recovering, swept, epoch, server_run = words
        return ShardStatus(
            state=state,
            floor=int(floor or 0),
            newest=int(newest or 0),
            run=run,
            recovering=recovering,
            swept=int(swept or 0),
            epoch=int(epoch or 0),
            server_run=server_run or "",
        )

    async def note(
        self, shard: int, field: Literal["run", "recovering"], *, run: str, swept: int
    ) -> bool:
        """Record a run of the shard's server in a field; False: the server has another run.

        `run`: the shard is complete on it. `recovering`: changes are marked for another sweep.
        """
        keys = [f"{self._starts[shard]}m"]
        return bool(await self._functions.call("headrace_feed_noted_v1", keys, [field, run, swept]))

    async def posts(self, shard: int, author: int) -> tuple[int, int, dict[str, int]]:
        """Version (-1: changed during the read), missing bucket entries and posts of an author."""
        start = self._starts[shard]
        keys = [f"{start}p:{author}", f"{start}m"]
        found: dict[str, int] = {}
        versions, unhinted, score, limit = set[int](), 0, 0, POSTS_AT_ONCE
        while True:
            arguments = [author, score, limit]
            reply = await self._functions.call(
                "headrace_feed_posts_v1", keys, arguments, reads=True
            )
            versions.add(reply[0])
            unhinted += reply[1]
            ids, scores = [word.decode() for word in reply[2::2]], reply[3::2]
            found.update(zip(ids, scores, strict=True))
            if len(scores) < limit:
                return versions.pop() if len(versions) == 1 else -1, unhinted, found
            if scores[-1] == score:
                limit *= 2
            score = scores[-1]

    async def follows(self, viewer: int) -> tuple[int, set[str]]:
        """A viewer's version and visible authors."""
        start = self._starts[self.shard_of(viewer)]
        keys = [f"{start}f:{viewer}", f"{start}m"]
        arguments = [viewer, viewer % VERSION_SLOTS]
        reply = await self._functions.call("headrace_feed_follows_v1", keys, arguments, reads=True)
        return reply[0], {word.decode() for word in reply[1:]}

    async def trim(self, shard: int, *, floor: int, fine: int, buckets_max: int) -> bool:
        """Raise floor and fine and delete older buckets. Return whether more remain."""
        keys = [f"{self._starts[shard]}m"]
        return bool(
            await self._functions.call("headrace_feed_trim_v1", keys, [floor, fine, buckets_max])
        )

    async def trim_posts(self, cursor: bytes) -> bytes:
        """Delete some authors' posts below the floor. Return the next cursor; `0`: complete."""
        cursor, found = await scan(self._connection, self._keys("p:"), cursor)
        for key in found:
            meta = key.partition("}:")[0] + "}:m"
            await self._functions.call("headrace_feed_trim_posts_v1", [key, meta], [])
        return cursor

    async def entities(self, kind: ChangeKind) -> AsyncIterator[list[int]]:
        """Viewers or authors with keys, in parts; some repeatedly."""
        letter = "p:" if kind is ChangeKind.POSTS else "f:"
        async for keys in scan_all(self._connection, self._keys(letter)):
            yield [int(key.rpartition(":")[2]) for key in keys]

    async def drop(self) -> int:
        """Delete the whole index. Return the number of keys."""
        for start in self._starts:
            await self._connection.command("UNLINK", f"{start}m")
        dropped = 0
        async for keys in scan_all(self._connection, self._keys("")):
            for key in keys:
                dropped += await self._connection.command("UNLINK", key)
        return dropped

    def _keys(self, letter: str) -> Keys:
        pattern = f"{self._starts[0].partition('{')[0]}{{f:*}}:{letter}*"
        return Keys(pattern, [start + letter for start in self._starts])

    async def _send_follows(self, function: str, shard: int, change: Change) -> tuple[str, int]:
        viewer = change.entity
        arguments: list[Any] = [viewer, change.version, viewer % VERSION_SLOTS]
        for author, score in zip(change.items, change.scores, strict=True):
            arguments += (score, author)
        return await self._call(function, shard, f"f:{viewer}", arguments)

    async def _call(
        self, function: str, shard: int, key: str, arguments: list[Any]
    ) -> tuple[str, int]:
        """Call a function that changes `key` of a shard, then split some crowded buckets."""
        start = self._starts[shard]
        keys = [f"{start}{key}", f"{start}m"]
        state, version, *crowded = await self._functions.call(function, keys, arguments)
        if crowded == [1]:
            for _ in range(SPLITS_PER_CHANGE):
                if not await self._split(shard):
                    break
        return state.decode(), version

    async def _split(self, shard: int) -> int:
        """Split one crowded bucket. Return how many remain."""
        keys = [f"{self._starts[shard]}m"]
        return int(await self._functions.call("headrace_feed_split_v1", keys, []))


def _found_of(score: int, entry: str, author: int) -> Found:
    post_id, _, kind = entry.partition(KIND_MARK)
    return Found(score, post_id, author, kind or None)


def hash_tags(shards: int) -> list[str]:
    """A hash tag for each shard, in the n-th part of the hash slots for shard n.

    So as many primaries as shards, with equal ranges of slots, get one shard each.
    """

    def tag_of(shard: int) -> str:
        tags = (f"f:{shard}.{n}" if n else f"f:{shard}" for n in count())
        return next(tag for tag in tags if hash_slot(tag.encode()) * shards // SLOTS == shard)

    return [tag_of(shard) for shard in range(shards)]


class Part(NamedTuple):
    """An author's posts between two scores, both included."""

    first: int
    last: int
    posts: list[tuple[int, str]]


def parts_of(snapshot: Change) -> Iterator[Part]:
    """Split an author's posts into parts, oldest first, that cover all scores; at least one.

    Posts of one score are in one part.
    """
    posts = sorted(zip(snapshot.scores, snapshot.items, strict=True))
    first = begin = 0
    while first <= SCORE_MAX:
        end = begin + POSTS_AT_ONCE
        if end < len(posts):
            end = bisect_right(posts, posts[end - 1][0], key=itemgetter(0))
        last = posts[end - 1][0] if end < len(posts) else SCORE_MAX
        yield Part(first, last, posts[begin:end])
        first, begin = last + 1, end
