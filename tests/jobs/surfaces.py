"""The verbs of jobs through each way in.

Python, HTTP on a real socket, the commands as they are typed.

`await surface.do("enqueue", {"queue": "mail", "priority": 0})` gives what JSON can hold, the same
on each surface; what is refused raises `Refused` with the status and the code. A verb that has no
answer gives None.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from contextlib import asynccontextmanager
from datetime import datetime
from types import SimpleNamespace
from urllib.parse import quote

import httpx
import msgspec
from click.testing import CliRunner
from tests.kit.ways_in import PythonVerbs, Refused, plain

from headrace.jobs import NewJob, cli, http
from headrace.jobs.crons import NewCron
from headrace.jobs.model import JobFilter, TakenOutcome
from headrace.kernel.config import load_config
from headrace.kernel.errors import HeadraceError
from headrace.web.model import WebConfig
from headrace.web.server import run_api
from headrace.web.tokens import Tokens

SURFACES = ("python", "http", "commands")
UNLIMITED = dict.fromkeys(("starts_max", "window_s", "concurrency"))


class PythonSurface(PythonVerbs):
    """The service itself."""

    def __init__(self, jobs) -> None:
        self._jobs = jobs

    async def enqueue(self, *, queue, jobs=None, **job):
        given = [NewJob(queue=queue, **_moments(one)) for one in ([job] if jobs is None else jobs)]
        return {"ids": await self._jobs.enqueue_many(given)}

    async def job(self, *, job):
        return await self._jobs.job(job)

    async def why(self, *, job):
        return await self._jobs.why(job)

    async def find(self, *, limit=100, after=None, **wanted):
        page = await self._jobs.find(before=after, jobs_max=limit, **wanted)
        return {"jobs": page.jobs, "next": page.next_before}

    async def cancel(self, *, job):
        return await self._jobs.cancel(job)

    async def retry(self, *, job):
        return await self._jobs.retry(job)

    async def delete(self, *, job):
        return await self._jobs.delete(job)

    async def bulk(self, *, action, dry_run=False, **wanted):
        done = await self._jobs.bulk(action, JobFilter(**wanted), dry_run=dry_run)
        return {**msgspec.to_builtins(done), "next_before": None}

    async def take(self, *, queue, n=1, lease="5m"):
        return await self._jobs.takes.take(queue, n, lease_s=_seconds(lease))

    async def ack(self, *, lease, outcomes=None, rest=None):
        said = {int(job): TakenOutcome(**told) for job, told in (outcomes or {}).items()}
        others = None if rest is None else TakenOutcome(**rest)
        return await self._jobs.takes.ack(lease, said, rest=others)

    async def extend(self, *, lease, lease_for="5m"):
        expires_at = await self._jobs.takes.extend(lease, _seconds(lease_for))
        return {"lease_id": lease, "expires_at": expires_at}

    async def queues(self):
        return await self._jobs.queues.all()

    async def queue(self, *, queue):
        return await self._jobs.queues.get(queue)

    async def set_queue(self, *, queue, **changes):
        await self._jobs.queues.set(queue, create=True, **changes)
        return await self._jobs.queues.get(queue)

    async def pause_queue(self, *, queue):
        return await self._jobs.queues.pause(queue)

    async def resume_queue(self, *, queue):
        return await self._jobs.queues.resume(queue)

    async def lanes(self, *, limiter, limit=100):
        return await self._jobs.lanes.list(limiter, lanes_max=limit)

    async def lane(self, *, limiter, lane):
        return await self._jobs.lanes.get(limiter, lane)

    async def set_lane(self, *, limiter, lane, **limits):
        await self._jobs.lanes.set(limiter, lane, **{**UNLIMITED, **limits})
        return await self._jobs.lanes.get(limiter, lane)

    async def pause_lane(self, *, limiter, lane):
        await self._jobs.lanes.pause(limiter, lane)
        return await self._jobs.lanes.get(limiter, lane)

    async def resume_lane(self, *, limiter, lane):
        await self._jobs.lanes.resume(limiter, lane)
        return await self._jobs.lanes.get(limiter, lane)

    async def reset_lane(self, *, limiter, lane):
        return await self._jobs.lanes.reset(limiter, lane)

    async def limiters(self):
        return await self._jobs.lanes.limiters()

    async def limiter(self, *, limiter):
        return await self._jobs.lanes.get_limiter(limiter)

    async def reset_limiter(self, *, limiter):
        return await self._jobs.lanes.reset_limiter(limiter)

    async def set_limiter(self, *, limiter, **limits):
        await self._jobs.lanes.set_limiter(limiter, **limits)
        return await self._jobs.lanes.get_limiter(limiter)

    async def crons(self):
        return await self._jobs.crons.all()

    async def add_cron(self, **cron):
        return await self._jobs.crons.add(NewCron(**cron))

    async def run_cron(self, *, name):
        return {"id": await self._jobs.crons.run(name)}

    async def pause_cron(self, *, name):
        return await self._jobs.crons.pause(name)

    async def resume_cron(self, *, name):
        return await self._jobs.crons.resume(name)

    async def remove_cron(self, *, name):
        return await self._jobs.crons.remove(name)

    async def minutes(self, *, queue):
        return await self._jobs.queues.minutes(queue)

    async def fleet(self):
        return await self._jobs.fleet.state()

    async def drain(self, *, host):
        return await self._jobs.fleet.drain(host)

    async def undrain(self, *, host):
        return await self._jobs.fleet.undrain(host)


ROUTES = {
    "job": ("GET", "/v1/jobs/{job}"),
    "why": ("GET", "/v1/jobs/{job}/why"),
    "find": ("GET", "/v1/jobs"),
    "cancel": ("DELETE", "/v1/jobs/{job}"),
    "retry": ("POST", "/v1/jobs/{job}/retry"),
    "delete": ("DELETE", "/v1/jobs/{job}?keep=false"),
    "take": ("POST", "/v1/queues/{queue}/take"),
    "ack": ("POST", "/v1/leases/{lease}/ack"),
    "extend": ("POST", "/v1/leases/{lease}/extend"),
    "queues": ("GET", "/v1/queues"),
    "queue": ("GET", "/v1/queues/{queue}"),
    "set_queue": ("PUT", "/v1/queues/{queue}?create=true"),
    "lanes": ("GET", "/v1/limiters/{limiter}/lanes"),
    "lane": ("GET", "/v1/limiters/{limiter}/lanes/{lane}"),
    "set_lane": ("PUT", "/v1/limiters/{limiter}/lanes/{lane}"),
    "reset_lane": ("DELETE", "/v1/limiters/{limiter}/lanes/{lane}"),
    "pause_lane": ("POST", "/v1/limiters/{limiter}/lanes/{lane}/pause"),
    "resume_lane": ("POST", "/v1/limiters/{limiter}/lanes/{lane}/resume"),
    "limiters": ("GET", "/v1/limiters"),
    "limiter": ("GET", "/v1/limiters/{limiter}"),
    "set_limiter": ("PUT", "/v1/limiters/{limiter}"),
    "reset_limiter": ("DELETE", "/v1/limiters/{limiter}"),
    "crons": ("GET", "/v1/crons"),
    "add_cron": ("POST", "/v1/crons"),
    "run_cron": ("POST", "/v1/crons/{name}/run"),
    "pause_cron": ("PUT", "/v1/crons/{name}"),
    "resume_cron": ("PUT", "/v1/crons/{name}"),
    "remove_cron": ("DELETE", "/v1/crons/{name}"),
    "minutes": ("GET", "/v1/queues/{queue}/minutes"),
    "fleet": ("GET", "/v1/fleet"),
    "drain": ("POST", "/v1/fleet/hosts/{host}/drain"),
    "undrain": ("POST", "/v1/fleet/hosts/{host}/undrain"),
}
IN_QUERY = ("GET", "take", "extend")


class HttpSurface:
    """Requests to the room's routes."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client

    async def do(self, verb, given):
        special = getattr(self, verb, None)
        if special is not None:
            return await special(**given)
        method, path = ROUTES[verb]
        body = dict(given)
        for name in given:
            if f"{{{name}}}" in path:
                path = path.replace(f"{{{name}}}", quote(str(body.pop(name)), safe=""))
        if verb in {"pause_cron", "resume_cron"}:
            body = {"paused": verb == "pause_cron"}
        if verb == "extend":
            body = {"lease": body.pop("lease_for", "5m")}
        if method in IN_QUERY or verb in IN_QUERY:
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
        page = await self.ask("GET", "/v1/jobs", params=params)
        return {"jobs": page["jobs"], "next": page["next_cursor"]}

    async def bulk(self, *, action, dry_run=False, **wanted):
        body = {"action": action, "filter": wanted, "dry_run": dry_run}
        done = await self.ask("POST", "/v1/jobs/bulk", json=body)
        assert done.pop("next_cursor") is None
        return {**done, "next_before": None}

    async def pause_queue(self, *, queue):
        await self.do("set_queue", {"queue": queue, "paused": True})

    async def resume_queue(self, *, queue):
        await self.do("set_queue", {"queue": queue, "paused": False})


