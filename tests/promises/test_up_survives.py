"""`headrace up` as users run it: an engine, a role or everything dies, and nothing is lost.

One site for all tests; its engines sync as by default.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import threading
from pathlib import Path

import httpx
import pytest
from examples.recipes import spool
from tests.kit.processes import HeadraceProcess, descendants, is_alive, wait_until
from tests.kit.site import Site, photo, photo_host

pytestmark = pytest.mark.slow
ITEMS = [f"ad:{number}" for number in range(20)]


@pytest.fixture
def running(site):
    if site.process is None:
        site.up()
    return site


def pid_of(parent: int, word: bytes) -> int:
    """The process below `parent` whose command line begins with a program named `word`."""

    def name(pid: int) -> bytes:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].rpartition(b"/")[2]

    return next(pid for pid in descendants(parent) if name(pid) == word)


def test_a_second_site_in_the_same_folder_is_refused_and_the_first_continues(running):
    assert running.run("up", exit_code=5) is None
    assert running.call("GET", "/v1/queues").status_code == 200


def test_killed_postgres_is_restarted_and_no_role_ends(running):
    process = running.process
    died = len(process.events("role_died"))
    assert running.call("GET", "/v1/queues").status_code == 200
    os.kill(pid_of(process.pid, b"postgres"), signal.SIGKILL)
    statuses = []

    def is_back() -> bool:
        answer = running.call("GET", "/v1/queues")
        statuses.append(answer.status_code)
        if answer.status_code == 503:
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.headers["retry-after"]
            assert "headrace doctor" in answer.json()["detail"]
        return answer.status_code == 200 and bool(process.events("engine_restarted"))

    wait_until(is_back, what="the site answers again")
    assert set(statuses) <= {200, 503}
    running.run("jobs", "add", "notes", '{"text": "after PostgreSQL"}')
    wait_until(lambda: "after PostgreSQL" in running.lines("notes.txt"), what="the job ran")
    assert len(process.events("role_died")) == died


def test_packs_of_a_spool_are_applied_once_and_in_order_through_kill_9(running, monkeypatch):
    """The recipe `spool.py`: what it accepted while PostgreSQL is down is applied afterwards."""
    monkeypatch.setattr(spool, "SPOOL", running.folder / "spool")
    monkeypatch.setattr(spool, "API", running.facts["api"])
    monkeypatch.setattr(spool, "TOKEN", Path(running.facts["token_file"]).read_text().strip())
    running.run("fetch", "customer", "set", "packs", "--rate", "6000/m")
    packs = 40

    def items(number: int) -> list[dict]:
        changing = {"customer": "packs", "item": "a", "fields": {"name": "A", "price": number}}
        return [changing, {**changing, "item": f"p{number}"}]

    for number in range(1, packs + 1):
        path = spool.put(items(number))
        if number in (10, 25):
            os.kill(pid_of(running.process.pid, b"postgres"), signal.SIGKILL)
        if number < 25:
            spool.send(path)
    refused = spool.put([{"customer": "nobody", "item": "a"}])
    for path in sorted(spool.SPOOL.glob("*.json")):
        spool.send(path)
    assert [path.stem for path in spool.SPOOL.iterdir()] == [refused.stem]
    runs = running.document("GET", "/v1/fetch/runs?customer=packs&limit=1000")["runs"]
    assert len(runs) == packs, "each pack is one run"
    item = running.document("GET", "/v1/fetch/customers/packs/item?id=a")
    assert (item["fields"]["price"], item["version"]) == (str(packs), packs)


def test_a_killed_role_is_restarted_and_reported(running):
    process = running.process
    seen = len(process.events("role_died"))
    started = [e for e in process.events("role_started") if e["name"] == "agent"]
    os.kill(started[-1]["pid"], signal.SIGKILL)
    wait_until(lambda: len(process.events("role_died")) > seen, what="its death is reported")
    died = process.events("role_died")[-1]
    assert (died["name"], died["exit_code"]) == ("agent", -signal.SIGKILL)
    running.run("jobs", "add", "notes", '{"text": "after the agent"}')
    wait_until(lambda: "after the agent" in running.lines("notes.txt"), what="the job ran")


class Callers:
    """Hits over HTTP until nobody answers; what was answered, and what may have been counted."""

    def __init__(self, site) -> None:
        self.answered, self.sent = dict.fromkeys(ITEMS, 0), dict.fromkeys(ITEMS, 0)
        self._site = site
        self._threads = [threading.Thread(target=self._call, args=(n,)) for n in range(3)]
        for thread in self._threads:
            thread.start()

    def join(self):
        """Wait until all found that nobody answers."""
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()

    def _call(self, number):
        # Each caller has its own items, so its counts need no lock.
        while True:
            for item in ITEMS[number::3]:
                self.sent[item] += 1
                try:
                    answer = self._site.call("POST", f"/v1/views/items/{item}?class=human")
                except httpx.HTTPError:
                    return
                if answer.status_code == 200:
                    self.answered[item] += 1


def test_acknowledged_jobs_photos_and_hits_survive_kill_9_of_everything(running):
    body = {"payload": {"text": "later"}, "after_s": 3600}
    [job] = running.document("POST", "/v1/queues/notes/jobs", json=body)["ids"]
    with photo_host() as (base, paths):
        running.run_catalogue("shop", base, [f"item{n}" for n in range(6)])
        wanted = {f"item{n}" for n in range(6)}
        wait_until(
            lambda: wanted <= {row["id"] for row in running.items()},
            what="six items are published",
        )
        downloads = list(paths)
        key = next(row["photos"][0] for row in running.items() if row["id"] == "item3")
        callers = Callers(running)
        wait_until(lambda: sum(callers.answered.values()) > 100, what="hits were answered")
        killed = running.process.kill_all()
        assert len(killed) > 6
        callers.join()
        wait_until(lambda: not any(map(is_alive, killed)), what="all are dead")

        running.up()
        assert running.document("GET", f"/v1/jobs/{job}")["state"] == "scheduled"
        assert paths == downloads, "no photo is downloaded again"
    part = running.media(key, Range="bytes=0-99")
    assert (part.status_code, part.content) == (206, photo("item3")[:100])
    assert hashlib.sha256(running.media(key).content).hexdigest() in key
    require_counted(running, callers)

    family = running.process.family()
    running.process.signal(signal.SIGTERM)
    assert running.process.wait_exit() == 0
    wait_until(lambda: not any(map(is_alive, family)), what="no process is left")
    running.process = None


def require_counted(site, callers):
    """Each answered hit is counted once, in the total and in its hour."""

    def total(item):
        [row] = site.document("GET", f"/v1/views?ids={item}")
        return row["total"]

    totals = {item: total(item) for item in ITEMS}
    for item, seen in totals.items():
        assert callers.answered[item] <= seen <= callers.sent[item], item
    hit = site.document("POST", f"/v1/views/items/{ITEMS[0]}?class=human")
    assert hit == {"id": ITEMS[0], "total": totals[ITEMS[0]] + 1}
    wait_until(
        lambda: not sum(row["pending"] for row in site.document("GET", "/v1/views/lag")),
        what="everything is flushed",
    )
    verified = site.run("views", "verify")
    assert (verified["differences"], verified["views"]) == ([], sum(totals.values()) + 1)
    hours = site.run("views", "series", ITEMS[1], "--by", "hour")["items"]
    assert sum(hour["human"] for hour in hours) == totals[ITEMS[1]]


def test_a_start_that_is_refused_names_the_cause_and_leaves_no_process(
    tmp_path, running_engines, database_url
):
    site = Site(tmp_path / "site")
    settings = site.folder / "headrace.toml"
    text = settings.read_text()
    settings.write_text('[web]\nlisten = "here"\n[jobs]\nleese = "1s"\n')
    process = HeadraceProcess(["up"], folder=site.folder)
    assert process.wait_exit() == 2
    assert "expected an address and a port" in process.err
    assert "jobs.leese" in process.err
    assert not (site.folder / "headrace-data").exists()

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings.write_text(text.replace("127.0.0.1:0", f"127.0.0.1:{port}", 1))
        urls = {"HEADRACE_POSTGRES_URL": database_url}
        urls["HEADRACE_VALKEY_URL"] = running_engines.endpoints.valkey_url
        process = HeadraceProcess(["up"], folder=site.folder, env=urls)
        assert process.wait_exit() == 5
    assert f"127.0.0.1:{port} of web.listen (HEADRACE_WEB_LISTEN) is in use" in process.err
    assert "Nothing was started" in process.err
