"""Measure a room, print and write its figures, and exit with 1 if a figure misses its goal.

`python -m bench jobs --list` prints the names for `--only`. `--quick` writes to `build/bench`
and leaves the record in `bench/results` as it is.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import uvloop

from bench import backup_loss, costs, feed, fetch, jobs, media, views
from bench.figures import Figure, figure
from bench.harness import QUICK_S, Run, bench_run, bounded
from bench.machine import (
    now_text,
    own_versions,
    read_commit,
    read_machine_facts,
    sync_us,
    versions_of,
)
from bench.report import broken, recorded, remarks, table, write_results
from bench.systems import OURS, PEERS, peer_python
from headrace.kernel.logs import configure_logs

SYNCS_DIFFER = 4
ROOMS = {
    "jobs": jobs.QUESTIONS,
    "fetch": fetch.QUESTIONS,
    "views": views.QUESTIONS,
    "feed": feed.QUESTIONS,
    "media": media.QUESTIONS,
    "costs": costs.QUESTIONS,
    "backup": backup_loss.QUESTIONS,
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
    "costs": [],
    "backup": [],
}
SETTINGS = {
    "jobs": {system.name: system.settings for system in (OURS, *PEERS)},
    "fetch": fetch.SETTINGS,
    "views": views.SETTINGS,
    "feed": feed.SETTINGS,
    "media": media.SETTINGS,
    "costs": costs.SETTINGS,
    "backup": backup_loss.SETTINGS,
}


def main() -> None:
    """Measure the named room, or all."""
    arguments = _arguments()
    rooms = [arguments.room] if arguments.room else list(ROOMS)
    if arguments.list:
        for room in rooms:
            print("\n".join(_listed(room)))
        return
    configure_logs("bench", level="warning")
    failed = False
    for room in rooms:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            failed |= runner.run(_measure(room, arguments))
    sys.exit(1 if failed else 0)


async def _measure(room: str, arguments: argparse.Namespace) -> bool:
    # SIGTERM unwinds as Ctrl-C does, so that every process and folder of the run goes.
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    head = _head(room, arguments.note)
    async with bench_run(quick=arguments.quick, churn_s=arguments.churn_s) as run:
        head["versions"] |= await run.engines.versions()
        head["command"] += run.flag
        for name in arguments.only or ROOMS[room]:
            print(f"== {name}", flush=True)
            found = await rows_of(run, room, name)
            for row in found:
                row.question, row.commit, row.date = name, head["commit"], now_text()
            run.add(*found)
            # What comes after may be cut short; this stays measured.
            _write(room, head, run)
        # Questions that are only computed have no cell.
        syncs_us = run.syncs_us or [sync_us(run.folder)]
    head["machine"]["sync_us"] = {
        "median": round(statistics.median(syncs_us)),
        "least": round(min(syncs_us)),
        "most": round(max(syncs_us)),
    }
    head["faults"] = run.faults
    head["machine"]["load_after"] = round(os.getloadavg()[0], 2)
    head["machine"]["seconds"] = round(time.monotonic() - run.began_s)
    return _show(room, head, run)


async def rows_of(run: Run, room: str, name: str) -> list[Figure]:
    """The rows of one question. A row without figures has the reason."""
    why = f"left out: the {QUICK_S:.0f} s of a quick run were over"
    try:
        if run.question_s > 0:
            return await bounded(ROOMS[room][name](run), run.question_s)
    except Exception as error:  # noqa: BLE001 - the other questions' figures cost half an hour
        if run.question_s > 0:
            traceback.print_exception(error)
            why = str(error) or repr(error)
            run.faults.append(f"{name}: {why}")
    print(f"  {why}; make bench ROOM={room} ONLY={name}{run.flag}", flush=True)
    return [figure(name, "", "", ours=None, not_measured=[why])]


def _write(room: str, head: dict[str, Any], run: Run) -> Path:
    return write_results(room, head, run.figures, list(ROOMS[room]), folder=run.results)


def _show(room: str, head: dict[str, Any], run: Run) -> bool:
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
        print(f"note: {line}")
    print(f"written: {_write(room, head, run)} ({head['machine']['seconds']} s)")
    missed = broken(run.figures)
    for row in missed:
        print(f"MISSED: {row.name}, {row.size}: {row.ours} {row.unit}, goal {row.goal}: {row.why}")
    return bool(missed or run.faults)


def _listed(room: str) -> Iterable[str]:
    """The names of a room for `--only`, each with its rows in the record."""
    rows = {name: list(own) for name, own in groupby(recorded(room), lambda row: row.question)}
    yield f"{room}:"
    for name in ROOMS[room]:
        names = list(dict.fromkeys(row.name for row in rows.get(name, [])))
        yield f"  {name:<15} {'; '.join(names) or 'not recorded yet'}"


def _head(room: str, note: str | None) -> dict[str, Any]:
    python = peer_python()
    versions = own_versions() | (versions_of(python, PEER_PACKAGES[room]) if python else {})
    return {
        "command": f"make bench ROOM={room}",
        "notes": [note] if note else [],
        "machine": read_machine_facts(),
        "commit": read_commit(),
        "date": now_text(),
        "versions": versions,
        "settings": SETTINGS[room],
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("room", nargs="?", choices=ROOMS, help="without it: all rooms")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, one pair, three minutes; no record"
    )
    parser.add_argument("--churn-s", type=float, help="seconds of each churn, 600 for a soak")
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help="these rows; the others' figures stay in the record",
    )
    parser.add_argument("--list", action="store_true", help="print the names for --only")
    parser.add_argument("--note", help="a remark on this run, written with it")
    arguments = parser.parse_args()
    if arguments.only and not arguments.room:
        parser.error("--only needs a room: " + ", ".join(ROOMS))
    for name in arguments.only or []:
        if name not in ROOMS[arguments.room]:
            names = ", ".join(ROOMS[arguments.room])
            parser.error(f"{arguments.room} has no rows {name!r}: choose from {names}")
    return arguments


if __name__ == "__main__":
    main()
