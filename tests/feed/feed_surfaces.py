"""The verbs of the feed through each way in.

Python, HTTP on a real socket, the commands as they are typed.

`await surface.do("page", {"viewer": 7})` gives what JSON can hold, the same on each surface; what
is refused raises `Refused` with the status and the code.
"""

# ruff: noqa: A002 - a post's own word is `id`

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import asynccontextmanager
from datetime import datetime
from types import SimpleNamespace
from urllib.parse import quote

import httpx
from click.testing import CliRunner
from tests.kit.ways_in import PythonVerbs, Refused, plain

from headrace.feed import cli, http
from headrace.feed.model import feed_page, feed_people
from headrace.kernel.config import load_config
from headrace.kernel.errors import HeadraceError
from headrace.web.model import WebConfig
from headrace.web.server import run_api
from headrace.web.tokens import Tokens

SURFACES = ("python", "http", "commands")
SCOPES = ("feed:read", "feed:write")
SECRET = "a root secret of at least thirty-two characters"


class PythonSurface(PythonVerbs):
    """The service itself."""

    def __init__(self, feed) -> None:
        self._feed = feed

    async def follow(self, *, viewer, authors):
        return {"changed": await self._feed.follow(viewer, authors)}

    async def unfollow(self, *, viewer, authors):
        return {"changed": await self._feed.unfollow(viewer, authors)}

    async def unfollow_all(self, *, viewer):
        return {"changed": await self._feed.follows.unfollow_all(viewer)}

    async def mute(self, *, viewer, authors):
        return {"changed": await self._feed.follows.mute(viewer, authors)}

    async def unmute(self, *, viewer, authors):
        return {"changed": await self._feed.follows.unmute(viewer, authors)}

    async def block(self, *, viewer, authors):
        return {"changed": await self._feed.follows.block(viewer, authors)}

    async def unblock(self, *, viewer, authors):
        return {"changed": await self._feed.follows.unblock(viewer, authors)}

    async def following(self, *, viewer, limit=100, cursor=None):
        return feed_people(await self._feed.follows.following(viewer, limit, cursor=cursor))

    async def followers(self, *, author, limit=100, cursor=None):
        return feed_people(await self._feed.follows.followers(author, limit, cursor=cursor))

    async def muted(self, *, viewer):
        return feed_people(await self._feed.follows.muted(viewer))

    async def blocked(self, *, viewer):
        return feed_people(await self._feed.follows.blocked(viewer))

    async def post(self, *, author, id, at=None, **more):
        moment = None if at is None else datetime.fromisoformat(at)
        return await self._feed.post(author, id, at=moment, **more)

    async def find(self, *, id):
        return await self._feed.posts.find(id)

    async def delete(self, *, id):
        return await self._feed.delete(id)

    async def page(self, *, viewer, limit=20, **more):
        return feed_page(await self._feed.page(viewer, limit, **more))

    async def author_posts(self, *, author):
        return feed_page(await self._feed.pages.author_posts(author))

    async def unread(self, *, viewer):
        return await self._feed.pages.unread(viewer)

    async def marker(self, *, viewer):
        return await self._feed.pages.marker(viewer)

    async def set_marker(self, *, viewer, position):
        return await self._feed.pages.set_marker(viewer, position)

    async def rebuild(self):
        return {"job": await self._feed.index.rebuild()}

    async def verify(self):
        return await self._feed.index.verify()

    async def stats(self):
        return await self._feed.index.stats()

    async def why(self, *, viewer, post):
        return await self._feed.pages.why(viewer, post)


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
        return answer.json() if answer.content else None

    async def follow(self, *, viewer, authors):
        if len(authors) == 1:
            return await self.ask("PUT", f"{_viewer(viewer)}/follows/{_quoted(authors[0])}")
        return await self.ask("POST", f"{_viewer(viewer)}/follows", json=authors)

    async def unfollow(self, *, viewer, authors):
        if len(authors) == 1:
            return await self.ask("DELETE", f"{_viewer(viewer)}/follows/{_quoted(authors[0])}")
        told = ",".join(map(str, authors))
        return await self.ask("DELETE", f"{_viewer(viewer)}/follows", params={"authors": told})

    async def unfollow_all(self, *, viewer):
        return await self.ask("DELETE", f"{_viewer(viewer)}/follows", params={"all": "true"})

    async def mute(self, **given):
        return await self._mute_block("mutes", "PUT", **given)

    async def unmute(self, **given):
        return await self._mute_block("mutes", "DELETE", **given)

    async def block(self, **given):
        return await self._mute_block("blocks", "PUT", **given)

    async def unblock(self, **given):
        return await self._mute_block("blocks", "DELETE", **given)

    async def _mute_block(self, name, method, *, viewer, authors):
        path = f"{_viewer(viewer)}/{name}"
        if len(authors) == 1:
            return await self.ask(method, f"{path}/{_quoted(authors[0])}")
        if method == "PUT":
            return await self.ask("POST", path, json=authors)
        return await self.ask("DELETE", path, params={"authors": ",".join(map(str, authors))})

    async def following(self, *, viewer, **params):
        return await self.ask("GET", f"{_viewer(viewer)}/follows", params=params)

    async def followers(self, *, author, **params):
        return await self.ask("GET", f"/v1/feed/authors/{_quoted(author)}/followers", params=params)

    async def muted(self, *, viewer):
        return await self.ask("GET", f"{_viewer(viewer)}/mutes")

    async def blocked(self, *, viewer):
        return await self.ask("GET", f"{_viewer(viewer)}/blocks")

    async def post(self, **body):
        [told] = await self.ask("POST", "/v1/feed/posts", json=body)
        return told

    async def find(self, *, id):
        return await self.ask("GET", f"/v1/feed/posts/{_quoted(id)}")

    async def delete(self, *, id):
        return await self.ask("DELETE", f"/v1/feed/posts/{_quoted(id)}") or "gone"

    async def page(self, *, viewer, **params):
        return await self.ask("GET", _viewer(viewer), params=params)

    async def author_posts(self, *, author):
        return await self.ask("GET", f"/v1/feed/authors/{_quoted(author)}/posts")

    async def unread(self, *, viewer):
        return await self.ask("GET", f"{_viewer(viewer)}/unread")

    async def marker(self, *, viewer):
        return await self.ask("GET", f"{_viewer(viewer)}/marker")

    async def set_marker(self, *, viewer, position):
        return await self.ask("PUT", f"{_viewer(viewer)}/marker", json={"position": position})

    async def rebuild(self):
        return await self.ask("POST", "/v1/feed/rebuild")

    async def verify(self):
        return await self.ask("GET", "/v1/feed/verify")

    async def stats(self):
        return await self.ask("GET", "/v1/feed/stats")

    async def why(self, *, viewer, post):
        return await self.ask("GET", f"{_viewer(viewer)}/why", params={"post": post})


