"""The feed's index in Valkey; the only caller of the functions in `lua/`.

All of it is rebuilt from PostgreSQL, and nothing is here alone. A shard without its key `m` is empty or was lost: pages
then come from PostgreSQL, and changes need not be made, since whoever builds it reads the truth after that. One that came
back with its server, and may lack the last changes, is not read from either (`returning.py`).

Functions are loaded again where the server has lost them, since an unknown function did nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Final, NamedTuple

from headrace.engines.functions import Functions
from headrace.engines.multiplex import Keys, Multiplexer, scan, scan_all
from headrace.engines.valkey import Valkey
from headrace.feed.model import SCORE_MAX, VERSION_SLOTS, Change, Kind, Place

PACKAGE: Final = "headrace.feed"
POSTS_AT_ONCE: Final = 5_000
"""So many posts a call puts or tells: 30 ms of Valkey's time, in which nobody is served."""
SPLITS_PER_CHANGE: Final = 8
"""Crowded buckets that a writer splits after its change; others are left to the next writers and the sweep."""
_CHANGE: Final = {
    Kind.POSTS: "headrace_feed_change_posts_v2",
    Kind.FOLLOWS: "headrace_feed_change_follows_v2",
}
_PUT: Final = {
    Kind.POSTS: "headrace_feed_put_posts_v2",
    Kind.FOLLOWS: "headrace_feed_put_follows_v2",
}


class Found(NamedTuple):
    """A post of a page, with the number of its author."""

    score: int
    id: str
    author: int


@dataclass(frozen=True, slots=True)
class ShardPage:
    """What one shard has of a page."""

    floor: int
    """No post with a lower score is here."""
    posts: list[Found]


@dataclass(frozen=True, slots=True)
class Look:
    """How a shard stands."""

    state: str | None
    floor: int
    fine: int
    newest: int
    oldest: int
    run: str | None
    """Of the server on which it was last known to have all."""
    returned: str | None
    """Of the server on which it came back, once what it may have lost is to be swept again."""
    swept: int
    """The last change of the outbox that was swept."""
    server_run: str

    @property
    def came_back(self) -> bool:
        """Whether it is whole and from before its server was started: its last changes may be missing."""
        return self.state == "ready" and self.run != self.server_run


