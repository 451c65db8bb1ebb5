"""A console in this process on a real socket, for tests of sessions, forms and headers."""

from __future__ import annotations

import asyncio
import re
import secrets
from contextlib import asynccontextmanager

import httpx

from headrace import Headrace
from headrace.engines.endpoints import Endpoints
from headrace.web.serving import run_api
from headrace.web.sessions import Sessions

PAGE = {"accept": "text/html"}
CSRF_TOKEN = re.compile(r'name="csrf_token" value="([0-9a-f]{32})"')


class Visitor:
    """A client of a served console with cookies of its own."""

    def __init__(self, app, address, client) -> None:
        self.app, self.address, self.client = app, address, client
        self.get = client.get
        self._entries_before = 0

    async def note_entries(self):
        """Ignore audit entries up to now."""
        self._entries_before = max((line.id for line in await self.app.audit.lines()), default=0)

    async def entries(self):
        """New audit entries, newest first."""
        return [line for line in await self.app.audit.lines() if line.id > self._entries_before]

    async def token(self, *scopes, **options):
        """A new token."""
        name = f"t-{secrets.token_hex(4)}"
        return (await self.app.tokens.create(name, scopes or ("*",), **options)).text

    async def link(self, token=None):
        """Path of a new one-time login link."""
        sessions = Sessions(self.app.engines.postgres)
        return f"/console/enter?code={await sessions.make_link(token or await self.token())}"

    async def log_in(self, token, back="/console/jobs"):
        """Submit the login form."""
        return await self.post("/console/login", token=token, back=back)

    async def post(self, path, *, origin=None, **fields):
        """Submit a form from a page of the console or of another origin."""
        headers = {"origin": origin or self.address}
        return await self.client.post(path, data=fields, headers=headers)

    async def form(self, name, **values):
        """The hidden fields of the form of an action."""
        page = await self.get(f"/console/do/{name}", params=values)
        assert page.status_code == 200, page.text
        return dict(re.findall(r'name="(csrf_token|form_id)" value="([^"]+)"', page.text))

    async def send(self, name, /, **values):
        """Open the form of an action and submit it, as a browser does."""
        given = {key: str(value) for key, value in values.items()}
        return await self.post(f"/console/do/{name}", **await self.form(name, **given), **given)


def app_of(folder, endpoints: Endpoints, **flags: str) -> Headrace:
    """An application on the given engines."""
    settings = {"data.folder": str(folder / "data"), "web.listen": "127.0.0.1:0"}
    given = {name.replace("__", "."): text for name, text in flags.items()}
    app = Headrace(flags={**settings, **given})
    app.use_endpoints(endpoints)
    app.load_rooms()
    return app


@asynccontextmanager
async def visiting(app, address, *, logged_in=True):
    """A client with cookies of its own."""
    async with httpx.AsyncClient(
        base_url=address, headers=PAGE, timeout=60, verify=False
    ) as client:
        visitor = Visitor(app, address, client)
        if logged_in:
            entered = await client.get(await visitor.link())
            assert entered.status_code == 303, entered.text
        await visitor.note_entries()
        yield visitor


@asynccontextmanager
async def serving(app: Headrace):
    """Serve `app` on a free port; yield its address."""
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    running = asyncio.create_task(run_api(app, stop, lambda *at: ready.set_result(at), app.pages()))
    await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    host, port = ready.result()
    try:
        yield f"http://{host}:{port}"
    finally:
        stop.set()
        await running
        await app.close()