class CommandSurface:
    """The commands, in a thread as a terminal would run them."""

    def __init__(self, feed) -> None:
        self._feed = feed

    async def do(self, verb, given):
        return await getattr(self, verb)(**given)

    async def run(self, *words, text=None):
        """The document that a command shows. Raises: Refused."""
        loop, shown = asyncio.get_running_loop(), []
        terminal = SimpleNamespace(
            is_json=True,
            run=lambda _kind, verb: asyncio.run_coroutine_threadsafe(verb(self._feed), loop).result(
                60
            ),
            show=lambda value, text: shown.append((plain(value), text)),
            progress=lambda text: None,
        )
        [command] = cli.COMMANDS
        words = [str(word) for word in words]
        ran = await asyncio.to_thread(CliRunner().invoke, command, words, obj=terminal, input=text)
        if isinstance(ran.exception, HeadraceError):
            raise Refused(ran.exception.status, ran.exception.code) from ran.exception
        assert ran.exit_code == 0, (words, ran.output, ran.exception)
        [(value, text)] = shown
        assert isinstance(text, str)
        return value

    async def follow(self, *, viewer, authors):
        return await self.run("follow", viewer, *authors)

    async def unfollow(self, *, viewer, authors):
        return await self.run("unfollow", viewer, *authors)

    async def unfollow_all(self, *, viewer):
        return await self.run("unfollow", viewer, "--all")

    async def mute(self, *, viewer, authors):
        return await self.run("mute", viewer, *authors)

    async def unmute(self, *, viewer, authors):
        return await self.run("unmute", viewer, *authors)

    async def block(self, *, viewer, authors):
        return await self.run("block", viewer, *authors)

    async def unblock(self, *, viewer, authors):
        return await self.run("unblock", viewer, *authors)

    async def following(self, *, viewer, **options):
        return await self.run("following", viewer, *_words(options))

    async def followers(self, *, author, **options):
        return await self.run("followers", author, *_words(options))

    async def muted(self, *, viewer):
        return await self.run("muted", viewer)

    async def blocked(self, *, viewer):
        return await self.run("blocked", viewer)

    async def post(self, *, author, id, **options):
        return await self.run("post", author, id, *_words(options))

    async def find(self, *, id):
        return await self.run("show", id)

    async def delete(self, *, id):
        return await self.run("rm", id)

    async def page(self, *, viewer, **options):
        return await self.run("page", viewer, *_words(options))

    async def author_posts(self, *, author):
        return await self.run("author", author)

    async def unread(self, *, viewer):
        return await self.run("unread", viewer)

    async def marker(self, *, viewer):
        return await self.run("marker", viewer)

    async def set_marker(self, *, viewer, position):
        return await self.run("marker", viewer, position)

    async def rebuild(self):
        return await self.run("rebuild")

    async def verify(self):
        return await self.run("verify")

    async def stats(self):
        return await self.run("stats")

    async def why(self, *, viewer, post):
        return await self.run("why", viewer, post)


def _viewer(viewer):
    return f"/v1/feed/viewers/{_quoted(viewer)}"


def _quoted(id):
    return quote(str(id), safe="")


def _words(options):
    return [word for name, value in options.items() for word in (f"--{name}", value)]


@asynccontextmanager
async def surface_on(name, engines, feed):
    """The surface `name` of a service; HTTP is served while the block lasts."""
    if name == "python":
        yield PythonSurface(feed)
    elif name == "commands":
        yield CommandSurface(feed)
    else:
        async with client_of(engines, feed) as client:
            yield HttpSurface(client)


@asynccontextmanager
async def client_of(engines, feed, *, scopes=SCOPES, stop=None):
    """A client of the room's routes on a real socket, with a token for them.

    `stop` ends the server before.
    """
    loaded = load_config({"web": WebConfig}, env={})
    web = dataclasses.replace(loaded.section(WebConfig), listen=("127.0.0.1", 0))
    house = SimpleNamespace(
        version="0.0.0",
        metrics_folder=None,
        config=dataclasses.replace(loaded, sections={"web": web}),
        engines=engines,
        services=lambda: {"feed": feed},
        routes=lambda: http.ROUTES,
        secret=SECRET,
    )
    token = await Tokens(engines.postgres).create("tester", scopes)
    stop = stop or asyncio.Event()
    ready = asyncio.get_running_loop().create_future()
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
