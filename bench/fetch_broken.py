"""How many requests for dead links does the back-off save in a week, and how late are repairs seen?

A simulation with the product's own rule, read from its SQL functions. Links die at random moments
and are repaired after hours, days or never. Each run requests the links that are due, and the sweep
requests more between runs. The comparison is a request for every dead link in every run. A dead
link costs all its tries the first time, one try after that.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from bench.figures import Figure, Goal, Runs, figure
from bench.harness import Run
from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.sql import compile_query
from headrace.fetch.model import PHOTO_RETRIES

WEEK_S = 7 * 86_400.0
GAPS = (("a run every 15 minutes", 900.0), ("hourly runs", 3_600.0), ("a run a night", 86_400.0))
HOURLY = "hourly runs"
NEVER = 0.5
"""Share of the links that are dead for the rest of the week."""
REPAIR_MEAN_S = 12 * 3_600.0
CUT_GOAL, DELAY_GOAL = Goal(at_least=40), Goal(at_most=24)
FAILURES_MAX = 1000
RULE = compile_query(
    "rule",
    "-- After how many rounds a link that failed so often is due, and when in any case.\n"
    "SELECT array_agg(headrace.fetch_due_round_v1(0, n) ORDER BY n) AS rounds,"
    " extract(epoch FROM headrace.fetch_recheck_wait_v1())::float8 AS wait_s"
    " FROM generate_series(0, :most) AS n",
)


@dataclass(frozen=True)
class Rule:
    """When a failed link is requested again."""

    rounds: list[int]
    """By the number of failures."""
    wait_s: float


@dataclass
class Week:
    """The requests of a week, and the latest repair."""

    requests: int = 0
    requests_of_every_run: int = 0
    latest_s: float = 0.0
    """From a repair to the request that sees it."""

    @property
    def cut(self) -> float:
        """Percent of the requests for dead links that were not made."""
        return 100 * (1 - self.requests / self.requests_of_every_run)


async def measure(run: Run) -> list[Figure]:
    """Three rhythms; the saving's goal is for hourly runs, the delay's for all."""
    figures = []
    links = run.sized(20_000, 4_000)
    async with run.cell() as cell:
        postgres = Postgres(cell.url, PostgresConfig())
        rule = await read_rule(postgres)
        await postgres.close()
    for name, gap_s in GAPS:
        weeks = [live(rule, links, gap_s, seed) for seed in range(3)]
        size = f"a week of {name}, {links:,} links"
        cuts = Runs(tuple(week.cut for week in weeks))
        delays = Runs(tuple(week.latest_s / 3_600 for week in weeks))
        goal = CUT_GOAL if name == HOURLY else None
        figures += [
            figure("requests for dead links saved", "%", size, ours=cuts, goal=goal),
            figure("longest delay after a repair", "h", size, ours=delays, goal=DELAY_GOAL),
        ]
    return figures


async def read_rule(postgres: Postgres) -> Rule:
    """The rule as the database has it."""
    row = await postgres.one(RULE, most=FAILURES_MAX)
    assert row is not None, "an aggregate has one row"
    return Rule(list(row["rounds"]), row["wait_s"])


def live(rule: Rule, links: int, gap_s: float, seed: int) -> Week:
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
        _follow(week, rule, moments, dies_s, dies_s + lasts_s)
    return week


def _follow(week: Week, rule: Rule, moments: list[float], dies_s: float, repaired_s: float) -> None:
    """One link through the runs after its death, until it is seen repaired."""
    tries = 1 + PHOTO_RETRIES
    week.requests_of_every_run += tries * sum(dies_s <= now_s < repaired_s for now_s in moments)
    number = next((n for n, now_s in enumerate(moments) if now_s >= dies_s), len(moments))
    if number == len(moments) or moments[number] >= repaired_s:
        return
    now_s, failures = moments[number], 0
    while now_s < repaired_s:
        week.requests += 1 if failures else tries
        failures += 1
        due = number + rule.rounds[failures]
        of_run_s = moments[due] if due < len(moments) else WEEK_S
        now_s = min(of_run_s, now_s + rule.wait_s)
        if now_s >= WEEK_S:
            return
        number = max(n for n in range(number, len(moments)) if moments[n] <= now_s)
    week.latest_s = max(week.latest_s, now_s - repaired_s)
