"""Which lines a chart has, and their colors: keys joined, the largest kept, the others as one.

Pure functions of the lines of `history.py`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from headrace.console.views import Line
from headrace.kernel.config import parse_duration_s

LINES_MAX: Final = 8
COLORS: Final = 8
"""Colors of lines in `charts.css`; at least LINES_MAX."""
OTHERS: Final = "others"
OTHER_QUEUES: Final = "other queues"


def grouped(
    lines: Sequence[Line], groups: Mapping[str, str], tones: Mapping[str, str]
) -> list[Line]:
    """Lines whose keys begin alike as one line, in the order of the groups."""
    if not groups:
        return [
            Line(one.label, one.values, tones.get(one.label, ""))
            for one in sorted(lines, key=_natural)
        ]
    joined: dict[str, list[Line]] = {label: [] for label in groups.values()}
    for one in lines:
        label = next((label for key, label in groups.items() if one.label.startswith(key)), "")
        joined.setdefault(label or "other", []).append(one)
    kept = {label: some for label, some in joined.items() if some}
    return [summed(label, some, tones.get(label, "")) for label, some in kept.items()]


def summed(label: str, lines: Sequence[Line], tone: str = "") -> Line:
    """The sum of lines; None where all are None."""
    columns = zip(*(one.values for one in lines), strict=True)
    values = [
        None if all(value is None for value in column) else sum(value or 0 for value in column)
        for column in columns
    ]
    return Line(label, values, tone)


def busiest(lines: Sequence[Line]) -> list[Line]:
    """Up to LINES_MAX lines; the smallest are one."""
    if len(lines) <= LINES_MAX:
        return list(lines)
    by_size = sorted(lines, key=lambda one: -sum(value or 0 for value in one.values))
    kept = by_size[: LINES_MAX - 1]
    return [*(one for one in lines if one in kept), summed(OTHERS, by_size[LINES_MAX - 1 :])]


def largest_queues(lines: Iterable[Line]) -> list[Line]:
    """Up to LINES_MAX lines of queues with the largest sums; the others, with queue '', are one."""
    some = [one for one in lines if any(one.values)]
    some.sort(key=lambda one: (not one.label, -sum(value or 0 for value in one.values)))
    named = [one for one in some if one.label][:LINES_MAX]
    others = some[len(named) :]
    return [*named, *([summed(OTHER_QUEUES, others)] if others else [])]


def colors_of(charts: Sequence[Sequence[str]]) -> dict[str, int]:
    """A color from 1 to COLORS for each queue of a page, different from others in its charts.

    It follows from the name; if another queue of a chart has that color, the next free one is used.
    Queues of several charts choose first: the others then meet at most LINES_MAX - 1 colors.
    """
    names = {name for chart in charts for name in chart if name != OTHER_QUEUES}
    found: dict[str, int] = {}
    for name in sorted(names, key=lambda one: (-sum(one in chart for chart in charts), one)):
        taken = {found.get(other) for chart in charts if name in chart for other in chart}
        first = zlib.crc32(name.encode()) % COLORS
        turns = [(first + step) % COLORS + 1 for step in range(COLORS)]
        found[name] = next((one for one in turns if one not in taken), first + 1)
    return found


def _natural(line: Line) -> tuple[float, str]:
    """Sorts classes such as `500ms` and `30s` by their time, before all other labels."""
    try:
        return parse_duration_s(line.label), line.label
    except ValueError:
        return math.inf, line.label
