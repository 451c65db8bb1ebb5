"""The record of all runs, one JSON file per fault, and the page that shows it.

A file has the runs of one version of the product: a hash over the files of `src` without those of
the web console, which no run uses. Runs of another version replace them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any, Final

from verification.torture.faults import FAULTS, Fault
from verification.torture.site import ROOMS, Outcome

ROOT: Final = Path(__file__).parents[2]
RESULTS: Final = Path(__file__).parent / "results"
PAGE: Final = ROOT / "docs" / "reference" / "torture.md"
GOAL: Final = 200
BROKEN: Final = ("lost", "doubled", "wrong", "over_limit")
HEADS: Final = (
    *("fault", "room", "runs", "operations", "acknowledged", "unknown"),
    *(
        "lost",
        "doubled",
        "wrong",
        "over limit",
        "round trip s",
        "recovery p50 s",
        "recovery p99 s",
        "seeds",
    ),
)
HEAD: Final = (Path(__file__).parent / "head.md").read_text().rstrip()
"""The text of the page before its tables."""
FINDINGS: Final = (Path(__file__).parent / "findings.md").read_text().rstrip()
"""Failed runs whose causes are known, as a table whose second column has the seeds."""
COLUMNS: Final = (
    "seed",
    "operations",
    "acknowledged",
    "unknown",
    *BROKEN,
    "lost_as_promised",
    "recovery_s",
)


@cache
def code() -> str:
    """The version of the product: a hash over its files without those of the web console."""
    found = hashlib.sha256()
    for path in sorted((ROOT / "src").rglob("*")):
        is_used = not {"__pycache__", "console"} & set(path.parts) and path.suffix != ".so"
        if path.is_file() and is_used:
            found.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]


def row_of(seed: int, outcome: Outcome) -> list[Any]:
    """The values of COLUMNS."""
    tally = outcome.tally
    broken = [outcome.count(column) for column in BROKEN]
    counts = [seed, tally.operations, tally.acknowledged, tally.unknown, *broken]
    return [*counts, outcome.lost_as_promised, round(outcome.recovery_s, 3)]


class Record:
    """The runs of one fault."""

    def __init__(self, fault: str, *, is_kept: bool = True) -> None:
        self._path = RESULTS / f"{fault}.json"
        self._is_kept = is_kept
        self.fault = fault
        self.rooms: dict[str, list[list[Any]]] = {}
        self.trips_s: dict[str, list[float]] = {}
        self.failures: list[list[Any]] = []
        """Date, seed and text of each failed run or site; those of other versions stay."""
        if is_kept and self._path.exists():
            found = json.loads(self._path.read_text())
            self.failures = found.get("failures", [])
            if found["code"] == code():
                self.rooms, self.trips_s = found["rooms"], found["undisturbed_s"]

    def runs(self, rooms: list[str]) -> int:
        """Runs that each of these cells has."""
        return min(len(self.rooms.get(room, ())) for room in rooms)

    def is_clean(self, rooms: list[str]) -> bool:
        """Whether no run of these cells broke a promise."""
        at = [COLUMNS.index(column) for column in BROKEN]
        return not any(row[i] for room in rooms for row in self.rooms.get(room, ()) for i in at)

    def add_trips(self, trips_s: Mapping[str, float]) -> None:
        """Note a round trip of each room without a fault, once a site."""
        for room, trip_s in trips_s.items():
            self.trips_s.setdefault(room, []).append(round(trip_s, 3))

    def add(self, seed: int, outcomes: Mapping[str, Outcome]) -> None:
        """Append a run to its cells and write the file."""
        for room, outcome in outcomes.items():
            self.rooms.setdefault(room, []).append(row_of(seed, outcome))
            if outcome.findings:
                kinds = ", ".join(sorted({found.fault for found in outcome.findings}))
                self.failures.append([today(), seed, f"{room}: {kinds}"])
        self._write()

    def add_failure(self, seed: int | None, text: str) -> None:
        """Note a site that failed, and write the file."""
        self.failures.append([today(), seed, text])
        self._write()

    def _write(self) -> None:
        if not self._is_kept:
            return
        RESULTS.mkdir(exist_ok=True)
        head = {"fault": self.fault, "code": code(), "date": today()}
        head |= {"machine": machine(), "columns": list(COLUMNS), "undisturbed_s": self.trips_s}
        head |= {"failures": self.failures}
        rooms = ",\n".join(
            f'"{room}": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]"
            for room, rows in sorted(self.rooms.items())
        )
        text = json.dumps(head, indent=1)[:-2] + f',\n "rooms": {{\n{rooms}\n}}}}\n'
        draft = self._path.with_suffix(".new")
        draft.write_text(text)
        draft.replace(self._path)

    def line(self, seed: int, outcomes: Mapping[str, Outcome], seconds: float) -> str:
        """One line about a run."""
        cells = [
            f"{room} {one.tally.acknowledged}/{one.tally.operations} in {one.recovery_s:.2f} s"
            + ("" if not one.findings else f" BROKEN {len(one.findings)}")
            for room, one in outcomes.items()
        ]
        done = max(len(self.rooms[room]) for room in outcomes)
        return f"{self.fault} run {done} seed {seed} ({seconds:.1f} s): {'; '.join(cells)}"


def today() -> str:
    """The date, UTC."""
    return f"{datetime.now(UTC):%Y-%m-%d}"


def machine() -> str:
    """Cores and processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return f"{len(os.sched_getaffinity(0))} cores, {names[0] if names else 'unknown processor'}"


def write_page() -> None:
    """Write the page from the files."""
    PAGE.write_text(page_of(load_all()))


