"""Views and feeds: screens match the API, and forms have their effects."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from console_stack import act
from hostile import TEXT
from tests.kit.waiting import wait_true

pytestmark = pytest.mark.slow


async def test_top_list_and_entity_match_the_counts(screen, stack):
    await screen.open("/console/views?limit=20")
    top = stack.call("GET", "/v1/views/top?window=24h&limit=20")
    first = await screen.page.locator("tbody tr").first.inner_text()
    assert top[0]["id"] in first
    assert f"{top[0]['views']:,}" in first
    await screen.open("/console/views?class=bot")
    assert await screen.page.locator("tbody tr").count() == 1
    await screen.open("/console/views/entity?id=ad%3A39&span=2d")
    text = await screen.text("main")
    assert "118" in await screen.text(".tile:has-text('Views by people')")
    assert "7" in await screen.text(".tile:has-text('By bot')")
    assert "human" in text
    await screen.page.locator("[data-chart=series].drawn canvas").wait_for()


async def test_values_on_an_open_page_update(screen, stack):
    stack.call("POST", "/v1/views/items/ad:live?class=human")
    await screen.open("/console/views/entity?id=ad%3Alive")
    tile = screen.page.locator(".tile:has-text('Views by people') .v")
    assert await tile.inner_text() == "1"
    stack.call("POST", "/v1/views/items/ad:live?n=41&class=human")

    async def is_told():
        return await tile.inner_text() == "42"

    await wait_true(is_told, what="the total follows")


async def test_totals_are_verified_reclassified_and_deleted(screen, stack):
    stack.call("POST", "/v1/views/items/ad:moved?n=9&class=human")
    stack.wait("/v1/views/top?limit=1000", lambda top: any(one["id"] == "ad:moved" for one in top))
    assert "all match their hourly counts" in await act(screen, "views-verify")
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    span = {
        "from": (hour - timedelta(hours=2)).isoformat(),
        "to": (hour + timedelta(hours=2)).isoformat(),
    }
    told = await act(
        screen, "views-reclassify", id="ad:moved", source="human", target="bot", **span
    )
    assert "moves the views" in told
    path = "/v1/views?ids=ad:moved&fields=total,classes"
    stack.wait(path, lambda found: found[0]["classes"].get("bot") == 9)
    assert "9 views" not in await act(screen, "views-delete", id="ad:moved")
    assert stack.call("GET", path)[0]["total"] == 0


async def test_a_feed_is_paged_to_its_end(screen, stack):
    await screen.open("/console/feed?viewer=anna")
    seen = await screen.page.locator(".posts .id").all_inner_texts()
    assert len(seen) == 30
    await screen.press(".pager a[rel=next]")
    seen += await screen.page.locator(".posts .id").all_inner_texts()
    asked = stack.call("GET", "/v1/feed/viewers/anna?limit=200")["posts"]
    assert seen == [post["id"] for post in asked]
    assert not any(one.startswith(("loud", "enemy")) for one in seen)


@pytest.mark.parametrize(
    ("post", "word", "sentence"),
    [
        ("bike-shop-1", "followed", "anna follows bike-shop"),
        ("loud-1", "muted", "anna has muted loud"),
        ("enemy-1", "blocked", "anna has blocked enemy"),
        ("stranger-1", "not_followed", "anna does not follow stranger"),
        ("bike-soon", "waits", "the post waits until"),
        ("never-was", "unknown", "does not exist: it was never posted"),
    ],
)
async def test_post_visibility_is_explained(screen, post, word, sentence):
    await screen.open(f"/console/feed/why?viewer=anna&post={post}")
    text = await screen.text("main")
    assert word in text
    assert sentence in text


async def test_relations_of_a_viewer_are_changed(screen, stack):
    given = {"viewer": "tester", "author": "bike-shop"}
    path = "/v1/feed/viewers/tester"

    def names(part):
        return [one["id"] for one in stack.call("GET", f"{path}/{part}")["people"]]

    for verb, part, is_there in (
        ("follow", "follows", True),
        ("mute", "mutes", True),
        ("unmute", "mutes", False),
        ("block", "blocks", True),
        ("unblock", "blocks", False),
        ("unfollow", "follows", False),
    ):
        told = await act(screen, f"feed-{verb}", **given)
        assert told.startswith("viewer tester ")
        assert "bike-shop" in told
        assert names(part) == (["bike-shop"] if is_there else [])
    told = await act(screen, "feed-unfollow", **given)
    assert told == "viewer tester did not follow bike-shop; no change"


async def test_a_post_is_deleted_and_the_index_is_verified_and_rebuilt(screen, stack):
    stack.call("POST", "/v1/feed/posts", json={"author": "quiet", "id": "quiet-1", "ref": TEXT})
    assert "post quiet-1 is deleted" in await act(screen, "feed-delete", post="quiet-1")
    assert stack.call("GET", "/v1/feed/authors/quiet/posts")["posts"] == []
    assert "the index matches PostgreSQL" in await act(screen, "feed-verify")
    told = await act(screen, "feed-rebuild")
    job = int(told.split()[1])
    stack.wait(f"/v1/jobs/{job}", lambda found: found["state"] in ("done", "gone"))


async def test_hostile_names_in_urls_are_escaped(screen):
    screen.allow("status of 4")
    for path in ("feed?viewer", "feed/authors?author", "views/entity?id", "media/objects?prefix"):
        for text in (
            "%3Cscript%3Ealert(1)%3C/script%3E",
            "%22%3E%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E",
        ):
            await screen.open(f"/console/{path}={text}")
            assert (
                "alert(1)" in await screen.text("main")
                or await screen.page.locator(".load-error, .refusal").count()
            )
