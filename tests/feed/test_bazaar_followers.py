"""The demo's followers accept correct feeds and reject a feed with an extra or missing post."""

from __future__ import annotations

import asyncio

import pytest
from examples.bazaar import followers as demo
from examples.bazaar.adverts import Advert
from feed_surfaces import client_of
from tests.kit.waiting import wait_true

SHOPS = ["shop-01", "shop-02"]
ADVERTS = [Advert(shop, f"item{n}", 1, "Sofa", "10", ()) for shop in SHOPS for n in range(15)]


async def follow(engines, feed, shown, until):
    """Let followers read until `until` holds. Return what they found."""
    async with client_of(engines, feed) as client:
        token = client.headers["authorization"].removeprefix("Bearer ")
        followers = demo.Followers(str(client.base_url).rstrip("/"), token, SHOPS)
        reading = asyncio.create_task(followers.run())

        def looked():
            followers.show(shown)
            return until(followers.followed) or reading.done()

        await wait_true(looked, what="they read")
        assert not reading.done()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        return followers.followed


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """No time between the site's table and the feed, and whole feeds at once."""
    monkeypatch.setattr(demo, "GRACE_S", 0.2)
    monkeypatch.setattr(demo, "_WALK_SHARE", 0.6)


@pytest.mark.slow
async def test_feeds_that_are_what_the_site_shows_are_right(engines, feed):
    for advert in ADVERTS:
        await feed.post(advert.shop, demo.post_of(advert.shop, advert.item))
    followed = await follow(engines, feed, ADVERTS, lambda seen: seen.walks > 3 and seen.unfollowed)
    assert followed.faults == []
    assert followed.pages > followed.walks


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["lacks", "has"])
async def test_a_post_that_is_missing_or_too_many_is_seen(engines, feed, wrong):
    shown = ADVERTS if wrong == "lacks" else ADVERTS[:-1]
    posted = ADVERTS[1:] if wrong == "lacks" else ADVERTS
    # Who follows one shop of the two may not see the other's.
    await feed.follow("follower0", SHOPS)
    for advert in posted:
        await feed.post(advert.shop, demo.post_of(advert.shop, advert.item))
    followed = await follow(engines, feed, shown, lambda seen: seen.faults_count > 0)
    assert wrong in followed.faults[0] or "not followed" in followed.faults[0]
