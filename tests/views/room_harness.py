"""One harness for the rooms views and feed.

Fixtures, an HTTP client, scenarios over all surfaces, malformed requests, copies of Valkey's keys.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx
import pytest
from click.testing import CliRunner
from tests.kit.engines import NO_BACKUPS
from tests.kit.ways_in import Refused, bare, plain

from headrace.engines import Engines
from headrace.engines.multiplex import Multiplexer
from headrace.engines.sql import compile_query
from headrace.engines.valkey import ValkeyConfig
from headrace.jobs import Jobs, JobsConfig, Registry
from headrace.kernel.config import load_config
from headrace.kernel.errors import HeadraceError
from headrace.web.model import WebConfig
from headrace.web.serving import run_api
from headrace.web.tokens import Tokens

SURFACES = ("python", "http", "commands")
JSON = {"content-type": "application/json"}
PAGES = {
    "export": ("rows", "after"),
    "changes": ("changes", "position"),
    **dict.fromkeys(("page", "author_posts"), ("posts", "next_cursor")),
    **dict.fromkeys(("following", "followers", "muted", "blocked"), ("people", "next_cursor")),
}
"""How HTTP names the items and the cursor of a page."""


@pytest.fixture
async def engines(running_engines, postgres, valkey, blobs):
    """All engines, with the database and key prefix of one test."""
    config = ValkeyConfig(prefix=valkey.prefix)
    line = Multiplexer(running_engines.endpoints.valkey_url, config)
    yield Engines(postgres, valkey, line, blobs)
    await line.close()


@pytest.fixture
def registry():
    """An empty registry of tasks."""
    return Registry()


@pytest.fixture
def jobs(postgres, registry):
    """The queue on this database."""
    jobs = Jobs(postgres, JobsConfig(poll_s=0.2), registry)
    registry.bind(lambda: jobs)
    return jobs


@pytest.fixture
def app(jobs, engines):
    """The parts of an application that `drain` uses."""
    return SimpleNamespace(jobs=jobs, engines=engines)


@pytest.fixture
def sql(postgres):
    """Run any statement: `await sql("SELECT ...")` returns its rows."""

    async def run(text):
        return await postgres.all(compile_query("test", f"-- A statement of a test.\n{text}"))

    return run


class Anything:
    """Equals every value."""

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0


ANY = Anything()


class Verb(NamedTuple):
    """One verb on each surface. Each function receives the arguments of a step."""

    python: Callable[..., Any]
    """From the service and the arguments to an awaitable."""
    http: Callable[..., Any]
    """To a method, a path and, optionally, options of the request."""
    command: Callable[..., Any]
    """To the words of a command."""
    wrap: str = ""
    """Field in which HTTP and commands return the bare result of Python."""
    pick: str = ""
    """The only compared field of each row."""


def quoted(text):
    """A path segment."""
    return quote(str(text), safe="")


def words_of(options):
    """Options of a command."""
    return [word for name, value in options.items() for word in (f"--{name}", value)]


def only(value):
    """The element of a list of one, because some surfaces return it without the list."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


class Surface:
    """A service through one way in. `await do(verb, **given)` returns what JSON can hold."""

    def __init__(self, name, service, group, verbs, client=None):
        self._name, self._service, self._group = name, service, group
        self._verbs, self._client = verbs, client

    async def do(self, verb, **given):
        """The answer of a verb. Raises: Refused."""
        called = self._verbs[verb]
        answer = await getattr(self, f"_{self._name}")(called, given)
        if self._name == "commands" and verb in PAGES:
            answer = as_over_http(answer, *PAGES[verb])
        return only([row[called.pick] for row in answer] if called.pick else answer)

    async def _python(self, called, given):
        try:
            answer = plain(await called.python(self._service, **given))
        except HeadraceError as error:
            raise Refused(error.status, error.code) from error
        return {called.wrap: answer} if called.wrap else answer

    async def _http(self, called, given):
        method, path, *options = called.http(**given)
        answer = await self._client.request(method, path, **(options[0] if options else {}))
        if answer.is_error:
            raise Refused(answer.status_code, answer.json()["code"])
        return answer.json() if answer.content else None

    async def _commands(self, called, given):
        document = await run_document(self._group, self._service, *called.command(**given))
        return document if "next_cursor" in document else bare(document)


def as_over_http(document, items, cursor):
    """A page as HTTP names its parts; of a feed without the fields that have their default."""
    names = {"items": items, "next_cursor": cursor}
    found = {names.get(name, name): value for name, value in document.items()}
    if cursor != "next_cursor":
        return found
    return {
        name: value for name, value in found.items() if value is not None and value is not False
    }


async def run_command(group, service, *words, text=None):
    """The document that a command shows, without the frame of a list. Raises: Refused."""
    return bare(await run_document(group, service, *words, text=text))


