"""HTTP and command line: the same verbs, errors with their codes, over real sockets and processes' words."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from types import SimpleNamespace

import httpx
import msgspec
import pytest
from click.testing import CliRunner

from penstock.jobs import cli, http
from penstock.kernel.config import load_config
from penstock.kernel.errors import PenstockError
from penstock.web.model import WebConfig
from penstock.web.server import run_api
from penstock.web.tokens import Tokens

BEFORE_ALL = "0001-01-01T00:00:00+14:00"


@pytest.fixture
async def api(postgres, jobs, registry):
    """A client of the room's routes, with a token for them."""

    @registry.task("mail", limiter="post")
    async def mail(job: dict): ...

    await jobs.declare_queues()
    loaded = load_config({"web": WebConfig}, env={})
    web = dataclasses.replace(loaded.section(WebConfig), listen=("127.0.0.1", 0))
    house = SimpleNamespace(
        version="0.0.0",
        metrics_folder=None,
        config=dataclasses.replace(loaded, sections={"web": web}),
        engines=SimpleNamespace(postgres=postgres, valkey=None, blobs=None),
        services=lambda: {"jobs": jobs},
        routes=lambda: http.ROUTES,
    )
    token = await Tokens(postgres).create("tester", ("jobs:read", "jobs:write"))
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    running = asyncio.create_task(run_api(house, stop, lambda *at: ready.set_result(at)))
    host, port = await asyncio.wait_for(ready, 20)
    headers = {"authorization": f"Bearer {token.text}"}
    async with httpx.AsyncClient(base_url=f"http://{host}:{port}", headers=headers) as client:
        yield client
    stop.set()
    await running


async def test_enqueue_look_cancel(api, jobs):
    one = await api.post("/v1/queues/mail/jobs", json={"payload": {"to": "ann"}, "priority": 0})
    assert one.status_code == 202
    many = await api.post("/v1/queues/mail/jobs", json=[{"lane": "x"}, {"after_s": 60}])
    assert len(many.json()["ids"]) == 2
    [job_id] = one.json()["ids"]
    shown = (await api.get(f"/v1/jobs/{job_id}")).json()
    assert (shown["state"], shown["payload"], shown["priority"]) == ("ready", {"to": "ann"}, 0)
    assert (await api.get(f"/v1/jobs/{job_id}/why")).json()["reason"] == "no_worker"
    assert (await api.delete(f"/v1/jobs/{job_id}")).status_code == 204
    again = await api.delete(f"/v1/jobs/{job_id}")
    assert (again.status_code, again.json()["code"]) == (409, "jobs.not_waiting")
    status = (await api.get("/v1/queues/mail")).json()
    assert (status["ready"], status["scheduled"], status["limiter"]) == (1, 1, "post")
    assert (await jobs.job(job_id)).state.value == "cancelled"


async def test_steer_queues_and_lanes(api):
    paused = await api.put("/v1/queues/mail", json={"paused": True})
    assert paused.json()["paused"] is True
    assert (await api.get("/v1/queues")).json()[0]["paused"] is True
    limits = {"starts_max": 10, "window_s": 60, "concurrency": 2}
    put = await api.put("/v1/limiters/post/lanes/x", json=limits)
    assert put.status_code == 200
    shown = (await api.get("/v1/limiters/post/lanes/x")).json()
    assert limits.items() <= shown.items()


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/v1/queues/nobody/jobs", {}, 404, "jobs.queue_unknown"),
        ("POST", "/v1/queues/nobody/jobs", [], 404, "jobs.queue_unknown"),
        ("POST", "/v1/queues/mail/jobs", {"priority": 10}, 422, "jobs.invalid_job"),
        ("POST", "/v1/queues/mail/jobs", {"lane": "x" * 129}, 422, "jobs.invalid_job"),
        ("POST", "/v1/queues/mail/jobs", {"payload": "x" * 65536}, 413, "jobs.payload_too_large"),
        ("POST", "/v1/queues/mail/jobs", [{}] * 10_001, 413, "jobs.batch_too_large"),
        ("GET", "/v1/jobs/99999999", None, 404, "jobs.job_unknown"),
        ("GET", "/v1/jobs/9223372036854775808", None, 404, "jobs.job_unknown"),
        ("GET", "/v1/jobs/9223372036854775808/why", None, 404, "jobs.job_unknown"),
        ("DELETE", "/v1/jobs/9223372036854775808", None, 404, "jobs.job_unknown"),
        ("GET", "/v1/jobs/1_0", None, 404, "jobs.job_unknown"),
        ("GET", "/v1/jobs/+1", None, 404, "jobs.job_unknown"),
        ("GET", "/v1/jobs/%EF%BC%91", None, 404, "jobs.job_unknown"),
        ("GET", "/v1/queues/%00", None, 404, "jobs.queue_unknown"),
        ("PUT", "/v1/queues/%00", {"paused": True}, 404, "jobs.queue_unknown"),
        ("GET", "/v1/limiters/post/lanes/%00", None, 404, "jobs.lane_unknown"),
        ("GET", "/v1/limiters/%00/lanes/x", None, 404, "jobs.lane_unknown"),
        ("POST", "/v1/queues/mail/jobs", {"at": BEFORE_ALL}, 422, "jobs.invalid_job"),
        ("GET", "/v1/queues/nobody", None, 404, "jobs.queue_unknown"),
        ("PUT", "/v1/queues/nobody", {"paused": True}, 404, "jobs.queue_unknown"),
        ("GET", "/v1/limiters/post/lanes/nobody", None, 404, "jobs.lane_unknown"),
        ("PUT", "/v1/limiters/post/lanes/x", {"starts_max": 0}, 422, "jobs.invalid_job"),
    ],
)
async def test_bad_requests(api, jobs, method, path, body, status, code):  # noqa: PLR0917
    answer = await api.request(method, path, json=body)
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert (await jobs.queue("mail")).ready == 0


