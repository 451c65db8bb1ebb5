"""How values are shown: counts, durations, sizes, moments. `None` is `unknown`, never 0. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import quote

import msgspec

UNKNOWN: Final = "unknown"
PRETTY_CHARACTERS_MAX: Final = 20_000
TONES: Final = {
    "good": (
        "ready", "done", "alive", "valid", "published", "up", "ok", "won", "on", "running", "leased",
    ),
    "warn": (
        "paused", "draining", "held", "retried", "slow", "floating",
        "refused", "loaded", "revoked", "expired", "moved", "cancelled", "begun",
    ),
    "bad": ("failed", "quarantined", "silent", "down", "broken", "lost", "missing", "open", "error"),
}  # fmt: skip
_TONE_OF: Final = {word: tone for tone, words in TONES.items() for word in words}
_TIMES: Final = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"))
_SIZES: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SHORT: Final = ((1e9, "G"), (1e6, "M"), (1e4, "k"))


def tone_of(word: str) -> str:
    """The tone of a state's word: good, warn, bad, or none."""
    return _TONE_OF.get(word, "")


def count(value: float | None) -> str:
    """`12,345`."""
    if value is None:
        return UNKNOWN
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.2f}" if abs(value) < 10 else f"{value:,.1f}"


def counted(value: int, one: str, many: str) -> str:
    """`1 job is`, `12,345 jobs are`."""
    return f"1 {one}" if value == 1 else f"{value:,} {many}"


def short(value: float | None) -> str:
    """`1.2M`, where there is little room."""
    if value is None:
        return UNKNOWN
    for size, unit in _SHORT:
        if abs(value) >= size:
            factor = 1e3 if unit == "k" else size
            return f"{value / factor:.1f}".removesuffix(".0") + unit
    return count(value)


def seconds(value: float | None) -> str:
    """`0.4 ms`, `12 ms`, `3.4 s`, `38 s`, `4 min`, `2.5 h`, `3 d`."""
    if value is None:
        return UNKNOWN
    if value and abs(value) < 1:
        ms = value * 1000
        return f"{ms:.1f} ms" if abs(ms) < 10 else f"{ms:.0f} ms"
    for size, unit in _TIMES:
        if abs(value) >= 2 * size:
            shown = f"{value / size:.1f}" if abs(value) < 10 * size else f"{value / size:.0f}"
            return f"{shown.removesuffix('.0')} {unit}"
    return f"{value:.1f} s" if 0 < abs(value) < 10 else f"{value:.0f} s"


def size(value: float | None) -> str:
    """`512 B`, `1.5 MiB`."""
    if value is None:
        return UNKNOWN
    left, unit = float(value), 0
    while abs(left) >= 1024 and unit < len(_SIZES) - 1:
        left, unit = left / 1024, unit + 1
    shown = f"{left:.0f}" if unit == 0 or abs(left) >= 100 else f"{left:.1f}".removesuffix(".0")
    return f"{shown} {_SIZES[unit]}"


def percent(ratio: float | None) -> str:
    """`63 %`."""
    if ratio is None:
        return UNKNOWN
    whole = ratio * 100
    shown = f"{whole:.1f}" if 0 < abs(whole) < 10 else f"{whole:,.0f}"
    return f"{shown.removesuffix('.0')} %"


def ago(moment: datetime | None, now_at: datetime) -> str:
    """`12 s ago`, `in 4 min`, `now`."""
    if moment is None:
        return UNKNOWN
    passed_s = (now_at - moment).total_seconds()
    if abs(passed_s) < 1:
        return "now"
    return f"{seconds(passed_s)} ago" if passed_s > 0 else f"in {seconds(-passed_s)}"


def stamp(moment: datetime) -> str:
    """`2026-11-21 21:50:01 UTC`."""
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def pretty(value: Any) -> str:
    """JSON for reading, cut where it is very long."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    if len(text) > PRETTY_CHARACTERS_MAX:
        return f"{text[:PRETTY_CHARACTERS_MAX]}\n... ({len(text):,} characters)"
    return text


def path_segment(text: Any) -> str:
    """One segment of a path, a slash in it included."""
    return quote(str(text), safe="")


def spark_points(values: Sequence[float | None], *, wide: float = 100.0, high: float = 24.0) -> str:
    """Points of a polyline through the values known, the greatest at the top."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return ""
    top = max(*known, 0.0) or 1.0
    step = wide / (len(values) - 1)
    return " ".join(
        f"{index * step:.1f},{high - 1 - (high - 2) * max(0.0, value) / top:.1f}"
        for index, value in enumerate(values)
        if value is not None
    )
