"""How many requests for dead links does the back-off save over a week, and how late is a link that
was repaired seen?

A simulation with the room's own rule, `fetch/patience.py`: links die at random moments and are
repaired after hours, days or never; each run asks what is due. Compared with asking every dead
link in every run.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from bench.figures import Figure, Goal, Runs, figure
from bench.harness import Run
from penstock.fetch.patience import due_round, is_due

WEEK_S = 7 * 86_400.0
GAPS = (("a run every 15 minutes", 900.0), ("hourly runs", 3_600.0), ("a run a night", 86_400.0))
HOURLY = "hourly runs"
NEVER = 0.5
"""Share of the links that are dead for the rest of the week."""
REPAIR_MEAN_S = 12 * 3_600.0
CUT_GOAL, DELAY_GOAL = Goal(at_least=40), Goal(at_most=24)


@dataclass
class Week:
    """What came of it."""

    asked: int = 0
    asked_in_every_run: int = 0
    latest_s: float = 0.0
    """From a repair to the request that sees it."""

    @property
    def cut(self) -> float:
        """Percent of the requests for dead links that were not made."""
        return 100 * (1 - self.asked / self.asked_in_every_run)


async def measure(run: Run) -> list[Figure]:
    """Three rhythms; the goals are for hourly runs, and the delay's for all that run often enough."""
    figures = []
    links = run.sized(20_000, 4_000)
    for name, gap_s in GAPS:
        weeks = [live(links, gap_s, seed) for seed in range(3)]
        size = f"a week of {name}, {links:,} links"
        cuts = Runs(tuple(week.cut for week in weeks))
        delays = Runs(tuple(week.latest_s / 3_600 for week in weeks))
        goal = CUT_GOAL if name == HOURLY else None
        late = DELAY_GOAL if gap_s < DELAY_GOAL.at_most * 3_600 else None
        figures += [
            figure("requests for dead links saved", "%", size, ours=cuts, goal=goal),
            figure("longest delay after a repair", "h", size, ours=delays, goal=late),
        ]
    return figures


def live(links: int, gap_s: float, seed: int) -> Week:
    """Let a week pass for so many links; runs come up to a tenth of the gap early or late."""
    chance = random.Random(seed)
    moments, at_s = [], 0.0
    while at_s < WEEK_S:
        moments.append(at_s)
        at_s += gap_s * chance.uniform(0.9, 1.1)
    week = Week()
    for _ in range(links):
        dies_s = chance.uniform(0, WEEK_S * 0.7)
        is_forever = chance.random() < NEVER
        lasts_s = WEEK_S if is_forever else chance.expovariate(1 / REPAIR_MEAN_S)
        _ask(week, moments, dies_s, dies_s + lasts_s)
    return week


def _ask(week: Week, moments: list[float], dies_s: float, repaired_s: float) -> None:
    """One link through the runs after its death, until it is seen repaired."""
    failures, due, asked_s = 0, 0, 0.0
    for number, now_s in enumerate(moments):
        if now_s < dies_s:
            continue
        is_dead = now_s < repaired_s
        week.asked_in_every_run += is_dead
        gap_s = now_s - moments[number - 1] if number else None
        if failures and not is_due(
            this_round=number, due=due, asked_ago_s=now_s - asked_s, gap_s=gap_s
        ):
            continue
        asked_s = now_s
        if not is_dead:
            week.latest_s = max(week.latest_s, now_s - repaired_s if failures else 0.0)
            return
        week.asked += 1
        failures += 1
        due = due_round(number, failures)
