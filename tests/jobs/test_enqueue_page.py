"""Every program on the page about enqueueing runs as it stands there."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "enqueue.md").read_text()
SHOP, *PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
FIRST = re.compile(
    r"^(?:import|from) (flask|django|sqlalchemy|psycopg|asyncpg|headrace)", re.MULTILINE
)
FRAMEWORKS = [FIRST.findall(program)[0] for program in PROGRAMS]


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=FRAMEWORKS)
async def test_a_program_runs(program, running_engines, database_url, sql, tmp_path):
    await sql("CREATE TABLE users (id serial PRIMARY KEY, name text)")
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "program.py").write_text(program)
    parts = urlsplit(database_url)
    user, host = parts.username, parse_qs(parts.query)["host"][0]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    env = {
        **kept,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "HEADRACE_POSTGRES_URL": database_url,
        "HEADRACE_VALKEY_URL": running_engines.endpoints.valkey_url,
        "DATABASE_URL": database_url,
        "SQLALCHEMY_URL": f"postgresql+psycopg://{user}@{parts.path}?host={host}",
        "SQLALCHEMY_ASYNC_URL": f"postgresql+asyncpg://{user}@{parts.path}?host={host}",
        "PGDATABASE": parts.path.lstrip("/"),
        "PGUSER": user,
        "PGHOST": host,
    }
    ran = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    jobs = await sql("SELECT payload FROM headrace.job_ready")
    users = await sql("SELECT name FROM users")
    is_test = "assert_enqueued" in program
    assert [row["payload"] for row in jobs] == ([] if is_test else [b'{"to":"ann"}'])
    assert [row["name"] for row in users] == ([] if is_test else ["ann"])
