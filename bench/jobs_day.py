"""A simulated day of the fleet: 350 million jobs, 150 queues, 40 hosts, and what goes wrong.

The scheduler is the real one: `plan()` and `Rates` as the product runs them, every 5 s, on readings
up to 6 s old with an error of 7 %. The fleet is simulated (`bench/day/fleet.py`). `python -m
bench.jobs_day` writes `bench/results/jobs_day.json` and a plot beside it; QUICK=1 squeezes the day
into 3 hours, whose load swings eight times faster than life, and writes to the console alone. With
`--hosts 17 --slots 3457 --name capacity_day` it runs on the agents and slots of the capacity plan,
and leaves the record that docs/reference/capacity.md compares with the plan.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.day.fleet import HOST_NOTICED_S, STEP_S, STEPS_PER_PLAN, SimulatedFleet
from bench.day.plot import draw
from bench.day.scenario import CLASSES, HOSTS, SLOTS, Scenario, build
from bench.day.waits import mean, percentile
from bench.figures import Figure, Goal, Runs, figure
from bench.figures import percentile as value_at
from bench.machine import now_text, read_commit, read_machine_facts
from bench.report import RESULTS, write_plot
from headrace.jobs.fleet.plan import Plan, QueueNeed, plan
from headrace.jobs.fleet.rates import Rates

STEPS_PER_MINUTE = int(60 / STEP_S)
QUIET_AFTER_S = 300.0
"""What happened less than so long ago still moves slots."""
NOT_SIMULATED = (
    "no contention of claims, no host that slows down under load",
    "floating slots: a slot that no plan has bound serves nobody here",
    "waits under 0.25 s read as 0",
)


@dataclass
class Scheduler:
    """Plans as the product does; remembers what it cost."""

    fleet: SimulatedFleet
    error: float
    rng: np.random.Generator
    rates: Rates = field(default_factory=Rates)
    current: dict[str, dict[str, int]] = field(default_factory=dict)
    took_s: list[float] = field(default_factory=list)
    took_cpu_s: list[float] = field(default_factory=list)
    was_away: bool = False
    codes: Counter[str] = field(default_factory=Counter)
    at_max: set[str] = field(default_factory=set)
    uneven: int = 0
    spreads: int = 0

    def run_once(self) -> int:
        """Plan, unless nobody leads or it is too early; return how many slots moved."""
        if self.fleet.scenario.under_way("no scheduler", self.fleet.now_s):
            self.was_away = True
            return 0
        if self.was_away:
            self.was_away, self.rates = False, Rates()
        readings = self.fleet.readings()
        self.rates.observe(readings)
        if not self.rates.is_ready:
            return 0
        needs = []
        for name, rate in self.rates.rates().items():
            queue = self.fleet.scenario.queues[self.fleet.index[name]]
            need = QueueNeed(
                queue=name,
                importance=queue.importance,
                slots_min=queue.slots_min,
                slots_max=queue.slots_max,
                batch=queue.batch,
                active=readings[name].active,
                rate_per_s=rate.rate_per_s * max(0.0, 1 + self.error * self.rng.normal()),
                handler_s=rate.handler_s,
            )
            needs.append(need)
        hosts = self.fleet.hosts()
        started, started_cpu = time.perf_counter(), time.thread_time()
        made = plan(needs, hosts, self.current)
        self.took_s.append(time.perf_counter() - started)
        self.took_cpu_s.append(time.thread_time() - started_cpu)
        self._note(made)
        self.current = made.slots
        self.fleet.apply(made.slots)
        return made.slots_moved

    def _note(self, made: Plan) -> None:
        for move in made.moves:
            self.codes[move.code] += abs(move.after - move.before)
        self.at_max.update(name for name, share in made.queues.items() if share.is_at_max)
        for queue in made.queues:
            counts = [there.get(queue, 0) for there in made.slots.values()]
            self.spreads += 1
            self.uneven += max(counts) - min(counts) > 1


@dataclass
class Day:
    """What was seen, a value a minute."""

    offered: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    alive: list[float] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)
    is_quiet: list[bool] = field(default_factory=list)
    wait_p99_s: dict[str, list[float]] = field(default_factory=dict)
    jobs: int = 0
    backlog: int = 0


def live(scenario: Scenario, fleet: SimulatedFleet, scheduler: Scheduler) -> Day:
    """Let the day pass."""
    day, busy, moved = Day(), 0.0, 0
    for step in range(1, int(scenario.day_s / STEP_S) + 1):
        fleet.step()
        busy += fleet.busy
        if step % STEPS_PER_PLAN == 0:
            moved += scheduler.run_once()
        if step % STEPS_PER_MINUTE == 0:
            _end_minute(day, fleet, busy / STEPS_PER_MINUTE, moved)
            busy, moved = 0.0, 0
    fleet.waits.end_day(fleet.now)
    day.jobs = int(fleet.finished.sum())
    day.backlog = int(fleet.waiting.sum())
    return day


def _end_minute(day: Day, fleet: SimulatedFleet, busy: float, moved: int) -> None:
    now_s, scenario = fleet.now_s, fleet.scenario
    is_disaster = bool(scenario.under_way("dead", now_s - 30))
    for name, steps in fleet.waits.end_minute(is_disaster=is_disaster).items():
        day.wait_p99_s.setdefault(name, []).append(steps * STEP_S)
    day.offered.append(round(fleet.offered))
    day.busy.append(round(busy))
    day.alive.append(int(np.array(scenario.capacities)[fleet.alive].sum()))
    day.moved.append(moved)
    ends = [e.from_s if e.what == "new queue" else e.to_s for e in scenario.events]
    starts = [e.from_s for e in scenario.events]
    # The cold start at the beginning of the day is an event too.
    day.is_quiet.append(
        not any(
            start - 60 < now_s < end + QUIET_AFTER_S
            for start, end in zip([0.0, *starts], [0.0, *ends], strict=True)
        )
    )


def summary(day: Day, fleet: SimulatedFleet, scheduler: Scheduler) -> dict[str, Any]:
    """The day in figures."""
    slots = sum(fleet.scenario.capacities)
    moved = [100 * count / slots for count in day.moved]
    quiet = [m for m, is_quiet in zip(moved, day.is_quiet, strict=True) if is_quiet]
    # The first map is no move.
    whole = moved[5:]
    return {
        "jobs": day.jobs,
        "still_waiting": day.backlog,
        "wait_s": {name: _spread(counts) for name, counts in sorted(fleet.waits.all.items())},
        "wait_s_while_a_fifth_of_hosts_is_dead": {
            name: _spread(counts) for name, counts in sorted(fleet.waits.disaster.items())
        },
        "moved_percent_per_minute": {
            "quiet_mean": round(mean(quiet), 3),
            "quiet_p99": round(value_at(quiet, 0.99), 3) if quiet else None,
            "quiet_minutes": len(quiet),
            "day_mean": round(mean(whole), 3),
            "day_max": round(max(whole), 1),
        },
        "moved_by_reason": dict(scheduler.codes.most_common()),
        "sizes": {"hosts": len(fleet.scenario.capacities), "slots": slots},
        "busy_slots": {
            "mean": round(mean(day.busy)),
            # The highest mean of an hour: what lasts, without bursts of a minute.
            "peak": round(
                max(mean(day.busy[at : at + 60]) for at in range(max(1, len(day.busy) - 59)))
            ),
        },
        "busy_share": round(mean(day.busy) / slots, 3),
        "even_share": round(1 - scheduler.uneven / max(1, scheduler.spreads), 4),
        "plans": len(scheduler.took_s),
        "plan_ms": _times_ms(scheduler.took_s),
        "plan_cpu_ms": _times_ms(scheduler.took_cpu_s),
        "queues_at_max": sorted(scheduler.at_max),
    }


def figures(made: dict[str, Any], hours: float) -> list[Figure]:
    """The rows of the contract."""
    size = f"{hours:g} h, {made['jobs'] / 1e6:.0f} M jobs"
    waits = made["wait_s"]
    important = max(waits[name]["p99"] for name in CLASSES[:2])
    rows: list[tuple[str, str, float, Goal | None]] = [
        ("important queues (p0-3) wait, p99", "s", important, Goal(at_most=2)),
        (
            "slots moved a minute, steady state",
            "%",
            made["moved_percent_per_minute"]["quiet_mean"],
            Goal(at_most=2),
        ),
        # By CPU time: a plan is one thread that waits for nothing, and benches share their machine.
        ("plan, CPU time p99", "ms", made["plan_cpu_ms"]["p99"], Goal(at_most=50)),
        ("plan, p99 by the clock", "ms", made["plan_ms"]["p99"], None),
    ]
    return [
        figure(name, unit, size, ours=Runs((value,)), goal=goal, not_measured=NOT_SIMULATED)
        for name, unit, value, goal in rows
    ]


def _times_ms(took_s: list[float]) -> dict[str, float]:
    return {
        "p50": round(1e3 * value_at(took_s, 0.5), 2),
        "p99": round(1e3 * value_at(took_s, 0.99), 2),
        "max": round(1e3 * max(took_s), 2),
    }


def _spread(counts: Counter[int]) -> dict[str, float]:
    waits_s = {
        f"p{share}": percentile(counts, float(share) / 100) * STEP_S
        for share in ("50", "99", "99.9")
    }
    return {**waits_s, "max": max(counts, default=0) * STEP_S, "jobs": counts.total()}


def write(
    document: dict[str, Any], day: Day, scenario: Scenario, *, results: Path, title: str
) -> None:
    """The result file and the plot."""
    events = [
        {"what": e.what, "from_h": round(e.from_s / 3_600, 4), "to_h": round(e.to_s / 3_600, 4)}
        for e in scenario.events
    ]
    series = {
        "offered": day.offered,
        "busy": day.busy,
        "alive": day.alive,
        "moved_percent": [round(100 * count / sum(scenario.capacities), 2) for count in day.moved],
        "wait_p99_s": {name: day.wait_p99_s[name] for name in CLASSES},
    }
    write_plot(results, document["room"], draw(title, scenario.hours, series, events))
    path = results / f"{document['room']}.json"
    path.write_text(json.dumps({**document, "events": events}, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Simulate the day, print and write it; 1 where a goal is missed."""
    is_quick = bool(os.environ.get("QUICK"))
    parser = argparse.ArgumentParser(prog="python -m bench.jobs_day", description=__doc__)
    parser.add_argument("--hours", type=float, default=3 if is_quick else 24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--name", default="jobs_day", help="of the record")
    parser.add_argument("--hosts", type=int, default=HOSTS)
    parser.add_argument("--slots", type=int, default=SLOTS, help="of all hosts together")
    parser.add_argument("--error", type=float, default=0.07, help="of a reading, one deviation")
    parser.add_argument("--noticed", type=float, default=HOST_NOTICED_S, help="dead hosts, after s")
    parser.add_argument("--results", type=Path, default=None if is_quick else RESULTS)
    options = parser.parse_args(arguments)
    facts, started = read_machine_facts(), time.perf_counter()
    scenario = build(options.hours, options.seed, hosts=options.hosts, slots=options.slots)
    rng = np.random.default_rng(options.seed + 1)
    fleet = SimulatedFleet(scenario, rng, noticed_s=options.noticed)
    scheduler = Scheduler(fleet, options.error, rng)
    day = live(scenario, fleet, scheduler)
    made = summary(day, fleet, scheduler)
    rows = figures(made, options.hours)
    document = {
        "room": options.name,
        "command": f"python -m bench.jobs_day --hours {options.hours:g} --seed {options.seed}"
        f" --error {options.error:g} --noticed {options.noticed:g}"
        f" --hosts {options.hosts} --slots {options.slots} --name {options.name}",
        "machine": facts,
        "commit": read_commit(),
        "date": now_text(),
        "seed": options.seed,
        "took_s": round(time.perf_counter() - started),
        "figures": [row.as_json() for row in rows],
        "day": made,
    }
    print(json.dumps(made, indent=1))
    for row in rows:
        print(f"{row.name}: {row.ours} {row.unit}, goal {row.goal}, holds: {row.holds}")
    if options.results is not None:
        title = f"{made['jobs'] / 1e6:.0f} million jobs in {options.hours:g} h, seed {options.seed}"
        write(document, day, scenario, results=options.results, title=title)
    return int(any(row.holds is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
