"""The schema that is shown is the schema there is."""

from __future__ import annotations

import asyncio

import pytest
from tools.schema import FILE, schema_of

from headrace.testing.engines import TEMPLATE


@pytest.mark.slow
async def test_the_schema_page_is_what_the_migrations_make(running_engines):
    found = await asyncio.to_thread(schema_of, running_engines.database_url(TEMPLATE))
    assert found == FILE.read_text(), "run `make reference`"
