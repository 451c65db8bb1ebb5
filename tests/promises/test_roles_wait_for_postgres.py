"""Roles that are started while PostgreSQL is down wait for it, and go on by themselves."""

from __future__ import annotations

import secrets
import signal

import pytest
from tests.kit.chaos import PASS, RESET, ChaosProxy
from tests.kit.processes import HeadraceProcess, wait_until

pytestmark = pytest.mark.slow
APPLICATION = "from headrace import Headrace\napp = Headrace()\n"
STARTED = {
    "agent": "host_registered",
    "work": "host_registered",
    "scheduler": "lead_taken",
    "flusher": "views_shard_taken",
}


@pytest.fixture
def start(tmp_path, running_engines):
    """Starts a role on a PostgreSQL; what still runs at the end of the test is ended."""
    started = []
    (tmp_path / "waiting_app.py").write_text(APPLICATION)

    def run(role, postgres_url):
        env = {
            "HEADRACE_POSTGRES_URL": postgres_url,
            "HEADRACE_VALKEY_URL": running_engines.endpoints.valkey_url,
            "HEADRACE_VALKEY_PREFIX": f"test-{secrets.token_hex(4)}",
        }
        application = [] if role == "flusher" else ["waiting_app:app"]
        started.append(HeadraceProcess([role, *application], folder=tmp_path, env=env))
        return started[-1]

    yield run
    for process in started:
        process.end()


@pytest.mark.parametrize("role", STARTED)
async def test_a_role_started_before_postgres_works_once_it_is_there(start, role, database_url):
    with ChaosProxy(database_url) as proxy:
        proxy.set(RESET)
        process = start(role, proxy.url)
        wait_until(lambda: process.events("role_waits"), what="it waits")
        assert not process.events(STARTED[role])
        proxy.set(PASS)
        wait_until(lambda: process.events(STARTED[role]), what="it works")
        process.signal(signal.SIGTERM)
        assert process.wait_exit() == 0


@pytest.mark.parametrize("role", STARTED)
async def test_a_role_that_waits_for_postgres_stops_when_it_is_asked_to(start, role, database_url):
    with ChaosProxy(database_url) as proxy:
        proxy.set(RESET)
        process = start(role, proxy.url)
        wait_until(lambda: process.events("role_waits"), what="it waits")
        process.signal(signal.SIGTERM)
        assert process.wait_exit() == 0


async def test_a_role_that_postgres_does_not_let_in_ends(start, database_url):
    """Waiting does not mend a wrong name in the URL."""
    process = start("scheduler", database_url.replace("//headrace@", "//nobody@", 1))
    assert process.wait_exit() == 7
    assert "postgres.url" in process.err
