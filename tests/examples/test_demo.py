"""The whole demo, as a user starts it: everything starts, works, and leaves no process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import httpx
import pytest
from examples.bazaar.breaks import descendants
from examples.bazaar.ledger import PAPER, WRONG
from examples.bazaar.records import BREAKS, Records
from examples.bazaar.stage import ROOT
from tests.kit.waiting import wait_true

pytestmark = pytest.mark.soak
UP_S = 120


async def start(folder, *words):
    """Begin a demo of ten sellers in `folder`; what it prints goes to a file."""
    command = [sys.executable, "-m", "examples.bazaar.demo", "--sellers", "10", "--folder", folder]
    env = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
    with (folder / "out").open("wb") as out:
        return await asyncio.create_subprocess_exec(
            *map(str, command), *words, cwd=ROOT, env=env, stdout=out, stderr=out
        )


def commands_in(folder):
    """The processes that were started with this folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"BAZAAR_DATABASE={folder}".encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


async def test_a_run_of_some_seconds_ends_well_and_leaves_no_process(tmp_path):
    demo = await start(tmp_path, "--seconds", "12")
    code = await asyncio.wait_for(demo.wait(), 240)
    said = (tmp_path / "out").read_text()
    assert code == 0, said[-3000:]
    assert said.rstrip().endswith("everything worked")
    for room in ("jobs", "fetch", "media", "views", "feed", "site"):
        assert f"\n  {room:<7}" in said
    assert commands_in(tmp_path) == []


async def started(folder):
    """A demo that has printed its addresses, and its ports."""
    demo = await start(folder)

    def is_up():
        return "the console" in (folder / "out").read_text() or demo.returncode is not None

    await wait_true(is_up, what="the demo prints its addresses", deadline_s=UP_S)
    return demo, json.loads((folder / "ports.json").read_text())


async def stopped(demo, folder):
    """End it by Ctrl-C."""
    demo.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(demo.wait(), 90) == 0, (folder / "out").read_text()[-3000:]
    assert commands_in(folder) == []


async def test_shop_and_console_open_and_ctrl_c_ends_it_all(tmp_path):
    demo, ports = await started(tmp_path)
    link = re.search(r"the console +(\S+)", (tmp_path / "out").read_text())[1]
    async with httpx.AsyncClient(headers={"accept": "text/html"}, follow_redirects=True) as client:
        shop = await client.get(f"http://127.0.0.1:{ports['shop']}/")
        stranger = await client.get(f"http://127.0.0.1:{ports['api']}/")
        console = await client.get(link)
    assert (shop.status_code, stranger.status_code, console.status_code) == (200, 200, 200)
    assert stranger.url.path == "/console/login"
    assert console.url.path == "/console"
    await stopped(demo, tmp_path)


async def test_each_fault_is_recovered_from_and_nothing_is_lost(tmp_path):
    demo, ports = await started(tmp_path)
    records, url = Records(tmp_path / "bazaar.sqlite"), f"http://127.0.0.1:{ports['shop']}"

    def ledger():
        at, paper = records.paper(PAPER) or (0, {"lines": []})
        return at, {line["name"]: line for line in paper["lines"]}

    def is_busy():
        return ledger()[1].keys() == {"jobs", "views", "photos", "posts"} and records.open_runs()

    await wait_true(is_busy, what="every line of the ledger", deadline_s=UP_S)
    async with httpx.AsyncClient(base_url=url, headers={"origin": url}, timeout=60) as client:
        for kind in BREAKS:
            assert (await client.post("/break", data={"kind": kind})).status_code == 303

            def done(kind=kind):
                [found] = [one for one in records.breaks(9) if one.kind == kind]
                return None if found.is_open else found

            found = await wait_true(done, what=f"{kind} is recovered from", deadline_s=200)
            assert found.recovery_s is not None, found.note
            assert (await client.get("/break")).status_code == 200
    over = time.time()
    # Three readings of the slow lines, which are read every 8 s.
    await wait_true(lambda: ledger()[0] > over + 30, what="a ledger after it", deadline_s=UP_S)
    for line in ledger()[1].values():
        assert line["is_right"], line
        parts = [line[name] for name in ("done", "waiting", "failed", "lost")]
        assert (line["sent"], min(parts) >= 0) == (sum(parts), True), line
    assert (records.paper(WRONG) or (0, {}))[1] == {"texts": []}
    await stopped(demo, tmp_path)


async def test_it_continues_after_the_machine_slept(tmp_path):
    demo, ports = await started(tmp_path)
    pids = [demo.pid, *descendants(demo.pid)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    over = time.monotonic() + 35  # leases of hosts end after 30 s
    await wait_true(lambda: time.monotonic() > over, what="the end of the sleep")
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    records = Records(tmp_path / "bazaar.sqlite")
    before = records.errands().done

    def goes_on():
        assert demo.returncode is None, (tmp_path / "out").read_text()[-3000:]
        return records.errands().done > before + 20

    await wait_true(goes_on, what="errands are done again", deadline_s=UP_S)
    async with httpx.AsyncClient(timeout=60) as client:
        assert (await client.get(f"http://127.0.0.1:{ports['shop']}/feed")).status_code == 200
    await stopped(demo, tmp_path)
