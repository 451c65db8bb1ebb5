"""Resumable uploads: what was acknowledged stays, one writer gets an offset, bounds hold."""

from __future__ import annotations

import asyncio
import hashlib
import os

import pytest
from raw_clients import pattern

from headrace.engines import joined_objects
from headrace.engines.blobs import BlobsDown
from headrace.engines.joined_objects import BlobCorrupt
from headrace.media.errors import ReservedKey, WrongContentAddress
from headrace.media.model import MediaConfig
from headrace.media.service import uploads as uploads_module
from headrace.media.service.uploads import (
    DONE,
    OPEN,
    PARTS,
    TooManyUploads,
    UploadAborted,
    UploadConflict,
    Uploads,
    UploadTooLarge,
    UploadUnknown,
)

DATA = pattern(100_000)
KEY = "tracks/long.mp3"


async def pieces(data, *, step=7_000, error=None):
    for start in range(0, len(data), step):
        yield data[start : start + step]
    if error is not None:
        raise error


@pytest.fixture
def uploads(blobs, monkeypatch):
    """Small parts, so that an upload has several."""
    monkeypatch.setattr(uploads_module, "PART_BYTES", 20_000)
    return Uploads(blobs, MediaConfig())


async def keys_below(blobs, prefix):
    return [info.key async for info in blobs.list(prefix)]


async def test_an_upload_in_requests_of_any_size_gives_the_object(uploads, blobs):
    upload = await uploads.create(KEY, len(DATA), sha256=hashlib.sha256(DATA).hexdigest())
    offset = 0
    for end in (1, 2, 45_000, 45_001, len(DATA)):
        assert await uploads.append(upload.id, offset, pieces(DATA[offset:end])) == end
        offset = end
        found = await uploads.get(upload.id)
        assert (found.offset_bytes, found.is_done) == (end, end == len(DATA))
    assert await blobs.get(KEY) == DATA
    assert await keys_below(blobs, OPEN) + await keys_below(blobs, PARTS) == []
    assert not (blobs.folder / PARTS / upload.id).exists()
    # A client that did not receive the last answer repeats it, and sends nothing.
    assert await uploads.append(upload.id, len(DATA), pieces(b"")) == len(DATA)


async def test_an_empty_upload_is_an_empty_object(uploads, blobs):
    assert (await uploads.create(KEY, 0)).is_done
    assert await blobs.get(KEY) == b""


async def test_an_aborted_request_keeps_what_arrived(uploads):
    upload = await uploads.create(KEY, len(DATA))
    with pytest.raises(UploadAborted):
        await uploads.append(upload.id, 0, pieces(DATA[:5_000], error=UploadAborted()))
    assert (await uploads.get(upload.id)).offset_bytes == 5_000


@pytest.mark.parametrize("offset", [0, 4_999, 5_001, 10**14])
async def test_a_wrong_offset_is_a_conflict_and_changes_nothing(uploads, offset):
    upload = await uploads.create(KEY, len(DATA))
    await uploads.append(upload.id, 0, pieces(DATA[:5_000]))
    with pytest.raises(UploadConflict, match="has 5000 bytes"):
        await uploads.append(upload.id, offset, pieces(DATA))
    assert (await uploads.get(upload.id)).offset_bytes == 5_000


async def test_of_two_writers_each_offset_has_one_and_the_bytes_are_right(uploads, blobs):
    upload = await uploads.create(KEY, len(DATA), sha256=hashlib.sha256(DATA).hexdigest())
    others = [uploads, Uploads(blobs, MediaConfig())]
    refused = 0

    async def write(writer, step):
        nonlocal refused
        while (offset := (await writer.get(upload.id)).offset_bytes) < len(DATA):
            try:
                await writer.append(upload.id, offset, pieces(DATA[offset:], step=step))
            except UploadConflict:
                refused += 1

    await asyncio.gather(*(write(one, 3_000 + n) for n, one in enumerate(others * 3)))
    assert refused
    assert await blobs.get(KEY) == DATA


async def test_wrong_bytes_are_never_stored_and_end_the_upload(uploads, blobs):
    await blobs.put(KEY, b"before")
    upload = await uploads.create(KEY, len(DATA), sha256="0" * 64)
    with pytest.raises(BlobCorrupt):
        await uploads.append(upload.id, 0, pieces(DATA))
    assert await blobs.get(KEY) == b"before"
    assert await keys_below(blobs, "_headrace") == []
    with pytest.raises(UploadUnknown):
        await uploads.get(upload.id)


