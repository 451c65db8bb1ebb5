"""The fleet, crons and minute statistics over HTTP and the command line.

The same verbs, errors with their codes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from types import SimpleNamespace

import httpx
import msgspec
import pytest
from click.testing import CliRunner
from tests.kit.queue_counts import add_counts

from headrace.jobs import cli, http, store
from headrace.jobs.fleet.scheduler import Planner
from headrace.jobs.fleet.state import QueueCounts
from headrace.kernel.config import load_config
from headrace.kernel.errors import HeadraceError
from headrace.kernel.routes import routes_in
from headrace.web.model import WebConfig
from headrace.web.server import run_api
from headrace.web.tokens import Tokens


@pytest.fixture
async def fleet(postgres, jobs, registry, sql):
    """A planned fleet of one host, with a queue that did something."""

    @registry.task("mail")
    async def mail(job: dict | None): ...

    queue_id = (await jobs.queues.declare())["mail"].id
    await sql("UPDATE headrace.queue SET slots_min = 2")
    host_id = await store.leases.add_host(postgres, "a:1", [queue_id], 30)
    slots = [{"queue": "mail", "pid": 7, "busy_s": 1.0}]
    await store.fleet.report_host(postgres, host_id, capacity=5, load_per_core=0.5, slots=slots)
    counts = {"done": 8, "failed": 2, "claimed": 10, "wait_s": 5.0, "wait_max_s": 1.5}
    await add_counts(postgres, queue_id, **counts)
    await store.fleet.add_counts(postgres, host_id, [QueueCounts(queue_id=queue_id, ended=10)])
    await store.fleet.raise_alert(postgres, "at_max", "mail", "it needs more")
    await Planner(postgres, jobs, "me").run_once()
    # It leads on, however long the test takes.
    await sql("UPDATE headrace.fleet_plan SET leads_until = now() + interval '1 h'")


@pytest.fixture
async def api(postgres, jobs, fleet):
    """A client of the room's routes, with a token for them."""
    loaded = load_config({"web": WebConfig}, env={})
    web = dataclasses.replace(loaded.section(WebConfig), listen=("127.0.0.1", 0))
    house = SimpleNamespace(
        version="0.0.0",
        metrics_folder=None,
        config=dataclasses.replace(loaded, sections={"web": web}),
        engines=SimpleNamespace(postgres=postgres, valkey=None, blobs=None),
        services=lambda: {"jobs": jobs},
        routes=lambda: routes_in(vars(http.fleet)),
        secret="a root secret of at least thirty-two characters",
    )
    token = await Tokens(postgres).create("tester", ("jobs:read", "jobs:write"))
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    running = asyncio.create_task(run_api(house, stop, lambda *at: ready.set_result(at)))
    host, port = await asyncio.wait_for(ready, 60)
    headers = {"authorization": f"Bearer {token.text}"}
    async with httpx.AsyncClient(
        base_url=f"http://{host}:{port}", headers=headers, verify=False
    ) as client:
        yield client
    stop.set()
    await running


async def test_the_fleet_is_shown_and_drained(api):
    state = (await api.get("/v1/fleet")).json()
    [host] = state["hosts"]
    assert (host["name"], host["capacity"], host["planned"]) == ("a:1", 5, {"mail": 2})
    assert host["slots"] == [{"queue": "mail", "pid": 7, "busy_s": 1.0}]
    assert (state["plan"]["version"], state["plan"]["is_led"]) == (1, True)
    assert [alert["rule"] for alert in state["alerts"]] == ["at_max"]
    assert state["decisions"] == (await api.get("/v1/fleet/decisions")).json()
    first = state["decisions"][0]["id"]
    assert (await api.get(f"/v1/fleet/decisions?before={first}")).json() == []
    assert (await api.post("/v1/fleet/hosts/a:1/drain")).status_code == 204
    assert (await api.get("/v1/fleet")).json()["hosts"][0]["is_draining"]
    assert (await api.post("/v1/fleet/hosts/a:1/undrain")).status_code == 204
    assert len((await api.get("/v1/fleet/alerts?open=true")).json()) == 1


async def test_minutes_over_http(api):
    [minute] = (await api.get("/v1/queues/mail/minutes")).json()
    assert (minute["done"], minute["failed"], minute["wait_s"]) == (8, 2, 5.0)
    span = {"from": "2026-01-01T00:00:00Z", "to": "2026-01-01T01:00:00Z"}
    assert (await api.get("/v1/queues/mail/minutes", params=span)).json() == []


