"""Media: audio plays, photos appear, and actions that need a cluster are refused without one."""

from __future__ import annotations

from urllib.parse import urlencode

import httpx
import pytest
from console_stack import TRACK, act, tone
from tests.kit.waiting import wait_true

pytestmark = pytest.mark.slow


async def test_a_track_plays_from_the_media_role(screen):
    await screen.open(f"/console/media/object?{urlencode({'key': TRACK})}")
    player = screen.page.locator("audio")

    async def is_ready():
        return await player.evaluate("player => player.readyState >= 1 && player.duration")

    assert await wait_true(is_ready, what="the player has loaded the track") == pytest.approx(
        1, abs=0.05
    )


async def test_the_node_page_shows_requests_and_hot_objects(screen, stack):
    with httpx.Client() as client:
        # Hot objects are sampled: of 32 requests on one connection, at least one counts.
        for _ in range(32):
            assert client.get(f"{stack.media}/m/{TRACK}").status_code == 200

    async def is_told():
        await screen.open("/console/media")
        counted = await screen.page.locator(".kv div:has(dt:text-is('200'))").count()
        return counted and await screen.page.locator(f".kv dt:has-text('{TRACK}')").count()

    await wait_true(is_told, what="a request and its object are counted")
    text = await screen.text("main")
    assert "local mode" in text
    assert "unknown" not in await screen.text(".tile:has-text('Connections')")


async def test_an_object_is_purged_and_deleted(screen, stack):
    await stack.put("tracks/away.wav", tone(0.1))
    told = await act(screen, "media-purge", key="tracks/away.wav")
    assert "all nodes purge tracks/away.wav" in told
    assert "is deleted" in await act(screen, "media-remove", key="tracks/away.wav")
    objects = stack.call("GET", "/v1/media/objects?prefix=tracks")["objects"]
    assert [one["key"] for one in objects] == [TRACK]


async def test_an_object_is_preloaded(screen):
    assert "1 block" in await act(screen, "media-warm", key=TRACK)
    assert await screen.page.locator(".flash.good").count() == 1


async def test_a_trace_is_started_and_ended(screen):
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
async def test_actions_without_cluster_or_disks_are_refused(screen, name, given):
    told = await act(screen, name, **given)
    assert "node" in told
    assert await screen.page.locator(".flash.bad").count() == 1
