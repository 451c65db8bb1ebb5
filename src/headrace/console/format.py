"""Format values for people: counts, durations, sizes, times. None becomes `unknown`, not 0."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import quote

import msgspec

from headrace.kernel.config import parse_duration_s

UNKNOWN: Final = "unknown"
PRETTY_CHARACTERS_MAX: Final = 20_000
TONES: Final = {
    "good": "ready done alive valid published up ok won on running leased",
    "warn": "paused draining held retried slow floating refused loaded revoked expired moved"
    " cancelled begun",
    "bad": "failed quarantined silent down broken lost missing open error",
}
"""States by tone."""
_TONE_OF: Final = {word: tone for tone, words in TONES.items() for word in words.split()}
_TIMES: Final = ((31_536_000.0, "y"), (86_400.0, "d"), (3_600.0, "h"), (60.0, "min"))
_SIZES: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SHORT: Final = ((1e9, "G"), (1e6, "M"), (1e4, "k"))


def tone_of(word: str) -> str:
    """The tone of a state: good, warn, bad, or empty."""
    return _TONE_OF.get(word, "")


def format_count(value: float | None) -> str:
    """`12,345`."""
    if value is None:
        return UNKNOWN
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.2f}" if abs(value) < 10 else f"{value:,.1f}"


def format_short(value: float | None) -> str:
    """`1.2M`, for narrow columns."""
    if value is None:
        return UNKNOWN
    for size, unit in _SHORT:
        if abs(value) >= size:
            factor = 1e3 if unit == "k" else size
            return f"{value / factor:.1f}".removesuffix(".0") + unit
    return format_count(value)


def format_duration(value: float | None) -> str:
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


def format_limit(text: str) -> str:
    """The duration of a setting, such as `6300ms`, as other durations: `6.3 s`."""
    return format_duration(parse_duration_s(text)).replace(".0 ", " ")


def format_bytes(value: float | None) -> str:
    """`512 B`, `1.5 MiB`."""
    if value is None:
        return UNKNOWN
    left, unit = float(value), 0
    while abs(left) >= 1024 and unit < len(_SIZES) - 1:
        left, unit = left / 1024, unit + 1
    shown = f"{left:.0f}" if unit == 0 or abs(left) >= 100 else f"{left:.1f}".removesuffix(".0")
    return f"{shown} {_SIZES[unit]}"


def format_in_unit(value: float | None, unit: str) -> str:
    """The value of a chart, whose caption has the unit unless it is one of time or size."""
    if value is not None and unit == "bytes/s":
        return f"{format_bytes(value)}/s"
    return format_duration(value) if unit == "s" else format_short(value)


def format_percent(ratio: float | None) -> str:
    """`63 %`."""
    if ratio is None:
        return UNKNOWN
    whole = ratio * 100
    shown = f"{whole:.1f}" if 0 < abs(whole) < 10 else f"{whole:,.0f}"
    return f"{shown.removesuffix('.0')} %"


def format_timestamp(moment: datetime) -> str:
    """`2026-11-21 21:50:01 UTC`."""
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def format_within(moment: datetime, within_s: int) -> str:
    """A time that is known to so many seconds: `in the minute 2026-11-21 21:50 UTC`; 0: exact."""
    if not within_s:
        return format_timestamp(moment)
    span = {60: "minute", 3_600: "hour"}.get(within_s, f"{format_duration(within_s)} from")
    return f"in the {span} {moment.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def pretty_json(value: Any) -> str:
    """Indented JSON, truncated if it is very long."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    if len(text) > PRETTY_CHARACTERS_MAX:
        return f"{text[:PRETTY_CHARACTERS_MAX]}\n... ({len(text):,} characters)"
    return text


def path_segment(text: Any) -> str:
    """One URL-quoted path segment; slashes are quoted too."""
    return quote(str(text), safe="")


def spark_points(values: Sequence[float | None], *, wide: float = 100.0, high: float = 24.0) -> str:
    """Points of a polyline through the known values, with the greatest at the top."""
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
