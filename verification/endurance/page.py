"""Judge the series of a run, and write its page and plot. No I/O but the two files.

A series is judged by a line (least squares) through its samples after WARM_UP_S: what it grows by
per hour, and the bound of that growth. Series without a bound grow with the site's data and are
shown alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from tests.kit.processes import ROOT

RESULTS: Final = ROOT / "verification" / "endurance" / "results.json"
PAGE: Final = ROOT / "docs" / "reference" / "endurance.md"
PLOT: Final = ROOT / "docs" / "reference" / "endurance.svg"
WARM_UP_S: Final = 600.0
"""Caches, pools and slots fill meanwhile; a shorter run is not judged."""
MIB: Final = 1024 * 1024
GOAL_HOURS: Final = 8.0
WIDTH, HEIGHT, GAP = 460, 110, 34


@dataclass(frozen=True, slots=True)
class Kind:
    """A series: its field of a sample, title, unit and the bound of its growth per hour."""

    field: str
    title: str
    unit: str
    scale: float
    growth_max: float | None
    """Per hour, in `unit`. None: it grows with the site's data."""


KINDS: Final = (
    Kind("memory_bytes", "Memory without PostgreSQL and Valkey (PSS)", "MiB", MIB, 8.0),
    Kind("descriptors", "Open descriptors without PostgreSQL and Valkey", "", 1, 20.0),
    Kind("processes", "Processes", "", 1, 2.0),
    Kind("connections", "Connections to PostgreSQL", "", 1, 2.0),
    Kind("dead_rows", "Dead rows", "thousand", 1000, 20.0),
    Kind("log_bytes", "Log of PostgreSQL (WAL)", "MiB", MIB, 64.0),
    Kind("stream_entries", "Entries of Valkey's streams", "thousand", 1000, 10.0),
    Kind("engines_bytes", "Memory of PostgreSQL and Valkey (PSS)", "MiB", MIB, None),
    Kind("valkey_bytes", "Memory of Valkey's data", "MiB", MIB, None),
    Kind("database_bytes", "Database", "MiB", MIB, None),
    Kind("disk_bytes", "Data folder", "MiB", MIB, None),
)


@dataclass(frozen=True, slots=True)
class Series:
    """A judged series; values are in the unit of its kind."""

    kind: Kind
    points: tuple[tuple[float, float], ...]
    growth_per_hour: float | None
    """None: the run was too short after the warm-up."""

    @classmethod
    def of(cls, samples: Sequence[Mapping[str, Any]]) -> list[Series]:
        """All series of the samples."""
        found = []
        for kind in KINDS:
            points = tuple(
                (sample["at_s"], sample[kind.field] / kind.scale)
                for sample in samples
                if sample[kind.field] is not None
            )
            found.append(cls(kind, points, growth_per_hour(points)))
        return found

    @property
    def is_over(self) -> bool:
        """Whether it grew beyond its bound."""
        bound, growth = self.kind.growth_max, self.growth_per_hour
        return bound is not None and growth is not None and growth > bound

    @property
    def text(self) -> str:
        """The series as a line."""
        growth = "not judged" if self.growth_per_hour is None else f"{self.growth_per_hour:+.2f}/h"
        bound = "" if self.kind.growth_max is None else f", at most {self.kind.growth_max:g}/h"
        return f"{self.kind.title}: {self.points[-1][1]:.1f} {self.kind.unit} {growth}{bound}"


def growth_per_hour(points: Sequence[tuple[float, float]]) -> float | None:
    """Slope of the least-squares line through the points after the warm-up, per hour."""
    settled = [(at_s / 3600, value) for at_s, value in points if at_s >= WARM_UP_S]
    if len(settled) < 10 or settled[-1][0] - settled[0][0] < WARM_UP_S / 3600:
        return None
    mean_x = sum(x for x, _ in settled) / len(settled)
    mean_y = sum(y for _, y in settled) / len(settled)
    spread = sum((x - mean_x) ** 2 for x, _ in settled)
    return sum((x - mean_x) * (y - mean_y) for x, y in settled) / spread


def write_page(result: Mapping[str, Any]) -> None:
    """Write the page and its plot."""
    series = Series.of(result["samples"])
    PLOT.write_text(plot(series, result["faults"]))
    PAGE.write_text(page(result, series))


