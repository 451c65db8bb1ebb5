"""No statement of a room is compiled (JIT) by a server with its stock configuration."""

from __future__ import annotations

import pytest
from rooms import ROOMS
from tests.kit.own_postgres import run_statements

pytestmark = pytest.mark.slow
COMPILED = """
SELECT calls, jit_functions, round(jit_generation_time + jit_inlining_time
    + jit_optimization_time + jit_emission_time) AS ms, left(query, 160) AS query
FROM pg_stat_statements WHERE jit_functions > 0 ORDER BY jit_functions DESC
"""


async def test_no_statement_of_a_room_is_compiled(make_postgres, make_rooms, running_engines):
    server = await make_postgres(
        "15", shared_preload_libraries="pg_stat_statements", **{"pg_stat_statements.track": "all"}
    )
    await run_statements(server.url, "CREATE EXTENSION pg_stat_statements")
    assert (await run_statements(server.url, "SHOW jit"))[0][0] == "on"
    rooms = make_rooms(
        HEADRACE_POSTGRES_URL=server.url,
        HEADRACE_VALKEY_URL=running_engines.endpoints.valkey_url,
        HEADRACE_VALKEY_PREFIX="planner",
    )
    for room in ROOMS:
        getattr(rooms, room)()
    compiled = [dict(row) for row in await run_statements(server.url, COMPILED)]
    assert compiled == []
