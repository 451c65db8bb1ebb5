"""A node over the test's own store."""

from __future__ import annotations

import pytest
from raw_clients import serving


@pytest.fixture
async def node(blobs):
    async with serving(blobs) as served:
        yield served
