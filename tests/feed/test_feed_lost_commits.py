"""PostgreSQL loses commits that the index has: by a failover, or because old data was restored."""

from __future__ import annotations

import pytest
from feed_world import ids
from tests.kit.own_postgres import OwnPostgres, missing_server
from tests.kit.waiting import wait_true

from headrace.app import PACKAGES
from headrace.engines import Engines
from headrace.engines.migrate import apply_migrations
from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.feed.model import Change, ChangeKind
from headrace.feed.worker import Sweeper

LOST = "z"
"""The ids of posts that will be lost begin with it."""


class OldData:
    """Takes PostgreSQL back to `taken`; its later commits are lost, and their versions free."""

    TABLES = ("feed_post", "feed_follow", "feed_version", "feed_outbox", "feed_id_map")

    def __init__(self, sql):
        self._sql = sql

    async def take(self):
        for table in self.TABLES:
            await self._sql(f"CREATE TABLE headrace.old_{table} AS TABLE headrace.{table}")

    async def put_back(self, *, is_crash):
        """With `is_crash` as a failover or restored files, else as a restored dump."""
        for table in self.TABLES:
            await self._sql(f"DELETE FROM headrace.{table}")
            await self._sql(
                f"INSERT INTO headrace.{table} OVERRIDING SYSTEM VALUE"
                f" SELECT * FROM headrace.old_{table}"
            )
            await self._sql(f"DROP TABLE headrace.old_{table}")
        if is_crash:
            await self._sql("TRUNCATE headrace.feed_epoch")


@pytest.fixture
def old_data(sql):
    return OldData(sql)


async def is_equal(feed):
    """Whether the index equals PostgreSQL, and no build of it runs."""
    states = {shard.state for shard in await feed.index.stats()}
    return states == {"ready"} and (await feed.index.verify()).is_equal


async def lose(feed, old_data, *, lost=3, is_crash=True):
    """Viewer 7 follows 1, 2 and "new"; of 1 and 2 some posts are lost, of "new" all."""
    await feed.follow(7, [1, 2, "new"])
    for author in (1, 2):
        await feed.post(author, f"a{author}")
    await old_data.take()
    await feed.follow(8, [1])
    await feed.follows.unfollow_all(7)
    for number in range(lost):
        for author in (1, 2, "new", 3):
            await feed.post(author, f"{LOST}{author}_{number}")
    await old_data.put_back(is_crash=is_crash)


@pytest.mark.parametrize("is_crash", [True, False])
@pytest.mark.parametrize("shards", [1, 3])
async def test_a_rebuild_removes_what_postgres_lost(make_feed, old_data, shards, is_crash):
    feed = make_feed(shards=shards)
    await lose(feed, old_data, is_crash=is_crash)
    assert not await is_equal(feed)
    await feed.index.rebuild_now()
    assert await is_equal(feed)
    assert await ids(feed, 7) == ["a2", "a1"]
    assert await ids(feed, 8) == []
    for author in (1, 2, 3):
        await feed.post(author, f"b{author}")
    await feed.follow(8, [3])
    assert (await ids(feed, 7), await ids(feed, 8)) == (["b2", "b1", "a2", "a1"], ["b3"])
    assert await is_equal(feed)


@pytest.mark.parametrize("lost", [1, 3])
async def test_after_a_failover_a_new_post_is_visible_at_once(feed, old_data, lost):
    """It has the same number as a lost one, and replaces all lost posts of its author."""
    await feed.post(1, "first")
    await lose(feed, old_data, lost=lost)
    await feed.post(1, "b1")
    await feed.follow(7, [3])
    page = await ids(feed, 7)
    assert [post for post in page if post in {"first", "a1", "b1"}] == ["b1", "a1", "first"]
    assert not [post for post in page if post.startswith(f"{LOST}1")]


