"""Engines of the distribution instead of the wheels: what is accepted, and a whole life."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import asyncpg
import pytest
from tests.kit.processes import HeadraceProcess

from headrace.app import PACKAGES
from headrace.engines.embedded import EmbeddedEngines, EngineMissing, EngineTooOld, WrongVersion
from headrace.engines.embedded.programs import packaged_file, postgres_program, valkey_program
from headrace.engines.migrate import apply_migrations
from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.valkey import Valkey, ValkeyConfig

FOLDERS = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
POSTGRES = FOLDERS[-1] if FOLDERS and (FOLDERS[-1] / "postgres").exists() else None
VALKEY = shutil.which("valkey-server") or shutil.which("redis-server")
installed = pytest.mark.skipif(
    POSTGRES is None or VALKEY is None,
    reason="the distribution's PostgreSQL or Valkey is not installed:"
    " apt-get install postgresql valkey (or redis-server)",
)


def program(folder, name, text):
    """A program that prints `text`."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{text}'\n")
    path.chmod(0o755)
    return path


async def test_a_setting_that_names_no_server_is_refused_with_the_place(tmp_path):
    path = program(tmp_path / "old", "postgres", "postgres (PostgreSQL) 14.11 (Debian)")
    with pytest.raises(EngineMissing, match=r"no initdb beside .*old/postgres"):
        await postgres_program(str(path))
    program(tmp_path / "old", "initdb", "")
    with pytest.raises(EngineTooOld, match="is PostgreSQL 14: Headrace needs 15 or newer"):
        await postgres_program(str(tmp_path / "old"))
    program(tmp_path / "old", "postgres", "postgres (PostgreSQL) 15.20")
    assert (await postgres_program(str(path))).major == 15
    for folder, text in ((tmp_path, "postgres is not a program"), (Path("/bin/sh"), "initdb")):
        with pytest.raises(EngineMissing, match=f"HEADRACE_POSTGRES_BIN: .*{text}"):
            await postgres_program(str(folder))
    for text, error, match in (
        ("Redis server v=6.2.7 sha=0", EngineTooOld, r"is Redis 6\.2: Headrace needs Redis 7\.0"),
        ("Valkey server v=7.0.1 sha=0", EngineTooOld, r"needs Valkey 7\.2 or newer"),
        ("KeyDB 6.3", EngineMissing, "is not Valkey: it printed 'KeyDB 6.3'"),
    ):
        with pytest.raises(error, match=match):
            await valkey_program(str(program(tmp_path, "redis-server", text)))
    program(tmp_path, "valkey-server", "Valkey server v=8.1.1 sha=0")
    assert (await valkey_program(str(tmp_path))).path.name == "valkey-server", "the first choice"
    (tmp_path / "broken").write_bytes(b"\x7fELF")
    (tmp_path / "broken").chmod(0o755)
    with pytest.raises(EngineMissing, match="cannot be started"):
        await valkey_program(str(tmp_path / "broken"))


def test_without_the_wheels_the_error_names_the_settings():
    with pytest.raises(EngineMissing) as raised:
        packaged_file("no_such_wheel", "bin", "postgres")
    assert "WHEEL[embedded]" in str(raised.value)
    named = re.search(
        r"HEADRACE_POSTGRES_BIN=(\S+) HEADRACE_VALKEY_BIN=([^\s;]+)", str(raised.value)
    )
    assert named
    if POSTGRES is not None and VALKEY is not None:
        assert (named[1], named[2]) == (str(POSTGRES), VALKEY)


@installed
@pytest.mark.slow
async def test_engines_of_the_distribution_keep_their_data(tmp_path):
    def engines(**named):
        given = {"postgres_bin": str(POSTGRES), "valkey_bin": VALKEY, **named}
        return EmbeddedEngines(tmp_path / "data", durable=False, **given)

    first = engines()
    endpoints = await first.start()
    try:
        postgres = Postgres(endpoints.postgres_url, PostgresConfig())
        await apply_migrations(postgres, PACKAGES)
        await postgres.close()
        valkey = Valkey(endpoints.valkey_url, ValkeyConfig())
        await valkey.command("SET", "kept", "yes")
        await valkey.close()
    finally:
        await first.stop()
    second = engines()
    endpoints = await second.start()
    try:
        connection = await asyncpg.connect(endpoints.postgres_url)
        version = await connection.fetchval("SHOW server_version_num")
        assert int(version) // 10_000 == int(POSTGRES.parent.name)
        upper = await connection.fetchval(
            "SELECT upper('été') || (SELECT count(*) FROM headrace.job_ready)"
        )
        assert upper == "ÉTÉ0"
        await connection.close()
        valkey = Valkey(endpoints.valkey_url, ValkeyConfig())
        assert await valkey.command("GET", "kept") == b"yes"
        await valkey.close()
    finally:
        await second.stop()
    with pytest.raises(WrongVersion, match=rf"version {POSTGRES.parent.name}, .* is version 18"):
        await engines(postgres_bin=None).start()


@installed
@pytest.mark.slow
async def test_up_recovers_with_engines_of_the_distribution_after_kill_9(tmp_path):
    """All processes of the folder are killed; the next `up` ends the rest and serves again."""
    env = {"HEADRACE_POSTGRES_BIN": str(POSTGRES), "HEADRACE_VALKEY_BIN": VALKEY}
    for _ in range(2):
        process = HeadraceProcess(["up", "--engines-only"], folder=tmp_path, env=env)
        try:
            process.wait_out("Engines are running")
            os.kill(process.pid, 9)
        finally:
            process.end()


@installed
def test_the_setting_reaches_the_environment_of_a_program(tmp_path):
    """`config show` names the source, so an operator sees which engine runs."""
    env = {**os.environ, "HEADRACE_POSTGRES_BIN": str(POSTGRES)}
    command = [sys.executable, "-m", "headrace", "config", "show"]
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert re.search(rf"postgres\.bin +{POSTGRES} +HEADRACE_POSTGRES_BIN", ran.stdout)