WORDS = {
    "job": "jobs show {job}",
    "why": "jobs why {job}",
    "cancel": "jobs cancel {job}",
    "retry": "jobs retry {job}",
    "delete": "jobs rm {job}",
    "take": "jobs take {queue}",
    "queues": "queues ls",
    "queue": "queues show {queue}",
    "pause_queue": "queues pause {queue}",
    "resume_queue": "queues resume {queue}",
    "lanes": "lanes ls {limiter}",
    "lane": "lanes show {limiter} {lane}",
    "reset_lane": "lanes reset {limiter} {lane}",
    "pause_lane": "lanes pause {limiter} {lane}",
    "resume_lane": "lanes resume {limiter} {lane}",
    "limiters": "lanes limiters",
    "reset_limiter": "lanes limiter {limiter} --as-declared",
    "crons": "crons ls",
    "run_cron": "crons run {name}",
    "pause_cron": "crons pause {name}",
    "resume_cron": "crons resume {name}",
    "remove_cron": "crons rm {name}",
    "minutes": "fleet minutes {queue}",
    "fleet": "fleet show",
    "drain": "fleet drain {host}",
    "undrain": "fleet undrain {host}",
}
SILENT = {"cancel", "retry", "delete", "reset_lane", "remove_cron", "drain", "undrain"}
SILENT |= {"ack", "pause_queue", "resume_queue", "reset_limiter"}
"""Verbs without an answer, of which the commands only say that it is done."""


