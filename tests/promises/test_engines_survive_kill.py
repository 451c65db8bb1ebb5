"""After `kill -9` of anything, or of everything, the engines recover without a manual step.

Never lost: a committed row; a key that Valkey wrote to its append-only file. With `appendfsync
everysec` Valkey answers first and writes up to 2 s later while its disk syncs. Bounded: engines
whose starter was killed end within ten seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import asyncpg
import pytest
from tests.kit.processes import descendants, is_alive, wait_until

from headrace.engines.embedded import EmbeddedEngines, running_endpoints
from headrace.engines.embedded.process import processes_in
from headrace.engines.valkey import Valkey, ValkeyConfig

STARTER = Path(__file__).parents[1] / "engines" / "embedded_starter.py"
pytestmark = pytest.mark.slow


def start(folder):
    """The starter in its own process, engines ready."""
    process = subprocess.Popen([sys.executable, str(STARTER), str(folder)], stdout=subprocess.PIPE)
    assert "postgres_pid" in json.loads(process.stdout.readline())
    return process


async def write(endpoints, numbers):
    """Rows and keys, committed and written, and one connection left in a transaction."""
    connection = await asyncpg.connect(endpoints.postgres_url)
    await connection.execute("CREATE TABLE IF NOT EXISTS kept (id int PRIMARY KEY)")
    valkey = Valkey(endpoints.valkey_url, ValkeyConfig())
    for number in numbers:
        await connection.execute("INSERT INTO kept VALUES ($1)", number)
        await valkey.command("RPUSH", "kept", number)
    async with asyncio.timeout(30):
        while not await is_written(valkey):
            await asyncio.sleep(0)
    await connection.transaction().start()
    await connection.execute("INSERT INTO kept VALUES (-1)")
    return connection, valkey


async def is_written(valkey):
    """Whether all keys are in the append-only file."""
    state = await valkey.command("INFO", "persistence")
    return state["aof_buffer_length"] == state["aof_pending_bio_fsync"] == 0


async def read(endpoints):
    """All rows, and all words of the list."""
    connection = await asyncpg.connect(endpoints.postgres_url)
    rows = [row["id"] for row in await connection.fetch("SELECT id FROM kept ORDER BY id")]
    await connection.close()
    valkey = Valkey(endpoints.valkey_url, ValkeyConfig())
    words = [int(word) for word in await valkey.command("LRANGE", "kept", 0, -1)]
    await valkey.close()
    return rows, words


async def test_acknowledged_writes_survive_kill_9_of_starter_engines_and_all(tmp_path):
    folder = tmp_path / "data"
    for number, victims in enumerate(("starter", "everything", "engines then starter")):
        # Each start comes at once and waits for the orphans itself.
        starter = start(folder)
        begin = 50 * number
        open_ones = await write(running_endpoints(folder), range(begin, begin + 50))
        below = descendants(starter.pid)
        assert len(below) > 2
        if victims == "starter":
            order = [starter.pid]
            # A backend that does not react must not keep PostgreSQL alive.
            os.kill(open_ones[0].get_server_pid(), signal.SIGSTOP)
        else:
            order = [starter.pid, *below] if victims == "everything" else [*below, starter.pid]
        for pid in order:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        starter.wait(60)
        if victims == "starter":
            wait_until(lambda: not processes_in(folder), what="engines ended")
        open_ones[0].terminate()
        await open_ones[1].close()
    engines = EmbeddedEngines(folder)
    endpoints = await engines.start()
    assert not any(map(is_alive, below))
    assert await read(endpoints) == (list(range(150)), list(range(150)))
    await engines.stop()


async def test_a_start_that_is_killed_in_the_middle_is_repeated_from_the_beginning(tmp_path):
    folder = tmp_path / "data"
    command = [sys.executable, str(STARTER), str(folder)]
    for wanted in ("postgres.new/base", "postgres.new/global/pg_control", "postgres"):
        starter = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        wait_until((folder / wanted).exists, what=wanted)
        starter.kill()
        starter.wait(60)
    engines = EmbeddedEngines(folder)
    endpoints = await engines.start()
    connection = await asyncpg.connect(endpoints.postgres_url)
    assert await connection.fetchval("SELECT 1") == 1
    await connection.close()
    await engines.stop()
    assert not (folder / "postgres.new").exists()
