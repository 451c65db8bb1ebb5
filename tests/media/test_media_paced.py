"""The rate of a signed URL on a real node is kept, fair, and no reason for a cut."""

from __future__ import annotations

import asyncio
import time

import pytest
from raw_clients import pattern, serving

from headrace.media.worker.deadlines import BURST_BYTES_MIN


@pytest.mark.slow
async def test_a_signed_rate_is_kept_and_a_paced_client_is_not_taken_for_a_stalled_one(blobs):
    data = pattern(250_000)
    settings = {"send_timeout_s": 0.5, "send_progress_bytes": 100_000}
    async with serving(blobs, **settings) as node:
        key = await node.put(data)
        signed = await node.media.objects.sign(key, rate=150_000)
        target = "/m/" + signed.url.partition("/m/")[2]
        paced, other = await node.connect(), await node.connect()
        began_s = time.monotonic()
        paced.send(f"GET {target} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        coming = asyncio.create_task(paced.answer())
        assert (await other.ask(key)).body == data
        assert not coming.done()
        answer = await coming
        took_s = time.monotonic() - began_s
        assert answer.body == data
        # All but the first burst, at most at this rate.
        assert took_s >= (len(data) - BURST_BYTES_MIN) / 150_000 - 0.1
        # The next answer on this connection has its own burst.
        paced.send(f"GET {target} HTTP/1.1\r\nHost: a\r\nRange: bytes=0-9\r\n\r\n".encode())
        assert (await paced.answer()).body == data[:10]
