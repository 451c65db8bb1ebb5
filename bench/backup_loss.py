"""What does a lost disk lose, and how long is the site away?

Jobs are enqueued over HTTP without pause. Everything is killed (SIGKILL) and the data folder
deleted. Then the site is restored from the archive, or a standby is promoted. Acknowledged jobs
that are missing afterwards are counted, with their age at the kill. The default settings are used.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import httpx
from tests.kit.processes import HeadraceProcess, wait_until
from tests.kit.site import Site

from bench.children import BenchFault
from bench.figures import Figure, Goal, figure
from bench.harness import Measure, Run
from bench.machine import sync_us

CALLERS: Final = 4
LOAD_S: Final = 15
QUICK_LOAD_S: Final = 8
ACKNOWLEDGED: Final = "acknowledged jobs"
LOST: Final = "acknowledged jobs that are lost"
OLDEST: Final = "age of the oldest lost job"
AWAY: Final = "until the site answers again"
RESTORE: Final = "`headrace restore` alone"
METRICS: Final = {
    ACKNOWLEDGED: ("jobs", None),
    LOST: ("jobs", None),
    OLDEST: ("s", Goal(at_most=10.0)),
    AWAY: ("s", None),
    RESTORE: ("s", None),
}
"""Units and goals: at most two pauses of `backup.every` are lost, one of them for the write."""
PRESENT_MAX: Final = 200
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
        raise BenchFault("no job was acknowledged, so nothing was measured")
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
        ACKNOWLEDGED: len(ids),
        LOST: len(lost),
        OLDEST: max(lost, default=0.0),
    }


def lose_disk(folder: Path, load_s: float, *, with_standby: bool) -> dict[str, float]:
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
        restored_s = 0.0
        if standby is not None:
            site.run("promote", "--data", "second")
            out = standby.wait_out('"api":')
            site.facts = json.loads(next(x for x in out.splitlines() if '"api":' in x))
        else:
            site.run("restore")
            restored_s = time.monotonic() - began_s
            site.run("promote")
            site.up()
        found = {AWAY: time.monotonic() - began_s, **missing(site, load, killed_s)}
        return found if with_standby else found | {RESTORE: restored_s}
    finally:
        if standby is not None:
            standby.end()
        site.end()


async def measure_loss(run: Run) -> list[Figure]:
    """Lose the disk of a site, with a restore and with a standby, in turns."""
    load_s = run.sized(LOAD_S, QUICK_LOAD_S)

    def cell(name: str, *, with_standby: bool) -> Callable[[], Awaitable[dict[str, float]]]:
        async def measure() -> dict[str, float]:
            run.cells_done += 1
            folder = run.folder / f"{name}{run.cells_done}"
            folder.mkdir()
            run.syncs_us.append(sync_us(folder))
            try:
                return await asyncio.to_thread(lose_disk, folder, load_s, with_standby=with_standby)
            finally:
                shutil.rmtree(folder, ignore_errors=True)

        return measure

    cells = {
        "restore": cell("restore", with_standby=False),
        "standby": cell("standby", with_standby=True),
    }
    found = await run.alternate(cells)
    size = f"{CALLERS} callers that enqueue for {load_s} s"
    return [
        figure(f"{name}: {metric}", unit, size, ours=found[metric][name], goal=goal)
        for name in cells
        for metric, (unit, goal) in METRICS.items()
        if name in found.get(metric, {})
    ]


QUESTIONS: Final[dict[str, Measure]] = {"backup_loss": measure_loss}
SETTINGS: Final = {"headrace": "default settings; the archive is a folder on the same disk"}
