"""The verbs of views through each way in.

Python, HTTP on a real socket, the commands as they are typed.

`await surface.do("hit", {"id": "ad:1"})` gives what JSON can hold, the same on each surface; what
is refused raises `Refused` with the status and the code.
"""

# ruff: noqa: A002 - the verbs' own word for what is counted is `id`

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import asynccontextmanager
from datetime import date, datetime
from types import SimpleNamespace
from urllib.parse import quote

import httpx
from click.testing import CliRunner
from tests.kit.ways_in import PythonVerbs, Refused, plain

from headrace.kernel.config import load_config, parse_duration_s
from headrace.kernel.errors import HeadraceError
from headrace.views import Hit, cli, http
from headrace.views.errors import InvalidSpan
from headrace.web.model import WebConfig
from headrace.web.server import run_api
from headrace.web.tokens import Tokens

SURFACES = ("python", "http", "commands")
SCOPES = ("views:hit", "views:read", "views:write")


class PythonSurface(PythonVerbs):
    """The service itself."""

    def __init__(self, views) -> None:
        self._views = views

    async def hit(self, *, id, n=1, **more):
        more = {"traffic" if name == "class" else name: value for name, value in more.items()}
        return await self._views.hit(id, n, **more)

    async def hits(self, *, hits):
        return await self._views.hits([one if isinstance(one, str) else Hit(**one) for one in hits])

    async def totals(self, *, ids, fields=("total",)):
        return await self._views.totals(ids, fields=fields)

    async def series(self, *, id, by="day", **span):
        moments = {f"{name}_at": datetime.fromisoformat(text) for name, text in span.items()}
        return await self._views.analytics.series(id, by, **moments)

    async def viewers(self, *, id, **span):
        try:
            days = {f"{name}_day": date.fromisoformat(text) for name, text in span.items()}
        except ValueError as error:
            raise InvalidSpan(str(span)) from error
        return await self._views.analytics.viewers(id, **days)

    async def top(self, *, window, limit, **more):
        try:
            window_s = parse_duration_s(window)
        except ValueError as error:
            raise InvalidSpan(window) from error
        return await self._views.analytics.top(window_s, limit, traffic=more.get("class", "human"))

    async def verify(self):
        return await self._views.analytics.verify()

    async def pending(self):
        return [row.pending for row in await self._views.analytics.lag()]

    async def delete(self, *, id):
        return await self._views.delete(id)

    async def reclassify(self, *, id, from_at, to_at, **classes):
        moments = [datetime.fromisoformat(text) for text in (from_at, to_at)]
        job = await self._views.corrections.reclassify(
            id, from_at=moments[0], to_at=moments[1], **classes
        )
        return {"job": job}


