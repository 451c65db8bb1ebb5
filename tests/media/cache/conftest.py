"""Nodes over the test's own object store."""

from __future__ import annotations

import pytest
from cache_lab import cache_node


@pytest.fixture
async def one_set(tmp_path, blobs):
    """A node with one disk of one set: 16 frames, each block in any of them."""
    async with cache_node(tmp_path, blobs) as node:
        yield node


@pytest.fixture
async def two_disks(tmp_path, blobs):
    """A node with two disks of two sets each: 64 frames."""
    async with cache_node(tmp_path, blobs, disks=2, sets=2) as node:
        yield node
