"""Simulate rooms from seeds.

python -m verification.simulation jobs --seed 7              one seed; the same result each time
python -m verification.simulation jobs --seeds 1-100         many seeds
python -m verification.simulation jobs --cpu-s 60            seeds until this much CPU is used
python -m verification.simulation jobs --seed 7 --twice      compare two runs of a seed
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import structlog

if TYPE_CHECKING:
    from verification.simulation.run import Scenario
    from verification.simulation.world import World

SCENARIOS: Final = {
    "fetch": "verification.simulation.fetch:FetchScenario",
    "feed": "verification.simulation.feed:FeedScenario",
    "jobs": "verification.simulation.jobs:JobsScenario",
    "media": "verification.simulation.media:MediaScenario",
    "views": "verification.simulation.views:ViewsScenario",
    "jobs-busy": "verification.simulation.jobs:BusyJobsScenario",
    "jobs-late-standby": "verification.simulation.jobs:LateStandbyScenario",
    "fetch-stalls": "verification.simulation.fetch:StallingFetchScenario",
    "jobs-stalls": "verification.simulation.jobs:StallingJobsScenario",
    "views-stalls": "verification.simulation.views:StallingViewsScenario",
}


def main() -> int:
    """Run what the arguments name; return 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m verification.simulation", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("room", choices=sorted(SCENARIOS))
    parser.add_argument("--seed", type=int, help="run this seed alone")
    parser.add_argument("--seeds", help="a range such as 1-100")
    parser.add_argument("--cpu-s", type=float, help="stop after this much processor time")
    parser.add_argument("--hours", type=float, default=1.0, help="virtual hours per seed")
    parser.add_argument("--twice", action="store_true", help="run each seed twice and compare")
    parser.add_argument("--no-shrink", action="store_true", help="stop at the first failure")
    parser.add_argument("--faults", action="store_true", help="print the plan of each seed")
    parser.add_argument("--plant", metavar="NAME", help="run with a bug of planted.toml")
    parser.add_argument("--verbose", action="store_true", help="print the product's log")
    arguments = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of sets of text is part of a run.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "verification.simulation", *sys.argv[1:]])
    if not arguments.verbose:
        logging.disable(logging.CRITICAL)
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    if arguments.plant:
        from verification.simulation.planted import plant

        plant(arguments.plant)
    return simulate(arguments)


def seeds_of(arguments: Any) -> Iterator[int]:
    """The seeds that the arguments name."""
    if arguments.seed is not None:
        return iter([arguments.seed])
    if arguments.seeds:
        first, _, last = arguments.seeds.partition("-")
        return iter(range(int(first), int(last or first) + 1))
    return count(1)


def scenario_of(room: str) -> Callable[[World], Scenario]:
    """The class of a room's scenario."""
    module, _, name = SCENARIOS[room].partition(":")
    kind: Callable[[World], Scenario] = getattr(import_module(module), name)
    return kind


def simulate(arguments: Any) -> int:
    """Run the seeds, print a line for each, and shrink the first that fails."""
    from verification.simulation.run import run_seed, shrink

    kind = scenario_of(arguments.room)
    hours_run = cpu_s = 0.0
    for seed in seeds_of(arguments):
        outcome = run_seed(kind, seed, hours=arguments.hours)
        hours_run, cpu_s = hours_run + outcome.hours, cpu_s + outcome.cpu_s
        print(
            f"{arguments.room} seed {seed}: {outcome.hours:.2f} h, {len(outcome.faults)} faults,"
            f" {outcome.events} events, {outcome.steps} steps, {outcome.cpu_s:.2f} s CPU,"
            f" digest {outcome.digest}: {len(outcome.findings)} findings",
            flush=True,
        )
        if arguments.faults:
            print(*outcome.faults, sep="\n")
        if arguments.twice:
            again = run_seed(kind, seed, hours=arguments.hours)
            if again.digest != outcome.digest:
                print(f"seed {seed} does not replay: digest {again.digest} in the second run")
                return 1
        if outcome.findings:
            print(*outcome.findings[:5], sep="")
            if arguments.no_shrink:
                return 1
            small = shrink(kind, outcome, hours=arguments.hours, note=print)
            print(f"\nthe {len(small.faults)} faults that matter:", *small.faults, sep="\n")
            print(*small.findings[:3], sep="")
            print(
                f"replay: python -m verification.simulation {arguments.room} --seed {seed}"
                f" --hours {arguments.hours:g}"
            )
            return 1
        if arguments.cpu_s is not None and cpu_s >= arguments.cpu_s:
            break
    rate = hours_run / (cpu_s / 60)
    print(
        f"{arguments.room}: {hours_run:.1f} simulated hours in {cpu_s:.1f} s CPU ({rate:.1f}"
        " hours per minute of CPU), nothing found"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
