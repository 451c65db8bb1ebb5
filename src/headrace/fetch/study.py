"""Study of download times: their distribution, errors per class and week, and fitting classes.

    attempt ended -> counted in memory (`host_stats`) -> one row per day, class, outcome, bucket

A bucket is a range of download times; its bounds are the preferred numbers 1, 1.25, 1.6, 2, ... 8
of each decade, so a bound is a usable limit of a class. An attempt that ran into the limit of a
class before the last has the outcome `moved`: its photo is counted in the next class again.

**Which classes fit.** A photo may occupy a place until the limit of the class in which it ends. So
the places that classes with the limits T1 < ... < Tn need are proportional to the reserved time

    sum over classes i of  n(i) * (T(i) + MISPLACED * T(i-1)),   T(0) = 0

where n(i) photos take, with HEADROOM, over T(i-1) and at most T(i); the last class has all others.
MISPLACED is the share of photos that routing may start one class too low. `best_plans` minimizes
the sum exactly, by dynamic programming over the bounds. The last limit is LAST_HEADROOM times the
time in which LAST_SHARE of the downloads end, but not longer than the present one, since longer
downloads were not observed. Each class needs slots of its own, so the proposal is the smallest
number of classes to which one more adds less than WORTH.
"""

from __future__ import annotations

import csv
import io
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from datetime import date
from itertools import accumulate, pairwise
from typing import Final

import msgspec

from headrace.engines.postgres import Runner
from headrace.fetch.host_stats import FIT, HEADROOM, Classes, TimeClass
from headrace.fetch.outcomes import count_bad
from headrace.fetch.settings import CLASS_S_MAX
from headrace.fetch.sql import SQL

BOUNDS_S: Final = tuple(
    round(step * 10.0**decade, 4)
    for decade in range(-2, 3)
    for step in (1, 1.25, 1.6, 2, 2.5, 3.15, 4, 5, 6.3, 8)
    if step * 10.0**decade <= 1.05 * CLASS_S_MAX
)
"""Upper bounds of the buckets 1, 2, ...; bucket 0 is for attempts without a body."""
MOVED: Final = "moved"
MISPLACED: Final = 1 - FIT
LAST_SHARE: Final = 0.999
LAST_HEADROOM: Final = 2.0
WORTH: Final = 0.1
"""Share of the reserved time that a further class must save."""
CLASS_S_MIN: Final = 0.05
CLASSES_TRIED: Final = 6
DOWNLOADS_MIN: Final = 1000
"""Fewer downloads give no proposal."""
WEEKS_MAX: Final = 57
QUANTILES: Final = (0.5, 0.9, 0.95, 0.99, 0.999)
_STATUS: Final = re.compile(r"failed:http_(\d)\d\d")
_STATUSES_KEPT: Final = frozenset({"401", "403", "404", "410", "500", "502", "503", "504"})


class AttemptCount(msgspec.Struct, frozen=True, kw_only=True):
    """Attempts of a week (its Monday, UTC) in a timeout class with one outcome."""

    week: date
    time_class: str
    outcome: str
    """As of a photo; `moved`: the limit of the class was too short. Rare statuses are grouped."""
    up_to_s: float | None
    """Upper bound of their download time; null: no body was received."""
    attempts: int


class TimeCount(msgspec.Struct, frozen=True, kw_only=True):
    """Downloads in one range of times, by its upper bound."""

    up_to_s: float
    downloads: int


class ClassWeek(msgspec.Struct, frozen=True, kw_only=True):
    """Attempts and errors of a timeout class in a week."""

    week: date
    time_class: str
    attempts: int
    errors: int
    """Failed and refused photos; `moved` ones are not over yet."""
    by_outcome: dict[str, int]


class ClassPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Timeout classes and their expected effect on the observed downloads."""

    classes: list[str]
    shares: list[float]
    """Share of the photos that end in each class."""
    reserved_s: float
    """Mean time for which a place must be reserved for a photo."""
    cut: float
    """Share of the downloads that take longer than the last class, and would fail."""


class Study(msgspec.Struct, frozen=True, kw_only=True):
    """Download times of all hosts, errors per class and week, and a proposal of classes."""

    attempts: list[AttemptCount]
    times: list[TimeCount]
    quantiles: dict[str, float]
    """Time within which that share of the downloads ended, such as `p95`."""
    downloads: int
    unfinished: int
    """Photos that failed with a timeout in the last class."""
    weeks: list[ClassWeek]
    current: ClassPlan
    options: list[ClassPlan]
    """The best limits of 1, 2, 3 and more classes; empty below 1,000 downloads."""
    proposed: ClassPlan | None


def attempt_of(
    here: TimeClass, outcome: str, took_s: float, *, has_body: bool, is_moved: bool
) -> tuple[float, str, int]:
    """The key under which an attempt is counted: class, outcome, bucket."""
    status = _STATUS.fullmatch(outcome)
    if is_moved:
        outcome = MOVED
    elif status is not None and outcome[-3:] not in _STATUSES_KEPT:
        outcome = f"failed:http_{status[1]}xx"
    bucket = min(bisect_left(BOUNDS_S, took_s) + 1, len(BOUNDS_S)) if has_body else 0
    return here.time_s, outcome, bucket


async def find_study(runner: Runner, classes: Classes, *, weeks: int) -> Study:
    """The study of the last `weeks` calendar weeks, this one included."""
    rows = await runner.all(SQL.attempts_by_week, weeks=min(max(1, weeks), WEEKS_MAX))
    attempts = [
        AttemptCount(
            week=row["week"],
            time_class=TimeClass(row["class_s"]).name,
            outcome=row["outcome"],
            up_to_s=min(BOUNDS_S[row["bucket"] - 1], row["class_s"]) if row["bucket"] else None,
            attempts=row["attempts"],
        )
        for row in rows
    ]
    return study_of(attempts, [limit.time_s for limit in classes.listed])


def study_of(attempts: list[AttemptCount], limits_s: Sequence[float]) -> Study:
    """The study of these attempts under the present classes."""
    times: Counter[float] = Counter()
    weeks: defaultdict[tuple[date, str], Counter[str]] = defaultdict(Counter)
    for one in attempts:
        weeks[one.week, one.time_class][one.outcome] += one.attempts
        if one.up_to_s is not None:
            times[one.up_to_s] += one.attempts
    unfinished = sum(counts["failed:timeout"] for counts in weeks.values())
    options = best_plans(times, unfinished, last_s=limits_s[-1])
    worthwhile = (
        one for one, next_ in pairwise(options) if next_.reserved_s > one.reserved_s * (1 - WORTH)
    )
    return Study(
        attempts=attempts,
        times=[TimeCount(up_to_s=up_to_s, downloads=times[up_to_s]) for up_to_s in sorted(times)],
        quantiles={f"p{q * 100:g}": time_s for q in QUANTILES if (time_s := quantile_s(times, q))},
        downloads=times.total(),
        unfinished=unfinished,
        weeks=[
            ClassWeek(
                week=week,
                time_class=name,
                attempts=counts.total(),
                errors=count_bad(counts),
                by_outcome=dict(counts.most_common()),
            )
            for (week, name), counts in weeks.items()
        ],
        current=plan_of(limits_s, times, unfinished),
        options=options,
        proposed=next(worthwhile, options[-1] if options else None),
    )


def quantile_s(times: Counter[float], share: float) -> float | None:
    """Time within which `share` of the downloads ended; None without downloads."""
    ordered = sorted(times)
    ended = accumulate(times[time_s] for time_s in ordered)
    enough = share * times.total()
    return next((at for at, count in zip(ordered, ended, strict=True) if count >= enough), None)


def plan_of(limits_s: Sequence[float], times: Counter[float], unfinished: int) -> ClassPlan:
    """Classes with these limits, shortest first, and their effect; see the module's formula."""
    classes = Classes(limits_s)
    ends_in = Counter({classes.last: unfinished})
    for time_s, downloads in times.items():
        ends_in[classes.enough_for(time_s)] += downloads
    total = ends_in.total() or 1
    shorter_s = (0.0, *(one.time_s for one in classes.listed))
    reserved_s = sum(
        ends_in[one] * (one.time_s + MISPLACED * before_s)
        for one, before_s in zip(classes.listed, shorter_s, strict=False)
    )
    cut = sum(downloads for time_s, downloads in times.items() if time_s > classes.last.time_s)
    return ClassPlan(
        classes=[one.name for one in classes.listed],
        shares=[ends_in[one] / total for one in classes.listed],
        reserved_s=reserved_s / total,
        cut=cut / (times.total() or 1),
    )


def best_plans(times: Counter[float], unfinished: int, *, last_s: float) -> list[ClassPlan]:
    """The plans of 1, 2, ... classes that reserve the least time, if there are enough data."""
    longest_s = quantile_s(times, LAST_SHARE)
    if longest_s is None or times.total() < DOWNLOADS_MIN:
        return []
    fitting = (s for s in BOUNDS_S if s >= max(CLASS_S_MIN, LAST_HEADROOM * longest_s))
    last_s = min(last_s, next(fitting, last_s))
    limits_s = [s for s in BOUNDS_S if CLASS_S_MIN <= s < last_s] + [last_s]
    fits = [sum(n for s, n in times.items() if s * HEADROOM <= limit_s) for limit_s in limits_s]
    fits[-1] = times.total() + unfinished
    best = [(fits[at] * limit_s, [limit_s]) for at, limit_s in enumerate(limits_s)]
    plans = [plan_of([last_s], times, unfinished)]
    for classes in range(1, min(CLASSES_TRIED, len(limits_s))):
        best[classes:] = [
            min(
                (
                    cost + (fits[at] - fits[below]) * (limits_s[at] + MISPLACED * limits_s[below]),
                    [*shorter, limits_s[at]],
                )
                for below, (cost, shorter) in enumerate(best[classes - 1 : at], classes - 1)
            )
            for at in range(classes, len(limits_s))
        ]
        plans.append(plan_of(best[-1][1], times, unfinished))
    return plans


def csv_of_study(attempts: Iterable[AttemptCount]) -> str:
    """The counts as CSV; a download time is the upper bound of its range."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(AttemptCount.__struct_fields__)
    writer.writerows(msgspec.structs.astuple(one) for one in attempts)
    return out.getvalue()