class HttpSurface:
    """Requests to the room's routes."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client

    async def do(self, verb, given):
        return await getattr(self, verb)(**given)

    async def ask(self, method, path, **options):
        """The body of an answer. Raises: Refused."""
        answer = await self.client.request(method, path, **options)
        if answer.is_error:
            raise Refused(answer.status_code, answer.json()["code"])
        return answer.json()

    async def hit(self, *, id, **more):
        return await self.ask("POST", _item(id), params={"class": "human", **more})

    async def hits(self, *, hits):
        named = [{"id": one} if isinstance(one, str) else one for one in hits]
        return await self.ask(
            "POST", "/v1/views", json=[{"class": "human", **one} for one in named]
        )

    async def totals(self, *, ids, fields=("total",)):
        params = {"ids": ",".join(ids), "fields": ",".join(fields)}
        return await self.ask("GET", "/v1/views", params=params)

    async def series(self, *, id, **params):
        return await self.ask("GET", f"{_item(id)}/series", params=params)

    async def viewers(self, *, id, **params):
        return await self.ask("GET", f"{_item(id)}/viewers", params=params)

    async def top(self, **params):
        return await self.ask("GET", "/v1/views/top", params=params)

    async def verify(self):
        return await self.ask("GET", "/v1/views/verify")

    async def pending(self):
        return [row["pending"] for row in await self.ask("GET", "/v1/views/lag")]

    async def delete(self, *, id):
        return await self.ask("DELETE", _item(id))

    async def reclassify(self, **body):
        return await self.ask("POST", "/v1/views/reclassify", json=body)


class CommandSurface:
    """The commands, in a thread as a terminal would run them."""

    def __init__(self, views) -> None:
        self._views = views

    async def do(self, verb, given):
        return await getattr(self, verb)(**given)

    async def run(self, *words):
        """The document that a command shows. Raises: Refused."""
        loop, shown = asyncio.get_running_loop(), []
        terminal = SimpleNamespace(
            is_json=True,
            run=lambda _kind, verb: asyncio.run_coroutine_threadsafe(
                verb(self._views), loop
            ).result(60),
            show=lambda value, text: shown.append((plain(value), text)),
        )
        [command] = cli.COMMANDS
        ran = await asyncio.to_thread(CliRunner().invoke, command, words, obj=terminal)
        if isinstance(ran.exception, HeadraceError):
            raise Refused(ran.exception.status, ran.exception.code) from ran.exception
        assert ran.exit_code == 0, (words, ran.output, ran.exception)
        [(value, text)] = shown
        assert isinstance(text, str)
        return value

    async def hit(self, *, id, n=1, **more):
        words = [word for name, value in more.items() for word in (f"--{name}", value)]
        [total] = await self.run("hit", id, "-n", str(n), *words)
        return total

    async def hits(self, *, hits):
        return await self.run("hit", *hits)

    async def totals(self, *, ids, fields=("total",)):
        return await self.run("get", *ids, "--fields", ",".join(fields))

    async def series(self, *, id, **options):
        return await self.run("series", id, *_words(options))

    async def viewers(self, *, id, **options):
        return await self.run("viewers", id, *_words(options))

    async def top(self, *, limit, **options):
        return await self.run("top", "--max", str(limit), *_words(options))

    async def verify(self):
        return await self.run("verify")

    async def pending(self):
        return [row["pending"] for row in await self.run("lag")]

    async def delete(self, *, id):
        return await self.run("rm", id)

    async def reclassify(self, *, id, from_at, to_at, **classes):
        return await self.run("reclassify", id, *_words({"from": from_at, "to": to_at, **classes}))


def _item(id):
    return f"/v1/views/items/{quote(id, safe='')}"


def _words(options):
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


@asynccontextmanager
async def surface_on(name, engines, views):
    """The surface `name` of a service; HTTP is served while the block lasts."""
    if name == "python":
        yield PythonSurface(views)
    elif name == "commands":
        yield CommandSurface(views)
    else:
        async with client_of(engines, views) as client:
            yield HttpSurface(client)


@asynccontextmanager
async def client_of(engines, views, *, scopes=SCOPES):
    """A client of the room's routes on a real socket, with a token for them."""
    loaded = load_config({"web": WebConfig}, env={})
    web = dataclasses.replace(loaded.section(WebConfig), listen=("127.0.0.1", 0))
    house = SimpleNamespace(
        version="0.0.0",
        metrics_folder=None,
        config=dataclasses.replace(loaded, sections={"web": web}),
        engines=engines,
        services=lambda: {"views": views},
        routes=lambda: http.ROUTES,
        secret="a root secret of at least thirty-two characters",
    )
    token = await Tokens(engines.postgres).create("tester", scopes)
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    running = asyncio.create_task(run_api(house, stop, lambda *at: ready.set_result(at)))
    await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    host, port = ready.result()
    headers = {"authorization": f"Bearer {token.text}"}
    try:
        async with httpx.AsyncClient(
            base_url=f"http://{host}:{port}", headers=headers, timeout=60, verify=False
        ) as client:
            yield client
    finally:
        stop.set()
        await running
