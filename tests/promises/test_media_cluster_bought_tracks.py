"""A buyer's copy of a track is the same, byte for byte, from every node.

Also while one that keeps it is dead.
"""

from __future__ import annotations

import pytest
from media_cluster import SECRET, content, running_cluster

from headrace.engines.blobs import Blobs
from headrace.media import Media, MediaConfig
from headrace.media.id3 import Tags, tag_bytes, tag_key
from headrace.media.partitions import partition_of

BUYER = {"title": "Ein Lied", "buyer": "user:42"}


@pytest.mark.soak
async def test_a_bought_track_is_the_same_from_every_node(tmp_path, monkeypatch):
    async with running_cluster(tmp_path, count=3, keys=3, SIGNED="off") as cluster:
        for name, value in cluster.bucket.env.items():
            if name.startswith("AWS_"):
                monkeypatch.setenv(name, value)
        blobs = Blobs(cluster.bucket.env["HEADRACE_BLOBS_URL"])
        media = Media(blobs, MediaConfig(), secret=lambda: SECRET)
        key = cluster.keys[0]
        stored = await media.tags.put(**BUYER)
        query = media.objects.url(key, ttl_s=600, tag=stored.id).partition("?")[2]
        tag = tag_bytes(Tags(**BUYER))
        bought = tag + content(key)
        seam = len(tag)

        async def require_right(node) -> str:
            whole = await cluster.client.get(f"{node.url(key)}?{query}")
            assert (whole.status_code, whole.content) == (200, bought), node.name
            for first, last in ((0, seam), (seam - 3, seam + 3), (300_000, 560_000)):
                asked = {"Range": f"bytes={first}-{last}", "If-Range": whole.headers["etag"]}
                part = await cluster.client.get(f"{node.url(key)}?{query}", headers=asked)
                assert (part.status_code, part.content) == (206, bought[first : last + 1])
            return whole.headers["etag"]

        etags = {await require_right(node) for node in cluster.nodes}
        assert len(etags) == 1
        refused = await cluster.client.get(f"{cluster.nodes[0].url(key)}?{query[:-1]}")
        assert refused.status_code == 403
        hidden = await cluster.client.get(cluster.nodes[0].url(tag_key(stored.id)))
        assert hidden.status_code == 404

        dead = cluster.table.owners(partition_of(key))[0]
        for node in cluster.nodes:
            if node.name == dead:
                node.kill()
        for node in cluster.nodes:
            if node.name != dead:
                assert {await require_right(node)} == etags
