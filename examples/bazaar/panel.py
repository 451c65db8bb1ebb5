"""The page that breaks the demo, with the ledger. No part of Headrace, and of no use elsewhere.

The page only records requests; the demo's own process carries it out (`breaks.py`), so
a shop that runs without the demo breaks nothing. Only a browser of the demo's own user on this
machine may send them: the kernel reports who owns the other end of a connection on loopback.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from examples.bazaar.ledger import PAPER, WRONG
from examples.bazaar.records import BREAKS, Break
from examples.bazaar.shops import Shop as Seller
from examples.bazaar.shops import shops
from examples.bazaar.storefront import Asked, Page, Shop, require_own_page
from litestar import get, post
from litestar.di import NamedDependency
from litestar.exceptions import PermissionDeniedException
from litestar.response import Redirect

SHOWN: Final = 8
COMMAND_S: Final = 30.0
LOCAL: Final = ("127.0.0.1", "localhost")
Given = NamedDependency[Shop]


@dataclass(frozen=True, slots=True)
class Way:
    """A button of the panel."""

    kind: str
    title: str
    text: str
    watch: str
    screen: str


WAYS: Final = (
    Way(
        "slot",
        "Kill a worker process",
        "kill -9 of a process in the middle of the site's jobs.",
        "Headrace starts another one at once; the jobs it had begun run again in other processes.",
        "/jobs/hosts",
    ),
    Way(
        "seller",
        "Hang a seller",
        "A seller's host accepts connections and is silent for 15 s.",
        "Its photos are requested again with a longer timeout. Photos of other sellers are not"
        " delayed.",
        "/fetch/hosts",
    ),
    Way(
        "valkey",
        "Empty Valkey",
        "FLUSHALL: all data in Valkey is deleted.",
        "Feeds and totals are read from PostgreSQL until they are filled again. Views of the last"
        " few seconds are the only thing that can be lost.",
        "/feed/index",
    ),
    Way(
        "postgres",
        "Stop PostgreSQL for 10 s",
        "PostgreSQL is killed and kept down for 10 s.",
        "Photos, tracks and cached totals are served. Jobs wait, and continue when it is back.",
        "",
    ),
    Way(
        "media",
        "Kill the media node",
        "kill -9 of the process that streams photos and tracks.",
        "Its supervisor starts it again; players request the missing part again.",
        "/media",
    ),
)
assert tuple(way.kind for way in WAYS) == BREAKS
LASTING: Final = {"seller": "silent", "postgres": "stopped"}
"""What the faults that last are called while they do."""


@get("/break")
async def show_panel(request: Asked, shop: Given) -> Page:
    """The buttons, the ledger and what was broken in this run."""
    return await _panel(request, shop, "break.html")


@get("/break/ledger")
async def show_ledger(request: Asked, shop: Given) -> Page:
    """The moving part of the page alone."""
    return await _panel(request, shop, "ledger.html")


@post("/break", status_code=303)
async def break_it(request: Asked, shop: Given) -> Page:
    """Ask for a fault."""
    require_own_page(request)
    await asyncio.to_thread(require_own_user, request)
    kind = str((await request.form()).get("kind", ""))
    if kind in BREAKS:
        await asyncio.to_thread(shop.records.ask_break, kind)
    return Redirect("/break#result", status_code=303)


@post("/console", status_code=303)
async def open_console(request: Asked, shop: Given) -> Page:
    """Log the browser in to the console, by a one-time link of `headrace console link`."""
    require_own_page(request)
    await asyncio.to_thread(require_own_user, request)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headrace", "console", "link"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(COMMAND_S):
            link = (await process.communicate())[0].decode().strip()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    is_link = process.returncode == 0 and link.startswith(f"{shop.console}/")
    return Redirect(link if is_link else shop.console, status_code=303)


async def _panel(request: Asked, shop: Shop, template: str) -> Page:
    # In this order: a fault's note states losses once the ledger has them.
    breaks = await asyncio.to_thread(shop.records.breaks, SHOWN)
    paper = await asyncio.to_thread(shop.records.paper, PAPER)
    wrong = await asyncio.to_thread(shop.records.paper, WRONG)
    at, kept = paper or (0.0, {"lines": [], "open": []})
    return shop.page(
        request,
        template,
        ways=WAYS,
        titles={way.kind: way.title for way in WAYS},
        faults=LASTING,
        breaks=breaks,
        sellers={one.id: seller_of(one) for one in breaks},
        is_open=any(one.is_open for one in breaks),
        lines=kept["lines"],
        unjudged=kept["open"],
        wrong=wrong[1]["texts"] if wrong else [],
        age_s=time.time() - at,
    )


def seller_of(one: Break) -> Seller | None:
    """The seller whose host is silent. The note of the fault begins with its title."""
    if one.kind != "seller":
        return None
    return next((shop for shop in shops() if one.note.startswith(f"{shop.title} ")), None)


def require_own_user(request: Asked) -> None:
    """Refuse everybody but the user who runs the demo, at a browser on this machine.

    Raises: PermissionDeniedException.
    """
    client, server = request.client, request.scope.get("server")
    # A name of somebody else's may lead here, too, with pages of that origin.
    is_local = urlsplit(f"//{request.headers.get('host', '')}").hostname in LOCAL
    ends = (client, server) if client and server and is_local else None
    if ends is None or not is_own_peer(ends[0].host, ends[0].port, ends[1][1]):
        raise PermissionDeniedException(
            "Only the user who started the demo may do this, at a browser on the same machine."
        )


def is_own_peer(host: str, port: int, own_port: int | None) -> bool:
    """Whether the other end of a connection on loopback belongs to this user or to root."""
    address = ipaddress.ip_address(host)
    if not address.is_loopback or address.version != 4:
        return False
    local = f"{int.from_bytes(address.packed, sys.byteorder):08X}:{port:04X}"
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1] == local and fields[2].endswith(f":{own_port:04X}"):
            return int(fields[7]) in (0, os.getuid())
    return False
