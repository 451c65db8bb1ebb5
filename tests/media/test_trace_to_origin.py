"""Only watched requests pass their trace tag to a remote object store."""

from __future__ import annotations

import asyncio

import pytest
from node_kinds import bucket_store

from headrace.kernel.logs import onward
from headrace.media.tracing import TraceTag, onward_fields, read_trace

KEY = "a.mp3"
TAG = TraceTag("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "42", "r7", KEY)


@pytest.fixture
async def remote(monkeypatch):
    """A remote store whose requests are signed, and its bucket."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    async with bucket_store(AWS_SKIP_SIGNATURE="false") as (blobs, bucket):
        bucket.objects[KEY] = b"abc"
        yield blobs, bucket


async def heads_of_reads(blobs, bucket, fields=()) -> list[dict[str, str]]:
    """The heads of two reads, made in their own task as those of a request are."""

    async def read() -> list[dict[str, str]]:
        onward.set(fields)
        heads = []
        for work in (
            blobs.read_part(KEY, 0, 3),
            blobs.info(KEY),
        ):
            await work
            heads.append(bucket.fields[KEY] if bucket is not None else {})
        return heads

    return await asyncio.create_task(read())


async def test_the_origin_receives_the_tag_of_a_watched_read_and_of_no_other(remote):
    for fields in ((), onward_fields(TAG), ()):
        for head in await heads_of_reads(*remote, fields):
            assert ("traceparent" in head, "baggage" in head) == (bool(fields), bool(fields))
            if fields:
                there = read_trace(head, KEY)
                assert (there.trace, there.user, there.request) == (TAG.trace, "42", "r7")
                # Part of the signature, so that no proxy can change it.
                assert "baggage;" in head["authorization"]


async def test_a_folder_is_read_without_a_tag(blobs):
    await blobs.put(KEY, b"abc")
    assert await heads_of_reads(blobs, None, onward_fields(TAG)) == [{}] * 2
