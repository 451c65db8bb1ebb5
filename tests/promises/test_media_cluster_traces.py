"""One trace covers a request in the node that receives it, the owner node and the object store."""

from __future__ import annotations

import pytest
from media_cluster import content, running_cluster
from tests.kit.waiting import wait_true

from headrace.engines.blobs import Blobs
from headrace.media.partitions import partition_of
from headrace.media.tracing import Traces, read_trace

PARENT = f"00-{'4b' * 16}-{'f0' * 8}-01"


@pytest.mark.soak
async def test_a_trace_goes_on_to_the_peer_and_the_object_store(tmp_path, monkeypatch):
    async with running_cluster(tmp_path, count=3, keys=24) as cluster:
        for name, value in cluster.bucket.env.items():
            if name.startswith("AWS_"):
                monkeypatch.setenv(name, value)
        table, [asked, keeper, _] = cluster.table, cluster.nodes
        owners = {key: table.owners(partition_of(key)) for key in cluster.keys}
        warm, key, other = [
            key
            for key, names in owners.items()
            if names[0] == keeper.name and asked.name not in names
        ][:3]
        traces = Traces(Blobs(cluster.bucket.env["HEADRACE_BLOBS_URL"]))
        await traces.start("user=42", for_s=60)

        async def is_followed() -> bool:
            await cluster.get(asked, warm, baggage="user=42", Range="bytes=0-0")
            return all(node.process.events("request_traced") for node in (asked, keeper))

        await wait_true(is_followed, what="both nodes know what is traced")
        answer = await cluster.get(asked, key, traceparent=PARENT, baggage="user=42,request=r7")
        assert answer.content == content(key)
        plain = await cluster.get(asked, other, traceparent=PARENT, baggage="user=43")
        assert plain.content == content(other)

        def lines(node) -> list[dict]:
            found = node.process.events("request_traced")
            return [line for line in found if line["object"] == key]

        await wait_true(lambda: lines(asked) and lines(keeper), what="lines of both nodes")
        for node in (asked, keeper):
            [line, *_] = lines(node)
            assert (line["trace_id"], line["user"], line["request"]) == ("4b" * 16, "42", "r7")
            assert line["node"] == node.name
        assert "detail=peer" in lines(asked)[0]["cache"]
        there = read_trace(cluster.bucket.fields[key], key)
        assert (there.trace, there.user, there.request) == ("4b" * 16, "42", "r7")
        # Another user's request is neither logged nor told to the store, and nobody's hop is in a
        # line.
        assert "baggage" not in cluster.bucket.fields[other]
        for node in (asked, keeper):
            assert other not in "".join(map(str, node.process.events("request_traced")))
