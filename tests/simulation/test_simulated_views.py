"""The models of the SQL of views and of the feed give the results of the real statements."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.simulation.both import Both
from verification.simulation.feed_sql import FeedTables
from verification.simulation.postgres import PostgresModel
from verification.simulation.postgres_client import SimulatedPostgres
from verification.simulation.views_sql import ViewsTables
from verification.simulation.world import World

from headrace.engines.sql import compile_query
from headrace.feed import store as feed_store
from headrace.feed.model import Change, ChangeKind, MuteOrBlock, Position
from headrace.views import store as views_store
from headrace.views.model import Count, Reclassify, Traffic

few = settings(
    max_examples=4,
    phases=[Phase.generate],
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
HOUR = 490_000
A_DAY_S = 86_400.0
"""Longer than any pause between two calls on the real engine, whose clock is not simulated."""
EMPTY = compile_query(
    "empty",
    "-- Empty all tables.\nTRUNCATE headrace.views_shard, headrace.views_lease,"
    " headrace.views_correction, headrace.views_flusher, headrace.views_total,"
    " headrace.views_hour, headrace.views_tombstone,"
    " headrace.feed_post, headrace.feed_follow, headrace.feed_mute_block, headrace.feed_version,"
    " headrace.feed_outbox, headrace.feed_index RESTART IDENTITY CASCADE",
)
entities = st.sampled_from(["ad:1", "ad:2", "ad:3"])
counts = st.builds(
    Count,
    entities,
    st.integers(0, 1),
    st.integers(HOUR, HOUR + 2),
    st.integers(1, 9),
    st.just(""),
)
# A flush has one count per entity, class and hour.
batches = st.lists(counts, max_size=4, unique_by=lambda one: (one.id, one.traffic, one.hour))
VIEWS_CALLS = st.one_of(
    st.tuples(st.just("flush"), st.integers(0, 1), st.integers(0, 1), batches),
    st.tuples(st.just("corrections"), st.integers(0, 3), st.integers(1, 3)),
    st.tuples(st.just("drop_corrections"), st.integers(0, 3)),
    st.tuples(st.just("set_up"), st.integers(0, 1), st.booleans()),
    st.tuples(st.just("lease"), st.sampled_from(["f1", "f2"])),
    st.tuples(st.just("leave"), st.sampled_from(["f1", "f2"])),
    st.tuples(st.just("fill"), st.lists(entities, unique=True)),
    st.tuples(st.just("totals"), st.lists(entities, unique=True)),
    st.tuples(st.just("delete"), st.just("ad:3")),
    st.tuples(st.just("move"), entities, st.booleans(), st.integers(HOUR, HOUR + 2)),
    st.tuples(
        st.just("state"),
    ),
)


class ViewsCalls:
    """Calls of the store of views; a flush starts at the offset or at another one.

    The set-up of its shard may be unknown to it.
    """

    def __init__(self, runner):
        self._runner, self._ends, self._setups = runner, {0: 1, 1: 1}, {0: 0, 1: 0}

    async def __call__(self, verb, *rest):  # noqa: C901, PLR0911 - a result per call
        runner = self._runner
        await views_store.ensure_shards(runner, 2)
        if verb == "flush":
            shard, off, rows = rest
            end = self._ends[shard]
            dead = await views_store.flush(
                runner,
                shard,
                setups=self._setups[shard],
                from_id=f"0-{end + off}",
                to_id=f"0-{end + 1}",
                counts=rows,
            )
            self._ends[shard] += dead is not None
            return sorted(dead) if dead is not None else None
        if verb == "set_up":
            shard, is_noted = rest
            found = await views_store.begin_set_up(runner, shard)
            if is_noted:
                self._setups[shard] = found.setups
            return found
        if verb == "lease":
            return sorted(await views_store.lease_shards(runner, rest[0], lease_s=A_DAY_S), key=str)
        if verb == "leave":
            return await views_store.leave_shards(runner, rest[0])
        if verb == "fill":
            found = await views_store.totals_to_fill(runner, rest[0], [0] * len(rest[0]))
            return sorted(found, key=str)
        if verb == "totals":
            return await views_store.totals(runner, rest[0])
        if verb == "delete":
            deleted, number = await views_store.delete(runner, rest[0], 0, shards=2, kept_s=A_DAY_S)
            return deleted.total, number
        if verb == "corrections":
            return await views_store.corrections(runner, 0, since=rest[0], rows_max=rest[1])
        if verb == "drop_corrections":
            return await views_store.drop_corrections(runner, kept_s=0, rows_max=rest[0])
        if verb == "move":
            source, target = (Traffic.HUMAN, Traffic.BOT)[:: 1 if rest[1] else -1]
            from_at = datetime.fromtimestamp(rest[2] * 3600, UTC)
            request = Reclassify(
                id=rest[0],
                from_at=from_at,
                to_at=from_at + timedelta(hours=1),
                source=source,
                target=target,
            )
            return await views_store.reclassify(runner, request, 0, shards=2)
        shards = await views_store.all_shards(runner)
        return shards, await views_store.differences(runner, rows_max=9)


people = st.integers(1, 4)
several = st.lists(people, min_size=1, max_size=3)
posts = st.sampled_from(["p1", "p2", "p3", "p4", "p5"])
FEED_CALLS = st.one_of(
    st.tuples(st.just("post"), st.lists(posts, min_size=1, unique=True), people, st.booleans()),
    st.tuples(st.just("delete"), st.lists(posts, min_size=1, unique=True)),
    st.tuples(st.just("follow"), people, several, st.sampled_from([3, 9])),
    st.tuples(st.just("unfollow"), people, several),
    st.tuples(st.just("unfollow_all"), people),
    st.tuples(st.just("hide"), people, several, st.sampled_from(list(MuteOrBlock)), st.booleans()),
    st.tuples(st.just("page"), people, st.integers(1, 5)),
    st.tuples(st.just("sweep"), st.integers(1, 4)),
    st.tuples(st.just("recover"), st.integers(0, 9)),
    st.tuples(
        st.just("purge"),
    ),
    st.tuples(st.just("after"), st.sampled_from(list(ChangeKind)), people, st.integers(0, 3)),
    st.tuples(st.just("snapshots"), st.sampled_from(list(ChangeKind)), st.booleans()),
)
OLD_AT = datetime(2025, 1, 1, tzinfo=UTC)


class FeedCalls:
    """Calls of the store of the feed, with scores by their order."""

    def __init__(self, runner):
        self._runner, self._scores = runner, {}

    def _plain(self, found):
        """A result without the clock of its server."""
        if isinstance(found, Change):
            pairs = sorted(zip(found.items, map(self._score, found.scores), strict=True))
            return (found.kind, found.entity, found.version, pairs, found.id)
        if isinstance(found, feed_store.Stored):
            score = self._score(found.score)
            return (found.id, found.author, score, found.is_waiting, found.is_new, found.version)
        if isinstance(found, list | tuple):
            return [self._plain(each) for each in found]
        return found

    def _score(self, score):
        return score if score <= 0 else self._scores.setdefault(score, len(self._scores) + 1)

    async def __call__(self, verb, *rest):
        await feed_store.ensure_shards(self._runner, 1)
        return self._plain(await getattr(self, "_" + verb)(self._runner, *rest))

    async def _post(self, runner, names, author, is_old):
        many, at = len(names), OLD_AT if is_old else None
        stored, changes = await feed_store.post(
            runner,
            ids=sorted(names),
            authors=[author] * many,
            ats=[at] * many,
            refs=[None] * many,
            kinds=["photo"] * many,
        )
        return sorted(stored, key=lambda post: post.id), _by_entity(changes)

    async def _delete(self, runner, names):
        gone, changes = await feed_store.delete_posts(runner, names)
        return sorted(gone, key=lambda post: post.id), _by_entity(changes)

    async def _follow(self, runner, viewer, authors, most):
        authors = list(dict.fromkeys(authors))
        ats = [None] * len(authors)
        return await feed_store.follow(runner, viewer, authors, ats=ats, follows_max=most)

    async def _unfollow(self, runner, viewer, authors):
        return await feed_store.unfollow(runner, viewer, list(dict.fromkeys(authors)))

    async def _unfollow_all(self, runner, viewer):
        return await feed_store.unfollow_all(runner, viewer)

    async def _hide(self, runner, viewer, authors, kind, is_set):
        authors = list(dict.fromkeys(authors))
        return await feed_store.mute_block(runner, viewer, authors, kind, is_set=is_set, rows_max=9)

    async def _page(self, runner, viewer, limit):
        rows = await feed_store.page(
            runner, viewer, before=None, after=Position(0, ""), kinds=None, rows_max=limit
        )
        # Old posts share a score.
        return [(self._score(score), name, author, kind) for score, name, author, kind in rows]

    async def _sweep(self, runner, rows_max):
        found = await feed_store.unswept(runner, older_s=0.0, rows_max=rows_max)
        await feed_store.mark_swept(runner, [change.id for change in found])
        return found

    async def _recover(self, runner, swept):
        return await feed_store.mark_unswept(runner, swept=swept, late_s=0.0)

    async def _purge(self, runner):
        return await feed_store.purge_swept(runner, older_s=0.0, rows_max=3), (
            await feed_store.last_purged(runner)
        )

    async def _after(self, runner, kind, entity, version):
        return await feed_store.changes_after(runner, kind, entity, version=version)

    async def _snapshots(self, runner, kind, is_new):
        entities = await feed_store.entities_after(runner, kind, after=0, rows_max=9)
        floor = 1_750_000_000_000 * 2048 if is_new else 0
        found = await feed_store.snapshots(runner, kind, entities, floor=floor)
        return _by_entity(found)


def _by_entity(changes):
    return sorted(changes, key=lambda change: change.entity)


@few
@given(
    st.lists(VIEWS_CALLS, min_size=10, max_size=30), st.lists(FEED_CALLS, min_size=15, max_size=50)
)
async def test_statements_return_what_postgresql_returns(postgres, views_calls, feed_calls):
    await postgres.run(EMPTY)
    world = World(1)
    model = PostgresModel(world)
    ViewsTables(model), FeedTables(model)
    modelled, both = SimulatedPostgres(model), Both(world)
    for kind, calls in ((ViewsCalls, views_calls), (FeedCalls, feed_calls)):
        await both.compare(kind(postgres), kind(modelled), calls)
