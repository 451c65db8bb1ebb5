"""The verbs of the jobs room as Python, HTTP on a real socket, and typed commands.

`await surface.do("enqueue", {"queue": "mail"})` returns what JSON can hold, the same on each
surface, or raises `Refused` with the status and the code. A verb without an answer returns None.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from contextlib import asynccontextmanager
from datetime import datetime
from operator import attrgetter
from types import SimpleNamespace
from urllib.parse import quote

import httpx
import msgspec
from click.testing import CliRunner
from tests.kit.engines import NO_BACKUPS
from tests.kit.ways_in import Refused, bare, plain

from headrace.jobs import NewJob, cli, http
from headrace.jobs.crons import NewCron
from headrace.jobs.model import JobFilter, TakenOutcome
from headrace.kernel.config import load_config
from headrace.kernel.errors import HeadraceError
from headrace.web.model import WebConfig
from headrace.web.serving import run_api
from headrace.web.tokens import Tokens

SURFACES = ("python", "http", "commands")
LIMITER = "/v1/limiters/{limiter}"
LANE = f"{LIMITER}/lanes/{{lane}}"
HOST = "/v1/fleet/hosts/{host}"

VERBS = {
    "job": ("job", "GET /v1/jobs/{job}", "jobs show {job}"),
    "why": ("why", "GET /v1/jobs/{job}/why", "jobs why {job}"),
    "cancel": ("cancel", "DELETE /v1/jobs/{job}", "jobs cancel {job}"),
    "edit": ("edit", "PATCH /v1/jobs/{job}", ""),
    "retry": ("retry", "POST /v1/jobs/{job}/retry", "jobs retry {job}"),
    "delete": ("delete", "DELETE /v1/jobs/{job}?keep=false", "jobs rm {job}"),
    "find": ("", "GET /v1/jobs", ""),
    "bulk": ("", "POST /v1/jobs/bulk", ""),
    "take": ("", "POST /v1/queues/{queue}/take", "jobs take {queue}"),
    "ack": ("", "POST /v1/leases/{lease}/ack", ""),
    "extend": ("", "POST /v1/leases/{lease}/extend", "jobs extend {lease}"),
    "queues": ("queues.all", "GET /v1/queues", "queues ls"),
    "queue": ("queues.get", "GET /v1/queues/{queue}", "queues show {queue}"),
    "set_queue": ("queues.set", "PUT /v1/queues/{queue}?create=true", ""),
    "pause_queue": ("queues.pause", "", "queues pause {queue}"),
    "resume_queue": ("queues.resume", "", "queues resume {queue}"),
    "lanes": ("lanes.list", "GET /v1/limiters/{limiter}/lanes", "lanes ls {limiter}"),
    "lane": ("lanes.get", f"GET {LANE}", "lanes show {limiter} {lane}"),
    "set_lane": ("lanes.set", f"PUT {LANE}", ""),
    "reset_lane": ("lanes.reset", f"DELETE {LANE}", "lanes reset {limiter} {lane}"),
    "pause_lane": ("lanes.pause", f"POST {LANE}/pause", "lanes pause {limiter} {lane}"),
    "resume_lane": ("lanes.resume", f"POST {LANE}/resume", "lanes resume {limiter} {lane}"),
    "limiters": ("lanes.limiters", "GET /v1/limiters", "lanes limiters"),
    "limiter": ("lanes.get_limiter", f"GET {LIMITER}", "lanes limiter {limiter}"),
    "set_limiter": ("lanes.set_limiter", f"PUT {LIMITER}", ""),
    "reset_limiter": (
        "lanes.reset_limiter",
        f"POST {LIMITER}/reset",
        "lanes limiter {limiter} --as-declared",
    ),
    "remove_limiter": (
        "lanes.remove_limiter",
        f"DELETE {LIMITER}",
        "lanes rm-limiter {limiter}",
    ),
    "remove_queue": ("queues.remove", "DELETE /v1/queues/{queue}", "queues rm {queue}"),
    "crons": ("crons.all", "GET /v1/crons", "crons ls"),
    "add_cron": ("", "POST /v1/crons", ""),
    "run_cron": ("crons.run", "POST /v1/crons/{name}/run", "crons run {name}"),
    "pause_cron": ("crons.pause", "PUT /v1/crons/{name}", "crons pause {name}"),
    "resume_cron": ("crons.resume", "PUT /v1/crons/{name}", "crons resume {name}"),
    "remove_cron": ("crons.remove", "DELETE /v1/crons/{name}", "crons rm {name}"),
    "minutes": ("queues.minutes", "GET /v1/queues/{queue}/minutes", "fleet minutes {queue}"),
    "hours": ("queues.hours", "GET /v1/queues/{queue}/hours", "fleet hours {queue}"),
    "start": ("", "POST /v1/workflows/{name}/start", ""),
    "workflow": ("workflows.get", "GET /v1/workflows/{workflow}", "workflows show {workflow}"),
    "event": ("", "POST /v1/workflows/events", ""),
    "cancel_workflow": ("", "DELETE /v1/workflows/{workflow}", "workflows cancel {workflow}"),
    "fleet": ("fleet.state", "GET /v1/fleet", "fleet show"),
    "drain": ("fleet.drain", f"POST {HOST}/drain", "fleet drain {host}"),
    "forget": ("fleet.forget", f"DELETE {HOST}", "fleet forget {host}"),
    "undrain": ("fleet.undrain", f"POST {HOST}/undrain", "fleet undrain {host}"),
}
"""Each verb in Python, as a request and as a command; empty: a method of the surface."""
MORE = {
    "set_queue": {"create": True},
    "set_lane": dict.fromkeys(("starts_max", "window_s", "concurrency")),
}
"""Arguments that Python needs besides those of the step."""
READ_AFTER = {"set_queue": "queue", "set_lane": "lane", "set_limiter": "limiter"}
READ_AFTER |= dict.fromkeys(("pause_lane", "resume_lane"), "lane")
"""Python verbs without an answer, and the verb that reads what they changed."""
SILENT = {
    "cancel",
    "edit",
    "retry",
    "delete",
    "reset_lane",
    "remove_cron",
    "drain",
    "undrain",
    "forget",
}
SILENT |= {"ack", "pause_queue", "resume_queue", "reset_limiter"}
SILENT |= {"remove_queue", "remove_limiter"}
"""Verbs without an answer over HTTP, of which a command only prints that it is done."""


class Surface:
    """Calls a verb by its name, through a method of the surface where it has one."""

    def __init__(self, jobs) -> None:
        self.jobs = jobs

    async def do(self, verb, given):
        special = getattr(self, verb, None)
        return await (special(**given) if special else self.call(verb, given))


class PythonSurface(Surface):
    """The service itself."""

    async def do(self, verb, given):
        try:
            return plain(await super().do(verb, given))
        except HeadraceError as error:
            raise Refused(error.status, error.code) from error

    async def call(self, verb, given):
        path, route, words = VERBS[verb]
        names = [name for name in given if f"{{{name}}}" in f"{route} {words}"]
        rest = {name: value for name, value in given.items() if name not in names}
        places = {name: given[name] for name in names}
        answer = await attrgetter(path)(self.jobs)(*places.values(), **MORE.get(verb, {}) | rest)
        if verb in READ_AFTER:
            return await self.call(READ_AFTER[verb], places)
        if verb in SILENT:
            return None
        return {"id": answer} if verb == "run_cron" else answer

    async def lanes(self, *, limiter, limit=100):
        return await self.jobs.lanes.list(limiter, lanes_max=limit)

    async def take(self, *, queue, n=1, lease="5m"):
        return await self.jobs.takes.take(queue, n, lease_s=_seconds(lease))

    async def add_cron(self, **cron):
        return await self.jobs.crons.add(NewCron(**cron))

    async def enqueue(self, *, queue, jobs=None, **job):
        given = [NewJob(queue=queue, **_moments(one)) for one in ([job] if jobs is None else jobs)]
        return {"ids": await self.jobs.enqueue_many(given)}

    async def find(self, *, limit=100, after=None, **wanted):
        page = await self.jobs.find(cursor=after, jobs_max=limit, **wanted)
        return {"jobs": page.jobs, "next": page.next_cursor}

    async def bulk(self, *, action, dry_run=False, **wanted):
        done = await self.jobs.bulk(action, JobFilter(**wanted), dry_run=dry_run)
        return {**msgspec.to_builtins(done), "next_cursor": None}

    async def ack(self, *, lease, outcomes=None, rest=None):
        given = {int(job): TakenOutcome(**one) for job, one in (outcomes or {}).items()}
        others = None if rest is None else TakenOutcome(**rest)
        return await self.jobs.takes.ack(lease, given, rest=others)

    async def start(self, *, name, payload=None, **options):
        return {"id": await self.jobs.workflows.start(name, payload, **options)}

    async def event(self, **event):
        return {"is_first": await self.jobs.workflows.send_event(**event)}

    async def cancel_workflow(self, *, workflow):
        return {"running": await self.jobs.workflows.cancel(workflow)}

    async def extend(self, *, lease, lease_for="5m"):
        expires_at = await self.jobs.takes.extend(lease, _seconds(lease_for))
        return {"lease_id": lease, "expires_at": expires_at}


class HttpSurface(Surface):
    """Requests to the room's routes."""

    def __init__(self, jobs, client: httpx.AsyncClient) -> None:
        super().__init__(jobs)
        self.client = client

    async def call(self, verb, given):
        method, path = VERBS[verb][1].split()
        body = {name: value for name, value in given.items() if f"{{{name}}}" not in path}
        path = re.sub(r"\{(\w+)\}", lambda name: quote(str(given[name[1]]), safe=""), path)
        if verb in {"pause_cron", "resume_cron"}:
            body = {"paused": verb == "pause_cron"}
        if verb == "extend":
            body = {"lease": body.pop("lease_for", "5m")}
        if method == "GET" or verb in {"take", "extend"}:
            return await self.ask(method, path, params=body)
        return await self.ask(method, path, json=body if body or method == "PUT" else None)

    async def ask(self, method, path, **options):
        """The body of an answer. Raises: Refused."""
        answer = await self.client.request(method, path, **options)
        if answer.is_error:
            raise Refused(answer.status_code, answer.json()["code"])
        return answer.json() if answer.content else None

    async def enqueue(self, *, queue, jobs=None, **job):
        body = json.dumps(job if jobs is None else jobs).encode()
        headers = {"content-type": "application/json"}
        path = f"/v1/queues/{quote(queue, safe='')}/jobs"
        return await self.ask("POST", path, content=body, headers=headers)

    async def find(self, *, limit=100, after=None, **wanted):
        params = {**wanted, "limit": limit} | ({} if after is None else {"cursor": after})
        page = await self.call("find", params)
        return {"jobs": page["jobs"], "next": page["next_cursor"]}

    async def bulk(self, *, action, dry_run=False, **wanted):
        done = await self.call("bulk", {"action": action, "filter": wanted, "dry_run": dry_run})
        assert done.pop("next_cursor") is None
        return {**done, "next_cursor": None}

    async def pause_queue(self, *, queue):
        await self.call("set_queue", {"queue": queue, "paused": True})

    async def resume_queue(self, *, queue):
        await self.call("set_queue", {"queue": queue, "paused": False})


