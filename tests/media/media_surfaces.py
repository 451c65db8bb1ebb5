"""The verbs of media on each surface: Python, HTTP as the API decodes it, and commands.

`await surface.do("put", {"key": "a.mp3", "size": 5})` returns JSON values, the same on each
surface. A refusal raises `Refused` with status and code.
"""

# ruff: noqa: A006 - the routes' own word is `id`

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from click.testing import CliRunner
from litestar import Litestar
from litestar.di import Provide
from litestar.testing import TestClient
from raw_clients import pattern
from tests.kit.ways_in import Refused, bare, plain

from headrace.kernel.errors import HeadraceError
from headrace.media.cli import COMMANDS
from headrace.media.http import ROUTES
from headrace.web.bodies import JsonBody, require_json
from headrace.web.problems import render_error

SURFACES = ("python", "http", "commands")
UNITS = {
    "ttl_s": ("ttl", "s"),
    "grid_s": ("grid", "s"),
    "for_s": ("for", "s"),
}


class Verb(NamedTuple):
    """One verb: the service's method, its route, and the words of its command.

    The arguments that the path does not name are JSON, or query parameters of GET and DELETE.
    """

    python: Callable[..., Any]
    route: str
    words: Callable[..., list[Any]]


def options(given: dict[str, Any]) -> list[Any]:
    """Options of a command by their names; a list repeats its option."""
    words: list[Any] = []
    for name, value in given.items():
        option, unit = UNITS.get(name, (name, ""))
        for one in value if isinstance(value, (list, tuple)) else [value]:
            words += [f"--{option}", f"{one}{unit}"]
    return words


def plan_words(lost=(), drained=(), weights=None) -> list[Any]:
    heavier = [f"{name}={weight}" for name, weight in (weights or {}).items()]
    words = options({"lose": lost, "drain": drained, "weight": heavier})
    return ["partitions", "plan", *words]


def purge_words(keys=(), prefix=None, *, dry_run=False) -> list[Any]:
    words = ["--prefix", prefix] if prefix is not None else []
    return ["purge", *keys, *words, *(["--dry-run"] if dry_run else [])]


def put_tag(media, cover=None, **texts):
    return media.tags.put(cover=base64.b64decode(cover) if cover else None, **texts)


def purge(media, keys=(), prefix=None, *, dry_run=False):
    return media.purges.purge(keys, prefix=prefix, is_dry_run=dry_run)


def nodes(name: str) -> Callable[..., Any]:
    return lambda m, node, **g: getattr(m.nodes, name)(node, **g)


def disks(name: str) -> Verb:
    return Verb(
        lambda m, id: getattr(m.disks, name)(id),
        f"POST disks/{{id}}/{name}",
        lambda id: ["disks", name, id],
    )


VERBS = {
    "put": Verb(
        lambda m, key, size: m.objects.put(key, pattern(size)), "PUT objects/{key}",
        lambda key, size: ["put", key, size],
    ),
    "info": Verb(
        lambda m, key: m.objects.info(key), "GET objects/{key}", lambda key: ["info", key]
    ),
    "ls": Verb(
        lambda m, prefix="": m.objects.ls(prefix), "GET objects", lambda prefix="": ["ls", prefix]
    ),
    "folder": Verb(
        lambda m, prefix="", after="": m.objects.folder(prefix, after=after),
        "GET folders",
        lambda prefix="", after="": ["folder", prefix, "--after", after],
    ),
    "rm": Verb(lambda m, key: m.objects.rm(key), "DELETE objects/{key}", lambda key: ["rm", key]),
    "purge": Verb(purge, "POST purge", purge_words),
    "warm": Verb(lambda m, keys: m.warming.warm(keys), "POST warm", lambda keys: ["warm", *keys]),
    "nodes": Verb(lambda m: m.nodes.list(), "GET nodes", lambda: ["nodes", "ls"]),
    "drain": Verb(nodes("drain"), "POST nodes/{node}/drain", lambda node: ["drain", node]),
    "undrain": Verb(nodes("undrain"), "POST nodes/{node}/undrain", lambda node: ["undrain", node]),
    "weight": Verb(
        nodes("set_weight"), "PUT nodes/{node}/weight",
        lambda node, weight: ["weight", node, weight],
    ),
    "forget": Verb(nodes("remove"), "DELETE nodes/{node}", lambda node: ["nodes", "rm", node]),
    "owners": Verb(
        lambda m, key: m.partitions.show(key), "GET partitions/{key}",
        lambda key: ["partitions", "show", key],
    ),
    "plan": Verb(lambda m, **change: m.partitions.plan(**change), "POST plan", plan_words),
    "hottest": Verb(
        lambda m, limit=20: m.hottest.list(objects_max=limit), "GET hottest",
        lambda limit=20: ["hottest", "--max", limit],
    ),
    "disks": Verb(lambda m: m.disks.list(), "GET disks", lambda: ["disks", "ls"]),
    "add_disk": Verb(
        lambda m, path, size_bytes: m.disks.add(path, size_bytes), "POST disks",
        lambda path, size_bytes: ["disks", "add", path, f"{size_bytes}B"],
    ),
    "drain_disk": disks("drain"),
    "undrain_disk": disks("undrain"),
    "retire_disk": disks("retire"),
    "verify": Verb(
        lambda m, share=1.0: m.disks.verify(share), "POST verify",
        lambda share=1.0: ["verify", "--share", share],
    ),
    "sign": Verb(
        lambda m, key, **given: m.objects.sign(key, **given), "POST sign",
        lambda key, **given: ["sign", key, *options(given)],
    ),
    "put_tag": Verb(put_tag, "POST tags", lambda **given: ["tag", "put", *options(given)]),
    "get_tag": Verb(
        lambda m, id: m.tags.get(id), "GET tags/{id}", lambda id: ["tag", "show", id]
    ),
    "rm_tag": Verb(
        lambda m, id: m.tags.rm(id), "DELETE tags/{id}", lambda id: ["tag", "rm", id]
    ),
    "trace": Verb(
        lambda m, tag, for_s: m.traces.start(tag, for_s=for_s), "POST traces",
        lambda **given: ["trace", "on", *options(given)],
    ),
    "untrace": Verb(
        lambda m, tag=None: m.traces.stop(tag), "DELETE traces",
        lambda **given: ["trace", "off", *options(given)],
    ),
    "traces": Verb(lambda m: m.traces.list(), "GET traces", lambda: ["trace", "show"]),
}  # fmt: skip
DESTRUCTIVE = ("rm", "forget", "rm_tag", "retire_disk")
"""Verbs whose command has a dry run; it must have no effect."""


