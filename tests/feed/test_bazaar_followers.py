"""The demo's followers accept correct feeds and reject a feed with an extra or missing post."""

from __future__ import annotations

import asyncio

import pytest
from examples.bazaar import followers as demo
from examples.bazaar.adverts import Advert
from examples.bazaar.client import Client, Reply
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
    for advert in posted:
        await feed.post(advert.shop, demo.post_of(advert.shop, advert.item))
    followed = await follow(engines, feed, shown, lambda seen: seen.faults_count > 0)
    text = "is missing 1 post" if wrong == "lacks" else "has 1 post"
    assert text in followed.faults[0]


class FailingClient(Client):
    """A client whose changes of follows fail in turn: refused before, or done without a reply."""

    is_done: bool = False
    failures: int = 0
    is_next: bool = False

    async def request(self, method, path, **given):
        """Fail every other change."""
        if method in ("PUT", "DELETE"):
            FailingClient.is_next = not FailingClient.is_next
            if FailingClient.is_next:
                FailingClient.failures += 1
                if self.is_done:
                    await super().request(method, path, **given)
                return Reply(503, {}, b"PostgreSQL is down")
        return await super().request(method, path, **given)


@pytest.mark.slow
@pytest.mark.parametrize("is_done", [False, True], ids=["refused", "done without a reply"])
async def test_a_failed_change_of_follows_may_be_done_or_not(engines, feed, monkeypatch, is_done):
    monkeypatch.setattr(demo, "_UNFOLLOW_SHARE", 0.3)
    monkeypatch.setattr(demo, "Client", FailingClient)
    monkeypatch.setattr(FailingClient, "is_done", is_done)
    monkeypatch.setattr(FailingClient, "failures", 0)
    for advert in ADVERTS:
        await feed.post(advert.shop, demo.post_of(advert.shop, advert.item))
    followed = await follow(
        engines, feed, ADVERTS, lambda seen: seen.walks > 3 and FailingClient.failures > 6
    )
    assert [text for text in followed.faults if "wrong answer" in text] == []
    assert sum("status 503" in text for text in followed.faults) > 3