def load_all() -> dict[str, dict[str, Any]]:
    """The records of all faults that have runs, by fault."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    return {fault: found[fault] for fault in FAULTS if fault in found}


def page_of(records: Mapping[str, dict[str, Any]]) -> str:
    """The page: a summary, the cells, the faults, the cells without runs."""
    cells = [
        Cell.of(fault, room, record["rooms"][room], record["undisturbed_s"][room])
        for fault, record in records.items()
        for room in ROOMS
        if room in record["rooms"]
    ]
    codes = sorted({f"`{record['code']}`" for record in records.values()})
    dates = sorted({record["date"] for record in records.values()})
    machines = sorted({record["machine"] for record in records.values()})
    runs = sum(cell.runs for cell in cells)
    broken = [cell for cell in cells if any(cell.broken)]
    summary = [
        f"{runs} runs of {len(cells)} cells are recorded. The goal of {GOAL} runs is reached in",
        f"{sum(cell.runs >= GOAL for cell in cells)} cells. {len(broken)} cells broke a promise.",
        f"Versions of the code (a hash of `src`): {', '.join(codes)}; {', '.join(dates)};",
        f"{', '.join(machines)}.",
    ]
    rows = ["| " + " | ".join(HEADS) + " |", "|" + " --- |" * len(HEADS)]
    rows += [cell.row() for cell in cells]
    faults = [f"| fault | what happens | runs of {GOAL} |", "| --- | --- | --- |"]
    faults += [
        f"| {name} | {fault.text} | {shown_runs(fault, records.get(name))} |"
        for name, fault in FAULTS.items()
    ]
    left = ["| fault | rooms | reason |", "| --- | --- | --- |"]
    for name, fault in FAULTS.items():
        reasons: dict[str, list[str]] = {}
        for room, reason in fault.without.items():
            reasons.setdefault(reason, []).append(room)
        missing = [
            room for room in fault.rooms if room not in records.get(name, {}).get("rooms", ())
        ]
        if missing:
            reasons["no run is recorded yet"] = missing
        left += [f"| {name} | {', '.join(found)} | {text} |" for text, found in reasons.items()]
    parts = [HEAD, " ".join(summary), "\n".join(rows), "## Findings", findings_of(records)]
    parts += ["## Faults", "\n".join(faults)]
    parts += ["## Not applicable or not run", "\n".join(left)]
    return "\n\n".join(parts) + "\n"


def findings_of(records: Mapping[str, dict[str, Any]]) -> str:
    """The failed runs with their causes, and those whose cause is not known yet."""
    rows = [
        f"| {fault} | {named} | {text} ({date}) | not known yet | open |"
        for fault, record in records.items()
        for date, seed, text in record.get("failures", [])
        for named in [f"site of {date}" if seed is None else str(seed)]
        if not is_known(fault, named)
    ]
    return "\n".join([FINDINGS, *rows])


def is_known(fault: str, named: str) -> bool:
    """Whether `findings.md` has the cause of a failed run, named by its seed or its site's date."""
    rows = [[cell.strip() for cell in line.split("|")] for line in FINDINGS.splitlines()]
    return any(row[1] == fault and named in row[2].split(", ") for row in rows if len(row) > 2)


def shown_runs(fault: Fault, record: Mapping[str, Any] | None) -> str:
    """The runs that each room of a fault has at least."""
    rooms = record["rooms"] if record else {}
    return str(min(len(rooms.get(room, ())) for room in fault.rooms))


@dataclass(frozen=True, slots=True)
class Cell:
    """A fault that met a room."""

    fault: str
    room: str
    runs: int
    seeds: str
    counts: tuple[int, ...]
    """Operations, acknowledged, unknown."""
    broken: tuple[int, ...]
    lost_as_promised: int
    times_s: tuple[float, ...]
    """p50 of a round trip without a fault, p50 and p99 of the recovery."""

    @classmethod
    def of(cls, fault: str, room: str, rows: list[list[Any]], trips_s: list[float]) -> Cell:
        """The cell of these rows of COLUMNS."""
        columns = dict(zip(COLUMNS, zip(*rows, strict=True), strict=True))
        sums = {name: sum(values) for name, values in columns.items()}
        return cls(
            fault,
            room,
            len(rows),
            seed_ranges(columns["seed"]),
            tuple(sums[name] for name in ("operations", "acknowledged", "unknown")),
            tuple(sums[name] for name in BROKEN),
            sums["lost_as_promised"],
            (
                percentile(trips_s, 0.5),
                percentile(columns["recovery_s"], 0.5),
                percentile(columns["recovery_s"], 0.99),
            ),
        )

    def row(self) -> str:
        """The row of the table."""
        lost, *others = self.broken
        shown = f"{lost} ({self.lost_as_promised} as promised)" if self.lost_as_promised else lost
        times = [f"{seconds:.2f}" for seconds in self.times_s]
        values = [
            self.fault,
            self.room,
            self.runs,
            *self.counts,
            shown,
            *others,
            *times,
            self.seeds,
        ]
        return "| " + " | ".join(map(str, values)) + " |"


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share of the values does not exceed."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)]


def seed_ranges(seeds: Sequence[int]) -> str:
    """Seeds in a row as one range."""
    ranges: list[list[int]] = []
    for seed in seeds:
        if ranges and seed == ranges[-1][1] + 1:
            ranges[-1][1] = seed
        else:
            ranges.append([seed, seed])
    texts = (f"{first}" if first == last else f"{first}..{last}" for first, last in ranges)
    return ", ".join(texts)