class PythonSurface:
    """The service itself."""

    def __init__(self, media) -> None:
        self._media = media

    async def do(self, verb, given):
        try:
            answer = VERBS[verb].python(self._media, **given)
            return plain(await answer)
        except HeadraceError as error:
            raise Refused(error.status, error.code) from error


class HttpSurface:
    """Requests to the routes."""

    def __init__(self, client) -> None:
        self._client = client

    async def do(self, verb, given):
        method, path = VERBS[verb].route.split()
        rest = {name: value for name, value in given.items() if f"{{{name}}}" not in path}
        sent: dict[str, Any] = {}
        if verb == "put":
            sent = {"content": pattern(rest["size"])}
        elif method in ("GET", "DELETE"):
            sent = {"params": rest}
        elif rest or "{" not in path:
            sent = {"json": rest}
        url = f"/v1/media/{path.format(**given)}"
        # In a thread: the node answers in this loop.
        answer = await asyncio.to_thread(self._client.request, method, url, **sent)
        if answer.is_error:
            raise Refused(answer.status_code, answer.json()["code"])
        found = answer.json() if answer.content else None
        return found["objects"] if verb == "ls" else found


class CommandSurface:
    """The commands, in a thread as a terminal would run them."""

    def __init__(self, media, folder: Path) -> None:
        self._media = media
        self._folder = folder
        self.text = ""

    async def do(self, verb, given):
        words = VERBS[verb].words(**self._with_files(verb, dict(given)))
        if verb in DESTRUCTIVE:
            dry = await self.run(*words, "--dry-run")
            assert dry.get("removed") is not True
            assert dry.get("state") != "out"
        found = await self.run(*words)
        return None if verb in DESTRUCTIVE and "removed" in found else found

    def _with_files(self, verb, given):
        """The arguments with the path of a file instead of its bytes."""
        if verb == "put":
            given["size"] = self._file(pattern(given["size"]))
        if "cover" in given:
            given["cover"] = self._file(base64.b64decode(given["cover"]))
        return given

    def _file(self, data: bytes) -> Path:
        file = self._folder / "upload"
        file.write_bytes(data)
        return file

    async def run(self, *words, exit_code=0):
        """The document that a command prints. Raises: Refused."""
        loop, shown = asyncio.get_running_loop(), []
        terminal = SimpleNamespace(
            is_json=True,
            run=lambda _kind, verb: asyncio.run_coroutine_threadsafe(
                verb(self._media), loop
            ).result(60),
            show=lambda value, text: shown.append((bare(value), text)),
            progress=lambda *_: None,
        )
        [command] = COMMANDS
        words = [str(word) for word in words]
        ran = await asyncio.to_thread(CliRunner().invoke, command, words, obj=terminal)
        if isinstance(ran.exception, HeadraceError):
            raise Refused(ran.exception.status, ran.exception.code) from ran.exception
        assert ran.exit_code == exit_code, (words, ran.output, ran.exception)
        [(value, self.text)] = shown
        assert isinstance(self.text, str)
        return value


@asynccontextmanager
async def surface_on(name, media, folder):
    """The surface `name` of a service."""
    if name == "python":
        yield PythonSurface(media)
    elif name == "commands":
        yield CommandSurface(media, folder)
    else:
        app = Litestar(
            ROUTES,
            dependencies={"media": Provide(lambda: media, sync_to_thread=False)},
            guards=[require_json],
            dto=JsonBody,
            return_dto=None,
            exception_handlers={Exception: render_error},
            openapi_config=None,
        )
        with TestClient(app) as client:
            yield HttpSurface(client)