class Hot:
    """Functions and keys of the feed in one Valkey."""

    def __init__(self, valkey: Valkey, line: Multiplexer, shards: int) -> None:
        self.shards = shards
        self._line = line
        self._functions = Functions(line, PACKAGE)
        self._starts = [f"{valkey.prefix}:{{f2:{shard}}}:" for shard in range(shards)]

    def shard_of(self, author: int) -> int:
        """Where an author's posts are."""
        return author % self.shards

    async def page(
        self, shard: int, viewer: int, *, limit: int, before: Place | None, after: Place | None
    ) -> ShardPage | None:
        """The newest posts between two places; None where the index is not ready. Raises: ValkeyDown."""
        start = self._starts[shard]
        arguments: list[Any] = [limit, *(before or ("", "")), *(after or ("", ""))]
        keys = [f"{start}f:{viewer}", f"{start}m"]
        reply = await self._functions.call("headrace_feed_page_v2", keys, arguments, reads=True)
        if reply is None:
            return None
        words = iter(reply[1:])
        posts = [
            Found(score, word.decode(), int(author))
            for word, score, author in zip(words, words, words, strict=True)
        ]
        return ShardPage(int(reply[0]), posts)

    async def change(self, shard: int, change: Change) -> tuple[str, int]:
        """Make the next change of a version: `ok`, `old`, `gap` or `unready`; and the version there was."""
        return await self._send(_CHANGE[change.kind], shard, change)

    async def bring(self, shard: int, change: Change) -> tuple[str, int]:
        """Make a change, or put it where it is whole; the answers are the same."""
        return await (self.put if change.is_whole else self.change)(shard, change)

    async def put(self, shard: int, whole: Change) -> tuple[str, int]:
        """Replace all of a viewer's or author's part: `ok`, `old` or `unready`; and the version there was.

        Of an author with many posts that takes several calls.
        """
        if whole.kind is Kind.POSTS and len(whole.items) > POSTS_AT_ONCE:
            return await self._put_in_parts(shard, whole)
        # Posts come from the oldest on; a listpack is looked through from there on for each: the other way it takes half as long.
        newest_first = replace(whole, items=whole.items[::-1], scores=whole.scores[::-1])
        return await self._send(_PUT[whole.kind], shard, newest_first)

    def parts(self, change: Change) -> list[tuple[int, Change]]:
        """A change as each shard that it concerns takes it: an author is in one, a viewer's follows are in all."""
        if change.kind is Kind.POSTS:
            return [(self.shard_of(change.entity), change)]
        if self.shards == 1:
            return [(0, change)]
        items: list[list[str]] = [[] for _ in range(self.shards)]
        scores: list[list[int]] = [[] for _ in range(self.shards)]
        for item, score in zip(change.items, change.scores, strict=True):
            shard = self.shard_of(int(item))
            items[shard].append(item)
            scores[shard].append(score)
        return [
            (
                shard,
                Change(
                    change.kind,
                    change.entity,
                    change.version,
                    items[shard],
                    scores[shard],
                    change.id,
                    change.is_whole,
                ),
            )
            for shard in range(self.shards)
        ]

    async def begin(
        self, shard: int, token: str, *, floor: int, fine: int, swept: int
    ) -> tuple[str, str]:
        """Begin to build a shard where there is nothing; state and token of what is there then."""
        keys = [f"{self._starts[shard]}m"]
        state, found = await self._functions.call(
            "headrace_feed_begin_v2", keys, [token, floor, fine, swept]
        )
        return state.decode(), found.decode()

    async def finish(self, shard: int, token: str) -> bool:
        """A shard has all; False where it was lost since it was begun."""
        keys = [f"{self._starts[shard]}m"]
        return bool(await self._functions.call("headrace_feed_finish_v2", keys, [token]))

    async def split_all(self, shard: int) -> None:
        """Split all crowded buckets of a shard. Raises: ValkeyDown."""
        while await self._split(shard):
            pass

    async def look(self, shard: int) -> Look:
        """How a shard stands."""
        keys = [f"{self._starts[shard]}m"]
        reply = await self._functions.call("headrace_feed_look_v2", keys, [], reads=True)
        words = [None if word is None else word.decode() for word in reply]
        state, floor, fine, newest, oldest, run, returned, swept, server_run = words
        return Look(
            state=state,
            floor=int(floor or 0),
            fine=int(fine or 0),
            newest=int(newest or 0),
            oldest=int(oldest or 0),
            run=run,
            returned=returned,
            swept=int(swept or 0),
            server_run=server_run or "",
        )

    async def note_swept(self, shard: int, *, run: str, swept: int) -> bool:
        """It has all changes on this run of its server; False where that is over."""
        return await self._note(shard, "run", run, swept)

    async def note_returned(self, shard: int, *, run: str, swept: int) -> bool:
        """What it may have lost before this run of its server is to be swept again; False where that is over."""
        return await self._note(shard, "returned", run, swept)

    async def posts(self, author: int) -> tuple[int, int, dict[str, int]]:
        """An author's version, how many buckets lack him, and his posts with their scores.

        The version is -1 where it changed in between.
        """
        start = self._starts[self.shard_of(author)]
        keys = [f"{start}p:{author}", f"{start}m"]
        found: dict[str, int] = {}
        versions, unhinted, score, limit = set[int](), 0, 0, POSTS_AT_ONCE
        while True:
            arguments = [author, score, limit]
            reply = await self._functions.call(
                "headrace_feed_posts_v2", keys, arguments, reads=True
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

    async def follows(self, shard: int, viewer: int) -> tuple[int, set[str]]:
        """A viewer's version in a shard, and the authors to be seen."""
        start = self._starts[shard]
        keys = [f"{start}f:{viewer}", f"{start}m"]
        arguments = [viewer, viewer % VERSION_SLOTS]
        reply = await self._functions.call("headrace_feed_follows_v2", keys, arguments, reads=True)
        return reply[0], {word.decode() for word in reply[1:]}

    async def trim(self, shard: int, *, floor: int, fine: int, buckets_max: int) -> bool:
        """Raise floor and fine, and remove buckets before them; whether there is more to remove."""
        keys = [f"{self._starts[shard]}m"]
        return bool(
            await self._functions.call("headrace_feed_trim_v2", keys, [floor, fine, buckets_max])
        )

    async def trim_posts(self, cursor: bytes) -> bytes:
        """Remove posts below the floor of some authors; where to go on (`0`: all were seen)."""
        cursor, found = await scan(self._line, self._keys("p:"), cursor)
        for key in found:
            meta = key.partition("}:")[0] + "}:m"
            await self._functions.call("headrace_feed_trim_posts_v2", [key, meta], [])
        return cursor

    async def drop(self) -> int:
        """Remove the whole index; how many keys there were."""
        for start in self._starts:
            await self._line.command("UNLINK", f"{start}m")
        dropped = 0
        async for keys in scan_all(self._line, self._keys("")):
            for key in keys:
                dropped += await self._line.command("UNLINK", key)
        return dropped

    def _keys(self, letter: str) -> Keys:
        pattern = self._starts[0].replace("{f2:0}", "{f2:*}") + f"{letter}*"
        return Keys(pattern, [start + letter for start in self._starts])

    async def _note(self, shard: int, field: str, run: str, swept: int) -> bool:
        keys = [f"{self._starts[shard]}m"]
        return bool(await self._functions.call("headrace_feed_noted_v2", keys, [field, run, swept]))

    async def _put_in_parts(self, shard: int, whole: Change) -> tuple[str, int]:
        start = self._starts[shard]
        keys = [f"{start}p:{whole.entity}", f"{start}m"]
        told = ("ok", 0)
        for part in parts_of(whole):
            arguments: list[Any] = [whole.entity, whole.version, part.first, part.last]
            arguments.append(int(part.last == SCORE_MAX))
            for score, post in part.posts:
                arguments += (score, post)
            told = await self._bring("headrace_feed_put_posts_part_v2", shard, keys, arguments)
            if told[0] != "ok":
                break
        return told

    async def _send(self, function: str, shard: int, change: Change) -> tuple[str, int]:
        start = self._starts[shard]
        arguments: list[Any] = [change.entity, change.version]
        if change.kind is Kind.FOLLOWS:
            arguments.append(change.entity % VERSION_SLOTS)
        for item, score in zip(change.items, change.scores, strict=True):
            arguments += (score, item)
        letter = "p" if change.kind is Kind.POSTS else "f"
        keys = [f"{start}{letter}:{change.entity}", f"{start}m"]
        return await self._bring(function, shard, keys, arguments)

    async def _bring(
        self, function: str, shard: int, keys: list[str], arguments: list[Any]
    ) -> tuple[str, int]:
        """Call a function that changes a shard, then split some of the buckets that became crowded."""
        state, version, *crowded = await self._functions.call(function, keys, arguments)
        if crowded == [1]:
            for _ in range(SPLITS_PER_CHANGE):
                if not await self._split(shard):
                    break
        return state.decode(), version

    async def _split(self, shard: int) -> int:
        """Split one crowded bucket, in 1 to 2 ms of Valkey's time; how many are left."""
        keys = [f"{self._starts[shard]}m"]
        return int(await self._functions.call("headrace_feed_split_v2", keys, []))


class Part(NamedTuple):
    """An author's posts from a score to another, both of them included."""

    first: int
    last: int
    posts: list[tuple[int, str]]


def parts_of(whole: Change) -> Iterator[Part]:
    """An author's posts in parts from the oldest on, which together reach from 0 to the greatest score there is.

    Those of one score are in one part.
    """
    posts = sorted(zip(whole.scores, whole.items, strict=True))
    first = begin = 0
    while begin < len(posts):
        end = begin + POSTS_AT_ONCE
        if end < len(posts):
            end = bisect_right(posts, posts[end - 1][0], key=itemgetter(0))
        last = posts[end - 1][0] if end < len(posts) else SCORE_MAX
        yield Part(first, last, posts[begin:end])
        first, begin = last + 1, end
