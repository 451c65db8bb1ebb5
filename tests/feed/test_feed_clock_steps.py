"""The database's clock is set back and forth, and stands still.

Pages stay what an oracle says, and nothing is left behind.

`now()` of the test's database is a function of its own, found before PostgreSQL's, so every
statement and every function of the product is run as it is, by a clock that the test sets. The
clock of this process is the real one all the while, hours and days away: a moment that was taken
from it would be seen.
"""

from __future__ import annotations

from datetime import timedelta

import asyncpg
import pytest
from feed_world import NOON, History

from headrace.engines.sql import compile_query
from headrace.feed import store
from headrace.feed.model import TICKS, score_of
from headrace.feed.worker import Sweeper
from headrace.testing import drain

STEPPED = """
CREATE SCHEMA stepped;
CREATE TABLE stepped.clock (stands_at timestamptz, ahead interval NOT NULL);
INSERT INTO stepped.clock VALUES (NULL, '0');
CREATE FUNCTION stepped.now() RETURNS timestamptz LANGUAGE sql STABLE AS $$
    SELECT coalesce(c.stands_at, pg_catalog.now() + c.ahead) FROM stepped.clock c
$$;
"""
HOURS = (-30, -2, -1, 0, 1, 3, 50)
YEAR_S = 365 * 86_400.0


class Clock:
    """Sets the clock of this test's database."""

    def __init__(self, connection):
        self._connection = connection

    async def stand(self, moment):
        """It stands still."""
        await self._connection.execute("UPDATE stepped.clock SET stands_at = $1", moment)

    async def go(self, ahead):
        """It goes, so far ahead of the real one."""
        await self._connection.execute(
            "UPDATE stepped.clock SET stands_at = NULL, ahead = $1", ahead
        )


@pytest.fixture
async def clock(database_url):
    """Before anything else connects to the database."""
    connection = await asyncpg.connect(database_url)
    name = await connection.fetchval("SELECT current_database()")
    await connection.execute(STEPPED)
    await connection.execute(f"ALTER DATABASE {name} SET search_path = stepped, pg_catalog, public")
    yield Clock(connection)
    await connection.close()


class SteppedHistory(History):
    """Random writes at moments that repeat, come before earlier ones, or are yet to come."""

    def __init__(self, feed, app, clock, seed, **size):
        super().__init__(feed, seed, **size)
        self.app, self.clock = app, clock
        self.moment = NOON
        self.moments += [NOON + timedelta(hours=hours) for hours in HOURS]
        self.waiting: set[str] = set()
        self.shown_late = 0

    async def step(self):
        """A write, or a step of the clock with whatever falls due by that."""
        if self.random.random() < 0.3:
            self.moment = NOON + timedelta(
                hours=self.random.choice(HOURS), milliseconds=self.random.choice([0, 0, 1, 700])
            )
            await self.clock.stand(self.moment)
            await drain(self.app)
            await self._look_at(sorted(self.waiting))
        else:
            await super().step()

    async def post(self):
        """As all do.

        What has no moment of its own has the clock's, and what is to come is not there yet.
        """
        before = set(self.world.posts)
        await super().post()
        self.waiting |= set(self.world.posts) - before
        await self._look_at(sorted(self.waiting))

    async def _look_at(self, ids):
        """Which of some posts are shown by now; those are where the clock stands."""
        names = ", ".join(f"'{each}'" for each in ["", *ids])
        text = f"-- Posts.\nSELECT * FROM headrace.feed_post WHERE id IN ({names})"
        for row in await self.feed.postgres.all(compile_query("shown", text)):
            score, is_shown = row["score"], row["state"] == 0
            assert is_shown == (row["visible_at"] <= self.moment), "the database's clock decides"
            if not is_shown:
                self.world.posts.pop(row["id"], None)
                continue
            self.shown_late += row["id"] not in self.world.posts
            self.waiting.remove(row["id"])
            self.world.posts[row["id"]] = (score, row["author"])
            if score % TICKS:
                assert score // TICKS == score_of(self.moment) // TICKS, "no other clock is asked"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
async def test_pages_are_right_while_the_clock_steps(clock, make_feed, registry, app, seed):
    await clock.stand(NOON)
    feed = make_feed(shards=2)
    feed.register(registry)
    history = SteppedHistory(feed, app, clock, seed)
    checked = 0
    for _ in range(60):
        await history.step()
        checked += await history.check(8)
    assert checked == 480
    assert history.shown_late > 0, "some waited for their moment"
    assert (await feed.index.verify()).is_equal


async def slow_pages(feed, history):
    """How many first pages PostgreSQL had a part in."""
    return sum([(await feed.page(viewer)).is_slow for viewer in history.viewers])


@pytest.mark.slow
async def test_pages_are_right_after_a_clock_was_months_ahead(clock, make_feed):
    """What it made the index forget is read from the truth, and a rebuild brings it back."""
    feed = make_feed(shards=2, index_for_s=YEAR_S)
    history = History(feed, seed=3)
    for _ in range(20):
        await history.step()
    await clock.go(timedelta(seconds=YEAR_S) + timedelta(days=20))
    await Sweeper(feed).trim()
    for _ in range(2):
        for _ in range(8):
            await history.step()
            await history.check(8)
        await clock.go(timedelta())
    assert await slow_pages(feed, history) > 0
    assert (await feed.index.verify()).is_equal
    await feed.index.rebuild_now(clean=True)
    assert await slow_pages(feed, history) == 0
    await history.check(40)
    assert (await feed.index.verify()).is_equal


async def test_what_a_writer_left_before_a_step_back_is_swept_at_once(feed, sweeper, sql):
    await feed.follow(7, 1)
    await store.post(feed.postgres, ids=["a"], authors=[1], ats=[None], refs=[None])
    await sql("UPDATE headrace.feed_outbox SET made_at = made_at + interval '1 hour'")
    assert await sweeper.run_once() == 1
    assert [post.id for post in (await feed.page(7)).posts] == ["a"]


async def test_what_valkey_lost_after_a_step_back_is_brought_again(feed, sweeper, sql, engines):
    """The change has a higher number and an earlier moment than Valkey's last recorded one."""
    await feed.follow(7, 1)
    await feed.post(1, "a")
    await sweeper.run_once(older_s=0)
    [row] = await sql("SELECT max(id) FROM headrace.feed_outbox")
    await feed.post(1, "b")
    await sql(
        "UPDATE headrace.feed_outbox SET made_at = made_at - interval '5 minutes'"
        f" WHERE id > {row[0]}"
    )
    await sweeper.run_once(older_s=0)
    prefix = f"{engines.valkey.prefix}:{{f:0}}:"
    await engines.valkey.command("ZREM", f"{prefix}p:1", "b")
    await engines.valkey.command("ZADD", f"{prefix}p:1", -1, "")
    await engines.valkey.command("HSET", f"{prefix}m", "run", "the run before", "swept", row[0])
    assert await sweeper.run_once(older_s=0, settle_s=0) == 1
    assert [post.id for post in (await feed.page(7)).posts] == ["b", "a"]
    assert (await feed.index.verify()).is_equal
