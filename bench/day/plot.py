"""The simulated day as an SVG: load and slots, waits by class, moves, marks of what went wrong."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import log10
from typing import Any

WIDTH, LEFT, RIGHT = 1_000, 60, 150
PANEL_HEIGHT, GAP, TOP = 190, 46, 60
COLOURS = ("#1f6feb", "#d1495b", "#2a9d5c", "#e09f3e")
MARK_COLOURS = {
    "dead": "#d1495b",
    "shrunk": "#e09f3e",
    "poisoned": "#7b5ea7",
    "backlog": "#2a9d5c",
    "no scheduler": "#222222",
    "new queue": "#1f6feb",
    "burst": "#bbbbbb",
}
STYLE = (
    "text{font-family:sans-serif;font-size:11px;fill:#444}.title{font-size:14px;font-weight:bold}"
    ".name{font-size:12px;font-weight:bold}.axis{stroke:#ccc;stroke-width:.5}"
    ".line{fill:none;stroke-width:1.2}"
)


class Panel:
    """One chart of the page: series over the minutes of the day."""

    def __init__(
        self, title: str, place: int, hours: float, most: float, *, unit: str = "h"
    ) -> None:
        self.title, self.hours, self.most, self.unit = title, hours, most, unit
        self.top = TOP + place * (PANEL_HEIGHT + GAP)
        self.parts: list[str] = []

    def x(self, hour: float) -> float:
        """Where a moment is."""
        return LEFT + (WIDTH - LEFT - RIGHT) * hour / self.hours

    def y(self, value: float) -> float:
        """Where a value is."""
        return self.top + PANEL_HEIGHT * (1 - min(value, self.most) / self.most)

    def line(self, name: str, values: Sequence[float], place: int) -> None:
        """Draw a series, with its name at the right; the highest of every few minutes is shown."""
        colour = COLOURS[place % len(COLOURS)]
        size = max(1, len(values) // 480)
        tops = [max(values[i : i + size]) for i in range(0, len(values), size)]
        hours = [i * size / len(values) * self.hours for i in range(len(tops))]
        points = " ".join(
            f"{self.x(hour):.1f},{self.y(value):.1f}"
            for hour, value in zip(hours, tops, strict=True)
        )
        self.parts.append(f'<polyline class="line" stroke="{colour}" points="{points}"/>')
        text_y = self.top + 14 + 16 * place
        self.parts.append(
            f'<text x="{WIDTH - RIGHT + 12}" y="{text_y}" style="fill:{colour}">'
            f"{escape(name)}</text>"
        )

    def drawn(self, ticks: dict[float, str]) -> str:
        """The panel with its axes; `ticks`: labels by value."""
        head = [f'<text class="name" x="{LEFT}" y="{self.top - 8}">{escape(self.title)}</text>']
        for value, label in ticks.items():
            y = self.y(value)
            head.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
            head.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{label}</text>')
        for eighth in range(9):
            hour = self.hours * eighth / 8
            head.append(
                f'<text x="{self.x(hour)}" y="{self.top + PANEL_HEIGHT + 14}"'
                f' text-anchor="middle">{hour:.4g} {self.unit}</text>'
            )
        return "".join([*head, *self.parts])


def draw(title: str, hours: float, series: dict[str, Any], marks: list[dict[str, Any]]) -> str:
    """The whole page. `series` has one value a minute; `marks`: what, from_h and to_h."""
    load = Panel("slots: what the load needs, what is busy, what lives", 0, hours, 3_600)
    for place, name in enumerate(("offered", "busy", "alive")):
        load.line(name, series[name], place)
    waits = Panel("wait p99 of each minute by importance, s (logarithmic)", 1, hours, 4.0)
    for place, (name, values) in enumerate(sorted(series["wait_p99_s"].items())):
        waits.line(name, [_log(value) for value in values], place)
    moves = Panel("slots moved a minute, % of all", 2, hours, 20)
    moves.line("moved", series["moved_percent"], 0)
    height = TOP + 3 * (PANEL_HEIGHT + GAP)
    body = [
        f'<text class="title" x="{LEFT}" y="20">{escape(title)}</text>',
        *(_mark(mark, load, height - GAP) for mark in marks),
        load.drawn({0: "0", 1_000: "1,000", 2_000: "2,000", 3_500: "3,500"}),
        waits.drawn({_log(s): f"{s:g}" for s in (0.25, 2, 10, 60, 600)}),
        moves.drawn({0: "0", 2: "2", 5: "5", 10: "10", 20: "20+"}),
        _legend(marks),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
        f' height="{height}"><style>{STYLE}</style>'
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>' + "".join(body) + "</svg>\n"
    )


def _log(seconds: float) -> float:
    """A step of 0.25 s is 0.1, and 10 times as much is one more."""
    return 0.0 if seconds <= 0 else 0.1 + log10(max(1.0, seconds / 0.25))


def _mark(mark: dict[str, Any], panel: Panel, bottom: float) -> str:
    left = panel.x(mark["from_h"])
    width = max(1.0, panel.x(mark["to_h"]) - left) if mark["what"] != "new queue" else 1.0
    return (
        f'<rect x="{left:.1f}" y="{TOP}" width="{width:.1f}" height="{bottom - TOP}"'
        f' fill="{MARK_COLOURS[mark["what"]]}" opacity="0.25"/>'
    )


def _legend(marks: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(mark["what"] for mark in marks))
    parts = []
    for place, name in enumerate(names):
        x = LEFT + 125 * place
        parts.append(
            f'<rect x="{x}" y="28" width="10" height="10" fill="{MARK_COLOURS[name]}"'
            ' opacity="0.6"/>'
            f'<text x="{x + 14}" y="37">{escape(name)}</text>'
        )
    return "".join(parts)
