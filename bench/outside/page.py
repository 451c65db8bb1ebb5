"""The records of all runs, and the page that is written from them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.machine import ROOT, read_commit, read_machine_facts
from bench.outside import checkout
from bench.outside.cells import CELLS, SHORT_RATE

RECORDS = ROOT / "bench" / "outside" / "results.json"
PAGE = ROOT / "docs" / "reference" / "outside-harness.md"
NONE = "-"
Record = dict[str, Any]

HERE = Path(__file__).parent
KINDS = {"chaos": "Chaos", "bloat": "Bloat and pressure"}


def records() -> list[Record]:
    """All recorded runs."""
    return json.loads(RECORDS.read_text())["runs"] if RECORDS.exists() else []


def is_recorded(cell: str, system: str, *, short: bool) -> bool:
    """Whether this system was run through this cell."""
    return any((r["cell"], r["system"], r["short"]) == (cell, system, short) for r in records())


def add(record: Record) -> None:
    """Store a run in place of an earlier one of the same cell."""
    key = ("cell", "system", "short")
    kept = [r for r in records() if [r[k] for k in key] != [record[k] for k in key]]
    found = [*kept, record | {"commit": read_commit()}]
    RECORDS.write_text(json.dumps({"runs": found}, indent=1) + "\n")


def write() -> None:
    """Write the page from the records."""
    runs = records()
    facts = read_machine_facts()
    is_short = any(run["short"] for run in runs)
    head = (HERE / "head.md").read_text()
    values = {
        "name": checkout.HARNESS.removeprefix("https://github.com/"),
        "url": checkout.HARNESS,
        "flags": "--short" if is_short else "",
        "commit": checkout.COMMIT,
        "machine": f"{facts['cores']} cores, {facts['cpu']}",
        "shortened": _shortened() if is_short else "",
        "postgres": checkout.POSTGRES_PACKAGE,
    }
    parts = [head.format(**values), _versions(runs)]
    for kind, title in KINDS.items():
        names = [name for name, cell in CELLS.items() if cell.kind == kind]
        parts += [f"## {title}\n", *(_table(name, runs) for name in names)]
    parts.append((HERE / "findings.md").read_text())
    PAGE.write_text("\n".join(part for part in parts if part))


def _shortened() -> str:
    return (
        f"A short run has {SHORT_RATE:.0%} of the rates, shorter phases, and a sample per second"
        " instead of every five. Its options are above each table."
    )


def _versions(runs: Iterable[Record]) -> str:
    found: dict[str, str] = {}
    for run in runs:
        if run.get("version"):
            pinned = f", pinned {run['pinned']}" if run["pinned"] else f", commit {run['commit']}"
            found[run["system"]] = f"`{run['version']}`{pinned}"
    return _lines(
        ("system", "version that its adapter reports, and version that the harness pins"),
        [(system, found[system]) for system in checkout.SYSTEMS if system in found],
    )


def _table(cell: str, runs: Iterable[Record]) -> str:
    """One cell: the options that its runs share, and a row a system."""
    chosen = {(run["short"], run["system"]): run for run in runs if run["cell"] == cell}
    if not chosen:
        return f"`{cell}` was not run.\n"
    ordered = [chosen[key] for key in sorted(chosen, key=_order)]
    options = " ".join(ordered[0]["options"][2:])
    rows = [_row(run) for run in ordered]
    table = _lines(tuple(rows[0]), [tuple(row.values()) for row in rows])
    return f"### {cell}\n\n`{options}`\n\n{table}"


def _order(key: tuple[bool, str]) -> tuple[bool, int]:
    return key[0], checkout.SYSTEMS.index(key[1])


def _row(run: Record) -> dict[str, str]:
    """The columns of a run."""
    cell, phases = CELLS[run["cell"]], run["phases"]
    names = [phase.label for phase in cell.phases[1:]]

    def each(figure: str, digits: int = 1) -> str:
        return " / ".join(_plain(phases.get(name, {}).get(figure), digits) for name in names)

    row = {
        "system": run["system"],
        "exit": f"{run['exit_code']}" + (f": {run['error']}" if run["exit_code"] else ""),
        "completed /s": each("median_throughput_per_s"),
        "enqueued /s": each("median_enqueue_rate_per_s"),
        "p99 ms": each("median_claim_p99_ms", 0),
        "dead rows": each("peak_dead_tup", 0),
    }
    if cell.kind == "chaos":
        last = phases.get(names[-1], {})
        jobs = ("jobs_enqueued", "jobs_completed", "jobs_lost")
        row["recovery s"] = _plain(last.get("chaos_recovery_time_s"))
        row["jobs"] = " / ".join(_plain(last.get(figure), 0) for figure in jobs)
    stop = ", ".join(f"{took_s:.1f}" for took_s in run["stopped_in_s"]) or NONE
    row["stop s"] = stop + (f", {run['killed_at_stop']} killed" if run["killed_at_stop"] else "")
    row["load"] = f"{run['load_before']:.0f}, {run['load_after']:.0f}"
    row["at"] = run["date"][:16].replace("T", " ")
    return row


def _plain(value: float | None, digits: int = 1) -> str:
    return NONE if value is None else f"{value:,.{digits}f}"


def _lines(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    cells = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells) + "\n"
