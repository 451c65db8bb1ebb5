"""Several processes of one API: a reload under load fails no request, and a killed one returns."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from contextlib import asynccontextmanager

import httpx
import pytest
from tests.kit.processes import descendants, free_ports
from tests.kit.waiting import wait_true

from headrace.kernel.resilience import wait_event
from headrace.web.tokens import Tokens

pytestmark = pytest.mark.slow
CLIENTS = 8


@pytest.fixture
async def root(postgres):
    """The header with a token for everything."""
    return {"authorization": f"Bearer {(await Tokens(postgres).create('root', ('*',))).text}"}


@pytest.fixture
async def api(fleet):
    """`headrace api` with two processes."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    process = fleet.start("api", WEB_LISTEN=address, WEB_PROCESSES="2")
    process.url = f"http://{address}"
    await wait_true(lambda: _answers(process.url), what="the API answers")
    await wait_true(lambda: len(workers_of(process)) == 2, what="both processes run")
    return process


def workers_of(api) -> set[int]:
    """The pids of the workers."""
    return set(descendants(api.pid))


async def _answers(url):
    try:
        async with httpx.AsyncClient(verify=False) as client:
            return (await client.get(f"{url}/healthz")).status_code == 200
    except httpx.TransportError:
        return False


@asynccontextmanager
async def load(api, headers):
    """Requests meanwhile, on kept and on new connections: `answers` by outcome."""
    outcomes, stop = {}, asyncio.Event()

    async def ask(client, path):
        try:
            outcome = (await client.get(f"{api.url}{path}", headers=headers)).status_code
        except httpx.TransportError as error:
            outcome = type(error).__name__
        outcomes[outcome] = outcomes.get(outcome, 0) + 1

    async def kept(number):
        async with httpx.AsyncClient(verify=False, timeout=60) as client:
            while not stop.is_set():
                await ask(client, "/v1/views?ids=a,b" if number % 2 else "/v1/queues")
                # Some connections are idle for a moment when they are drained.
                await wait_event(stop, 0.02 if number % 3 else 0.001)

    async def new():
        while not stop.is_set():
            async with httpx.AsyncClient(verify=False, timeout=60) as client:
                await ask(client, "/healthz")

    tasks = [asyncio.create_task(one) for one in (*map(kept, range(CLIENTS)), new())]
    try:
        yield outcomes
    finally:
        stop.set()
        await asyncio.gather(*tasks)


async def test_a_reload_under_load_replaces_all_processes_and_fails_no_request(api, root):
    async with load(api, root) as outcomes:
        await wait_true(lambda: outcomes.get(200, 0) > 100, what="the load runs")
        before = workers_of(api)
        os.kill(api.pid, signal.SIGHUP)
        await wait_true(
            lambda: len(workers_of(api)) == 2 and not workers_of(api) & before,
            what="both processes are replaced",
        )
        count = outcomes[200]
        await wait_true(lambda: outcomes[200] > count + 100, what="the new ones answer")
    assert outcomes.keys() == {200}, outcomes


async def test_a_killed_process_returns_and_only_its_clients_notice(api, root):
    async with load(api, root) as outcomes:
        await wait_true(lambda: outcomes.get(200, 0) > 100, what="the load runs")
        victim, other = sorted(workers_of(api))
        os.kill(victim, signal.SIGKILL)
        await wait_true(
            lambda: len(workers_of(api) - {victim}) == 2, what="the process is replaced"
        )
        count = outcomes[200]
        await wait_true(lambda: outcomes[200] > count + 100, what="requests are answered")
        assert other in workers_of(api)
    failed = sum(count for outcome, count in outcomes.items() if outcome != 200)
    assert outcomes.keys() <= {200, "ReadError", "RemoteProtocolError", "WriteError"}, outcomes
    assert failed <= CLIENTS + 1, outcomes


async def test_metrics_name_each_process(api, root):
    async def names():
        async with httpx.AsyncClient(verify=False) as client:
            text = (await client.get(f"{api.url}/metrics", headers=root)).text
        lines = [line for line in text.splitlines() if line.startswith("web_requests_total{")]
        assert len({line.split("}")[0] for line in lines}) == len(lines), "no series occurs twice"
        found = {pid for line in lines for pid in re.findall(r'process="(\d+)"', line)}
        return found == {str(pid) for pid in workers_of(api)}

    async with load(api, root):
        await wait_true(names, what="both processes have series")
