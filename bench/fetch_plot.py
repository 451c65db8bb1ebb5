"""Charts of fetch over seconds, drawn as the simulated day's are.

The same panel, style and page.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from bench.day.plot import (
    COLOURS,
    GAP,
    LEFT,
    PANEL_HEIGHT,
    RIGHT,
    STYLE,
    TOP,
    WIDTH,
    Panel,
)
from bench.report import RESULTS, write_plot


class Chart:
    """A panel whose axis is in seconds."""

    def __init__(self, title: str, seconds: float, most: float) -> None:
        self._panel = Panel(title, 0, max(seconds, 1.0), max(most, 1e-9), unit="s")
        self._most = most

    def line(self, name: str, values: Sequence[float], place: int) -> None:
        """A value a second."""
        self._panel.line(name, values, place)

    def dots(self, name: str, rows: Sequence[tuple[float, float]], place: int) -> None:
        """A dot for each (second, value)."""
        colour = COLOURS[place % len(COLOURS)]
        panel = self._panel
        panel.parts += [
            f'<circle cx="{panel.x(at):.1f}" cy="{panel.y(value):.1f}" r="1.6" fill="{colour}"'
            ' opacity="0.5"/>'
            for at, value in rows
        ]
        panel.parts.append(
            f'<text x="{WIDTH - RIGHT + 12}" y="{panel.top + 14 + 16 * place}"'
            f' style="fill:{colour}">{escape(name)}</text>'
        )

    def limit(self, name: str, value: float) -> None:
        """A dashed line across."""
        y = self._panel.y(value)
        self._panel.parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#222"'
            f' stroke-dasharray="5 4"/><text x="{WIDTH - RIGHT + 12}" y="{y + 4:.1f}">'
            f"{escape(name)}</text>"
        )

    def mark(self, name: str, from_s: float, to_s: float) -> None:
        """A stretch of time."""
        left, right = self._panel.x(from_s), self._panel.x(to_s)
        self._panel.parts.insert(
            0,
            f'<rect x="{left:.1f}" y="{self._panel.top}" width="{right - left:.1f}"'
            f' height="{PANEL_HEIGHT}" fill="#e09f3e" opacity="0.25"/>'
            f'<text x="{left + 4:.1f}" y="{self._panel.top + 12}">{escape(name)}</text>',
        )

    def drawn(self) -> str:
        """With four ticks."""
        ticks = {self._most * part / 4: f"{self._most * part / 4:.3g}" for part in range(5)}
        return self._panel.drawn(ticks)


def write_chart(name: str, title: str, charts: Sequence[Chart]) -> None:
    """Write the page `bench/results/<name>.svg`, charts one below the other."""
    height = TOP + len(charts) * (PANEL_HEIGHT + GAP)
    body = "".join(
        f'<g transform="translate(0,{place * (PANEL_HEIGHT + GAP)})">{chart.drawn()}</g>'
        for place, chart in enumerate(charts)
    )
    write_plot(
        RESULTS,
        name,
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
        f' height="{height}"><style>{STYLE}</style><rect width="{WIDTH}" height="{height}"'
        f' fill="#fff"/><text class="title" x="{LEFT}" y="20">{escape(title)}</text>{body}</svg>\n',
    )
