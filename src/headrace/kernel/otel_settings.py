"""Checks of the OTEL_... variables, without an import of OpenTelemetry.

Some wrong values fail inside its libraries, one while they are imported, and others are replaced by
a default with a traceback in the log. All are refused here, together and by name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from headrace.kernel.config import (
    InvalidConfig,
    parse_choice,
    parse_count,
    parse_count_between,
    parse_share,
    parse_url,
)
from headrace.kernel.errors import FieldProblem

_PARENT_BASED: Final = "parentbased_"
_SAMPLERS: Final = ("always_on", "always_off", "traceidratio")
_QUEUE: Final = "OTEL_BSP_MAX_QUEUE_SIZE"
_BATCH: Final = "OTEL_BSP_MAX_EXPORT_BATCH_SIZE"
_COUNT_MAX: Final = 2**31 - 1


def _parse_seconds(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text.strip()):
        raise ValueError("seconds such as 10")
    return float(text)


def _parse_file(text: str) -> str:
    if not (Path(text.strip()).is_file() and os.access(text.strip(), os.R_OK)):
        raise ValueError("the path of a file that this user may read")
    return text.strip()


def _parse_flag(text: str) -> bool:
    if text.strip().lower() not in ("true", "false"):
        raise ValueError("true or false")
    return text.strip().lower() == "true"


def _parse_pairs(text: str) -> str:
    if not all("=" in pair for pair in text.split(",") if pair.strip()):
        raise ValueError("pairs such as name=value,other=value")
    return text


def _per_signal(name: str) -> tuple[str, str]:
    return f"OTEL_EXPORTER_OTLP_{name}", f"OTEL_EXPORTER_OTLP_TRACES_{name}"


_POSITIVE: Final = parse_count_between(1, _COUNT_MAX)
_PARSERS: Final[Mapping[str, Callable[[str], Any]]] = {
    "OTEL_TRACES_SAMPLER": parse_choice(*_SAMPLERS, *(_PARENT_BASED + one for one in _SAMPLERS)),
    "OTEL_TRACES_SAMPLER_ARG": parse_share,
    "OTEL_SDK_DISABLED": _parse_flag,
    **dict.fromkeys(_per_signal("HEADERS"), _parse_pairs),
    "OTEL_RESOURCE_ATTRIBUTES": _parse_pairs,
    **dict.fromkeys(_per_signal("PROTOCOL"), parse_choice("http/protobuf")),
    **dict.fromkeys(_per_signal("ENDPOINT"), parse_url("http", "https")),
    **dict.fromkeys(_per_signal("TIMEOUT"), _parse_seconds),
    **dict.fromkeys(_per_signal("COMPRESSION"), parse_choice("none", "gzip", "deflate")),
    **dict.fromkeys(_per_signal("CERTIFICATE"), _parse_file),
    **dict.fromkeys(_per_signal("CLIENT_CERTIFICATE"), _parse_file),
    **dict.fromkeys(_per_signal("CLIENT_KEY"), _parse_file),
    **dict.fromkeys(("OTEL_BSP_SCHEDULE_DELAY", _QUEUE, _BATCH), _POSITIVE),
    "OTEL_BSP_EXPORT_TIMEOUT": parse_count,
    "OTEL_ATTRIBUTE_COUNT_LIMIT": parse_count,
    "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT": parse_count,
    "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": parse_count,
    "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT": parse_count,
    "OTEL_SPAN_EVENT_COUNT_LIMIT": parse_count,
    "OTEL_SPAN_LINK_COUNT_LIMIT": parse_count,
    "OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT": parse_count,
    "OTEL_LINK_ATTRIBUTE_COUNT_LIMIT": parse_count,
}
"""An empty variable counts as unset."""


def sampled_ratio(env: Mapping[str, str]) -> float:
    """The ratio of new traces that are sampled. Raises: InvalidConfig, with all wrong variables."""
    problems: list[FieldProblem] = []
    found: dict[str, Any] = {}
    for name, parse in _PARSERS.items():
        if text := env.get(name, ""):
            try:
                found[name] = parse(text)
            except ValueError as error:
                expected = f"expected {error}, got {text[:80]!r}"
                problems.append(FieldProblem(name, "invalid", expected))
    queue, batch = found.get(_QUEUE, 2048), found.get(_BATCH, 512)
    if batch > queue:
        expected = f"expected at most {_QUEUE}, which is {queue}, got {batch}"
        problems.append(FieldProblem(_BATCH, "invalid", expected))
    InvalidConfig.require_none(problems, "configuration of OpenTelemetry")
    ratios = {"always_on": 1.0, "always_off": 0.0}
    share: float = found.get("OTEL_TRACES_SAMPLER_ARG", 1.0)
    return ratios.get(
        found.get("OTEL_TRACES_SAMPLER", "always_on").removeprefix(_PARENT_BASED), share
    )