async def test_load_over_http(api):
    found = (await api.get("/v1/fleet/load")).json()
    [one] = found["queues"]
    assert (one["queue"], one["done"], one["wait_s"]) == ("mail", 8, 5.0)
    assert [minute["done"] for minute in found["minutes"]] == [8]


async def test_a_crons_life_over_http(api, jobs):
    body = {"name": "nightly", "spec": "0 4 * * *", "queue": "mail", "tz": "Europe/Moscow"}
    added = await api.post("/v1/crons", json={**body, "payload": {"a": 1}})
    assert added.status_code == 201
    shown = (await api.get("/v1/crons/nightly")).json()
    assert shown == added.json()
    assert shown["next_at"].endswith("T01:00:00Z")
    assert (await api.get("/v1/crons")).json() == [shown]
    ran = await api.post("/v1/crons/nightly/run")
    assert ran.status_code == 202
    assert (await jobs.job(ran.json()["id"])).payload == {"a": 1}
    changed = (await api.put("/v1/crons/nightly", json={"paused": True})).json()
    assert changed["paused"]
    changed = (await api.put("/v1/crons/nightly", json={"tz": "UTC", "payload": None})).json()
    assert changed["next_at"].endswith("T04:00:00Z")
    assert (changed["payload"], changed["paused"]) == (None, True)
    assert (await api.delete("/v1/crons/nightly")).status_code == 204
    assert (await api.get("/v1/crons")).json() == []


NEW = {"name": "new", "spec": "0 4 * * *", "queue": "mail"}


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/v1/crons", {**NEW, "spec": "soon"}, 422, "jobs.invalid_cron"),
        ("POST", "/v1/crons", {**NEW, "tz": "Mars/Olympus"}, 422, "jobs.invalid_cron"),
        ("POST", "/v1/crons", {**NEW, "name": "a b"}, 422, "invalid_id"),
        ("POST", "/v1/crons", {**NEW, "queue": "nobody"}, 404, "jobs.queue_unknown"),
        ("POST", "/v1/crons", {**NEW, "queue": "\0"}, 422, "web.invalid_input"),
        ("POST", "/v1/crons", {**NEW, "priority": 99}, 422, "jobs.invalid_job"),
        ("POST", "/v1/crons", {**NEW, "payload": "x" * 70000}, 413, "jobs.payload_too_large"),
        ("GET", "/v1/crons/nobody", None, 404, "jobs.cron_unknown"),
        ("GET", "/v1/crons/%00", None, 422, "invalid_id"),
        ("PUT", "/v1/crons/nobody", {"paused": True}, 404, "jobs.cron_unknown"),
        ("DELETE", "/v1/crons/nobody", None, 404, "jobs.cron_unknown"),
        ("POST", "/v1/crons/nobody/run", None, 404, "jobs.cron_unknown"),
        ("POST", "/v1/fleet/hosts/nobody/drain", None, 404, "jobs.host_unknown"),
        ("POST", "/v1/fleet/hosts/%00/undrain", None, 404, "jobs.host_unknown"),
        ("GET", "/v1/queues/nobody/minutes", None, 404, "jobs.queue_unknown"),
        (
            "GET",
            "/v1/queues/mail/minutes?from=2026-01-01T00:00:00Z",
            None,
            422,
            "jobs.invalid_span",
        ),
        ("GET", "/v1/queues/mail/minutes?from=2026-11-21T10:00:00", None, 422, "jobs.invalid_span"),
        ("GET", "/v1/queues/mail/minutes?to=0001-01-01T00:00:00Z", None, 422, "jobs.invalid_span"),
    ],
)
async def test_bad_requests(api, jobs, method, path, body, status, code):  # noqa: PLR0917
    answer = await api.request(method, path, json=body)
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert await jobs.crons.all() == []


async def test_ids_that_no_row_has(api):
    for before, status in (("9223372036854775808", 200), ("-1", 200), ("x", 422)):
        answer = await api.get(f"/v1/fleet/decisions?before={before}")
        assert answer.status_code == status, before