async def test_bodies_of_another_shape(api):
    for body in ({"no_such": 1}, {"priority": "5"}, [{"at": "noon"}], 3, "text"):
        answer = await api.post("/v1/queues/mail/jobs", json=body)
        assert answer.status_code == 422, body


async def run_command(jobs, *words, is_json=True):
    """Run a command of the room on `jobs` in a thread; returns its document, text or error."""
    loop, shown = asyncio.get_running_loop(), []
    terminal = SimpleNamespace(
        is_json=is_json,
        run=lambda _kind, verb: asyncio.run_coroutine_threadsafe(verb(jobs), loop).result(20),
        show=lambda value, text: shown.append((value, text)),
    )
    command = next(c for c in cli.COMMANDS if c.name == words[0])
    ran = await asyncio.to_thread(CliRunner().invoke, command, words[1:], obj=terminal)
    if isinstance(ran.exception, PenstockError):
        return ran.exception.code
    assert ran.exit_code == 0, ran.output
    value, text = shown[0]
    return json.loads(msgspec.json.encode(value)), text


async def test_commands(jobs, registry):
    @registry.task("mail", limiter="post")
    async def mail(job: dict): ...

    added, _ = await run_command(
        jobs, "jobs", "add", "mail", '{"to": "ann"}', "--lane", "x", "--unique", "k"
    )
    job_id = str(added["id"])
    shown, text = await run_command(jobs, "jobs", "show", job_id)
    assert shown["payload"] == {"to": "ann"}
    assert "state     ready" in text
    assert "start one" in (await run_command(jobs, "jobs", "why", job_id))[1]
    await run_command(jobs, "jobs", "cancel", job_id)
    listed, text = await run_command(jobs, "jobs", "ls", "--queue", "mail")
    assert [job["id"] for job in listed] == [added["id"]]
    assert "cancelled" in text
    await run_command(jobs, "jobs", "retry", job_id)
    assert "1" in (await run_command(jobs, "queues", "ls"))[1]
    await run_command(jobs, "queues", "pause", "mail")
    assert (await run_command(jobs, "queues", "show", "mail"))[0]["paused"]
    await run_command(jobs, "queues", "resume", "mail")
    lane, text = await run_command(
        jobs, "lanes", "set", "post", "x", "--rate", "600/m", "--concurrency", "3"
    )
    assert (lane["starts_max"], lane["window_s"], lane["concurrency"]) == (600, 60.0, 3)
    assert (await run_command(jobs, "lanes", "show", "post", "x"))[1] == text


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("jobs", "add", "nobody"), "jobs.queue_unknown"),
        (("jobs", "add", "mail", "{"), "jobs.invalid_job"),
        (("jobs", "add", "mail", "{}", "--after", "soon"), "jobs.invalid_job"),
        (("jobs", "show", "99999999"), "jobs.job_unknown"),
        (("jobs", "show", "9223372036854775808"), "jobs.job_unknown"),
        (("jobs", "cancel", "9223372036854775808"), "jobs.job_unknown"),
        (("lanes", "set", "post", "x", "--rate", "fast"), "jobs.invalid_job"),
        (("lanes", "show", "post", "x"), "jobs.lane_unknown"),
        (("queues", "pause", "nobody"), "jobs.queue_unknown"),
    ],
)
async def test_wrong_commands(jobs, words, code):
    assert await run_command(jobs, *words) == code