class CommandSurface:
    """The commands, in a thread as a terminal would run them."""

    def __init__(self, jobs) -> None:
        self._jobs = jobs

    async def do(self, verb, given):
        special = getattr(self, verb, None)
        if special is not None:
            return await special(**given)
        rest = dict(given)
        words = [
            str(rest.pop(word[1:-1])) if word.startswith("{") else word
            for word in WORDS[verb].split()
        ]
        told = await self.run(*words, *options(rest))
        return None if verb in SILENT else told

    async def run(self, *words):
        """The document that a command shows. Raises: Refused."""
        loop, shown = asyncio.get_running_loop(), []
        terminal = SimpleNamespace(
            is_json=True,
            run=lambda _kind, verb: asyncio.run_coroutine_threadsafe(verb(self._jobs), loop).result(
                60
            ),
            show=lambda value, text: shown.append((plain(value), text)),
            progress=lambda text: None,
        )
        command = next(c for c in cli.COMMANDS if c.name == words[0])
        ran = await asyncio.to_thread(CliRunner().invoke, command, words[1:], obj=terminal)
        if isinstance(ran.exception, HeadraceError):
            raise Refused(ran.exception.status, ran.exception.code) from ran.exception
        if ran.exit_code == 2:
            raise Refused(422, "usage")
        assert ran.exit_code == 0, (words, ran.output, ran.exception)
        [(value, text)] = shown
        assert isinstance(text, str)
        return value

    async def enqueue(self, *, queue, jobs=None, **job):
        ids = []
        for one in [job] if jobs is None else jobs:
            rest = dict(one)
            payload = json.dumps(rest.pop("payload", None))
            renamed = {"after_s": "after", "spread_s": "spread"}
            words = options(
                {
                    renamed.get(name, name): f"{value}s" if name in renamed else value
                    for name, value in rest.items()
                }
            )
            ids.append((await self.run("jobs", "add", queue, payload, *words))["id"])
        return {"ids": ids}

    async def find(self, *, limit=100, after=None, q=None, **wanted):
        search = [] if q is None else ["-q", q]
        words = options({**wanted, "max": limit, "before": after})
        page = await self.run("jobs", "ls", *search, *words)
        return {"jobs": page["jobs"], "next": page["next_before"]}

    async def bulk(self, *, action, dry_run=False, ids=(), q=None, older_than_s=None, **wanted):
        words = ["--dry-run"] if dry_run else []
        words += [word for job in ids for word in ("--id", str(job))]
        words += [] if q is None else ["-q", q]
        words += [] if older_than_s is None else ["--older", f"{older_than_s}s"]
        return await self.run("jobs", "bulk", action, *words, *options(wanted))

    async def ack(self, *, lease, outcomes=None, rest=None):
        names = {"return": "--back", "send_to": "--send-to"}
        assert rest in (None, {"outcome": "done"})
        for job, said in (outcomes or {}).items():
            more = options(
                {
                    "why": said.get("why"),
                    "after": f"{said['after_s']}s" if "after_s" in said else None,
                }
            )
            option = names.get(said["outcome"], f"--{said['outcome']}")
            moved = [said["queue"]] if "queue" in said else []
            await self.run("jobs", "ack", str(lease), option, str(job), *moved, *more)
        if rest is not None:
            await self.run("jobs", "ack", str(lease))

    async def extend(self, *, lease, lease_for="5m"):
        return await self.run("jobs", "extend", str(lease), "--lease", lease_for)

    async def set_queue(self, *, queue, **changes):
        paused = changes.pop("paused", None)
        told = await self.run("queues", "set", queue, "--create", *options(changes, none="none"))
        if paused is None:
            return told
        await self.run("queues", "pause" if paused else "resume", queue)
        return await self.run("queues", "show", queue)

    async def set_lane(self, *, limiter, lane, paused=False, **limits):
        words = ["--paused"] if paused else []
        return await self.run("lanes", "set", limiter, lane, *words, *options(_rated(limits)))

    async def limiter(self, *, limiter):
        [found] = await self.run("lanes", "limiter", limiter)
        return found

    async def set_limiter(self, *, limiter, **limits):
        words = options(_rated(limits)) or ["--unlimited"]
        [found] = await self.run("lanes", "limiter", limiter, *words)
        return found

    async def add_cron(self, *, name, spec, queue, payload=None, **more):
        words = [name, spec, queue, json.dumps(payload)]
        return await self.run("crons", "add", *words, *options(more))


