"""The whole demo, as a user starts it: everything starts, works, and leaves no process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from pathlib import Path

import httpx
import pytest
from examples.bazaar.stage import ROOT
from tests.kit.waiting import wait_true

pytestmark = pytest.mark.soak
UP_S = 120


async def start(folder, *words):
    """Begin a demo of ten sellers in `folder`; what it prints goes to a file."""
    command = [sys.executable, "-m", "examples.bazaar.demo", "--shops", "10", "--folder", folder]
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
    for room in ("jobs", "fetch", "media", "views", "feed", "shop"):
        assert f"\n  {room:<7}" in said
    assert commands_in(tmp_path) == []


async def test_shop_and_console_open_and_ctrl_c_ends_it_all(tmp_path):
    demo = await start(tmp_path)

    def is_up():
        return "the console" in (tmp_path / "out").read_text() or demo.returncode is not None

    await wait_true(is_up, what="the demo prints its addresses", deadline_s=UP_S)
    ports = json.loads((tmp_path / "ports.json").read_text())
    link = re.search(r"the console +(\S+)", (tmp_path / "out").read_text())[1]
    async with httpx.AsyncClient(headers={"accept": "text/html"}, follow_redirects=True) as client:
        shop = await client.get(f"http://127.0.0.1:{ports['shop']}/")
        stranger = await client.get(f"http://127.0.0.1:{ports['api']}/")
        console = await client.get(link)
    assert (shop.status_code, stranger.status_code, console.status_code) == (200, 200, 200)
    assert stranger.url.path == "/console/login"
    assert console.url.path == "/console"
    demo.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(demo.wait(), 90) == 0, (tmp_path / "out").read_text()[-3000:]
    assert commands_in(tmp_path) == []
