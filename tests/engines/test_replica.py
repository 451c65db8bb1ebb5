"""Reads on a standby: used while it answers in time; otherwise the primary answers."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path

import pytest
from tests.kit.own_postgres import OwnPostgres
from tests.kit.waiting import wait_true

from headrace.engines import replica as replica_module
from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.sql import compile_query

PORT = compile_query("test", "-- The server that answers.\nSELECT current_setting('port')::integer")
TICK = compile_query("test", "-- A commit.\nSELECT txid_current()")
SLOW = compile_query("test", "-- Too slow anywhere.\nSELECT pg_sleep(30)")
CONFIG = PostgresConfig(connect_timeout_s=2.0, statement_timeout_s=1.0)


@pytest.fixture
async def servers(servers_folder):
    """A primary and its standby."""
    primary = OwnPostgres(servers_folder / "p", "18")
    standby = OwnPostgres(servers_folder / "s", "18")
    await primary.make()
    await primary.start()
    await standby.copy(primary, name="standby")
    await standby.start()
    yield primary, standby
    standby.end()
    primary.end()


async def probed(postgres):
    """The state of a new probe, after a commit."""
    await postgres.value(TICK)
    postgres.replica._probed_s = float("-inf")
    return await postgres.replica.state()


@pytest.mark.slow
async def test_reads_use_the_standby_and_fall_back_to_the_primary(servers, monkeypatch):
    primary, standby = servers
    monkeypatch.setattr(replica_module, "PROBE_EVERY_S", 0.05)
    config = dataclasses.replace(CONFIG, replica_url=standby.url, replica_lag_max_s=20.0)
    postgres = Postgres(primary.url, config)

    async def reads_from(server):
        await postgres.value(TICK)
        return await postgres.reads.value(PORT) == server.port

    try:
        await wait_true(lambda: reads_from(standby), what="the standby is read")
        assert await postgres.value(PORT) == primary.port
        state = await probed(postgres)
        assert state.is_used
        assert state.text.startswith("replica, at most ")
        with pytest.raises(Exception, match="stopped the statement"):
            await postgres.reads.value(SLOW)

        os.kill(standby._process.pid, signal.SIGSTOP)
        for child in _children(standby):
            os.kill(child, signal.SIGSTOP)
        await probed(postgres)
        assert await reads_from(primary), "frozen"
        assert "does not respond" in (await probed(postgres)).text
        for child in _children(standby):
            os.kill(child, signal.SIGCONT)
        os.kill(standby._process.pid, signal.SIGCONT)
        await wait_true(lambda: reads_from(standby), what="the standby is read again")

        standby.kill()
        assert await reads_from(primary), "killed while its connection is open"
        await standby.start()
        await wait_true(lambda: reads_from(standby), what="the standby is read once more")

        postgres.replica._lag_max_s = -1.0
        assert "over postgres.replica_lag_max" in (await probed(postgres)).text
        assert await reads_from(primary), "late"
    finally:
        await postgres.close()


@pytest.mark.slow
async def test_a_server_that_is_no_standby_is_not_read(servers):
    primary, standby = servers
    postgres = Postgres(standby.url, dataclasses.replace(CONFIG, replica_url=primary.url))
    try:
        assert await postgres.reads.value(PORT) == standby.port
        assert (
            await postgres.replica.state()
        ).text == "primary, because the replica is not a standby"
    finally:
        await postgres.close()


def _children(server):
    pid = server._process.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
