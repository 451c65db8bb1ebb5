"""Media on the console: a track plays, a photo shows, and what needs a cluster says so where there is none."""

from __future__ import annotations

from urllib.parse import urlencode

import httpx
import pytest
from console_acts import act
from console_stack import TRACK, tone
from tests.kit.waiting import wait_true

pytestmark = pytest.mark.slow


async def test_a_track_plays_from_the_media_role(screen):
    await screen.open(f"/console/media/object?{urlencode({'key': TRACK})}")
    player = screen.page.locator("audio")

    async def is_ready():
        return await player.evaluate("player => player.readyState >= 1 && player.duration")

    assert await wait_true(is_ready, what="the player knows the track") == pytest.approx(
        1, abs=0.05
    )


async def test_the_node_tells_what_it_served(screen, stack):
    with httpx.Client() as client:
        # What is asked for most is a sample: of 32 requests on one connection at least one is in it.
        for _ in range(32):
            assert client.get(f"{stack.media}/m/{TRACK}").status_code == 200

    async def is_told():
        await screen.open("/console/media")
        counted = await screen.page.locator(".kv div:has(dt:text-is('200'))").count()
        return counted and await screen.page.locator(f".kv dt:has-text('{TRACK}')").count()

    await wait_true(is_told, what="an answer is counted, and what it was of")
    text = await screen.text("main")
    assert "local mode" in text
    assert "unknown" not in await screen.text(".tile:has-text('Clients')")


async def test_an_object_is_purged_and_removed(screen, stack):
    await stack.put("tracks/away.wav", tone(0.1))
    told = await act(screen, "media-purge", key="tracks/away.wav")
    assert "every node forgets tracks/away.wav" in told
    assert "is removed" in await act(screen, "media-remove", key="tracks/away.wav")
    objects = stack.call("GET", "/v1/media/objects?prefix=tracks")["objects"]
    assert [one["key"] for one in objects] == [TRACK]


async def test_an_object_is_fetched_ahead(screen):
    assert "1 block" in await act(screen, "media-warm", key=TRACK)
    assert await screen.page.locator(".told.good").count() == 1


async def test_a_trace_is_begun_and_ended(screen):
    assert "is traced until" in await act(screen, "media-trace", tag="user=42", minutes=5)
    await screen.open("/console/media/traces")
    assert "user=42" in await screen.text("main")
    assert "1 trace is ended" in await act(screen, "media-trace-end", tag="user=42")


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("media-drain", {"node": "n1"}),
        ("media-undrain", {"node": "n1"}),
        ("media-weight", {"node": "n1", "weight": "2"}),
        ("media-disk-drain", {"disk": "d1"}),
        ("media-disk-undrain", {"disk": "d1"}),
        ("media-disk-retire", {"disk": "d1"}),
        ("media-verify", {"share": "0.5"}),
    ],
)
async def test_what_needs_a_cluster_or_disks_says_so(screen, name, given):
    told = await act(screen, name, **given)
    assert "node" in told
    assert await screen.page.locator(".told.bad").count() == 1
