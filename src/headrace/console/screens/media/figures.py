"""What the media node of this machine counts: rates of the last seconds, and sums since its processes began.

The time to the first byte is told as the bound of a bucket, which is as exact as a histogram is. Nothing is asked of the node:
its series lie beside those of the other roles of this machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client.utils import floatToGoString

from headrace.console.rates import Rates
from headrace.kernel.metrics import FINE_BUCKETS_S
from headrace.media.model import SOURCES, STAGES, STATUSES

OF_NODE: Final = 'role="media"'
"""The API's own process declares the same series, and counts nothing in them."""
QUANTILES: Final = {"p50": 0.5, "p75": 0.75, "p99": 0.99}
CUTS: Final = ("client", "source", "stalled", "stop")
OUTCOMES: Final = ("hit", "miss", "pass")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFigures:
    """The figures of the node; None is not known, of rates for now while `is_measuring`."""

    is_measuring: bool
    connections: float | None
    requests_per_s: float | None
    bytes_per_s: Mapping[str, float | None]
    """By source."""
    bytes_by_source: Mapping[str, float]
    blocks: Mapping[str, float]
    hit_ratio: float | None
    statuses: Mapping[str, float]
    ttfb_s: Mapping[str, float | None]
    stages_s: Mapping[str, float | None]
    """Of each stage the bound that 99 of 100 are within."""
    cuts: Mapping[str, float]
    stalls: float | None
    deaths: float


async def read_figures(rates: Rates) -> NodeFigures | None:
    """The figures now; None: no media node of this machine has written any of late."""
    await rates.read()
    if rates.total("media_requests_total", OF_NODE) is None:
        return None
    blocks = _by(rates, "media_blocks_total", "outcome", OUTCOMES)
    begun = sum(blocks.values())
    return NodeFigures(
        is_measuring=rates.is_measuring,
        connections=rates.total("media_connections", OF_NODE),
        requests_per_s=rates.rate_per_s("media_requests_total", OF_NODE),
        bytes_per_s={
            source: rates.rate_per_s("media_bytes_total", OF_NODE, f'source="{source}"')
            for source in SOURCES
        },
        bytes_by_source=_by(rates, "media_bytes_total", "source", SOURCES),
        blocks=blocks,
        hit_ratio=blocks.get("hit", 0.0) / begun if begun else None,
        statuses=_by(rates, "media_requests_total", "status", map(str, STATUSES)),
        ttfb_s={
            name: bound_s(rates, "media_ttfb_seconds", share) for name, share in QUANTILES.items()
        },
        stages_s={
            stage: bound_s(rates, "media_stage_seconds", 0.99, f'stage="{stage}"')
            for stage in STAGES
        },
        cuts=_by(rates, "media_cuts_total", "reason", CUTS),
        stalls=rates.total("media_demand_stalls_total", OF_NODE),
        # A series of this one begins with the first death.
        deaths=rates.total("media_child_deaths_total", OF_NODE) or 0.0,
    )


def bound_s(rates: Rates, name: str, share: float, *labels: str) -> float | None:
    """The least bucket bound that `share` of a histogram's values are within; None: it has none, or they are over all."""
    count = rates.total(f"{name}_count", OF_NODE, *labels)
    if not count:
        return None
    for bound in FINE_BUCKETS_S:
        least = floatToGoString(bound)  # type: ignore[no-untyped-call]
        within = rates.total(f"{name}_bucket", OF_NODE, f'le="{least}"', *labels)
        if within is not None and within >= share * count:
            return bound
    return None


def _by(rates: Rates, name: str, label: str, values: Iterable[str]) -> dict[str, float]:
    """A series by the values of a label, those without any left out."""
    found = {value: rates.total(name, OF_NODE, f'{label}="{value}"') for value in values}
    return {value: total for value, total in found.items() if total}