async def test_a_key_named_by_its_content_needs_that_content(uploads, blobs):
    address = hashlib.sha256(DATA).hexdigest()
    key = f"photos/{address[:2]}/{address}.jpg"
    with pytest.raises(WrongContentAddress):
        await uploads.create(key, 5, sha256="0" * 64)
    upload = await uploads.create(key, 5)
    with pytest.raises(BlobCorrupt):
        await uploads.append(upload.id, 0, pieces(b"other"))
    upload = await uploads.create(key, len(DATA))
    await uploads.append(upload.id, 0, pieces(DATA))
    assert await blobs.get(key) == DATA


@pytest.mark.parametrize("crash", ["join", "put", "delete", "clear"])
async def test_a_crash_while_it_is_finished_leaves_an_upload_that_finishes(
    uploads, blobs, monkeypatch, crash
):
    upload = await uploads.create(KEY, len(DATA))

    async def crashes(*_, **__):
        raise RuntimeError("killed here")

    with monkeypatch.context() as patch:
        patch.setattr(type(blobs), crash, crashes)
        with pytest.raises(RuntimeError):
            await uploads.append(upload.id, 0, pieces(DATA))
    again = await Uploads(blobs, MediaConfig()).get(upload.id)
    assert (again.is_done, await blobs.get(KEY) == DATA) == (True, True)


async def test_a_process_that_is_killed_while_it_joins_leaves_no_file_behind(
    uploads, blobs, monkeypatch
):
    upload = await uploads.create(KEY, len(DATA))
    with monkeypatch.context() as patch:
        patch.setattr(joined_objects, "rename_durably", _killed)
        with pytest.raises(BlobsDown):
            await uploads.append(upload.id, 0, pieces(DATA))
    assert (await uploads.get(upload.id)).is_done
    files = {path.name for path in blobs.folder.rglob("*") if path.is_file()}
    assert files == {"long.mp3", upload.id, ".headrace-lock"}


def _killed(*_, **__):
    raise OSError("killed here")


async def test_bounds(uploads, blobs):
    small = Uploads(blobs, MediaConfig(uploads_max=2, upload_max_bytes=1_000))
    with pytest.raises(UploadTooLarge, match=r"media\.upload_max"):
        await small.create(KEY, 1_001)
    first = await small.create(KEY, 10)
    await small.create(KEY, 10)
    with pytest.raises(TooManyUploads):
        await small.create(KEY, 10)
    with pytest.raises(UploadTooLarge, match="goes beyond the 10 bytes"):
        await small.append(first.id, 0, pieces(DATA[:11]))
    await small.append(first.id, 0, pieces(DATA[:10]))
    await small.create(KEY, 10)
    with pytest.raises(ReservedKey):
        await small.create("_headrace/media/x", 10)
    for unknown in ("", "x" * 32, "../../etc/passwd", "0" * 32):
        with pytest.raises(UploadUnknown):
            await small.get(unknown)


async def test_many_small_requests_are_bounded(uploads, monkeypatch):
    monkeypatch.setattr(uploads_module, "PARTS_MAX", 3)
    upload = await uploads.create(KEY, 10)
    for offset in range(3):
        await uploads.append(upload.id, offset, pieces(b"x"))
    with pytest.raises(UploadTooLarge, match="3 parts"):
        await uploads.append(upload.id, 3, pieces(b"x"))


async def test_an_expired_upload_is_gone_and_swept_with_its_parts(uploads, blobs):
    expired, alive, done = [await uploads.create(KEY, len(DATA)) for _ in range(3)]
    for one in (expired, alive):
        await uploads.append(one.id, 0, pieces(DATA[:30_000]))
    await uploads.append(done.id, 0, pieces(DATA))
    orphan = f"{PARTS}/{'a' * 32}/{0:015d}"
    await blobs.put(orphan, b"of a writer after a sweep")
    long_ago = alive.expires_at.timestamp() - 3 * 86_400
    for key in (f"{OPEN}/{expired.id}", f"{DONE}/{done.id}", orphan):
        os.utime(blobs.folder / key, (long_ago, long_ago))
    for one in (expired, done):
        with pytest.raises(UploadUnknown):
            await uploads.get(one.id)
    with pytest.raises(UploadUnknown):
        await uploads.append(expired.id, 30_000, pieces(DATA[30_000:]))
    assert await uploads.sweep() == 3
    left = {key.split("/")[-2] for key in await keys_below(blobs, PARTS)}
    assert left == {alive.id}
    assert await keys_below(blobs, DONE) == []
    assert await blobs.get(KEY) == DATA
    assert await uploads.sweep() == 0