def page(result: Mapping[str, Any], series: Sequence[Series]) -> str:
    """The page as Markdown."""
    skipped = [one for one in result["faults"] if (one["note"] or "").startswith("not done")]
    done = [one for one in result["faults"] if one["recovered_at"] is not None]
    rows = "\n".join(
        f"| {one.kind.title} | {one.kind.unit or 'count'} | {one.points[0][1]:.1f} |"
        f" {max(value for _, value in one.points):.1f} | {one.points[-1][1]:.1f} |"
        f" {'not judged' if one.growth_per_hour is None else f'{one.growth_per_hour:+.2f}'} |"
        f" {'with the data' if one.kind.growth_max is None else f'{one.kind.growth_max:g}'} |"
        for one in series
    )
    grown = ", ".join(one.kind.title for one in series if one.is_over) or "none"
    shown = "\n".join(f"    {line}" for line in result["summary"])
    return f"""# Endurance: hours of load with a fault every minute

`make endurance HOURS=8` runs [the demo](../install.md), a small classifieds site whose simulated
users send the load, and causes a fault every minute. The faults take turns: a worker is killed, a
seller's host hangs, Valkey is emptied, PostgreSQL is stopped for 10 s, the media node is killed.
The users compare every answer with the expected one. A ledger compares what the users sent with
what Headrace stored, and counts what was lost or doubled. The command writes this page.

**Recorded**: {result["hours"]:.2f} hours of a goal of {GOAL_HOURS:g}, by
`{result["command"]}` on {result["date"]}; {result["machine"]}. The site recovered from
{len(done)} of {len(result["faults"]) - len(skipped)} faults; {len(skipped)} more could not take
place, because no worker was busy. Exit code of the demo: {result["exit_code"]} (0: every answer was
right).

Each series is measured every 10 s. Its growth is the slope of a line through all samples after the
first {WARM_UP_S / 60:.0f} minutes, and the bound is the greatest growth per hour that is accepted.
Series without a bound grow with the data of the site.

| series | unit | first | highest | last | growth per hour | bound |
| --- | --- | --- | --- | --- | --- | --- |
{rows}

Series that grew faster than their bound: {grown}.
In a run of an hour or two, caches that still fill and other load on the machine decide the slope,
so such a run shows neither that a series grows for good nor that it does not.

![Each series over time](endurance.svg)

The demo of {result["date"]} printed this summary; a later demo may name some figures differently.
Views that had not been flushed to PostgreSQL when Valkey was emptied are counted apart: Headrace
[permits this loss](../views.md#what-may-be-lost).

{shown}
"""


def plot(series: Sequence[Series], faults: Sequence[Mapping[str, Any]]) -> str:
    """Small charts of all series, two beside each other, as SVG."""
    rows = -(-len(series) // 2)
    width, height = 2 * (WIDTH + GAP) + GAP, rows * (HEIGHT + 2 * GAP) + GAP
    charts = [
        _chart(one, GAP + (number % 2) * (WIDTH + GAP), GAP + number // 2 * (HEIGHT + 2 * GAP))
        for number, one in enumerate(series)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        ' font-family="sans-serif" font-size="12">'
        f'<rect width="{width}" height="{height}" fill="#fff"/>{"".join(charts)}'
        f'<text x="{GAP}" y="{height - 8}" fill="#555">{len(faults)} faults, one a minute</text>'
        "</svg>\n"
    )


def _chart(one: Series, left: float, top: float) -> str:
    last_s = max(one.points[-1][0], 1.0)
    highest = max(1e-9, *(value for _, value in one.points)) * 1.1
    points = " ".join(
        f"{left + at_s / last_s * WIDTH:.1f},{top + HEIGHT - value / highest * HEIGHT:.1f}"
        for at_s, value in one.points
    )
    title = escape(f"{one.kind.title} {one.kind.unit}".strip())
    color = "#b3261e" if one.is_over else "#1f6f5c"
    return (
        f'<text x="{left}" y="{top - 8}" fill="#222">{title}</text>'
        f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="#f6f7f7"/>'
        f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>'
        f'<text x="{left + 4}" y="{top + 14}" fill="#555">{highest / 1.1:.0f}</text>'
        f'<text x="{left}" y="{top + HEIGHT + 15}" fill="#555">0</text>'
        f'<text x="{left + WIDTH}" y="{top + HEIGHT + 15}" fill="#555" text-anchor="end">'
        f"{last_s / 60:.0f} min</text>"
    )
