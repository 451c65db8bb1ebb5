"""A process that dies while it stages, compares or applies a run applies all of it or none."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from headrace.engines.sql import compile_query
from headrace.fetch.model import Customer
from headrace.fetch.sql import SQL
from headrace.fetch.store.runs import set_customer

PROGRAM = Path(__file__).with_name("catalogue_process.py")
ROWS = 9000
HEAD = "id,name,price,photos\n"
OLD = HEAD + "".join(f"i{n},Old,5,https://x.example/{n}.jpg\n" for n in range(300))
NEW = HEAD + "".join(f"i{n},New,5,https://x.example/{n}.jpg\n" for n in range(150, 150 + ROWS))
pytestmark = pytest.mark.slow


@pytest.fixture
def run(database_url, tmp_path):
    """Run a program to its end, dying at a named point; (exit code, what it printed)."""

    async def start(what: str, *, crash_at: str = "") -> tuple[int, str]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(PROGRAM), database_url, str(tmp_path), what),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "HEADRACE_CRASH_AT": crash_at},
        )
        printed, _ = await asyncio.wait_for(process.communicate(), 120)
        return process.returncode, printed.decode().strip()

    return start


@pytest.fixture
async def files(postgres, tmp_path, run):
    """The old catalogue, run, and the new one."""
    limits = {"starts_max": 1, "window_s": 1, "connections": 1}
    await set_customer(postgres, Customer(customer="shop", **limits, hold_share=1.0))
    for name, text in (("old.csv", OLD), ("new.csv", NEW)):
        (tmp_path / name).write_text(text)
    code, _ = await run(str(tmp_path / "old.csv"))
    assert code == 0
    return tmp_path


async def facts(postgres) -> dict[str, int]:
    """Everything that a run leaves behind, but its own row."""
    text = """-- What there is.
    SELECT
    (SELECT count(*) FROM headrace.fetch_item WHERE NOT is_gone) AS items,
    (SELECT count(*) FROM headrace.fetch_item WHERE is_gone) AS gone,
    (SELECT count(*) FROM headrace.fetch_item WHERE fields LIKE '%Old%') AS old,
    (SELECT count(*) FROM headrace.fetch_change) AS changes,
    (SELECT count(*) FROM headrace.fetch_need) AS needs,
    (SELECT count(*) FROM headrace.lane_job) + (SELECT count(*) FROM headrace.job_ready) AS jobs,
    (SELECT count(*) FROM headrace.job_group) AS groups,
    (SELECT count(*) FROM headrace.fetch_run WHERE state IN ('applied', 'done')) AS runs"""
    return dict(await postgres.one(compile_query("facts", text)))


POINTS = ("rows_staged:2", "compared", "items_stored", "jobs_enqueued")


@pytest.mark.parametrize("point", POINTS)
async def test_a_catalogue_that_died_changed_nothing_and_the_next_one_works(
    postgres, run, files, point
):
    before = await facts(postgres)
    code, _ = await run(str(files / "new.csv"), crash_at=f"fetch.{point}")
    assert code == -signal.SIGKILL
    assert await facts(postgres) == before
    code, run_id = await run(str(files / "new.csv"))
    assert code == 0
    after = await facts(postgres)
    assert (after["items"], after["gone"], after["runs"]) == (ROWS, 150, 2)
    rows = await postgres.all(SQL.runs, run_id=None, customer="shop", rows_max=10)
    assert [row["state"] for row in rows] == ["applied", "abandoned", "applied"]
    assert rows[0]["id"] == int(run_id)
    left = compile_query("left", "-- Staged rows.\nSELECT count(*) FROM headrace.fetch_staged")
    assert await postgres.value(left) == 0


async def test_a_catalogue_that_was_applied_stays_so(postgres, run, files):
    code, _ = await run(str(files / "new.csv"), crash_at="fetch.run_applied")
    assert code == -signal.SIGKILL
    after = await facts(postgres)
    assert (after["items"], after["gone"], after["runs"]) == (ROWS, 150, 2)
    assert after["changes"] == 300 + ROWS + 150
    # A changed name alone asks photos again only where no outcome is known yet.
    assert after["jobs"] == after["needs"] + 150
    code, _ = await run(str(files / "new.csv"))
    assert code == 0
    assert (await facts(postgres))["changes"] == after["changes"]


@pytest.mark.parametrize("point", ["items_stored", "jobs_enqueued", "items_sent"])
async def test_items_sent_are_taken_all_or_none(postgres, run, files, point):
    before = await facts(postgres)
    code, _ = await run("send", crash_at=f"fetch.{point}")
    assert code == -signal.SIGKILL
    assert await facts(postgres) == before
    code, _ = await run("send")
    assert code == 0
    after = await facts(postgres)
    assert (after["items"], after["changes"]) == (300, before["changes"] + 50)


async def test_a_run_is_undone_whole_or_not(postgres, run, files):
    before = await facts(postgres)
    code, bad = await run(str(files / "new.csv"))
    assert code == 0
    applied = await facts(postgres)
    code, _ = await run(f"undo:{bad}", crash_at="fetch.jobs_enqueued")
    assert code == -signal.SIGKILL
    assert await facts(postgres) == applied
    code, _ = await run(f"undo:{bad}", crash_at="fetch.run_applied")
    assert code == -signal.SIGKILL
    undone = await facts(postgres)
    assert (undone["items"], undone["old"], undone["gone"]) == (300, before["old"], ROWS - 150)
    code, _ = await run(f"undo:{bad}")
    assert code != 0, "once"
    assert await facts(postgres) == undone


async def test_items_are_published_at_their_deadline_once(postgres, run, files):
    """300 items without a worker, in two pages; the first attempt dies behind the first page."""
    age = (
        "-- Time passes.\nUPDATE headrace.fetch_run SET applied_at = applied_at - interval '1 day'"
    )
    await postgres.run(compile_query("age", age))
    results = compile_query("results", "-- Results.\nSELECT count(*) FROM headrace.fetch_result")
    assert files.exists()
    code, _ = await run("late", crash_at="fetch.published_late")
    assert code == -signal.SIGKILL
    assert await postgres.value(results) == 200
    for _ in range(2):
        code, _ = await run("late")
        assert code == 0
        assert await postgres.value(results) == 300