class CommandSurface(Surface):
    """The commands, in a thread as a terminal runs them."""

    async def call(self, verb, given):
        words = VERBS[verb][2].split()
        rest = {name: value for name, value in given.items() if f"{{{name}}}" not in words}
        words = [str(given[word[1:-1]]) if word.startswith("{") else word for word in words]
        if verb == "extend":
            rest = {"lease": rest.get("lease_for", "5m")}
        shown = await self.run(*words, *options(rest))
        return None if verb in SILENT else bare(shown)

    async def run(self, *words):
        """The document that a command shows. Raises: Refused."""
        return (await run_command(self.jobs, *words))[0]

    async def enqueue(self, *, queue, jobs=None, **job):
        ids = []
        for one in [job] if jobs is None else jobs:
            rest = {_typed(name): _with_unit(name, value) for name, value in one.items()}
            payload = json.dumps(rest.pop("payload", None))
            ids.append((await self.run("jobs", "add", queue, payload, *options(rest)))["id"])
        return {"ids": ids}

    async def find(self, *, limit=100, after=None, q=None, **wanted):
        words = [*([] if q is None else ["-q", q]), *options({**wanted, "max": limit})]
        page = await self.run("jobs", "ls", *words, *options({"cursor": after}))
        return {"jobs": page["items"], "next": page["next_cursor"]}

    async def bulk(self, *, action, dry_run=False, ids=(), q=None, older_than_s=None, **wanted):
        words = ["--dry-run"] if dry_run else []
        words += [word for job in ids for word in ("--id", str(job))]
        words += [] if q is None else ["-q", q]
        words += [] if older_than_s is None else ["--older", f"{older_than_s}s"]
        return await self.run("jobs", "bulk", action, *words, *options(wanted))

    async def ack(self, *, lease, outcomes=None, rest=None):
        names = {"return": "--back", "send_to": "--send-to"}
        assert rest in (None, {"outcome": "done"})
        for job, given in (outcomes or {}).items():
            after = f"{given['after_s']}s" if "after_s" in given else None
            option = names.get(given["outcome"], f"--{given['outcome']}")
            words = [option, str(job), *([given["queue"]] if "queue" in given else [])]
            words += options({"why": given.get("why"), "after": after})
            await self.run("jobs", "ack", str(lease), *words)
        if rest is not None:
            await self.run("jobs", "ack", str(lease))

    async def edit(self, *, job, **changes):
        typed = {_typed(name): _with_unit(name, value) for name, value in changes.items()}
        if "payload" in typed:
            typed["payload"] = json.dumps(typed["payload"])
        await self.run("jobs", "edit", str(job), *options(typed))

    async def start(self, *, name, payload=None, **rest):
        return await self.run("workflows", "start", name, json.dumps(payload), *options(rest))

    async def event(self, *, name, key, payload=None):
        return await self.run("workflows", "event", name, str(key), json.dumps(payload))

    async def cancel_workflow(self, *, workflow):
        shown = await self.call("cancel_workflow", {"workflow": workflow})
        return {"running": shown["running"]}

    async def set_queue(self, *, queue, **changes):
        paused = changes.pop("paused", None)
        words = options(changes, none="none")
        shown = await self.run("queues", "set", queue, "--create", *words)
        if paused is None:
            return shown
        await self.run("queues", "pause" if paused else "resume", queue)
        return await self.run("queues", "show", queue)

    async def set_lane(self, *, limiter, lane, paused=False, **limits):
        words = ["--paused"] if paused else []
        return await self.run("lanes", "set", limiter, lane, *words, *options(_rated(limits)))

    async def set_limiter(self, *, limiter, **limits):
        words = options(_rated(limits)) or ["--unlimited"]
        return await self.run("lanes", "limiter", limiter, *words)

    async def add_cron(self, *, name, spec, queue, payload=None, **more):
        words = [name, spec, queue, json.dumps(payload)]
        return await self.run("crons", "add", *words, *options(more))


