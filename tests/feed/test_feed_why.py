"""Why a viewer sees a post or not: every reason at once, also where index and truth differ."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from headrace.feed import store
from headrace.feed.errors import InvalidFeedId


async def codes(feed, viewer, post):
    """Whether it is shown, and the reasons."""
    why = await feed.pages.why(viewer, post)
    return why.is_shown, [reason.code for reason in why.reasons]


async def test_every_reason_that_keeps_a_post_away_is_told_at_once(feed):
    later = datetime.now(UTC) + timedelta(hours=1)
    await feed.post(1, "later", at=later)
    await feed.follows.mute(7, 1)
    await feed.follows.block(7, 1)
    await feed.follows.block(1, 7)
    is_shown, found = await codes(feed, 7, "later")
    assert not is_shown
    assert found == ["waits", "not_followed", "muted", "blocked", "blocked_by_author"]
    why = await feed.pages.why(7, "later")
    assert why.reasons[0].at == why.at
    assert all(reason.at for reason in why.reasons if reason.code != "not_followed")


async def test_the_post_itself_is_found_among_those_of_its_moment(feed):
    moment = datetime(2026, 11, 1, 10, tzinfo=UTC)
    await feed.follow(7, [1, 2])
    for author, post in ((1, "a"), (2, "a-"), (1, "aa"), (2, "b")):
        await feed.post(author, post, at=moment)
    for post in ("a", "a-", "aa", "b"):
        assert await codes(feed, 7, post) == (True, ["followed"])


async def test_an_index_that_lacks_a_change_is_told(feed, sweeper):
    await feed.index.ready()
    await feed.post(1, "a")
    await store.follow(feed.postgres, 7, [1], ats=[None], follows_max=10)
    assert await codes(feed, 7, "a") == (False, ["index_behind"])
    await sweeper.run_once(older_s=0)
    assert await codes(feed, 7, "a") == (True, ["followed"])
    await store.delete_posts(feed.postgres, ["a"])
    assert await codes(feed, 7, "a") == (False, ["unknown"])


async def test_an_index_that_shows_too_much_is_told(feed):
    await feed.post(1, "a")
    await feed.follow(7, 1)
    await store.unfollow(feed.postgres, 7, [1])
    assert await codes(feed, 7, "a") == (True, ["not_followed", "index_behind"])


async def test_without_an_index_it_is_asked_of_postgresql_and_says_so(feed, engines):
    await feed.follow(7, 1)
    await feed.post(1, "a")
    await engines.valkey.command("DEL", f"{engines.valkey.prefix}:{{f:0}}:m")
    why = await feed.pages.why(7, "a")
    assert (why.is_shown, why.is_slow) == (True, True)


@pytest.mark.parametrize(("viewer", "post"), [("b b", "a"), (7, "a b"), (7, "x" * 65)])
async def test_ids_that_mean_nothing_are_refused(feed, viewer, post):
    with pytest.raises(InvalidFeedId):
        await feed.pages.why(viewer, post)
