"""Every room works on servers as they are installed, through `headrace up`.

The soak run has the full form: the rooms' own tests and the promises on these servers.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from itertools import count
from pathlib import Path

import httpx
import pytest
from tests.kit.certificates import LOOPBACK, certificate
from tests.kit.own_postgres import OwnPostgres, missing_server, run_statements
from tests.kit.processes import HeadraceProcess, free_ports
from tests.kit.stock_valkey import program_of
from tests.kit.waiting import wait_true

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parents[1]
FOLDERS = ("promises", "jobs", "fetch", "views", "feed")
STREAMING = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"
COMPILED = """
SELECT calls, jit_functions, round(jit_generation_time + jit_inlining_time
    + jit_optimization_time + jit_emission_time) AS ms, left(query, 160) AS query
FROM pg_stat_statements WHERE jit_functions > 0 ORDER BY jit_functions DESC
"""


async def test_all_rooms_work_over_tls_on_stock_servers_and_no_statement_is_compiled(
    make_postgres, make_valkey, make_rooms, tmp_path
):
    """PostgreSQL 15 and Redis 7. Compiled: by JIT, which is on in the stock configuration."""
    root = certificate("root")
    own = certificate("127.0.0.1", root, names=(LOOPBACK,))
    ca_file, cert_file, key_file = (tmp_path / name for name in ("ca", "cert", "key"))
    ca_file.write_bytes(root.pem)
    own.write(cert_file, key_file)
    [port] = free_ports(1)
    make_valkey(
        "redis7",
        **{"tls-port": str(port), "tls-auth-clients": "no", "tls-ca-cert-file": str(ca_file)},
        **{"tls-cert-file": str(cert_file), "tls-key-file": str(key_file)},
    )
    server = await make_postgres(
        "15", shared_preload_libraries="pg_stat_statements", **{"pg_stat_statements.track": "all"}
    )
    await server.use_certificate(own)
    await run_statements(server.url, "ALTER SYSTEM SET ssl = on", "SELECT pg_reload_conf()")
    await run_statements(server.url, "CREATE EXTENSION pg_stat_statements")
    assert (await run_statements(server.url, "SHOW jit"))[0][0] == "on"
    make_rooms(
        HEADRACE_POSTGRES_URL=f"{server.url}?sslmode=verify-full&sslrootcert={ca_file}",
        HEADRACE_VALKEY_URL=f"valkeys://127.0.0.1:{port}?ssl_ca_certs={ca_file}",
    ).require_all()
    assert [dict(row) for row in await run_statements(server.url, COMPILED)] == []


async def test_all_rooms_work_on_postgres_16_behind_pgbouncer(make_pooler, make_valkey, make_rooms):
    """In transaction mode."""
    valkey = make_valkey("valkey9")
    pooled, direct = await make_pooler(default_pool_size="10", max_client_conn="200")
    make_rooms(
        HEADRACE_POSTGRES_URL=pooled,
        HEADRACE_POSTGRES_DIRECT_URL=direct,
        HEADRACE_VALKEY_URL=valkey.url,
    ).require_all()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("postgres", "valkey"), [("16", "valkey9"), ("18", "valkey9"), ("15", "valkey8")]
)
async def test_all_rooms_work(make_postgres, make_valkey, make_rooms, postgres, valkey):
    server, hot = await make_postgres(postgres), make_valkey(valkey)
    make_rooms(HEADRACE_POSTGRES_URL=server.url, HEADRACE_VALKEY_URL=hot.url).require_all()


@pytest.fixture
async def pair(servers_folder):
    """A primary and its synchronous standby, both with stock configurations otherwise."""
    reason = missing_server("18")
    if reason:
        pytest.skip(reason)
    primary = OwnPostgres(servers_folder / "p", "18", synchronous_standby_names="standby")
    standby = OwnPostgres(servers_folder / "s", "18")
    try:
        await primary.make()
        await primary.start()
        await standby.copy(primary, name="standby")
        await standby.start()

        async def is_synchronous() -> bool:
            return (await run_statements(primary.url, STREAMING))[0][0] == 1

        await wait_true(is_synchronous, what="the standby is synchronous")
        yield primary, standby
    finally:
        standby.end()
        primary.end()


async def test_a_promoted_standby_has_all_acknowledged_writes_and_all_rooms_work_on_it(
    pair, make_rooms, running_engines
):
    primary, standby = pair
    hosts = f"127.0.0.1:{primary.port},127.0.0.1:{standby.port}"
    rooms = make_rooms(
        HEADRACE_POSTGRES_URL=f"postgresql://headrace@{hosts}/postgres?target_session_attrs=read-write",
        HEADRACE_POSTGRES_CONNECT_TIMEOUT="2s",
        HEADRACE_VALKEY_URL=running_engines.endpoints.valkey_url,
        HEADRACE_VALKEY_PREFIX="pair",
    )
    acknowledged: list[str] = []
    stop = threading.Event()

    def produce() -> None:
        for number in count():
            if stop.is_set():
                return
            payload = {"payload": {"text": f"n{number}"}}
            try:
                rooms.document("POST", "/v1/queues/notes/jobs", json=payload)
            except (AssertionError, httpx.HTTPError):
                stop.wait(0.05)
                continue
            acknowledged.append(f"n{number}")

    async def pass_more() -> None:
        least = len(acknowledged) + 50
        await wait_true(lambda: len(acknowledged) >= least, what="more jobs")

    producing = threading.Thread(target=produce)
    producing.start()
    try:
        await pass_more()
        primary.kill()
        standby.run("pg_ctl", "promote", "-D", standby.data)
        await pass_more()
    finally:
        stop.set()
        await asyncio.to_thread(producing.join)
    await wait_true(
        lambda: set(acknowledged) <= set(rooms.lines("notes.txt")),
        what="every acknowledged job ran",
    )
    await asyncio.to_thread(rooms.require_all)


@pytest.mark.parametrize("valkey", ["valkey9", "redis7"])
def test_a_server_without_functions_is_refused_at_the_start(
    make_valkey, database_url, tmp_path, valkey
):
    hot = make_valkey(valkey, **{"rename-command": "FUNCTION OLDER"})
    urls = {"HEADRACE_POSTGRES_URL": database_url, "HEADRACE_VALKEY_URL": hot.url}
    started = HeadraceProcess(["up"], folder=tmp_path, env=urls)
    assert started.wait_exit() == 5
    assert "use Valkey 7.2, Redis 7.0 or newer" in started.out + started.err


@pytest.mark.soak
@pytest.mark.parametrize(
    ("postgres", "valkey"), [("15", "redis7"), ("16", "valkey9"), ("15", "valkey8")]
)
def test_the_rooms_tests_and_the_promises_hold(postgres, valkey):
    reason = missing_server(postgres)
    if reason or program_of(valkey) is None:
        pytest.skip(reason or f"{valkey} is not installed")
    words = ["-n", "2", "--postgres", postgres, "--valkey", valkey]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *words, *(str(TESTS / folder) for folder in FOLDERS)],
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=3300,
    )
    assert ended.returncode == 0, ended.stdout[-8000:]
