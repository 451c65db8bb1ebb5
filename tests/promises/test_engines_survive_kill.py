"""Promise.

After `kill -9` of anything, or of everything, the engines recover without a manual step.

Never lost: a committed row; a key whose write was answered (it reached the kernel). Bounded:
engines whose starter was killed have ended within ten seconds.
"""

from __future__ import annotations

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
    """The starter in a process of its own, engines ready."""
    process = subprocess.Popen([sys.executable, str(STARTER), str(folder)], stdout=subprocess.PIPE)
    assert "postgres_pid" in json.loads(process.stdout.readline())
    return process


async def write(endpoints, count):
    """`count` rows and keys, each acknowledged, and one connection left busy in a transaction."""
    connection = await asyncpg.connect(endpoints.postgres_url)
    await connection.execute("CREATE TABLE IF NOT EXISTS kept (id int PRIMARY KEY)")
    valkey = Valkey(endpoints.valkey_url, ValkeyConfig())
    for number in range(count):
        await connection.execute("INSERT INTO kept VALUES ($1)", number)
        await valkey.command("RPUSH", "kept", number)
    busy = connection.transaction()
    await busy.start()
    await connection.execute("INSERT INTO kept VALUES (-1)")
    return connection, valkey


async def read(endpoints):
    """All rows, and all words of the list."""
    connection = await asyncpg.connect(endpoints.postgres_url)
    rows = [row["id"] for row in await connection.fetch("SELECT id FROM kept ORDER BY id")]
    await connection.close()
    valkey = Valkey(endpoints.valkey_url, ValkeyConfig())
    words = [int(word) for word in await valkey.command("LRANGE", "kept", 0, -1)]
    await valkey.close()
    return rows, words


@pytest.mark.parametrize("victims", ["starter", "everything", "engines then starter"])
async def test_what_was_acknowledged_survives_kill_9(tmp_path, victims):
    folder = tmp_path / "data"
    starter = start(folder)
    connection, valkey = await write(running_endpoints(folder), 50)
    below = descendants(starter.pid)
    assert len(below) > 2
    if victims == "starter":
        order = [starter.pid]
    elif victims == "everything":
        order = [starter.pid, *below]
    else:
        order = [*reversed(below), starter.pid]
    for pid in order:
        if is_alive(pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    starter.wait(60)
    # The next start comes at once and waits for the orphans itself; it need not be told.
    engines = EmbeddedEngines(folder)
    endpoints = await engines.start()
    assert not any(is_alive(pid) for pid in below)
    assert await read(endpoints) == (list(range(50)), list(range(50)))
    await engines.stop()
    connection.terminate()
    await valkey.close()


async def test_engines_end_by_themselves_when_their_starter_is_killed(tmp_path):
    folder = tmp_path / "data"
    starter = start(folder)
    connection, valkey = await write(running_endpoints(folder), 1)
    # A backend that does not react must not keep PostgreSQL alive.
    os.kill(connection.get_server_pid(), signal.SIGSTOP)
    starter.kill()
    starter.wait(60)
    wait_until(lambda: not processes_in(folder), what="engines ended")
    connection.terminate()
    await valkey.close()


async def test_a_start_that_is_killed_in_the_middle_is_begun_anew(tmp_path):
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
