"""The services of media through each surface: Python, HTTP as the API decodes it, and commands.

`await surface.do("put", {"key": "a.mp3", "size": 5})` returns JSON values, the same on each
surface. A refusal raises `Refused` with status and code.
"""

# ruff: noqa: A002 - the routes' own word is `id`

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

from click.testing import CliRunner
from litestar import Litestar
from litestar.di import Provide
from litestar.testing import AsyncTestClient
from raw_clients import pattern
from tests.kit.ways_in import PythonVerbs, Refused, plain

from headrace.kernel.errors import HeadraceError
from headrace.media.cli import COMMANDS
from headrace.media.http import ROUTES
from headrace.media.simulate.cluster import Cluster, simulate
from headrace.web.bodies import JsonBody, require_json
from headrace.web.problems import render_error

SURFACES = ("python", "http", "commands")


class PythonSurface(PythonVerbs):
    """The service itself."""

    def __init__(self, media) -> None:
        self._media = media

    async def put(self, *, key, size):
        return await self._media.objects.put(key, pattern(size))

    async def info(self, *, key):
        return await self._media.objects.info(key)

    async def ls(self, *, prefix=""):
        return [one.key for one in await self._media.objects.ls(prefix)]

    async def rm(self, *, key):
        return await self._media.objects.rm(key)

    async def purge(self, *, keys=(), prefix=None, dry_run=False):
        return await self._media.purges.purge(keys, prefix=prefix, is_dry_run=dry_run)

    async def warm(self, *, keys):
        return await self._media.warming.warm(keys)

    async def nodes(self):
        return await self._media.nodes.list()

    async def drain(self, *, node):
        return await self._media.nodes.drain(node)

    async def undrain(self, *, node):
        return await self._media.nodes.undrain(node)

    async def weight(self, *, node, weight):
        return await self._media.nodes.set_weight(node, weight)

    async def forget(self, *, node):
        return await self._media.nodes.remove(node)

    async def owners(self, *, key):
        return await self._media.partitions.show(key)

    async def plan(self, **change):
        return await self._media.partitions.plan(**change)

    async def simulate(self, *, lost=(), **cluster):
        return simulate(Cluster(**cluster), lost=lost)

    async def hottest(self, *, limit=20):
        return await self._media.hottest.list(objects_max=limit)

    async def disks(self):
        return await self._media.disks.list()

    async def add_disk(self, *, path, size_bytes):
        return await self._media.disks.add(path, size_bytes)

    async def drain_disk(self, *, id):
        return await self._media.disks.drain(id)

    async def undrain_disk(self, *, id):
        return await self._media.disks.undrain(id)

    async def retire_disk(self, *, id):
        return await self._media.disks.retire(id)

    async def verify(self, *, share=1.0):
        return await self._media.disks.verify(share)


class HttpSurface:
    """Requests to the routes."""

    def __init__(self, client) -> None:
        self.client = client

    async def do(self, verb, given):
        return await getattr(self, verb)(**given)

    async def ask(self, method, path, **options):
        """The body of an answer. Raises: Refused."""
        answer = await self.client.request(method, f"/v1/media/{path}", **options)
        if answer.is_error:
            raise Refused(answer.status_code, answer.json()["code"])
        return answer.json() if answer.content else None

    async def put(self, *, key, size):
        return await self.ask("PUT", f"objects/{key}", content=pattern(size))

    async def info(self, *, key):
        return await self.ask("GET", f"objects/{key}")

    async def ls(self, *, prefix=""):
        found = await self.ask("GET", "objects", params={"prefix": prefix})
        return [one["key"] for one in found["objects"]]

    async def rm(self, *, key):
        return await self.ask("DELETE", f"objects/{key}")

    async def purge(self, **body):
        return await self.ask("POST", "purge", json=body)

    async def warm(self, **body):
        return await self.ask("POST", "warm", json=body)

    async def nodes(self):
        return await self.ask("GET", "nodes")

    async def drain(self, *, node):
        return await self.ask("POST", f"nodes/{node}/drain")

    async def undrain(self, *, node):
        return await self.ask("POST", f"nodes/{node}/undrain")

    async def weight(self, *, node, weight):
        return await self.ask("PUT", f"nodes/{node}/weight", json={"weight": weight})

    async def forget(self, *, node):
        return await self.ask("DELETE", f"nodes/{node}")

    async def owners(self, *, key):
        return await self.ask("GET", f"partitions/{key}")

    async def plan(self, **body):
        return await self.ask("POST", "plan", json=body)

    async def simulate(self, **body):
        return await self.ask("POST", "simulate", json=body)

    async def hottest(self, *, limit=20):
        return await self.ask("GET", "hottest", params={"limit": limit})

    async def disks(self):
        return await self.ask("GET", "disks")

    async def add_disk(self, **body):
        return await self.ask("POST", "disks", json=body)

    async def drain_disk(self, *, id):
        return await self.ask("POST", f"disks/{id}/drain")

    async def undrain_disk(self, *, id):
        return await self.ask("POST", f"disks/{id}/undrain")

    async def retire_disk(self, *, id):
        return await self.ask("POST", f"disks/{id}/retire")

    async def verify(self, **body):
        return await self.ask("POST", "verify", json=body)


