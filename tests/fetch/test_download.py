"""Downloads: validators, redirects, timeouts, connections, and the bytes of a body."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from dataclasses import replace

import pytest
from origin import Answer, photo, redirect
from tests.kit.waiting import wait_true

from headrace.fetch.curl import HELD_BYTES_MAX, Body, Validators, parsed_retry_after_s
from headrace.fetch.download import Downloader


@pytest.fixture
async def downloader(config):
    downloader = Downloader(config)
    yield downloader
    await downloader.close()


async def test_a_photo_arrives_whole_with_its_validators(downloader, origin):
    origin.answers["/a.jpg"] = [
        Answer(200, photo("a"), {"ETag": '"x"', "Last-Modified": "Sat, 01 Nov 2025 10:00:00 GMT"})
    ]
    found = await downloader.download(origin.url("/a.jpg"))
    assert found.outcome == "received"
    with found.body:
        assert found.body.read() == photo("a")
    assert found.etag == '"x"'
    sent = origin.headers["/a.jpg"]
    assert sent["user-agent"].startswith("headracefetch/")
    assert sent["accept-encoding"] == "identity"
    assert not {"cookie", "authorization", "if-none-match"} & sent.keys()


async def test_a_known_photo_is_requested_conditionally(downloader, origin):
    first = await downloader.download(origin.url("/photo/1"))
    again = await downloader.download(origin.url("/photo/1"), Validators(first.etag))
    assert again.outcome == "unchanged"
    assert origin.requests("/photo/1") == [200, 304]


async def test_redirects_are_followed_five_times_and_no_more(downloader, origin):
    for n in range(6):
        origin.answers[f"/hop{n}"] = [redirect(f"/hop{n + 1}")]
    origin.answers["/hop6"] = [Answer(200, photo("far"))]
    assert (await downloader.download(origin.url("/hop0"))).outcome == "refused:redirect_limit"
    found = await downloader.download(origin.url("/hop1"))
    assert found.outcome == "received"
    assert len(found.hops) == 6


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("120", 120.0),
        ("999999999999", 999_999_999.0),
        ("-1", None),
        ("abc", None),
        ("", None),
        (None, None),
        ("Thu, 01 Jan 1970 00:00:00 GMT", None),
    ],
)
def test_retry_after_means_seconds_or_nothing(value, seconds):
    assert parsed_retry_after_s(value) == seconds


def spin(seconds: float) -> None:
    """Keep this process busy."""
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        pass


async def test_a_process_too_busy_to_look_does_not_blame_the_host(config, origin):
    """It spins for longer than the class, again and again; the photo is received all the same."""
    loop = asyncio.get_running_loop()

    def spin_often(times: int = 2) -> None:
        spin(0.5)
        if times:
            loop.call_soon(spin_often, times - 1)

    downloader = Downloader(replace(config, classes=(1.0,)))
    loop.call_later(0.001, spin_often)
    found = await downloader.download(origin.url("/photo/1"))
    assert found.outcome == "received", found.text
    await downloader.close()


async def test_a_silent_host_is_left_however_busy_this_process_is(config, origin):
    """It never stops to spin, so hardly any time counts as the host's."""
    downloader = Downloader(replace(config, classes=(0.1,)))
    origin.answers["/never"] = [Answer(hangs=True)]

    def spin_on() -> None:
        spin(0.03)
        if not downloading.done():
            asyncio.get_running_loop().call_soon(spin_on)

    downloading = asyncio.create_task(downloader.download(origin.url("/never")))
    await wait_true(lambda: origin.requests("/never"), what="it is requested")
    spin_on()
    found = await asyncio.wait_for(downloading, 60)
    assert found.outcome == "failed:timeout"
    await downloader.close()


@pytest.mark.parametrize("ends", ["hangs", "is cut"])
async def test_an_error_counts_without_its_body(config, origin, ends):
    """A host that responds 429 and never completes the body has requested a pause."""
    downloader = Downloader(replace(config, classes=(0.5,)))
    head = b"HTTP/1.1 429 Too Many\r\nRetry-After: 45\r\nContent-Length: 99\r\n\r\nwait"
    origin.answers["/busy"] = [Answer(raw=head, hangs=ends == "hangs")]
    found = await downloader.download(origin.url("/busy"))
    assert found.outcome == "failed:rate_limited"
    assert found.retry_after_s == 45
    await downloader.close()


async def test_connections_to_one_host_are_bounded(config, origin):
    downloader = Downloader(replace(config, host_connections=2))
    urls = [origin.url(f"/photo/{n}") for n in range(20)]
    found = await asyncio.gather(*(downloader.download(url) for url in urls))
    assert {f.outcome for f in found} == {"received"}
    assert origin.connections <= 2
    await downloader.close()


async def test_a_port_without_a_listener_fails_to_connect(downloader, origin):
    url = origin.url("/a")
    await origin.close()
    assert (await downloader.download(url)).outcome == "failed:connect"


@pytest.mark.parametrize("size_bytes", [0, 1, 150_000, HELD_BYTES_MAX, HELD_BYTES_MAX * 3 + 5])
def test_a_body_holds_what_was_added_and_little_in_memory(size_bytes, tmp_path):
    rng = random.Random(size_bytes)
    data, at = rng.randbytes(size_bytes), 0
    with Body() as body:
        while at < size_bytes:
            part = data[at : at + rng.randrange(1, 70_000)]
            body.add(part)
            at += len(part)
            assert sum(len(part) for part in body._held) <= HELD_BYTES_MAX
            if rng.random() < 0.1:
                assert body.read() == data[:at]
        for _ in range(2):
            assert body.sha256() == hashlib.sha256(data).hexdigest()
            assert body.read() == data
            body.copy_to(tmp_path / "copy")
            assert (tmp_path / "copy").read_bytes() == data
