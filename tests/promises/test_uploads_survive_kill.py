"""An upload by tus 1.0 survives kill -9 of the API: acknowledged bytes are kept."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import random
import signal

import httpx
import pytest
from tests.kit.processes import descendants, free_ports
from tests.kit.waiting import wait_true
from tusclient.client import TusClient

from headrace.web.tokens import Tokens

pytestmark = pytest.mark.slow
SIZE_BYTES = 30 * 2**20
ROOT = "/v1/media/uploads"
CHUNK = {"Content-Type": "application/offset+octet-stream"}


def encoded(**fields):
    return ",".join(f"{n} {base64.b64encode(v.encode()).decode()}" for n, v in fields.items())


@pytest.fixture
async def headers(postgres):
    """A token for uploads."""
    token = (await Tokens(postgres).create("uploads", ("media:read", "media:write"))).text
    return {"authorization": f"Bearer {token}", "Tus-Resumable": "1.0.0"}


@pytest.fixture
async def api(fleet, tmp_path):
    """`headrace api` with two processes, which share nothing but the object store."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    store = (tmp_path / "objects").as_uri()
    process = fleet.start("api", WEB_LISTEN=address, WEB_PROCESSES="2", BLOBS_URL=store)
    process.url = f"http://{address}"
    await wait_true(lambda: serves(process.url), what="the API answers")
    return process


async def serves(url):
    try:
        async with httpx.AsyncClient(verify=False) as client:
            return (await client.get(f"{url}/healthz")).status_code == 200
    except httpx.TransportError:
        return False


async def test_an_upload_through_kills_loses_no_acknowledged_byte(api, headers, tmp_path):
    data = random.Random(1).randbytes(SIZE_BYTES)
    kills = 0
    async with httpx.AsyncClient(verify=False, base_url=api.url, timeout=60) as client:
        fields = encoded(key="tracks/long.mp3", sha256=hashlib.sha256(data).hexdigest())
        made = await client.post(
            ROOT, headers={**headers, "Upload-Length": str(SIZE_BYTES), "Upload-Metadata": fields}
        )
        assert (made.status_code, made.headers["tus-resumable"]) == (201, "1.0.0"), made.text
        target, acknowledged = made.headers["location"], 0

        async def body(start, kill_at):
            for at in range(start, SIZE_BYTES, 2**18):
                if at >= kill_at:
                    for pid in descendants(api.pid):
                        os.kill(pid, signal.SIGKILL)
                    return
                yield data[at : at + 2**18]

        chance = random.Random(2)
        while acknowledged < SIZE_BYTES:
            try:
                head = await client.head(target, headers=headers)
                if head.status_code != 200:
                    continue
                offset = int(head.headers["upload-offset"])
                assert offset >= acknowledged
                acknowledged = offset
                kill_at = offset + chance.randrange(2**20, 14 * 2**20) if kills < 4 else 2**40
                kills += kill_at < SIZE_BYTES
                answer = await client.patch(
                    target,
                    headers={**headers, **CHUNK, "Upload-Offset": str(offset)},
                    content=body(offset, kill_at),
                )
                if answer.status_code == 204:
                    acknowledged = int(answer.headers["upload-offset"])
            except httpx.TransportError:
                await wait_true(lambda: serves(api.url), what="the API answers again")
    assert kills
    assert (tmp_path / "objects/tracks/long.mp3").read_bytes() == data


async def test_the_reference_client_uploads_and_resumes(api, headers, tmp_path):
    data = random.Random(3).randbytes(3 * 2**20)
    file = tmp_path / "a.mp3"
    file.write_bytes(data)
    client = TusClient(f"{api.url}{ROOT}", headers={"authorization": headers["authorization"]})

    def send():
        first = client.uploader(str(file), chunk_size=2**20, metadata={"key": "tracks/a.mp3"})
        first.upload_chunk()
        again = client.uploader(str(file), chunk_size=2**20, url=first.url)
        assert again.offset == 2**20
        again.upload()

    await asyncio.to_thread(send)
    assert (tmp_path / "objects/tracks/a.mp3").read_bytes() == data


async def test_requests_that_break_the_protocol(api, headers):
    async with httpx.AsyncClient(verify=False, base_url=api.url, timeout=60) as client:
        about = await client.options(ROOT)
        assert (about.status_code, about.headers["tus-version"]) == (204, "1.0.0")
        assert int(about.headers["tus-max-size"]) > 2**20
        assert about.headers["tus-extension"] == "creation,expiration,termination"
        fields = encoded(key="a.mp3")
        good = {"Upload-Length": "5", "Upload-Metadata": fields}
        for status, code, changed in (
            (412, "media.tus_version_unknown", {"Tus-Resumable": "0.2.2"}),
            (400, "media.upload_malformed", {"Upload-Length": "-5"}),
            (400, "media.upload_malformed", {"Upload-Length": "5.0"}),
            (400, "media.upload_malformed", {"Upload-Length": "9" * 16}),
            (400, "media.upload_malformed", {"Upload-Metadata": "key !"}),
            (400, "media.upload_malformed", {"Upload-Metadata": "filename YQ=="}),
            (400, "media.upload_malformed", {"Upload-Metadata": f"{fields},{fields}"}),
            (413, "media.upload_too_large", {"Upload-Length": str(2**40)}),
            (422, "blobs.invalid_key", {"Upload-Metadata": encoded(key="../a")}),
            (422, "media.reserved_key", {"Upload-Metadata": encoded(key="_headrace/a")}),
            (422, "media.invalid_object", {"Upload-Metadata": encoded(key="a", sha256="X")}),
            (401, "web.unauthenticated", {"authorization": "Bearer none"}),
        ):
            answer = await client.post(ROOT, headers={**headers, **good, **changed})
            assert (answer.status_code, answer.json()["code"][: len(code)]) == (status, code)
        target = (await client.post(ROOT, headers={**headers, **good})).headers["location"]
        at_0 = {**CHUNK, "Upload-Offset": "0"}
        for status, code, changed in (
            (415, "media.chunk_type_refused", {"Content-Type": "text/plain"}),
            (400, "media.upload_malformed", {"Upload-Offset": ""}),
            (409, "media.upload_conflict", {"Upload-Offset": "1"}),
            (413, "media.upload_too_large", {"content": b"123456"}),
        ):
            content = changed.pop("content", b"12345")
            answer = await client.patch(
                target, headers={**headers, **at_0, **changed}, content=content
            )
            assert (answer.status_code, answer.json()["code"]) == (status, code)
            assert answer.headers["tus-resumable"] == "1.0.0"
        head = await client.head(target, headers=headers)
        assert (head.headers["upload-offset"], head.headers["upload-length"]) == ("0", "5")
        assert head.headers["upload-metadata"] == fields
        assert "upload-expires" in head.headers
        for status in (204, 404):
            assert (await client.delete(target, headers=headers)).status_code == status
