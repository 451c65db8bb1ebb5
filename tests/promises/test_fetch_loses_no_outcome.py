"""Every photo of a run has one outcome and the counts add up after kills of slots and agents."""

from __future__ import annotations

import hashlib
import http.server
import io
import json
import os
import signal
import threading
from collections import Counter

import httpx
import pytest
from PIL import Image
from slots_host import slot_pids
from tests.kit.processes import wait_until

pytestmark = pytest.mark.slow
ITEMS = 150


def photo(number: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (32, 32), (number % 256, number * 7 % 256, number * 31 % 256)).save(out, "PNG")
    return out.getvalue()


@pytest.fixture
def origin():
    """Every third photo is missing, every third redirects to a forbidden address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            number = int(self.path.strip("/"))
            body = photo(number) if number % 3 == 0 else b""
            self.send_response({0: 200, 1: 404, 2: 302}[number % 3])
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Location", f"http://169.254.169.254/{number}")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def agent_pid(process) -> int:
    """The agent that the supervisor started last."""
    started = [e for e in process.events("role_started") if e["name"] == "agent"]
    return started[-1]["pid"]


def kill_slot(process) -> None:
    """SIGKILL for the first slot; its agent replaces it."""
    pid = wait_until(lambda: slot_pids(process), what="a slot runs")[0]
    os.kill(pid, signal.SIGKILL)


def kill_agent(process) -> None:
    """SIGKILL for the agent; its slots end with it, the supervisor starts another."""
    pid = agent_pid(process)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: agent_pid(process) != pid, what="a new agent")


KILLS = (kill_slot, kill_agent, kill_slot)


@pytest.mark.soak
def test_counts_add_up_while_slots_and_agents_are_killed(site, origin):
    process = site.up()
    site.run("fetch", "customer", "set", "shop", "--rate", "60/s", "--connections", "6")
    rows = [f"i{n},Item {n},5,{origin}/{2 * n}|{origin}/{2 * n + 1}" for n in range(ITEMS)]
    text = "\n".join(["id,name,price,photos", *rows, ""])
    run = site.call("POST", "/v1/fetch/customers/shop/catalogues", content=text.encode()).json()
    path = f"/v1/fetch/runs/{run['run']}"
    for number, kill in enumerate(KILLS, 1):
        goal = 2 * ITEMS * number // (len(KILLS) + 2)
        wait_until(
            lambda goal=goal: site.call("GET", path).json()["photos_pending"] <= 2 * ITEMS - goal,
            what=f"{goal} photos decided",
        )
        kill(process)
        site.age_hosts()
    found = wait_until(
        lambda: (r := site.call("GET", path).json())["state"] == "done" and r,
        what="the run is done",
    )
    assert found["photos"] == 2 * ITEMS == sum(found["photos_by_outcome"].values())
    assert found["photos_by_outcome"] == {
        "stored": ITEMS * 2 // 3,
        "failed:http_404": ITEMS * 2 // 3,
        "refused:forbidden_address": ITEMS * 2 // 3,
    }
    results = site.call("GET", "/v1/fetch/results", params={"limit": 1000}).json()["results"]
    assert Counter(r["id"] for r in results) == {f"i{n}": 1 for n in range(ITEMS)}
    for photo_of in [p for r in results for p in r["photos"] if p["key"]][:30]:
        body = httpx.get(f"{site.told['media']}/m/{photo_of['key']}", timeout=60).content
        assert hashlib.sha256(body).hexdigest() == photo_of["sha256"], "a row always has its bytes"
    told = wait_until(
        lambda: len(t := {json.loads(x)["id"] for x in site.lines("items.jsonl")}) == ITEMS and t,
        what="all items delivered",
    )
    assert told == {f"i{n}" for n in range(ITEMS)}
