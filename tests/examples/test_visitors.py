"""The demo's visitors see right photos as right, and a single wrong byte as wrong."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

import pytest
from examples.bazaar.adverts import Advert, Photo
from examples.bazaar.pictures import Album
from examples.bazaar.visitors import Crowd, Seen
from tests.kit.waiting import wait_true

from headrace.media import Media, MediaConfig
from headrace.media.worker import serve


@pytest.fixture
async def media_url(blobs):
    """The range server on this test's object store."""
    stop, listening = asyncio.Event(), asyncio.get_running_loop().create_future()
    media = Media(blobs, MediaConfig(listen=("127.0.0.1", 0)))
    serving = asyncio.create_task(
        serve(media, stop, lambda *address: listening.set_result(address))
    )
    host, port = await asyncio.wait_for(listening, 60)
    yield f"http://{host}:{port}"
    stop.set()
    await serving


@pytest.fixture
async def photo(blobs):
    """A stored photo, as an advert has it."""
    data = Album().photo("sofa.jpg")
    sha256 = hashlib.sha256(data).hexdigest()
    key = f"photos/{sha256[:2]}/{sha256[2:4]}/{sha256}.jpg"
    await blobs.put(key, data)
    return Photo("http://shop/sofa.jpg", key, sha256, "stored", len(data))


async def visit(media_url: str, photo: Photo, until: Callable[[Seen], bool]) -> Seen:
    """Let visitors look at the photo until `until`, ten seconds at most."""
    crowd = Crowd(media_url)
    crowd.show([Advert("shop", "item", 1, "Sofa", "10", (photo,))])
    visiting = asyncio.create_task(crowd.run())
    await wait_true(lambda: until(crowd.seen) or visiting.done(), what="the visitors came")
    assert not visiting.done()
    visiting.cancel()
    await asyncio.gather(visiting, return_exceptions=True)
    return crowd.seen


async def test_visitors_put_a_photo_together_from_its_ranges(media_url, photo):
    seen = await visit(media_url, photo, lambda seen: seen.statuses.keys() == {200, 206, 304, 416})
    assert seen.faults == []
    assert seen.photos_whole > 0
    assert seen.keys == {photo.key}


async def test_visitors_notice_one_wrong_byte(media_url, photo, blobs):
    file = blobs.folder / photo.key
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    seen = await visit(media_url, photo, lambda seen: seen.faults_count > 0)
    assert seen.photos_whole == 0
    assert "not the bytes of" in seen.faults[0]


async def test_visitors_notice_a_photo_that_is_not_there(media_url, photo, blobs):
    await blobs.delete(photo.key)
    seen = await visit(media_url, photo, lambda seen: seen.faults_count > 0)
    assert "expected 206" in seen.faults[0]
    assert "got 404" in seen.faults[0]