async def run_command(jobs, *words):
    """The last document and text that a command shows. Raises: Refused."""
    loop, shown = asyncio.get_running_loop(), []
    terminal = SimpleNamespace(
        is_json=True,
        run=lambda _kind, verb, **_: asyncio.run_coroutine_threadsafe(verb(jobs), loop).result(60),
        show=lambda value, text: shown.append((plain(value), text)),
        progress=lambda text, *_: shown.append((None, text)),
        note=lambda _: None,
    )
    command = next(one for one in cli.COMMANDS if one.name == words[0])
    ran = await asyncio.to_thread(CliRunner().invoke, command, words[1:], obj=terminal)
    if isinstance(ran.exception, HeadraceError):
        raise Refused(ran.exception.status, ran.exception.code) from ran.exception
    if ran.exit_code == 2:
        raise Refused(422, "usage")
    assert ran.exit_code == 0, (words, ran.output, ran.exception)
    assert all(isinstance(text, str) for _, text in shown)
    return shown[-1]


def options(given, *, none=None):
    """`{"slots_min": 2}` as it is typed; None is left out, or typed as `none`."""
    typed = {name: none if value is None else value for name, value in given.items()}
    return [
        word
        for name, value in typed.items()
        if value is not None
        for word in (("-" if len(name) == 1 else "--") + name.replace("_", "-"), str(value))
    ]