async def test_after_a_failover_the_sweep_rebuilds_the_index(feed, sweeper, old_data):
    await lose(feed, old_data)
    assert [shard.state for shard in await feed.index.stats()] == ["ahead"]
    await sweeper.run_once(older_s=0)
    await wait_true(lambda: is_equal(feed), what="the index equals PostgreSQL")
    assert await ids(feed, 7) == ["a2", "a1"]


async def test_a_delayed_change_of_the_lost_history_does_not_win(feed, old_data):
    """Its process committed it before the loss and sends it after newer ones."""
    await lose(feed, old_data, lost=1)
    await feed.post(1, "b1")
    [has] = {(await feed.valkey.posts(0, 1))[0]}
    for version in (2, 3, 4):
        change = Change(ChangeKind.POSTS, 1, version, [f"{LOST}late"], [2**52])
        assert await feed.index.applier.apply_or_defer([change])
    assert (await feed.valkey.posts(0, 1))[0] == has
    assert f"{LOST}late" not in await ids(feed, 7)


async def test_a_change_of_a_lost_author_empties_the_index(feed, old_data):
    await lose(feed, old_data, lost=2)
    assert await feed.index.applier.apply_or_defer(
        [Change(ChangeKind.POSTS, 3, 9, [f"{LOST}late"], [2**52])]
    )
    assert (await feed.valkey.posts(0, 3))[2] == {}


async def test_after_a_restored_dump_the_sweep_notices_a_reused_version(feed, sweeper, old_data):
    await lose(feed, old_data, is_crash=False)
    await feed.post(1, "b1")
    assert await ids(feed, 7) != ["b1", "a2", "a1"]
    await sweeper.run_once(older_s=0)
    await sweeper.run_once(older_s=0)
    await wait_true(lambda: is_equal(feed), what="the index equals PostgreSQL")
    assert await ids(feed, 7) == ["b1", "a2", "a1"]


async def test_a_large_index_is_rebuilt_by_a_job(feed, sweeper, old_data, sql):
    await lose(feed, old_data)
    await sql("INSERT INTO headrace.feed_version SELECT 1, n, 1 FROM generate_series(10, 1100) n")
    await sweeper.run_once(older_s=0)

    async def is_enqueued():
        [row] = await sql("SELECT count(*) FROM headrace.job_ready")
        return row[0] == 1

    await wait_true(is_enqueued, what="the job")
    assert not (await feed.page(7)).is_slow


@pytest.mark.slow
@pytest.mark.skipif(missing_server("18") is not None, reason=str(missing_server("18")))
async def test_a_failover_to_a_standby_without_the_last_commits(servers_folder, make_feed, engines):
    """The standby stops, two posts are made, the primary is killed, and the standby promoted."""
    primary = OwnPostgres(servers_folder / "p", "18")
    standby = OwnPostgres(servers_folder / "s", "18")
    await primary.make()
    await primary.start()
    try:
        before = Postgres(primary.url, PostgresConfig())
        await apply_migrations(before, PACKAGES)
        feed = make_feed(engines=_with_postgres(engines, before))
        await feed.follow(7, [1, 2])
        for author in (1, 2):
            await feed.post(author, f"a{author}")
        await standby.copy(primary, name="standby")
        for author in (1, 2):
            await feed.post(author, f"{LOST}{author}")
        await before.close()
        primary.kill()
        await standby.start()
        standby.run("pg_ctl", "promote", "-D", standby.data)
        after = Postgres(standby.url, PostgresConfig())
        feed = make_feed(engines=_with_postgres(engines, after))
        assert [shard.state for shard in await feed.index.stats()] == ["ahead"]
        await feed.post(1, "b1")
        assert await ids(feed, 7) == ["b1", f"{LOST}2", "a2", "a1"]
        await Sweeper(feed).run_once(older_s=0)
        await wait_true(lambda: is_equal(feed), what="the index equals PostgreSQL")
        assert await ids(feed, 7) == ["b1", "a2", "a1"]
        await after.close()
    finally:
        primary.end()
        standby.end()


def _with_postgres(engines, postgres):
    return Engines(postgres, engines.valkey, engines.multiplexer, engines.blobs)
