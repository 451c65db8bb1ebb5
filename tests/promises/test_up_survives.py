"""`headrace up` as a whole: engines that die under it, engines of the user's own, wrong starts."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest
from tests.kit.processes import HeadraceProcess, descendants, is_alive, wait_until

from headrace.engines.embedded import EmbeddedEngines

pytestmark = pytest.mark.slow


def pid_of(parent: int, word: bytes) -> int:
    """The process below `parent` whose command line begins with a program named `word`."""

    def name(pid: int) -> bytes:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].rpartition(b"/")[2]

    return next(pid for pid in descendants(parent) if name(pid) == word)


def test_postgres_killed_under_a_running_site_is_restarted_and_no_role_dies(site):
    process = site.up()
    assert site.call("GET", "/v1/queues").status_code == 200
    os.kill(pid_of(process.pid, b"postgres"), signal.SIGKILL)
    statuses = []

    def is_back() -> bool:
        answer = site.call("GET", "/v1/queues")
        statuses.append(answer.status_code)
        if answer.status_code == 503:
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.headers["retry-after"]
            assert "headrace doctor" in answer.json()["detail"]
        return answer.status_code == 200 and bool(process.events("engine_restarted"))

    wait_until(is_back, what="the site answers again")
    assert set(statuses) <= {200, 503}
    site.run("jobs", "add", "notes", '{"text": "after the storm"}')
    wait_until(lambda: site.lines("notes.txt") == ["after the storm"], what="the job ran")
    assert process.events("role_died") == []


def test_a_killed_role_is_restarted_and_reported(site):
    process = site.up()
    [started] = [e for e in process.events("role_started") if e["name"] == "agent"]
    os.kill(started["pid"], signal.SIGKILL)
    wait_until(lambda: process.events("role_died"), what="its death is reported")
    [died] = process.events("role_died")
    assert (died["name"], died["exit_code"]) == ("agent", -signal.SIGKILL)
    site.run("jobs", "add", "notes", '{"text": "worked by the next"}')
    wait_until(lambda: site.lines("notes.txt") == ["worked by the next"], what="the job ran")


async def test_the_same_commands_run_on_engines_of_the_users_own(site, tmp_path, servers_folder):
    engines = EmbeddedEngines(servers_folder / "engines")
    told = await engines.start()
    try:
        env = {
            "HEADRACE_POSTGRES_URL": told.postgres_url,
            "HEADRACE_VALKEY_URL": told.valkey_url,
            "HEADRACE_BLOBS_URL": (tmp_path / "own blobs").as_uri(),
        }
        process = site.up(**env)
        assert {b"postgres", b"valkey-server"}.isdisjoint(
            {Path(f"/proc/{pid}/comm").read_bytes().strip() for pid in process.family()}
        )
        added = HeadraceProcess(
            ["jobs", "add", "notes", '{"text": "elsewhere"}'], folder=site.folder, env=env
        )
        assert added.wait_exit() == 0
        wait_until(lambda: site.lines("notes.txt") == ["elsewhere"], what="the job ran")
        checked = HeadraceProcess(["doctor"], folder=site.folder, env=env)
        assert checked.wait_exit() == 0, checked.out
        family = process.family()
        process.signal(signal.SIGINT)
        assert process.wait_exit() == 0
        wait_until(lambda: not any(is_alive(pid) for pid in family), what="nothing stays behind")
    finally:
        await engines.stop()


def test_a_port_that_is_taken_is_told_and_nothing_stays_behind(site):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = site.folder / "headrace.toml"
        settings.write_text(settings.read_text().replace("127.0.0.1:0", f"127.0.0.1:{port}", 1))
        process = HeadraceProcess(["up"], folder=site.folder)
        wait_until(lambda: len(process.family()) > 3, what="it starts")
        family = process.family()
        assert process.wait_exit() == 5
    assert f"127.0.0.1:{port} is in use by" in process.err
    assert "cli.role_refused" in process.err
    wait_until(lambda: not any(is_alive(pid) for pid in family), what="nothing stays behind")


def test_settings_that_are_wrong_are_all_told_before_anything_starts(site):
    (site.folder / "headrace.toml").write_text('[web]\nlisten = "here"\n[jobs]\nleese = "1s"\n')
    process = HeadraceProcess(["up"], folder=site.folder)
    assert process.wait_exit() == 2
    assert "expected an address and a port" in process.err
    assert "jobs.leese" in process.err
    assert not (site.folder / "headrace-data").exists()
