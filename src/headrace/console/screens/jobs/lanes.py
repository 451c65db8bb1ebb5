"""Limiters and their lanes: windows, what runs, what waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from headrace.console.seeing import Ask
from headrace.jobs.model import Lane, Limiter

LANES_SHOWN: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitersView:
    """Every limiter."""

    limiters: Sequence[Limiter]


@dataclass(frozen=True, slots=True, kw_only=True)
class LimiterView:
    """A limiter and a page of its lanes, by name."""

    limiter: Limiter
    lanes: Sequence[Lane]
    after: str
    next_url: str | None
    first_url: str | None


async def see_limiters(ask: Ask) -> LimitersView:
    """Every limiter, by name."""
    return LimitersView(limiters=await ask.service("jobs").lanes.limiters())


async def see_limiter(ask: Ask) -> LimiterView:
    """A limiter with those of its lanes that come after the name in the address. Raises: LimiterUnknown."""
    lanes = ask.service("jobs").lanes
    limiter = await lanes.get_limiter(ask.params["limiter"])
    after = ask.query.text("after")
    found = await lanes.list(limiter.limiter, after=after, lanes_max=LANES_SHOWN + 1)
    has_more = len(found) > LANES_SHOWN
    shown = found[:LANES_SHOWN]
    return LimiterView(
        limiter=limiter,
        lanes=shown,
        after=after,
        next_url=ask.url(after=shown[-1].lane) if has_more else None,
        first_url=ask.url(after=None) if after else None,
    )
