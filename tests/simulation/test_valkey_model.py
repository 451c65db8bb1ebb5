"""The model of Valkey gives the replies of a real server, to commands and to both libraries."""

from __future__ import annotations

import random
from itertools import count

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.simulation.both import Both
from verification.simulation.valkey import SimulatedValkey, ValkeyModel
from verification.simulation.valkey_data import Data
from verification.simulation.valkey_values import ErrorReply
from verification.simulation.world import World

from headrace.engines.multiplex import Multiplexer
from headrace.engines.valkey import ValkeyConfig, ValkeyDown
from headrace.feed.model import Change, ChangeKind, Position
from headrace.feed.valkey_store import ValkeyStore as FeedStore
from headrace.views.model import Correction
from headrace.views.valkey_store import ValkeyStore as ViewsStore

few = settings(
    max_examples=4,
    phases=[Phase.generate],
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
keys = st.sampled_from([b"a", b"b", b"c"])
names = st.sampled_from([b"x", b"y", b"z"])
numbers = st.integers(-3, 9).map(lambda n: b"%d" % n)
limits = st.sampled_from([b"-inf", b"+inf", b"(2", b"3", b"0", b"(7"])
ids = st.builds(lambda ms, n: b"%d-%d" % (ms, n), st.integers(1, 5), st.integers(0, 3))
UNORDERED = {b"SMEMBERS", b"SINTER", b"SRANDMEMBER"}
COMMANDS = st.one_of(
    st.tuples(st.sampled_from([b"GET", b"DEL", b"EXISTS", b"SCARD", b"SMEMBERS"]), keys),
    st.tuples(st.just(b"SET"), keys, numbers),
    st.tuples(st.just(b"SET"), keys, names, st.just(b"NX"), st.just(b"EX"), st.just(b"90")),
    st.tuples(st.just(b"INCRBY"), keys, numbers),
    st.tuples(st.just(b"MSET"), keys, numbers, keys, numbers),
    st.tuples(st.just(b"MGET"), keys, keys),
    st.tuples(st.just(b"RENAME"), keys, keys),
    st.tuples(st.sampled_from([b"HSET", b"HSETNX"]), keys, names, numbers),
    st.tuples(st.sampled_from([b"HGET", b"HDEL", b"HMGET"]), keys, names),
    st.tuples(st.sampled_from([b"SADD", b"SREM", b"SISMEMBER"]), keys, names),
    st.tuples(st.just(b"SINTER"), keys, keys),
    st.tuples(st.just(b"SINTERCARD"), st.just(b"2"), keys, keys, st.just(b"LIMIT"), st.just(b"2")),
    st.tuples(st.just(b"SRANDMEMBER"), keys, st.just(b"9")),
    st.tuples(st.just(b"ZADD"), keys, numbers, names),
    st.tuples(st.sampled_from([b"ZREM", b"ZSCORE"]), keys, names),
    st.tuples(st.sampled_from([b"ZCOUNT", b"ZREMRANGEBYSCORE"]), keys, limits, limits),
    st.tuples(st.just(b"ZRANGE"), keys, numbers, numbers, st.just(b"REV")),
    st.tuples(
        st.just(b"ZRANGE"), keys, limits, limits, st.just(b"BYSCORE"), st.just(b"REV"),
        st.just(b"LIMIT"), st.just(b"0"), numbers, st.just(b"WITHSCORES"),
    ),
    st.tuples(st.just(b"XADD"), keys, ids, st.just(b"v"), names),
    st.tuples(st.just(b"XADD"), keys, st.just(b"NOMKSTREAM"), ids, st.just(b"v"), names),
    st.tuples(st.just(b"XADD"), keys, st.just(b"5-*"), st.just(b"v"), names),
    st.tuples(st.just(b"XDEL"), keys, ids),
    st.tuples(st.just(b"XTRIM"), keys, st.just(b"MINID"), ids),
    st.tuples(st.just(b"XRANGE"), keys, st.one_of(ids, ids.map(b"(".__add__)), ids),
    st.tuples(st.just(b"XREVRANGE"), keys, st.just(b"+"), st.just(b"-"), st.just(b"COUNT"),
              st.just(b"1")),
    st.tuples(st.just(b"PFADD"), keys, names),
    st.tuples(st.just(b"PFCOUNT"), keys),
)  # fmt: skip
FRESH = count()
KEYS_OF = {b"SINTERCARD": (2, 3), b"MSET": (1, 3), b"MGET": (1, 2), b"SINTER": (1, 2)}


@few
@given(st.lists(COMMANDS, min_size=20, max_size=80))
async def test_commands_reply_as_the_server_does(valkey, calls):
    prefix = f"{valkey.prefix}:{{{next(FRESH)}}}:".encode()
    data = Data(lambda: 1_700_000_000_000, random.Random(1))
    for words in calls:
        places = KEYS_OF.get(words[0], (1, 2) if words[0] == b"RENAME" else (1,))
        own = [prefix + word if at in places else word for at, word in enumerate(words)]
        is_sketch_text = words[0] == b"GET" and type(data.keys.get(words[1])) not in (bytes, None)
        if is_sketch_text:
            continue
        assert _model(data, words) == await _server(valkey, own), words


def _model(data, words):
    try:
        reply = data.execute(list(words))
    except ErrorReply as error:
        return str(error).split(" ", 1)[0]
    return _comparable(words, reply)


async def _server(valkey, words):
    try:
        reply = await valkey.command(*words)
    except ValkeyDown as error:
        text = str(error.__cause__)
        # valkey-py drops the word ERR.
        return "WRONGTYPE" if text.startswith("WRONGTYPE") else "ERR"
    return _comparable(words, reply)


def _comparable(words, reply):
    if words[0] in UNORDERED and isinstance(reply, list | set):
        return sorted(reply)
    if words[0] in (b"SET", b"MSET", b"RENAME"):
        return reply in (True, b"OK")
    if words[0] == b"ZSCORE" and reply is not None:
        return float(reply)
    if words[0] in (b"SISMEMBER", b"HSETNX", b"EXPIRE"):
        return int(reply)
    if words[0] == b"ZRANGE" and reply and isinstance(reply[0], tuple):
        return [word for member, score in reply for word in (member, b"%d" % score)]
    return _listed(reply)


def _listed(reply):
    return [_listed(each) for each in reply] if isinstance(reply, list | tuple) else reply


# Libraries

entities = st.sampled_from(["ad:1", "ad:2", "ad:3"])
lines = st.builds(
    lambda entity, mark, event, viewer: entity + mark + event + viewer,
    entities,
    st.sampled_from(["", "", "*5", "/b", "*2/o"]),
    st.sampled_from(["", "!e1", "!e2"]),
    st.sampled_from(["", "=u1", "=u2"]),
)
VIEWS_CALLS = st.one_of(
    st.tuples(st.just("hit"), st.lists(st.one_of(entities, lines), min_size=1, max_size=4)),
    st.tuples(st.just("fill"), st.integers(0, 4), entities, st.integers(0, 9)),
    st.tuples(st.just("init"), st.integers(0, 4)),
    st.tuples(st.just("pending"), st.integers(0, 4)),
    st.tuples(st.just("flushed"), st.integers(0, 4)),
    st.tuples(
        st.just("correct"),
        st.integers(-2, 1),
        st.lists(st.tuples(entities, st.booleans()), min_size=1, max_size=3),
    ),
    st.tuples(st.just("reset"), st.integers(-1, 1)),
    st.tuples(
        st.just("corrections"),
    ),
    st.tuples(st.just("deleted"), st.just("ad:3")),
    st.tuples(
        st.just("drop"),
    ),
    st.tuples(st.just("unflushed"), st.lists(entities, min_size=1)),
    st.tuples(st.just("lag"), st.integers(0, 4)),
)


class ViewsCalls:
    """Calls of the library of views, with ids of entries and corrections by their number."""

    def __init__(self, store):
        self._store, self._ids, self._last = store, ["0-1"], 0

    def _number(self, entry):
        if entry and entry not in self._ids:
            self._ids.append(entry)
        return self._ids.index(entry) if entry else entry

    async def __call__(self, verb, *rest):  # noqa: C901, PLR0911 - a result per call
        store, known = self._store, self._ids
        through = known[-1 - rest[0] % len(known)] if rest and type(rest[0]) is int else "0-1"
        if verb == "hit":
            found = await store.hit(0, rest[0], floor_ms="0", offset_s=0)
            return self._number(found.entry), found.totals
        if verb == "fill":
            totals = [(rest[1], rest[2])]
            return await store.fill(0, through=through, corrections=99, totals=totals)
        if verb == "init":
            start = await store.start(0)
            return await store.init(0, start=start, through=through, corrections=0, shards=1)
        if verb == "pending":
            found = await store.pending(0, through=through, entries_max=50)
            rows = [(self._number(entry), hits) for entry, hits in found.rows]
            return found.has_anchor, self._number(found.last), found.is_cut, rows
        if verb == "flushed":
            return await store.note_flushed(0, through=through, trim_to=None)
        if verb == "correct":
            return await self._correct(*rest)
        if verb == "reset":
            found = self._last + rest[0]
            return await store.reset_corrections(0, found=found, stored=found - 1)
        if verb == "corrections":
            return await store.corrections(0)
        if verb == "deleted":
            return await store.mark_deleted(0, [rest[0]])
        if verb == "drop":
            return await store.drop_totals([0])
        if verb == "unflushed":
            return await store.unflushed(0, rest[0])
        return (await store.lag(0, through))[0]

    async def _correct(self, off, entities):
        first = max(1, self._last + 1 + off)
        corrections = [Correction(n, *each) for n, each in enumerate(entities, first)]
        self._last = corrections[-1].number
        return await self._store.correct(0, corrections, after=first - 1)


people = st.integers(1, 4)
posts = st.sampled_from(["p1", "p2\x1fphoto", "p3", "p4"])
scores = st.one_of(st.just(-1), st.integers(0, 40).map(lambda n: 3_600_000_000_000 + n * 2**27))
FEED_CALLS = st.one_of(
    st.tuples(st.just("posts"), people, st.integers(0, 2), st.lists(st.tuples(posts, scores))),
    st.tuples(st.just("follows"), people, st.integers(0, 2), st.lists(people)),
    st.tuples(st.just("put"), people, st.lists(st.tuples(posts, scores), max_size=3)),
    st.tuples(st.just("page"), people, st.integers(1, 5), st.one_of(st.none(), scores)),
    st.tuples(st.just("stored"), people),
    st.tuples(st.just("trim"), st.integers(0, 3)),
)


class FeedCalls:
    """Calls of the library of the feed; versions follow those of the last call, with a gap."""

    def __init__(self, store):
        self._store, self._versions = store, {}

    async def __call__(self, verb, *rest):
        store = self._store
        await store.begin(0, "token", floor=0, fine=0, swept=0)
        await store.finish(0, "token")
        await self._note_run()
        if verb in ("posts", "put"):
            who, skipped, items = rest if verb == "posts" else (rest[0], 1, rest[1])
            unique = dict(items) if verb == "posts" else {i: s for i, s in items if s >= 0}
            kind, words = ChangeKind.POSTS, (list(unique), list(unique.values()))
        elif verb == "follows":
            who, skipped, authors = rest
            texts = [str(author) for author in dict.fromkeys(authors)]
            kind, words = ChangeKind.FOLLOWS, (texts, [0] * len(texts))
        elif verb == "page":
            before = None if rest[2] is None else Position(rest[2], "p2")
            found = await store.page(rest[0], limit=rest[1], before=before, after=None)
            return None if found is None else (found.floor, found.posts)
        elif verb == "stored":
            return await store.posts(0, rest[0]), await store.follows(rest[0])
        else:
            floor = rest[0] * 2**27 * 64
            return await store.trim(0, floor=floor, fine=floor, buckets_max=100)
        version = self._versions.get((kind, who), 0) + skipped
        call = store.put if verb == "put" else store.change
        reply = await call(0, Change(kind, who, version, *words))
        if reply[0] == "ok":
            self._versions[kind, who] = version
        return reply

    async def _note_run(self):
        status = await self._store.status(0)
        if status.state == "ready":
            await self._store.note(0, "run", run=status.server_run, swept=0)


@few
@given(
    st.lists(VIEWS_CALLS, min_size=10, max_size=40), st.lists(FEED_CALLS, min_size=10, max_size=40)
)
async def test_libraries_reply_as_on_the_server(running_engines, valkey, views_calls, feed_calls):
    config = ValkeyConfig(prefix=f"{valkey.prefix}-{next(FRESH)}")
    real = Multiplexer(running_engines.endpoints.valkey_url, config)
    world = World(1)
    model = ValkeyModel(world)
    handle = SimulatedValkey(model, config.prefix)

    def stores(multiplexer):
        return (
            ViewsCalls(ViewsStore(handle, multiplexer)),
            FeedCalls(FeedStore(handle, multiplexer, 1)),
        )

    both = Both(world)
    modelled, real_calls = stores(Multiplexer(model.url, config)), stores(real)
    try:
        for at, calls in enumerate((views_calls, feed_calls)):
            await both.compare(real_calls[at], modelled[at], calls)
    finally:
        await real.close()
