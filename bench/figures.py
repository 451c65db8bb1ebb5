"""One entry a figure: what was measured, its peers, what it must reach and whether it does."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

OURS = "headrace"
UNEXPLAINED = "no cause is known: compare with another run on a quiet machine"


@dataclass(frozen=True)
class Runs:
    """The values of one system over the pairs of a run."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.values)

    @property
    def spread(self) -> list[float]:
        """Least and most."""
        return [rounded(min(self.values)), rounded(max(self.values))]


@dataclass(frozen=True)
class Goal:
    """What a figure must reach: a least or most value, and a least multiple of each named peer."""

    at_least: float | None = None
    at_most: float | None = None
    times: dict[str, float] = field(default_factory=dict)

    def text(self, unit: str) -> str:
        """As it is shown."""
        parts = []
        if self.at_least is not None:
            parts.append(f">= {shown(self.at_least)} {unit}")
        if self.at_most is not None:
            parts.append(f"<= {shown(self.at_most)} {unit}")
        parts += [f">= {times:g} x {peer}" for peer, times in self.times.items()]
        return "; ".join(parts)

    def is_met(self, ours: float, peers: dict[str, float]) -> bool:
        """Whether `ours` is there; peers that were not measured decide nothing."""
        return (
            (self.at_least is None or ours >= self.at_least)
            and (self.at_most is None or ours <= self.at_most)
            and all(ours >= x * peers[peer] for peer, x in self.times.items() if peer in peers)
        )


@dataclass
class Figure:
    """One row of the table and one entry of the result file. `ratio`: ours to the best peer's.

    `question`, `commit` and `date` name its run: questions may be measured one at a time.
    """

    name: str
    unit: str
    size: str
    ours: float | None = None
    peers: dict[str, float] = field(default_factory=dict)
    limit: dict[str, float] = field(default_factory=dict)
    ratio: float | None = None
    goal: str | None = None
    holds: bool | None = None
    why: str = ""
    """Why the goal is missed; empty where it is met."""
    runs: int = 0
    spread: dict[str, list[float]] = field(default_factory=dict)
    not_measured: list[str] = field(default_factory=list)
    question: str = ""
    commit: str = ""
    date: str = ""

    def as_json(self) -> dict[str, Any]:
        """The entry as it is written."""
        return asdict(self)


def figure(
    name: str,
    unit: str,
    size: str,
    *,
    ours: Runs | None,
    peers: dict[str, Runs] | None = None,
    limit: dict[str, float] | None = None,
    goal: Goal | None = None,
    why: str = "",
    is_less_better: bool = False,
    not_measured: Sequence[str] = (),
) -> Figure:
    """Make the entry; a goal whose figure could not be measured does not hold.

    `why` is the known cause of a miss. It is kept only if the goal is missed.
    """
    medians = {peer: rounded(runs.median) for peer, runs in (peers or {}).items()}
    made = Figure(
        name=name,
        unit=unit,
        size=size,
        ours=rounded(ours.median) if ours else None,
        peers=medians,
        limit={what: rounded(value) for what, value in (limit or {}).items()},
        goal=goal.text(unit) if goal else None,
        runs=len(ours.values) if ours else 0,
        not_measured=list(not_measured),
    )
    if goal is not None:
        made.holds = ours is not None and goal.is_met(ours.median, medians)
        missing = [peer for peer in goal.times if peer not in medians]
        made.not_measured += [f"{peer}: no figure of it to compare with" for peer in missing]
    if made.holds is False:
        made.why = (why or UNEXPLAINED) if ours is not None else "not measured"
    if ours is not None:
        made.spread = {OURS: ours.spread, **{p: r.spread for p, r in (peers or {}).items()}}
        if medians and ours.median and (best := _best(medians, is_less_better=is_less_better)):
            times = best / ours.median if is_less_better else ours.median / best
            made.ratio = rounded(times)
    return made


def others(rows: Mapping[str, Runs]) -> dict[str, Runs]:
    """All systems but ours."""
    return {name: runs for name, runs in rows.items() if name != OURS}


def rounded(value: float) -> float:
    """Three figures behind the point where the value is small, whole where it is large."""
    return round(value, 3) if abs(value) < 100 else round(value)


def shown(value: float | None) -> str:
    """A number as a person reads it."""
    if value is None:
        return "-"
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def _best(peers: dict[str, float], *, is_less_better: bool) -> float:
    return min(peers.values()) if is_less_better else max(peers.values())
