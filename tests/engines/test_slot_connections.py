"""A slot holds few connections: a host has many slots and a server accepts a hundred."""

from __future__ import annotations

import asyncio

import pytest

from headrace import Headrace
from headrace.engines.sql import compile_query

PID = compile_query(
    "pid", "-- Who am I, after a while.\nSELECT pg_backend_pid() FROM pg_sleep(0.05)"
)


@pytest.mark.parametrize(("is_slot", "connections"), [(True, 3), (False, 10)])
async def test_many_handlers_at_once_share_them(
    is_slot, connections, running_engines, database_url, tmp_path
):
    app = Headrace(
        flags={
            "data.folder": str(tmp_path),
            "postgres.url": database_url,
            "valkey.url": running_engines.endpoints.valkey_url,
        }
    )
    if is_slot:
        app.use_as_slot()
    postgres = app.engines.postgres
    pids = await asyncio.gather(*[postgres.value(PID) for _ in range(30)])
    assert len(set(pids)) == connections
    await app.close()
