"""What was acknowledged survives the death of everything at once; nothing is left running.

The engines here are the embedded ones with all syncs on, started as a user starts them.
"""

from __future__ import annotations

import hashlib
import http.server
import io
import json
import signal
import threading

import httpx
import pytest
from PIL import Image
from tests.kit.processes import is_alive, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def origin():
    """A seller's host on loopback: a photo for any path, and the list of what was asked."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            asked.append(self.path)
            body = photo(int(self.path.strip("/").removesuffix(".jpg")))
            self.send_response(200)
            self.send_header("Content-Type", "image/jpeg")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def photo(number: int) -> bytes:
    """A real JPEG, another one for each number."""
    out = io.BytesIO()
    Image.new("RGB", (64, 48), (number * 37 % 256, number * 91 % 256, 128)).save(out, "JPEG")
    return out.getvalue()


def catalogue(base: str, numbers) -> str:
    rows = [f"item{n},Item {n},{100 + n},{base}/{n}.jpg" for n in numbers]
    return "\n".join(["id,name,price,photos", *rows, ""])


def test_jobs_and_photos_survive_kill_9_of_all(site, origin):
    base, asked = origin
    first = site.up()
    answer = site.call(
        "POST", "/v1/queues/notes/jobs", json={"payload": {"text": "later"}, "after_s": 3600}
    )
    assert answer.status_code == 202, answer.text
    [job_id] = answer.json()["ids"]

    site.run("fetch", "customer", "set", "shop", "--rate", "6000/m")
    (site.folder / "shop.csv").write_text(catalogue(base, range(6)))
    site.run("fetch", "catalogue", "run", "shop.csv", "--customer", "shop")
    wait_until(lambda: len(site.lines("items.jsonl")) >= 6, what="six items are published")
    key = next(
        json.loads(line)["photos"][0]
        for line in site.lines("items.jsonl")
        if json.loads(line)["id"] == "item3"
    )

    killed = first.kill_all()
    assert len(killed) > 6
    wait_until(lambda: not any(is_alive(pid) for pid in killed), what="all are dead")

    second = site.up()
    state = site.call("GET", f"/v1/jobs/{job_id}").json()
    assert state["state"] == "scheduled"
    served = httpx.get(f"{site.told['media']}/m/{key}", headers={"Range": "bytes=0-99"}, timeout=60)
    assert (served.status_code, served.content) == (206, photo(3)[:100])
    whole = httpx.get(f"{site.told['media']}/m/{key}", timeout=60).content
    assert hashlib.sha256(whole).hexdigest() in key
    assert len(asked) == 6, "nothing is downloaded twice"

    family = second.family()
    second.signal(signal.SIGTERM)
    assert second.wait_exit() == 0
    wait_until(lambda: not any(is_alive(pid) for pid in family), what="no process stays behind")


def test_a_slot_killed_between_bytes_and_row_leaves_no_photo_undecided(site, origin):
    base, _ = origin
    # Every slot dies there, three before a busy machine has looked: they are not to be given up for
    # that.
    process = site.up(HEADRACE_CRASH_AT="fetch.stored_before_row", HEADRACE_JOBS_LOSSES_MAX="100")
    site.run("fetch", "customer", "set", "shop", "--rate", "6000/m")
    (site.folder / "shop.csv").write_text(catalogue(base, range(4)))
    run = site.run("fetch", "catalogue", "run", "shop.csv", "--customer", "shop", "--no-wait")
    wait_until(lambda: process.events("slot_died"), what="a slot died at its crash point")
    process.kill_all()

    site.up()
    site.age_hosts()
    wait_until(lambda: len(site.lines("items.jsonl")) >= 4, what="all items are published")
    counts = site.call("GET", f"/v1/fetch/runs/{run['run']}").json()
    assert counts["photos_by_outcome"] == {"stored": 4}, counts


def test_a_second_up_on_the_same_folder_is_refused_and_the_first_lives(site):
    site.up()
    refused = site.run("up", exit_code=5)
    assert refused is None
    assert site.call("GET", "/v1/queues").status_code == 200
