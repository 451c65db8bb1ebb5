"""`headrace console link`: a one-time link that logs a browser in to this machine's console.

The link uses the root token of the data folder, so only users who can read that file can create
one. It works once, for LINK_LASTS_S. The API stores its address in the data folder, as its port
may be any free one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import webbrowser
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any, Final

import click

from headrace.cli.app_context import App, CommandLine
from headrace.kernel.config import parse_listen
from headrace.kernel.errors import Conflict, Unavailable
from headrace.kernel.logs import logger
from headrace.web.model import WebConfig
from headrace.web.tokens import RootToken, dead_token, ensure_root_token, remedy_for

ADDRESS_FILE: Final = "run/api-address"
LINK_FILE: Final = "run/console-link.html"
REFRESH: Final = (
    '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={url}">\n'
)
ANSWER_S: Final = 2.0
WILDCARDS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - not bound here
log = logger(__name__)


class ApiNotRunning(Unavailable):
    """No API of this data folder responds, so there is no console to open."""

    code = "cli.api_not_running"


class RootTokenRefused(Conflict):
    """The root token of this data folder was revoked."""

    code = "cli.root_token_refused"


@click.group("console")
def console() -> None:
    """The web console."""


@console.command("link", short_help="Print a one-time login link for the console.")
@click.pass_obj
def link(line: CommandLine) -> None:
    """Print a link that logs one browser in to this machine's console.

    The link works once, within 10 minutes.
    """
    from headrace.web.sessions import LINK_LASTS_S

    async def work(app: App) -> str:
        address = await running_api(app)
        token = await ensure_root_token(app.data_folder, app.tokens)
        if token.state != "valid":
            raise RootTokenRefused(f"{dead_token(token)}: {remedy_for(token)}")
        return link_at(base_url(address), await make_code(app, token))

    text = line.run_app(work)
    line.show({"console_link": text, "expires_in_s": LINK_LASTS_S}, text)


async def make_code(app: App, token: RootToken) -> str:
    """Create a one-time code for the root token; return '' if the token is not valid."""
    from headrace.web.sessions import Sessions

    if token.state != "valid":
        return ""
    text = await asyncio.to_thread(token.file.read_text)
    return await Sessions(app.engines.postgres).make_link(text.strip())


def link_at(base: str, code: str) -> str:
    """The login URL of a code."""
    return f"{base}/console/enter?code={code}"


def base_url(listen: str, scheme: str = "http") -> str:
    """URL for browsers on this machine: `0.0.0.0:8080` becomes `http://127.0.0.1:8080`."""
    host, _, port = listen.rpartition(":")
    host = WILDCARDS.get(host.strip("[]"), host.strip("[]"))
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


@contextlib.contextmanager
def address_noted(folder: Path, listen: str) -> Iterator[None]:
    """Store the address of this API in the data folder inside the block."""
    path = folder / ADDRESS_FILE
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(listen)
    except OSError as error:
        log.warning("address_not_noted", path=str(path), error=str(error))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if path.read_text() == listen:
                path.unlink()


def noted_address(folder: Path) -> str:
    """The address of the API that runs with this data folder; empty if it stored none."""
    try:
        return (folder / ADDRESS_FILE).read_text()
    except OSError:
        return ""


async def running_api(app: App) -> str:
    """The address of a running API of this data folder. Raises: ApiNotRunning."""
    host, port = app.config.section(WebConfig).listen
    found = [f"{host}:{port}"] if port else []
    if noted := await asyncio.to_thread(noted_address, app.data_folder):
        found.insert(0, noted)
    for listen in found:
        if await _answers(listen):
            return listen
    raise ApiNotRunning(
        f"no API responds on this machine ({', '.join(found) or 'no known address'}): start it with"
        " `headrace up` or `headrace api`"
    )


async def _answers(listen: str) -> bool:
    try:
        host, port = parse_listen(base_url(listen).partition("://")[2])
        async with asyncio.timeout(ANSWER_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), port)
    except (OSError, TimeoutError, ValueError):
        return False
    writer.close()
    return True


def opens_browser() -> bool:
    """Whether standard output is a terminal on a machine with a desktop."""
    has_desktop = sys.platform == "darwin" or bool(
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )
    return sys.stdout.isatty() and has_desktop and not os.environ.get("CI")


async def open_browser(url: str, folder: Path) -> None:
    """Open `url` in the desktop browser through a file that only this user can read.

    Other users can see the arguments of processes, so the code must not be among them.
    """
    page = folder / LINK_FILE
    await asyncio.to_thread(_write_private, page, REFRESH.format(url=escape(url)))
    if not await asyncio.to_thread(webbrowser.open, page.as_uri()):
        log.info("browser_not_opened")


def _write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


COMMANDS: Final[list[Any]] = [console]
