"""A site: a cluster with `media.upstream`, whose objects are kept at its home."""

from __future__ import annotations

import base64
import socket

import pytest
from media_surfaces import SURFACES, surface_on
from raw_clients import SECRET, serving
from tests.kit.ways_in import Refused

from headrace.engines.blobs import Blobs
from headrace.media import Media, MediaConfig
from headrace.media.errors import StoredAtHome, VariantNotAllowed

HOME = "https://n1.home.example.com"
KEY = "tracks/a.mp3"
TAG = "0" * 64


def media_of(blobs: Blobs, **settings) -> Media:
    return Media(blobs, MediaConfig(upstream=(HOME,), **settings), secret=lambda: SECRET)


@pytest.mark.parametrize("name", SURFACES)
async def test_what_is_kept_at_the_home_is_refused_at_a_site(name, blobs, tmp_path):
    await blobs.put(KEY, b"never served here")
    async with surface_on(name, media_of(blobs), tmp_path) as surface:
        for verb, given in (
            ("put", {"key": "tracks/b.mp3", "size": 5}),
            ("info", {"key": KEY}),
            ("ls", {}),
            ("rm", {"key": KEY}),
            ("put_tag", {"title": "Title"}),
            ("get_tag", {"id": TAG}),
            ("rm_tag", {"id": TAG}),
        ):
            with pytest.raises(Refused) as raised:
                await surface.do(verb, given)
            assert raised.value.told == "409 media.stored_at_home", verb
    assert [info.key async for info in blobs.list("")] == [KEY]


async def test_uploads_to_a_site_are_refused_before_a_byte_is_sent(blobs, tmp_path):
    media = media_of(blobs)
    with pytest.raises(StoredAtHome, match=f"media.upstream is set.*{HOME}.*do this there"):
        await media.uploads.create(KEY, 5)
    async with surface_on("http", media, tmp_path) as surface:
        key = base64.b64encode(KEY.encode()).decode()
        fields = {"Tus-Resumable": "1.0.0", "Upload-Length": "5", "Upload-Metadata": f"key {key}"}
        answer = surface._client.post("/v1/media/uploads", headers=fields)
        assert (answer.status_code, answer.json()["code"]) == (409, "media.stored_at_home")
    assert [info.key async for info in blobs.list("")] == []


async def test_an_unreachable_home_is_named_to_clients(blobs):
    with socket.create_server(("127.0.0.1", 0)) as unused:
        dead = f"http://127.0.0.1:{unused.getsockname()[1]}"
    async with serving(blobs, upstream=(dead,)) as site:
        client = await site.connect()
        answer = await client.ask(KEY)
        client.drop()
    assert (answer.status, answer.code) == (503, "media.store_unavailable")
    assert b"no node of the upstream cluster answers" in answer.body


async def test_urls_of_variants_are_refused_at_a_site(blobs):
    media = media_of(blobs, variants=())
    with pytest.raises(VariantNotAllowed, match="made in the upstream cluster"):
        media.objects.url("photos/a.jpg", w=40)
    assert media.objects.url(KEY).endswith(KEY)
