"""`make torture`: run cells of the scoreboard, record the runs and write the page.

    python -m verification.torture --fault kill-postgres --room jobs --runs 20
    python -m verification.torture --minutes 30

Runs accumulate in `verification/torture/results` as long as the product's code is the same. With
`--minutes` all faults share that time in turns. Each site is a process of its own: one that hangs
is ended and reported. Ctrl-C keeps all runs that have ended. The exit code is 1 if any run broke a
promise, or a site failed.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Final

import structlog
from tests.kit import run_cleanup

from verification.torture.disk_faults import private_mounts
from verification.torture.faults import FAULTS, Fault
from verification.torture.results import GOAL, Record, write_page
from verification.torture.site import ROOMS, open_site

RUNS_PER_SITE: Final = 40
"""A site is replaced after so many runs, or after one that broke a promise."""
SITE_OVER_S: Final = 420.0
"""A site that runs so much longer than its time is ended: it includes its start and one run."""
ENDING_S: Final = 30.0


def main() -> int:
    """Run what the arguments name."""
    words = read_words()
    if words.site_s is not None:
        return run_site_here(words.fault[0], words)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    names = [name for name in words.fault or FAULTS if can_run(name, words)]
    broken: set[str] = set()
    try:
        run_in_turns(names, words, broken)
    except KeyboardInterrupt:
        print("interrupted; all runs that ended are recorded", flush=True)
        return 130
    finally:
        if not words.no_record:
            write_page()
    for name in sorted(broken):
        print(f"{name}: a promise was broken, or a site failed")
    return 1 if broken else 0


def read_words() -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(prog="make torture", description=__doc__)
    parser.add_argument("--fault", action="append", choices=FAULTS, help="default: all")
    parser.add_argument("--room", action="append", choices=ROOMS, help="default: all it meets")
    parser.add_argument(
        "--runs", type=int, help=f"runs that each cell has afterwards; 2, with --minutes {GOAL}"
    )
    parser.add_argument("--minutes", type=float, help="end after so long; all faults in turns")
    parser.add_argument("--seed", type=int, help="the seed of the first run; default: random")
    parser.add_argument("--keep", type=Path, help="a folder for logs and histories of broken runs")
    parser.add_argument("--no-record", action="store_true", help="leave results and page as are")
    parser.add_argument("--site-s", type=float, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.runs is None:
        words.runs = 2 if words.minutes is None else GOAL
    return words


def rooms_of(fault: Fault, words: argparse.Namespace) -> list[str]:
    """The rooms of a fault that the arguments name."""
    return [room for room in words.room or ROOMS if room in fault.rooms]


def can_run(name: str, words: argparse.Namespace) -> bool:
    """Whether a fault can run here; otherwise print the reason."""
    fault = FAULTS[name]
    reason = fault.missing()
    if reason or not rooms_of(fault, words):
        print(f"{name}: skipped, {reason or next(iter(fault.without.values()), 'no such room')}")
        return False
    return True


def run_in_turns(names: list[str], words: argparse.Namespace, broken: set[str]) -> None:
    """One site of each fault in turn, until all have their runs or the time is over."""
    ends_s = time.monotonic() + 60 * words.minutes if words.minutes else float("inf")
    unrecorded: set[str] = set()
    while names:
        for number, name in enumerate(list(names)):
            left_s = ends_s - time.monotonic()
            if left_s <= 0:
                return
            rooms = rooms_of(FAULTS[name], words)
            record = Record(name, is_kept=not words.no_record)
            if name in broken | unrecorded or record.runs(rooms) >= words.runs:
                names.remove(name)
                continue
            share_s = min(left_s / max(1, len(names) - number), 86_400.0)
            if not run_site_process(name, words, share_s if words.minutes else 86_400.0):
                broken.add(name)
            if words.no_record:
                unrecorded.add(name)


def run_site_process(name: str, words: argparse.Namespace, site_s: float) -> bool:
    """Runs of a fault on one site in another process; whether none broke a promise."""
    command = [sys.executable, "-m", "verification.torture", "--fault", name]
    command += ["--runs", str(words.runs), "--site-s", str(site_s)]
    command += [word for room in words.room or () for word in ("--room", room)]
    command += ["--seed", str(words.seed)] if words.seed is not None else []
    command += ["--keep", str(words.keep)] if words.keep else []
    command += ["--no-record"] if words.no_record else []
    site = subprocess.Popen(command)
    bound_s = min(site_s, RUNS_PER_SITE * 60.0) + SITE_OVER_S
    try:
        return site.wait(bound_s) == 0
    except subprocess.TimeoutExpired:
        text = f"the site was ended after {bound_s:.0f} s"
        print(f"{name}: {text}", flush=True)
        Record(name, is_kept=not words.no_record).add_failure(None, text)
        return False
    finally:
        # Its cleanup process ends its roles and engines.
        if site.poll() is None:
            site.terminate()
            try:
                site.wait(ENDING_S)
            except subprocess.TimeoutExpired:
                site.kill()
                site.wait()


def run_site_here(name: str, words: argparse.Namespace) -> int:
    """Runs of a fault on one site of this process; 1 if it failed or a run broke a promise."""
    quiet = structlog.make_filtering_bound_logger(logging.CRITICAL)
    structlog.configure(wrapper_class=quiet)
    fault = FAULTS[name]
    if fault.has_mounts:
        private_mounts()
    record = Record(name, is_kept=not words.no_record)
    seed = random.SystemRandom().getrandbits(32) if words.seed is None else words.seed
    cleanup = run_cleanup.start()
    try:
        with tempfile.TemporaryDirectory(prefix="torture-") as made:
            asyncio.run(run_site(fault, record, folder=Path(made), seed=seed, words=words))
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001 - one failed site must not end the runs of other faults
        traceback.print_exc()
        record.add_failure(None, f"{type(error).__name__}: {error}"[:300])
        return 1
    finally:
        cleanup.pytest_unconfigure()
    return 0 if record.is_clean(rooms_of(fault, words)) else 1


async def run_site(
    fault: Fault, record: Record, *, folder: Path, seed: int, words: argparse.Namespace
) -> None:
    """Some runs on one site; a broken promise ends it early."""
    began_s = time.monotonic()
    rooms = rooms_of(fault, words)
    left = words.runs - record.runs(rooms)
    site_of = open_site(folder, rooms, fault.needs, seed=seed)
    async with site_of as site:
        record.add_trips(await site.round_trips_s())
        for number in range(min(left, RUNS_PER_SITE)):
            run_began_s = time.monotonic()
            outcomes = await site.run(fault.apply, seed + number)
            took_s = time.monotonic() - run_began_s
            record.add(seed + number, outcomes)
            print(record.line(seed + number, outcomes, took_s), flush=True)
            for name, outcome in outcomes.items():
                for finding in outcome.findings:
                    print(f"  {name}: {finding!r}", flush=True)
            if any(outcome.findings for outcome in outcomes.values()):
                if words.keep:
                    shutil.copytree(site.folder, words.keep / f"{record.fault}-{seed + number}")
                return
            if time.monotonic() - began_s + took_s > words.site_s:
                return


if __name__ == "__main__":
    sys.exit(main())