def _typed(name):
    return {"after_s": "after", "spread_s": "spread"}.get(name, name)


def _with_unit(name, value):
    return value if _typed(name) == name else f"{value}s"


def _rated(limits):
    """With `--rate 600/60s` for starts and window, `--slack 1s` for the slack."""
    typed = {k: v for k, v in limits.items() if k not in {"starts_max", "window_s", "slack_s"}}
    if "starts_max" in limits or "window_s" in limits:
        typed["rate"] = f"{limits.get('starts_max', '')}/{limits.get('window_s', '')}s"
    if "slack_s" in limits:
        typed["slack"] = f"{limits['slack_s']}s"
    return typed


def _moments(job):
    return {**job, "at": datetime.fromisoformat(job["at"])} if job.get("at") else job


def _seconds(text):
    return float(text[:-1]) * {"s": 1, "m": 60, "h": 3600}[text[-1]]


@asynccontextmanager
async def surface_on(name, postgres, jobs):
    """The surface `name` of a service; HTTP is served while the block lasts."""
    if name == "http":
        async with client_of(postgres, jobs) as client:
            yield HttpSurface(jobs, client)
    else:
        yield (PythonSurface if name == "python" else CommandSurface)(jobs)


@asynccontextmanager
async def client_of(postgres, jobs):
    """A client of the room's routes on a real socket, with a token for them."""
    loaded = load_config({"web": WebConfig}, env={})
    web = dataclasses.replace(loaded.section(WebConfig), listen=("127.0.0.1", 0))
    app = SimpleNamespace(
        version="0.0.0",
        metrics_folder=None,
        config=dataclasses.replace(loaded, sections={"web": web}),
        engines=SimpleNamespace(postgres=postgres, valkey=None, blobs=None),
        services=lambda: {"jobs": jobs, "backups": NO_BACKUPS},
        routes=lambda: http.ROUTES,
        secret="a root secret of at least thirty-two characters",
    )
    token = await Tokens(postgres).create("tester", ("jobs:read", "jobs:write"))
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    running = asyncio.create_task(run_api(app, stop, lambda *at: ready.set_result(at)))
    await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    host, port = ready.result()
    headers = {"authorization": f"Bearer {token.text}"}
    # verify=False: a plain address needs no certificate authorities, and reading them costs 20 ms.
    async with httpx.AsyncClient(
        base_url=f"http://{host}:{port}", headers=headers, timeout=60, verify=False
    ) as client:
        yield client
    stop.set()
    await running