async def run_document(group, service, *words, text=None):
    """The document that a command shows, run in a thread as in a terminal. Raises: Refused."""
    loop, shown = asyncio.get_running_loop(), []
    terminal = SimpleNamespace(
        is_json=True,
        run=lambda _kind, verb: asyncio.run_coroutine_threadsafe(verb(service), loop).result(60),
        show=lambda value, text: shown.append((plain(value), text)),
        progress=lambda *_: None,
    )
    words = [str(word) for word in words]
    ran = await asyncio.to_thread(CliRunner().invoke, group, words, obj=terminal, input=text)
    if isinstance(ran.exception, HeadraceError):
        raise Refused(ran.exception.status, ran.exception.code) from ran.exception
    assert ran.exit_code == 0, (words, ran.output, ran.exception)
    [(value, text)] = shown
    assert isinstance(text, str)
    return value


class Refusal(str):
    """Status and code of an expected refusal."""

    __slots__ = ()


async def run_scenario(surface, steps, *, meanwhile, resolve=dict, check=None):
    """Compare the answer of each step: verb, arguments, expected answer or Refusal.

    `resolve` replaces placeholders in the arguments; `check` compares answers of its own kinds.
    """
    for number, (verb, given, expected) in enumerate(steps):
        try:
            if verb in meanwhile:
                await meanwhile[verb]()
            elif isinstance(expected, Refusal):
                with pytest.raises(Refused) as raised:
                    await surface.do(verb, **resolve(given))
                assert raised.value.told == expected
            else:
                answer = await surface.do(verb, **resolve(given))
                if check is None or not check(verb, answer, expected):
                    assert answer == only(expected), (answer, expected)
        except (Exception, pytest.fail.Exception) as error:
            error.add_note(f"step {number}: {verb} {given}")
            raise


@asynccontextmanager
async def served(engines, services, routes, *, scopes, stop=None):
    """A client of routes on a real socket, with a token. Setting `stop` ends the server early."""
    loaded = load_config({"web": WebConfig}, env={})
    web = dataclasses.replace(loaded.section(WebConfig), listen=("127.0.0.1", 0))
    application = SimpleNamespace(
        version="0.0.0",
        metrics_folder=None,
        config=dataclasses.replace(loaded, sections={"web": web}),
        engines=engines,
        services=lambda: {**services, "backups": NO_BACKUPS},
        routes=lambda: routes,
        secret="a root secret of at least thirty-two characters",
    )
    token = await Tokens(engines.postgres).create("tester", scopes)
    stop, ready = stop or asyncio.Event(), asyncio.get_running_loop().create_future()
    running = asyncio.create_task(run_api(application, stop, lambda *at: ready.set_result(at)))
    await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    host, port = ready.result()
    url, headers = f"http://{host}:{port}", {"authorization": f"Bearer {token.text}"}
    try:
        async with httpx.AsyncClient(
            base_url=url, headers=headers, timeout=60, verify=False
        ) as client:
            yield client
    finally:
        stop.set()
        await running


def bodies(method, path, *values):
    """Requests with JSON bodies; bytes are sent as they are."""
    return [
        (method, path, {"content": v if isinstance(v, bytes) else json.dumps(v), "headers": JSON})
        for v in values
    ]


def paths(method, *targets):
    """Requests without a body."""
    return [(method, target, {}) for target in targets]


async def require_all_refused(client, table, good):
    """Send each request of the table {status and code: requests}; `await good(seen)` after each."""
    for expected, requests in table.items():
        for method, path, options in requests:
            answer = await client.request(method, path, **options)
            seen = f"{method} {path[:80]} {str(options)[:80]}"
            assert answer.is_error, seen
            problem = answer.json()
            assert f"{answer.status_code} {problem['code']}" == expected, seen
            assert answer.headers["content-type"] == "application/problem+json", seen
            assert problem["detail"], seen
            await good(seen)


class KeysCopy:
    """A copy of all keys of one prefix, to put an older state of Valkey back."""

    def __init__(self, valkey):
        self._valkey = valkey
        self._place = f"copy-of-{valkey.prefix}"

    async def take(self):
        """Copy the keys, replacing an earlier copy."""
        await self._delete(self._place)
        await self._copy(self._valkey.prefix, self._place)

    async def put_back(self):
        """Replace the keys by the copy."""
        await self._delete(self._valkey.prefix)
        await self._copy(self._place, self._valkey.prefix)
        await self._delete(self._place)

    async def empty(self):
        """Delete all keys of the prefix."""
        await self._delete(self._valkey.prefix)

    async def _copy(self, source, target):
        for key in await self._valkey.command("KEYS", f"{source}:*"):
            await self._valkey.command("COPY", key, target.encode() + key[len(source) :])

    async def _delete(self, prefix):
        keys = await self._valkey.command("KEYS", f"{prefix}:*")
        if keys:
            await self._valkey.command("DEL", *keys)
