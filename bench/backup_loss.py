"""Measure what a lost disk loses, and how long a site is away: `python -m bench.backup_loss`.

Jobs are enqueued over HTTP without pause. Everything is killed (SIGKILL) and the data folder
deleted. Then the site is restored from the archive, or a standby is promoted. Acknowledged jobs
that are missing afterwards are counted, with their age at the kill. The default settings are used.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path

import httpx
from tests.kit.processes import HeadraceProcess, wait_until
from tests.kit.site import Site

CALLERS = 4
PRESENT_MAX = 200
"""Present jobs, newest first, after which no older one is looked up."""


class Load:
    """Callers that enqueue jobs until nobody answers; when each acknowledged one was."""

    def __init__(self, site: Site) -> None:
        self.acknowledged: dict[int, float] = {}
        self._site = site
        self._threads = [threading.Thread(target=self._call, daemon=True) for _ in range(CALLERS)]
        for thread in self._threads:
            thread.start()

    def _call(self) -> None:
        job = {"payload": {"text": "x" * 500}, "after_s": 86400}
        while True:
            try:
                answer = self._site.call("POST", "/v1/queues/notes/jobs", json=job)
            except httpx.HTTPError:
                return
            if answer.is_success:
                now_s = time.monotonic()
                self.acknowledged |= dict.fromkeys(answer.json()["ids"], now_s)

    def join(self) -> None:
        """Wait until every caller found that nobody answers."""
        for thread in self._threads:
            thread.join(60)


def missing(site: Site, load: Load, killed_s: float) -> dict[str, float]:
    """Acknowledged jobs that do not exist, and their ages at the kill."""
    ids = sorted(load.acknowledged, key=load.acknowledged.__getitem__, reverse=True)
    if not ids:
        raise SystemExit("no job was acknowledged, so nothing was measured")
    lost: list[float] = []
    present = 0
    for job in ids:
        if site.call("GET", f"/v1/jobs/{job}").status_code == 404:
            lost.append(killed_s - load.acknowledged[job])
        else:
            present += 1
        if present == PRESENT_MAX:
            break  # commits are archived in order, so older ones exist
    return {
        "acknowledged": len(ids),
        "lost": len(lost),
        "oldest_lost_s": round(max(lost, default=0.0), 1),
    }


def measure(folder: Path, load_s: float, *, with_standby: bool) -> dict[str, float]:
    """One loss of the disk under load."""
    site = Site(folder, HEADRACE_BACKUP_URL=(folder / "archive").as_uri())
    site.up()
    process = site.process
    assert process is not None
    standby = None
    try:
        wait_until(lambda: process.events("base_backup_taken"), what="the first base backup")
        if with_standby:
            words = ["standby", "site_for_tests:app", "--json", "--data", "second"]
            standby = HeadraceProcess(words, folder=folder, env=site.env)
            standby.wait_out('"archive":')
        load = Load(site)
        ends_s = time.monotonic() + load_s
        wait_until(lambda: time.monotonic() > ends_s, what="the load", deadline_s=load_s + 60)
        process.kill_all()
        killed_s = time.monotonic()
        load.join()
        shutil.rmtree(folder / "headrace-data")
        began_s = time.monotonic()
        if standby is not None:
            site.run("promote", "--data", "second")
            out = standby.wait_out('"api":')
            site.facts = json.loads(next(x for x in out.splitlines() if '"api":' in x))
        else:
            site.run("restore")
            restored_s = time.monotonic() - began_s
            site.run("promote")
            site.up()
        away_s = time.monotonic() - began_s
        found = missing(site, load, killed_s) | {"back_after_s": round(away_s, 1)}
        return found if with_standby else found | {"restore_s": round(restored_s, 1)}
    finally:
        if standby is not None:
            standby.end()
        site.end()


def main() -> None:
    """Print each run and the medians as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--load-s", type=float, default=15.0)
    parser.add_argument("--standby", action="store_true", help="Promote a standby, do not restore.")
    given = parser.parse_args()
    runs = []
    for _ in range(given.runs):
        with tempfile.TemporaryDirectory(prefix="hr-loss-") as folder:
            runs.append(measure(Path(folder), given.load_s, with_standby=given.standby))
            print(json.dumps(runs[-1]), flush=True)
    print(json.dumps({key: statistics.median(run[key] for run in runs) for key in runs[0]}))


if __name__ == "__main__":
    main()
