"""A console on the test's own engines, served in this process on a real socket."""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager
from types import SimpleNamespace

import httpx

from headrace import Headrace
from headrace.engines.endpoints import Endpoints
from headrace.web.server import run_api
from headrace.web.sessions import Sessions

PAGE = {"accept": "text/html"}
CSRF_TOKEN = re.compile(r'name="csrf_token" value="([0-9a-f]{32})"')


def app_of(tmp_path, endpoints: Endpoints, **flags: str) -> Headrace:
    """An application on the given engines."""
    settings = {"data.folder": str(tmp_path / "data"), "web.listen": "127.0.0.1:0"}
    given = {name.replace("__", "."): text for name, text in flags.items()}
    app = Headrace(flags={**settings, **given})
    app.use_endpoints(endpoints)
    app.load_rooms()
    return app


@asynccontextmanager
async def serving(app: Headrace, *, logged_in: bool = True):
    """Serve `app` on a free port; yield its address and a client for pages."""
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    running = asyncio.create_task(run_api(app, stop, lambda *at: ready.set_result(at), app.pages()))
    await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    host, port = ready.result()
    address = f"http://{host}:{port}"
    try:
        async with httpx.AsyncClient(
            base_url=address, headers=PAGE, timeout=60, verify=False
        ) as client:
            if logged_in:
                token = (await app.tokens.create("root", ("*",))).text
                code = await Sessions(app.engines.postgres).make_link(token)
                entered = await client.get("/console/enter", params={"code": code})
                assert entered.status_code == 303, entered.text
            yield SimpleNamespace(app=app, address=address, client=client)
    finally:
        stop.set()
        await running
        await app.close()


async def send(at, name: str, /, **values: object) -> httpx.Response:
    """Open the form of an action and submit it, as a browser does."""
    given = {key: str(value) for key, value in values.items()}
    form = await at.client.get(f"/console/do/{name}", params=given)
    assert form.status_code == 200, form.text
    csrf_token = CSRF_TOKEN.search(form.text)
    assert csrf_token is not None
    return await post(at, f"/console/do/{name}", csrf_token=csrf_token[1], **given)


async def post(at, path: str, *, origin: str | None = None, **fields: str) -> httpx.Response:
    """Submit a form from a page of the console or of another origin."""
    return await at.client.post(path, data=fields, headers={"origin": origin or at.address})


async def make_link(at, token):
    """Path of a one-time login link for a token."""
    return f"/console/enter?code={await Sessions(at.app.engines.postgres).make_link(token)}"