async def test_a_name_is_taken_once(api):
    assert (await api.post("/v1/crons", json=NEW)).status_code == 201
    again = await api.post("/v1/crons", json=NEW)
    assert (again.status_code, again.json()["code"]) == (409, "jobs.cron_exists")


async def test_a_cron_of_code_can_rest_and_no_more(api, sql):
    await api.post("/v1/crons", json=NEW)
    await sql("UPDATE headrace.cron SET source = 'code'")
    assert (await api.put("/v1/crons/new", json={"paused": True})).json()["paused"]
    for answer in (
        await api.put("/v1/crons/new", json={"spec": "0 5 * * *"}),
        await api.delete("/v1/crons/new"),
    ):
        assert (answer.status_code, answer.json()["code"]) == (409, "jobs.cron_fixed")


async def run_command(jobs, *words):
    """Run a command of the room on `jobs` in a thread.

    Returns its document and text, or an error's code.
    """
    loop, shown = asyncio.get_running_loop(), []
    terminal = SimpleNamespace(
        is_json=True,
        run=lambda _kind, verb: asyncio.run_coroutine_threadsafe(verb(jobs), loop).result(20),
        show=lambda value, text: shown.append((value, text)),
    )
    command = next(c for c in cli.COMMANDS if c.name == words[0])
    ran = await asyncio.to_thread(CliRunner().invoke, command, words[1:], obj=terminal)
    if isinstance(ran.exception, HeadraceError):
        return ran.exception.code
    assert ran.exit_code == 0, ran.output
    value, text = shown[0]
    return json.loads(msgspec.json.encode(value)), text


async def test_commands_of_the_fleet(jobs, fleet):
    state, text = await run_command(jobs, "fleet", "show")
    assert state["hosts"][0]["name"] == "a:1"
    for word in ("plan 1, led by me", "a:1", "mail 2", "at_max", "below_min"):
        assert word in text
    await run_command(jobs, "fleet", "drain", "a:1")
    assert "draining" in (await run_command(jobs, "fleet", "show"))[1]
    await run_command(jobs, "fleet", "undrain", "a:1")
    assert "0 -> 2" in (await run_command(jobs, "fleet", "decisions", "--max", "5"))[1]
    assert "open" in (await run_command(jobs, "fleet", "alerts", "--open"))[1]
    [minute], text = await run_command(jobs, "fleet", "minutes", "mail")
    assert minute["done"] == 8
    assert "0.500" in text, "the mean wait"
    span = ("--from", "2026-01-01T00:00:00+0000", "--to", "2026-01-01T01:00:00+0000")
    assert (await run_command(jobs, "fleet", "minutes", "mail", *span))[0] == []


async def test_commands_of_crons(jobs, fleet):
    words = ("nightly", "0 4 * * *", "mail", '{"a": 1}', "--tz", "Europe/Moscow", "--priority", "1")
    added, text = await run_command(jobs, "crons", "add", *words)
    assert (added["payload"], added["priority"]) == ({"a": 1}, 1)
    assert "01:00:00" in text
    ran, _ = await run_command(jobs, "crons", "run", "nightly")
    assert str(ran["id"]) in (await run_command(jobs, "crons", "ls"))[1]
    assert (await run_command(jobs, "crons", "pause", "nightly"))[0]["paused"]
    assert not (await run_command(jobs, "crons", "resume", "nightly"))[0]["paused"]
    await run_command(jobs, "crons", "rm", "nightly")
    assert (await run_command(jobs, "crons", "ls"))[0] == []


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("fleet", "drain", "nobody"), "jobs.host_unknown"),
        (("fleet", "minutes", "nobody"), "jobs.queue_unknown"),
        (("crons", "add", "new", "soon", "mail"), "jobs.invalid_cron"),
        (("crons", "add", "new", "0 4 * * *", "mail", "{"), "jobs.invalid_cron"),
        (("crons", "add", "new", "0 4 * * *", "nobody"), "jobs.queue_unknown"),
        (("crons", "run", "nobody"), "jobs.cron_unknown"),
        (("crons", "pause", "nobody"), "jobs.cron_unknown"),
        (("crons", "resume", "nobody"), "jobs.cron_unknown"),
        (("crons", "rm", "nobody"), "jobs.cron_unknown"),
    ],
)
async def test_wrong_commands(jobs, fleet, words, code):
    assert await run_command(jobs, *words) == code