class CommandSurface:
    """The commands, in a thread as a terminal would run them."""

    def __init__(self, media, folder) -> None:
        self._media = media
        self._folder = folder

    async def do(self, verb, given):
        return await getattr(self, verb)(**given)

    async def run(self, *words, exit_code=0):
        """The document that a command prints. Raises: Refused."""
        loop, shown = asyncio.get_running_loop(), []
        terminal = SimpleNamespace(
            is_json=True,
            run=lambda _kind, verb: asyncio.run_coroutine_threadsafe(
                verb(self._media), loop
            ).result(60),
            show=lambda value, text: shown.append((plain(value), text)),
            progress=lambda text: None,
        )
        [command] = COMMANDS
        words = [str(word) for word in words]
        ran = await asyncio.to_thread(CliRunner().invoke, command, words, obj=terminal)
        if isinstance(ran.exception, HeadraceError):
            raise Refused(ran.exception.status, ran.exception.code) from ran.exception
        assert ran.exit_code == exit_code, (words, ran.output, ran.exception)
        [(value, text)] = shown
        assert isinstance(text, str)
        return value

    async def put(self, *, key, size):
        file = self._folder / "upload"
        file.write_bytes(pattern(size))
        return await self.run("put", key, file)

    async def info(self, *, key):
        return await self.run("info", key)

    async def ls(self, *, prefix=""):
        return [one["key"] for one in await self.run("ls", prefix)]

    async def rm(self, *, key):
        shown = await self.run("rm", key, "--dry-run")
        assert shown == {"key": key, "removed": False}
        assert await self.run("rm", key) == {"key": key, "removed": True}

    async def purge(self, *, keys=(), prefix=None, dry_run=False):
        words = ["--prefix", prefix] if prefix is not None else []
        return await self.run("purge", *keys, *words, *(["--dry-run"] if dry_run else []))

    async def warm(self, *, keys):
        return await self.run("warm", *keys)

    async def nodes(self):
        return await self.run("nodes", "ls")

    async def drain(self, *, node):
        return await self.run("drain", node)

    async def undrain(self, *, node):
        return await self.run("undrain", node)

    async def weight(self, *, node, weight):
        return await self.run("weight", node, weight)

    async def forget(self, *, node):
        assert (await self.run("nodes", "rm", node, "--dry-run"))["removed"] is False
        assert (await self.run("nodes", "rm", node))["removed"] is True

    async def owners(self, *, key):
        return await self.run("partitions", "show", key)

    async def plan(self, *, lost=(), drained=(), weights=None):
        heavier = [f"{name}={weight}" for name, weight in (weights or {}).items()]
        words = [*_each("--lose", lost), *_each("--drain", drained), *_each("--weight", heavier)]
        return await self.run("partitions", "plan", *words)

    async def simulate(self, *, lost=(), centres=3, nodes=4, load_gbit=120.0, replicas=0):
        words = [
            "--centres",
            centres,
            "--nodes",
            nodes,
            "--gbit",
            load_gbit,
            "--replicas",
            replicas,
        ]
        return await self.run("partitions", "simulate", *words, *_each("--lose", lost))

    async def hottest(self, *, limit=20):
        return await self.run("hottest", "--max", limit)

    async def disks(self):
        return await self.run("disks", "ls")

    async def add_disk(self, *, path, size_bytes):
        return await self.run("disks", "add", path, f"{size_bytes}B")

    async def drain_disk(self, *, id):
        return await self.run("disks", "drain", id)

    async def undrain_disk(self, *, id):
        return await self.run("disks", "undrain", id)

    async def retire_disk(self, *, id):
        dry = await self.run("disks", "retire", id, "--dry-run")
        assert dry["state"] != "out"
        return await self.run("disks", "retire", id)

    async def verify(self, *, share=1.0):
        return await self.run("verify", "--share", share)


def _each(option, values):
    return [word for value in values for word in (option, value)]


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
            exception_handlers={Exception: render_error},
            openapi_config=None,
        )
        async with AsyncTestClient(app) as client:
            yield HttpSurface(client)
