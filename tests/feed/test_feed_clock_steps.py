"""Pages equal an oracle while the database's clock steps back and forth, or does not move.

`now()` of the test's database is a function that shadows PostgreSQL's, so every statement of the
product uses a clock that the test sets. The clock of this process is hours or days away, so a time
taken from it would be detected.
"""

from __future__ import annotations

from datetime import timedelta

import asyncpg
import pytest
from feed_world import NOON, History

from headrace.engines.sql import compile_query
from headrace.feed.model import TICKS, score_of
from headrace.feed.worker import Sweeper
from headrace.testing import drain

STEPPED = """
CREATE SCHEMA stepped;
CREATE TABLE stepped.clock (stopped_at timestamptz, ahead interval NOT NULL);
INSERT INTO stepped.clock VALUES (NULL, '0');
CREATE FUNCTION stepped.now() RETURNS timestamptz LANGUAGE sql STABLE AS $$
    SELECT coalesce(c.stopped_at, pg_catalog.now() + c.ahead) FROM stepped.clock c
$$;
"""
HOURS = (-30, -2, -1, 0, 1, 3, 50)
YEAR_S = 365 * 86_400.0


class Clock:
    """Sets the clock of this test's database."""

    def __init__(self, connection):
        self._connection = connection

    async def stop_at(self, moment):
        """Stop at a moment."""
        await self._connection.execute("UPDATE stepped.clock SET stopped_at = $1", moment)

    async def run_ahead(self, ahead):
        """Run ahead of the real clock."""
        await self._connection.execute(
            "UPDATE stepped.clock SET stopped_at = NULL, ahead = $1", ahead
        )


@pytest.fixture
async def clock(database_url):
    """The clock, installed before any other connection."""
    connection = await asyncpg.connect(database_url)
    name = await connection.fetchval("SELECT current_database()")
    await connection.execute(STEPPED)
    await connection.execute(f"ALTER DATABASE {name} SET search_path = stepped, pg_catalog, public")
    yield Clock(connection)
    await connection.close()


class SteppedHistory(History):
    """Random writes at moments that repeat, precede earlier ones, or are in the future."""

    def __init__(self, feed, app, clock, seed, **size):
        super().__init__(feed, seed, **size)
        self.app, self.clock = app, clock
        self.moment = NOON
        self.moments += [NOON + timedelta(hours=hours) for hours in HOURS]
        self.waiting: set[str] = set()
        self.shown_late = 0

    async def step(self):
        """Write, or step the clock and run the jobs that are due."""
        if self.random.random() < 0.3:
            self.moment = NOON + timedelta(
                hours=self.random.choice(HOURS), milliseconds=self.random.choice([0, 0, 1, 700])
            )
            await self.clock.stop_at(self.moment)
            await drain(self.app)
            await self._note_visible(sorted(self.waiting))
        else:
            await super().step()

    async def post(self):
        """Add posts; those without a time get the clock's, and future ones are not visible."""
        before = set(self.world.posts)
        await super().post()
        self.waiting |= set(self.world.posts) - before
        await self._note_visible(sorted(self.waiting))

    async def _note_visible(self, ids):
        """Move posts that have become visible to the oracle."""
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
                assert score // TICKS == score_of(self.moment) // TICKS, "no other clock is used"


@pytest.mark.slow
async def test_pages_are_right_while_the_clock_steps(clock, make_feed, registry, app):
    await clock.stop_at(NOON)
    feed = make_feed(shards=2)
    feed.register(registry)
    history = SteppedHistory(feed, app, clock, seed=1)
    checked = 0
    for _ in range(60):
        await history.step()
        checked += await history.check(8)
    assert checked == 480
    assert history.shown_late > 0, "some posts were scheduled"
    assert (await feed.index.verify()).is_equal


async def slow_pages(feed, history):
    """Number of first pages read partly from PostgreSQL."""
    return sum([(await feed.page(viewer)).is_slow for viewer in history.viewers])


@pytest.mark.slow
async def test_pages_are_right_after_a_clock_was_months_ahead(clock, make_feed):
    """Posts trimmed from the index are read from PostgreSQL, until a rebuild."""
    feed = make_feed(shards=2, index_for_s=YEAR_S)
    history = History(feed, seed=3)
    for _ in range(20):
        await history.step()
    await clock.run_ahead(timedelta(seconds=YEAR_S) + timedelta(days=20))
    await Sweeper(feed).trim()
    for _ in range(2):
        for _ in range(8):
            await history.step()
            await history.check(8)
        await clock.run_ahead(timedelta())
    assert await slow_pages(feed, history) > 0
    assert (await feed.index.verify()).is_equal
    await feed.index.rebuild_now(clean=True)
    assert await slow_pages(feed, history) == 0
    await history.check(40)
    assert (await feed.index.verify()).is_equal
