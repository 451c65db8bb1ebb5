"""Media on an S3 store that fails: right bytes, an error in time, or a cut; never wrong bytes."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time

import pytest
from node_kinds import disk_in
from raw_clients import pattern, serving
from tests.kit.own_s3 import closed, cut_after, done_then, error, reset, stalled, with_etag

from headrace.engines.blobs import Blobs, BlobsConfig, BlobsDown
from headrace.media import MediaConfig
from headrace.media.service import uploads as uploads_module
from headrace.media.service.uploads import UploadConflict, Uploads

pytestmark = pytest.mark.slow
DATA = pattern(3 * 2**20 + 12_345)
TIMEOUT_S = 1.5
FAULTS = {
    "500": error(500, "InternalError"),
    "SlowDown": error(503, "SlowDown", Retry_After="1"),
    "reset": reset,
    "a truncated body": cut_after(70_000, closed),
    "a body that is reset": cut_after(70_000, reset),
    "stalled": stalled,
    "a stalled body": cut_after(70_000, stalled),
    "another ETag": with_etag("another"),
}


@pytest.fixture
async def blobs(s3, s3_proxy):
    """A store behind the proxy."""
    blobs = Blobs(s3.url, BlobsConfig(timeout_s=TIMEOUT_S))
    yield blobs
    await blobs.close()


@pytest.fixture(params=["without disks", "with disks"])
async def node(request, blobs, tmp_path):
    """A node that reads the store for each answer, or once per block."""
    disks = disk_in(tmp_path / "disk") if request.param == "with disks" else ()
    settings = {"origin_timeout_s": TIMEOUT_S, "disks": disks}
    async with serving(blobs, run=tmp_path / "run", **settings) as node:
        yield node


async def fetched(node, key):
    """(status, the bytes until the end or the cut) of a whole object."""
    client = await node.connect()
    client.send(f"GET /m/{key} HTTP/1.1\r\nHost: media.test\r\n\r\n".encode())
    head = (await client.reader.readuntil(b"\r\n\r\n")).decode()
    length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0])
    body, is_cut = await client.read_up_to(length)
    client.drop()
    status = int(head.split(" ")[1])
    assert is_cut == (len(body) < length)
    return status, body


SHORT = ("500", "a truncated body", "stalled")
"""The others are alike and run in `make soak`."""


@pytest.mark.parametrize(
    "fault",
    [name if name in SHORT else pytest.param(name, marks=pytest.mark.soak) for name in FAULTS],
)
async def test_no_answer_has_wrong_bytes_and_all_end_in_time(node, s3_proxy, fault):
    """The object is known; then three of its blocks fail, then all; then the store is back."""
    keys = [f"tracks/{secrets.token_hex(8)}.mp3" for _ in range(3)]
    for key in keys:
        await node.blobs.put(key, DATA)
    for times in (3, 1_000_000):
        s3_proxy.fail(FAULTS[fault], when=b"GET ", times=times)
        began_s = time.monotonic()
        found = await asyncio.gather(*[fetched(node, key) for key in keys for _ in range(2)])
        assert time.monotonic() - began_s < 4 * TIMEOUT_S + 2
        s3_proxy.heal()
        for status, body in found:
            assert status in (200, 503), status
            assert status != 200 or DATA.startswith(body)
    for key in keys:
        assert await fetched(node, key) == (200, DATA)


@pytest.fixture
def uploads(blobs, monkeypatch):
    """Parts of 100 kB."""
    monkeypatch.setattr(uploads_module, "PART_BYTES", 100_000)
    return Uploads(blobs, MediaConfig())


async def chunks_from(offset):
    for start in range(offset, len(DATA), 50_000):
        yield DATA[start : start + 50_000]


@pytest.mark.parametrize(
    "fault",
    [
        done_then(error(500, "InternalError")),
        error(503, "SlowDown"),
        pytest.param(done_then(reset), marks=pytest.mark.soak),
        pytest.param(reset, marks=pytest.mark.soak),
        pytest.param(done_then(stalled), marks=pytest.mark.soak),
    ],
    ids=["500 after the effect", "SlowDown", "reset after the effect", "reset", "a lost answer"],
)
async def test_an_upload_is_resumed_through_faults_and_stored_whole(
    uploads, blobs, s3, s3_proxy, fault
):
    """Each error may hide a stored part; the client reads the offset and continues there."""
    key = f"tracks/{secrets.token_hex(8)}.mp3"
    upload = await uploads.create(key, len(DATA), sha256=hashlib.sha256(DATA).hexdigest())
    offset, errors = 0, 0
    s3_proxy.fail(fault, when=b"PUT ", times=6)
    while True:
        try:
            offset = await uploads.append(upload.id, offset, chunks_from(offset))
        except (BlobsDown, UploadConflict):
            errors += 1
            assert errors < 20
        try:
            found = await uploads.get(upload.id)
        except BlobsDown:
            continue
        assert found.offset_bytes >= offset
        offset = found.offset_bytes
        if found.is_done:
            break
    s3_proxy.heal()
    assert await blobs.get(key) == DATA
    assert [info.key async for info in blobs.list(uploads_module.PARTS)] == []
