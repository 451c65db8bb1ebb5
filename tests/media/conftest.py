"""Nodes of every kind, shared by the tests of a module."""

from __future__ import annotations

import pytest
from conformance_cases import FORMER, LOCAL, OBJECTS, SHOP
from node_kinds import KINDS
from raw_clients import serving

STRICT = {
    "header_timeout_s": 0.5,
    "idle_timeout_s": 0.5,
    "send_timeout_s": 1.0,
    "send_progress_bytes": 100_000,
    "connections_max": 12,
    "cors_origins": ("*",),
}


@pytest.fixture
async def node(blobs):
    """A node that sends the files of the test's own store."""
    async with serving(blobs) as served:
        yield served


@pytest.fixture(scope="module", params=KINDS, ids=str)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
async def plain(kind, tmp_path_factory):
    """A node without settings; every object was read, so that it answers by its kind's way."""
    async with kind.start(tmp_path_factory.mktemp(kind.name)) as served:
        client = await served.connect()
        for key, data, _ in OBJECTS.values():
            await served.blobs.put(key, data)
            for _ in range(2):
                assert ((await client.ask(key)).body == data) is True
        client.drop()
        yield served


@pytest.fixture(scope="module")
async def shut(kind, tmp_path_factory):
    """A node that serves signed URLs only, and two origins."""
    settings = {"signed": "required", "cors_origins": (SHOP, LOCAL), "accepted_secrets": (FORMER,)}
    async with kind.start(tmp_path_factory.mktemp(kind.name), **settings) as served:
        await served.blobs.put(*OBJECTS["track"][:2])
        yield served


@pytest.fixture(scope="module")
async def strict(kind, tmp_path_factory):
    """A node with short timeouts and few clients."""
    async with kind.start(tmp_path_factory.mktemp(kind.name), **STRICT) as served:
        await served.blobs.put(*OBJECTS["track"][:2])
        yield served
