"""Real embedded engines: unusual folders, restarts, crashes, refusals, no side effects."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path

import asyncpg
import pytest
from tests.kit.processes import descendants, is_alive

from headrace.engines.embedded import (
    EmbeddedEngines,
    FolderInUse,
    StartFailed,
    WrongVersion,
    running_endpoints,
)
from headrace.engines.embedded.data_folder import is_locked
from headrace.engines.embedded.process import processes_in
from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.postgres_errors import PostgresDown
from headrace.engines.sql import compile_query
from headrace.engines.valkey import Valkey, ValkeyConfig

COUNT = compile_query("count", "-- Count the words.\nSELECT count(*) FROM kept")
pytestmark = pytest.mark.slow


async def keep(endpoints, word):
    """Commit a row and write a key. Return the words in both engines, which must agree."""
    connection = await asyncpg.connect(endpoints.postgres_url)
    await connection.execute("CREATE TABLE IF NOT EXISTS kept (word text)")
    await connection.execute("INSERT INTO kept VALUES ($1)", word)
    rows = [row["word"] for row in await connection.fetch("SELECT word FROM kept ORDER BY word")]
    await connection.close()
    valkey = Valkey(endpoints.valkey_url, ValkeyConfig())
    await valkey.command("RPUSH", "kept", word)
    words = await valkey.command("LRANGE", "kept", 0, -1)
    await valkey.close()
    assert sorted(word.decode() for word in words) == rows
    return rows


def outside(folder, pid):
    """Files, mappings and network sockets that process `pid` has open outside of `folder`."""
    unix = {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    opened = {str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    found = {
        target
        for target in opened
        if not target.startswith((f"{folder}/", "/dev/null", "pipe:", "anon_inode:"))
        and not (target.startswith("socket:[") and target[8:-1] in unix)
    }
    lines = [line.split(None, 5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    shared = {line[5] for line in lines if line[1][3] == "s" and len(line) > 5}
    ours = ("/dev/zero", f"{folder}/", "/SYSV")
    return found | {s for s in shared if s.startswith("/") and not s.startswith(ours)}


async def test_engines_in_a_folder_with_spaces_start_twice_and_touch_nothing_outside(tmp_path):
    folder = tmp_path / "data of the shop" / "été"
    engines = EmbeddedEngines(folder)
    endpoints = await engines.start()
    assert await engines.start() == endpoints
    assert running_endpoints(folder) == endpoints
    await keep(endpoints, "first")
    connection = await asyncpg.connect(endpoints.postgres_url)
    for name, value in (("fsync", "on"), ("listen_addresses", ""), ("synchronous_commit", "on")):
        assert await connection.fetchval(f"SHOW {name}") == value
    await connection.close()
    with pytest.raises(FolderInUse, match=str(os.getpid())):
        await EmbeddedEngines(folder).start()
    pids = processes_in(folder)
    assert {engines.postgres_pid, engines.valkey_pid} <= set(pids)
    assert {pid: outside(folder, pid) for pid in pids} == {pid: set() for pid in pids}
    assert {path.stat().st_mode & 0o777 for path in (folder, folder / "run")} == {0o700}
    await engines.stop()
    assert (processes_in(folder), is_locked(folder)) == ([], False)
    assert await keep(await engines.start(), "second") == ["first", "second"]
    await engines.stop()


async def require_no_endless_wait(pid, endpoints):
    """A call to a stopped PostgreSQL ends, and the pool works again afterwards."""
    config = PostgresConfig(statement_timeout_s=0.5, connect_timeout_s=0.5)
    postgres = Postgres(endpoints.postgres_url, config)
    assert await postgres.value(COUNT) == 2
    stopped = [pid, *descendants(pid)]
    for each in stopped:
        os.kill(each, signal.SIGSTOP)
    try:
        async with asyncio.timeout(60):
            with pytest.raises(PostgresDown, match="headrace doctor"):
                await postgres.value(COUNT)
    finally:
        for each in stopped:
            os.kill(each, signal.SIGCONT)
    assert await postgres.value(COUNT) == 2
    await postgres.close()


async def test_engines_in_a_very_long_path_die_restart_hang_and_stop(tmp_path):
    """The path is longer than a socket's address, has odd characters, and leftovers of a kill."""
    folder = tmp_path / ("very long " * 12) / "a,b;c%20d'e\\f:é"
    (folder / "run").mkdir(parents=True)
    (folder / "postgres.new").mkdir()
    (folder / "postgres.new" / "PG_VERSION").write_text("half made by a killed initdb")
    (folder / "layout").touch()
    engines = EmbeddedEngines(folder, durable=False)
    await keep(await engines.start(), "1")
    await engines.stop()
    # The state after a kill when another program has reused the pid.
    (folder / "postgres" / "postmaster.pid").write_text(f"{os.getpid()}\n{folder}/postgres\n")
    (folder / "run" / ".s.PGSQL.5432.lock").write_text(f"{os.getpid()}\n")
    (folder / "run" / ".s.PGSQL.5432").touch()
    endpoints = await engines.start()
    assert await keep(endpoints, "2") == ["1", "2"]
    await require_no_endless_wait(engines.postgres_pid, endpoints)
    for number, name in (
        (signal.SIGKILL, "postgres"),
        (signal.SIGKILL, "valkey"),
        (signal.SIGTERM, "postgres"),
        (signal.SIGTERM, "valkey"),
    ):
        pid = getattr(engines, f"{name}_pid")
        os.kill(pid, number)
        assert await engines.wait_exit() == name
        assert getattr(engines, f"{name}_pid") is None
        await engines.restart(name)
        assert getattr(engines, f"{name}_pid") not in (None, pid)
    assert await keep(endpoints, "3") == ["1", "2", "3"]
    pids = [engines.postgres_pid, engines.valkey_pid]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    hurry = asyncio.Event()
    hurry.set()
    await engines.stop(hurry)
    assert not any(is_alive(pid) for pid in pids)
    assert processes_in(tmp_path) == []


async def test_a_refused_start_names_the_reason_and_leaves_no_process_and_no_lock(tmp_path):
    folder = tmp_path / "data"
    with pytest.raises(StartFailed, match=r'(?s)logs/postgres.log.*"shared_buffers": "a lot"'):
        await EmbeddedEngines(folder, durable=False, extra={"shared_buffers": "a lot"}).start()
    assert (processes_in(folder), is_locked(folder)) == ([], False)
    version = folder / "postgres" / "PG_VERSION"
    version.write_text("16\n")
    with pytest.raises(WrongVersion, match=r"version 16.*pg_upgrade"):
        await EmbeddedEngines(folder).start()
    version.write_text("18\n")
    aof = folder / "valkey" / "appendonlydir"
    shutil.rmtree(aof)
    aof.write_text("a file where a folder should be")
    with pytest.raises(StartFailed, match=r"valkey ended.*logs/valkey.log"):
        await EmbeddedEngines(folder, durable=False).start()
    assert (processes_in(folder), is_locked(folder)) == ([], False)
