"""`python -m bench jobs`: run, print, write, and exit with 1 where a row misses its goal."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import sys
import time
import traceback
from typing import Any

import uvloop

from bench import feed, fetch, jobs, media, views
from bench.figures import figure
from bench.harness import Run, bench_run, bounded
from bench.machine import (
    now_text,
    own_versions,
    read_commit,
    read_machine_facts,
    sync_us,
    versions_of,
)
from bench.report import broken, remarks, table, write_results
from bench.systems import OURS, PEERS, peer_python

SYNCS_DIFFER = 4
ROOMS = {
    "jobs": jobs.QUESTIONS,
    "fetch": fetch.QUESTIONS,
    "views": views.QUESTIONS,
    "feed": feed.QUESTIONS,
    "media": media.QUESTIONS,
}
PEER_PACKAGES = {
    "jobs": [
        "awa-pg",
        "pgqueuer",
        "procrastinate",
        "taskiq",
        "taskiq-redis",
        "dramatiq",
        "redis",
    ],
    "fetch": fetch.PACKAGES,
    "views": views.PACKAGES,
    "feed": feed.PACKAGES,
    "media": media.PACKAGES,
}
SETTINGS = {
    "jobs": {system.name: system.settings for system in (OURS, *PEERS)},
    "fetch": fetch.SETTINGS,
    "views": views.SETTINGS,
    "feed": feed.SETTINGS,
    "media": media.SETTINGS,
}


def main() -> None:
    """Measure the named rooms."""
    arguments = _arguments()
    failed = False
    for room in [arguments.room] if arguments.room else list(ROOMS):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            failed |= runner.run(_measure(room, arguments))
    sys.exit(1 if failed else 0)


async def _measure(room: str, arguments: argparse.Namespace) -> bool:
    # SIGTERM unwinds as Ctrl-C does, so that every process and folder of the run goes.
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    began_s = time.monotonic()
    head = _head(room) | {"notes": [arguments.note] if arguments.note else []}
    wanted = ROOMS[room] if not arguments.only else {n: ROOMS[room][n] for n in arguments.only}
    async with bench_run(quick=arguments.quick, churn_s=arguments.churn_s) as run:
        head["versions"] |= await run.engines.versions()
        for name, measure in wanted.items():
            print(f"== {name}", flush=True)
            try:
                found = await bounded(measure(run), run.question_s)
            except Exception as error:  # noqa: BLE001 - the other questions' figures cost half an hour
                traceback.print_exception(error)
                fault = str(error) or repr(error)
                run.faults.append(f"{name}: {fault}")
                found = [figure(name, "", "", ours=None, not_measured=[fault])]
            for row in found:
                row.question, row.commit, row.date = name, head["commit"], now_text()
            run.add(*found)
            # What comes after may be cut short; this stays measured.
            write_results(room, head, run.figures, list(ROOMS[room]))
        # Questions that are only computed have no cell.
        syncs_us = run.syncs_us or [sync_us(run.folder)]
    head["machine"]["sync_us"] = {
        "median": round(statistics.median(syncs_us)),
        "least": round(min(syncs_us)),
        "most": round(max(syncs_us)),
    }
    head["faults"] = run.faults
    head["machine"]["load_after"] = round(os.getloadavg()[0], 2)
    head["machine"]["seconds"] = round(time.monotonic() - began_s)
    return _tell(room, head, run)


def _tell(room: str, head: dict[str, Any], run: Run) -> bool:
    print(table(run.figures))
    syncs = head["machine"]["sync_us"]
    if syncs["most"] > SYNCS_DIFFER * syncs["least"]:
        text = (
            f"syncs of the disk took {syncs['least']} to {syncs['most']} us from cell to"
            " cell: rates that wait for commits are not to be compared"
        )
        head["notes"].append(text)
        print(f"note: {text}")
    for line in [*remarks(run.figures), *(f"fault: {fault}" for fault in run.faults)]:
        print(f"to know: {line}")
    print(f"written: {write_results(room, head, run.figures, list(ROOMS[room]))}")
    missed = broken(run.figures)
    for row in missed:
        print(f"DOES NOT HOLD: {row.name}, {row.size}: {row.ours} {row.unit}, goal {row.goal}")
    return bool(missed or run.faults)


def _head(room: str) -> dict[str, Any]:
    python = peer_python()
    versions = own_versions() | (versions_of(python, PEER_PACKAGES[room]) if python else {})
    return {
        "machine": read_machine_facts(),
        "commit": read_commit(),
        "date": now_text(),
        "versions": versions,
        "settings": SETTINGS[room],
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("room", nargs="?", choices=ROOMS, help="without it: all rooms")
    parser.add_argument("--quick", action="store_true", help="small sizes, one pair: two minutes")
    parser.add_argument("--churn-s", type=float, help="seconds of each churn, 600 for a soak")
    parser.add_argument(
        "--only", action="append", help="one question, by name; the others' figures stay"
    )
    parser.add_argument("--note", help="what to know of this run, written with it")
    return parser.parse_args()


if __name__ == "__main__":
    main()