def options(given, *, none=None):
    """`{"slots_min": 2}` as it is typed; None is left out, or typed as `none`."""
    typed = {name: none if value is None else value for name, value in given.items()}
    return [
        word
        for name, value in typed.items()
        if value is not None
        for word in (("-" if len(name) == 1 else "--") + name.replace("_", "-"), str(value))
    ]


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
    if name == "python":
        yield PythonSurface(jobs)
    elif name == "commands":
        yield CommandSurface(jobs)
    else:
        async with client_of(postgres, jobs) as client:
            yield HttpSurface(client)


@asynccontextmanager
async def client_of(postgres, jobs):
    """A client of the room's routes on a real socket, with a token for them."""
    loaded = load_config({"web": WebConfig}, env={})
    web = dataclasses.replace(loaded.section(WebConfig), listen=("127.0.0.1", 0))
    house = SimpleNamespace(
        version="0.0.0",
        metrics_folder=None,
        config=dataclasses.replace(loaded, sections={"web": web}),
        engines=SimpleNamespace(postgres=postgres, valkey=None, blobs=None),
        services=lambda: {"jobs": jobs},
        routes=lambda: http.ROUTES,
        secret="a root secret of at least thirty-two characters",
    )
    token = await Tokens(postgres).create("tester", ("jobs:read", "jobs:write"))
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    running = asyncio.create_task(run_api(house, stop, lambda *at: ready.set_result(at)))
    await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    host, port = ready.result()
    headers = {"authorization": f"Bearer {token.text}"}
    # verify=False: reading the authorities, 20 ms of CPU a client, is for no one on a plain
    # address.
    async with httpx.AsyncClient(
        base_url=f"http://{host}:{port}", headers=headers, timeout=60, verify=False
    ) as client:
        yield client
    stop.set()
    await running
