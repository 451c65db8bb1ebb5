"""`make torture`: run cells of the scoreboard, record the runs and write the page.

    python -m verification.torture --fault kill-postgres --room jobs --runs 20

Runs accumulate in `verification/torture/results` as long as the product's code is the same. The
exit code is 1 if any run broke a promise.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

import structlog
from tests.kit import run_cleanup

from verification.torture.disk_faults import private_mounts, small_disk
from verification.torture.faults import FAULTS, Fault
from verification.torture.results import Record, write_page
from verification.torture.site import ROOMS, open_site

RUNS_PER_SITE = 40
"""A site is replaced after so many runs, or after one that broke a promise."""


def main() -> int:
    """Run what the arguments name."""
    parser = argparse.ArgumentParser(prog="make torture", description=__doc__)
    parser.add_argument("--fault", action="append", choices=FAULTS, help="default: all")
    parser.add_argument("--room", action="append", choices=ROOMS, help="default: all it meets")
    parser.add_argument("--runs", type=int, default=2, help="runs that each cell has afterwards")
    parser.add_argument("--seed", type=int, help="the seed of the first run; default: random")
    parser.add_argument("--keep", type=Path, help="a folder for logs and histories of broken runs")
    parser.add_argument("--no-record", action="store_true", help="leave results and page as are")
    words = parser.parse_args()
    quiet = structlog.make_filtering_bound_logger(logging.CRITICAL)
    structlog.configure(wrapper_class=quiet)
    if any(FAULTS[name].has_small_disk for name in words.fault or FAULTS):
        private_mounts()
    cleanup = run_cleanup.start()
    try:
        broken = [name for name in words.fault or FAULTS if not run_fault(name, words)]
    finally:
        cleanup.pytest_unconfigure()
    if not words.no_record:
        write_page()
    for name in broken:
        print(f"{name}: a promise was broken, or a run failed")
    return 1 if broken else 0


def run_fault(name: str, words: argparse.Namespace) -> bool:
    """Run the cells of a fault; whether no run broke a promise."""
    fault = FAULTS[name]
    rooms = [room for room in words.room or ROOMS if room in fault.rooms]
    reason = fault.missing()
    if reason or not rooms or fault.apply is None:
        print(f"{name}: skipped, {reason or next(iter(fault.without.values()), 'no such room')}")
        return True
    record = Record(name, is_kept=not words.no_record)
    while record.runs(rooms) < words.runs:
        left = words.runs - record.runs(rooms)
        with tempfile.TemporaryDirectory(prefix="torture-") as made:
            folder = Path(made)
            try:
                asyncio.run(run_site(fault, rooms, record, folder=folder, left=left, words=words))
            except Exception:  # noqa: BLE001 - one failed site must not end the runs of other faults
                traceback.print_exc()
                return False
    return record.is_clean(rooms)


async def run_site(
    fault: Fault, rooms: list[str], record: Record, *, folder: Path, left: int, words
) -> None:
    """Some runs on one site; a broken promise ends it early."""
    seed = random.SystemRandom().getrandbits(32) if words.seed is None else words.seed
    site_of = open_site(
        folder,
        rooms,
        seed=seed,
        mounted=small_disk if fault.has_small_disk else None,
        has_stepped_clock=fault.has_stepped_clock,
    )
    async with site_of as site:
        record.add_trips(await site.round_trips_s())
        for number in range(min(left, RUNS_PER_SITE)):
            began_s = time.monotonic()
            outcomes = await site.run(fault.apply, seed + number)
            record.add(seed + number, outcomes)
            print(record.line(seed + number, outcomes, time.monotonic() - began_s), flush=True)
            for name, outcome in outcomes.items():
                for finding in outcome.findings:
                    print(f"  {name}: {finding!r}", flush=True)
            if any(outcome.findings for outcome in outcomes.values()):
                if words.keep:
                    shutil.copytree(site.folder, words.keep / f"{record.fault}-{seed + number}")
                return


if __name__ == "__main__":
    sys.exit(main())
