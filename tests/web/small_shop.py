"""Routes and a service of a small room, for tests of the web server."""

from __future__ import annotations

import asyncio
import threading
from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from litestar import Request, delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from headrace.kernel.errors import LimitExceeded, TooLarge, Unavailable
from headrace.kernel.routes import FAST_PATH, FastResponse, ItemsMax

SEEN_MAX = 1000
FAST, LITESTAR = "fast", "litestar"


class Thing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An item of a body."""

    url: str
    position: int = 1


class NewThings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A body."""

    things: list[Thing]
    payload: Any = None


class Shop:
    """A service that handlers request by name; `reached` is set when a slow one begins."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()


@post("/v1/things", operation_id="addThings", opt={"scope": "jobs:write"})
async def add_things(data: JSONBody[NewThings], shop: NamedDependency[Shop]) -> dict[str, int]:
    """Count the things."""
    return {"things": len(data.things)}


@get("/v1/things/{thing_id:int}", operation_id="getThing", opt={"scope": "jobs:read"})
async def get_thing(
    thing_id: FromPath[int],
    *,
    limit: FromQuery[int] = 10,
    name: FromQuery[list[str] | None] = None,
    traffic: Annotated[Literal["human", "bot"] | None, QueryParameter(name="class")] = None,
    from_at: Annotated[datetime | None, QueryParameter(name="from")] = None,
    pages: Annotated[int, QueryParameter(ge=1, le=9)] = 1,
) -> dict[str, int]:
    """Echo a thing."""
    return {"id": thing_id, "limit": limit}


@delete("/v1/things/{thing_id:int}", operation_id="deleteThing", opt={"scope": "jobs:write"})
async def delete_thing(thing_id: FromPath[int]) -> None:
    """Remove nothing."""


@post(
    "/v1/uploads",
    operation_id="upload",
    opt={"scope": "jobs:write"},
    request_max_body_size=None,
)
async def upload(request: Request) -> dict[str, int]:
    """Count the bytes of a body that is streamed."""
    return {"bytes": sum([len(chunk) async for chunk in request.stream()])}


@get("/v1/slow", operation_id="getSlow", opt={"scope": None})
async def get_slow(shop: NamedDependency[Shop]) -> dict[str, bool]:
    """Wait until the test continues."""
    shop.reached.set()
    await shop.go_on.wait()
    return {"done": True}


@get("/v1/broken", operation_id="getBroken", opt={"scope": None})
async def get_broken() -> None:
    """Fail unexpectedly."""
    raise RuntimeError("secret inside")


@get("/v1/limited", operation_id="getLimited", opt={"scope": None})
async def get_limited() -> None:
    """Fail with a HeadraceError."""
    raise LimitExceeded("too many calls: wait", retry_after_s=2.4)


@get("/v1/away", operation_id="getAway", opt={"scope": None})
async def get_away() -> None:
    """Fail as with a stopped engine."""
    raise Unavailable("away: try again")


class TooManySeen(TooLarge):
    """A list of the tests is too long."""

    code = "tests.too_many_seen"


decoded: list[str] = []
"""The thread of each `Seen` that was decoded."""
may_end = threading.Event()


class Seen(msgspec.Struct, frozen=True):
    """An item that records where it is decoded; the one named `wait` blocks its thread."""

    id: str

    def __post_init__(self) -> None:
        decoded.append(threading.current_thread().name)
        if self.id == "wait":
            may_end.wait(60)


@post(
    "/v1/seen",
    operation_id="seen",
    status_code=200,
    opt={
        "scope": "views:hit",
        "for_pages": True,
        "items_max": ItemsMax(SEEN_MAX, lambda count: TooManySeen(f"{count} seen")),
    },
)
async def see(data: JSONBody[list[Seen]]) -> dict[str, int]:
    """Count what was seen."""
    return {"seen": len(data)}


@get("/v1/seen", operation_id="getSeen", opt={"scope": "views:read"})
async def get_seen() -> dict[str, int]:
    """What was seen."""
    return {"seen": 1}


@post("/v1/hidden", operation_id="hide", status_code=200, opt={"scope": "views:hit"})
async def hide() -> dict[str, int]:
    """A route that pages cannot use."""
    return {"hidden": 1}


@post("/v1/ping", operation_id="ping", opt={"scope": "views:hit", "for_pages": True})
async def ping() -> None:
    """A route for pages without a body."""


@post("/v1/document", operation_id="document", status_code=200, opt={"scope": "views:hit"})
async def put_document(data: JSONBody[dict[str, str]]) -> dict[str, int]:
    """Take one document."""
    return {"fields": len(data)}


class Looked(msgspec.Struct):
    """A response that names its path."""

    name: str
    n: int
    way: str


def look(name: str, n: int, way: str) -> Looked:
    """The effect on both paths."""
    if name == "limited":
        raise LimitExceeded("too many calls: wait", retry_after_s=2.4)
    if name == "broken":
        raise RuntimeError("secret inside")
    return Looked(name, n, way)


async def look_fast(_shop: Shop, asked: Any) -> FastResponse | None:
    """Answer plain requests."""
    n = asked.query.get("n", "1")
    if not asked.query.keys() <= {"n"} or not n.isdecimal():
        return None
    return FastResponse(msgspec.json.encode(look(asked.name, int(n), FAST)))


@post(
    "/v1/things/{name:str}/look",
    operation_id="look",
    status_code=200,
    opt={"scope": "jobs:write", FAST_PATH: look_fast},
)
async def look_at(
    shop: NamedDependency[Shop],
    name: FromPath[str],
    n: Annotated[int, QueryParameter(ge=0)] = 1,
) -> Looked:
    """Look at a thing."""
    return look(name, n, LITESTAR)


async def shelf_fast(shop: Shop, asked: Any) -> FastResponse | None:
    """Answer all but one query."""
    what = asked.query.get("q", "")
    if what == "unknown":
        return None
    if what == "limited":
        raise LimitExceeded("too many calls: wait", retry_after_s=2.4)
    if what == "slow":
        shop.reached.set()
        await shop.go_on.wait()
    body = msgspec.json.encode({"q": what, "way": FAST, "agent": asked.user_agent})
    return FastResponse(body, 200, ((b"cache-control", b"private"), (b"etag", b'"1"')))


@get("/v1/shelf", operation_id="shelf", opt={"scope": "jobs:read", FAST_PATH: shelf_fast})
async def show_shelf(shop: NamedDependency[Shop], q: FromQuery[str] = "") -> dict[str, str]:
    """Return the path."""
    return {"way": LITESTAR}


ROUTES = [
    *(add_things, get_thing, delete_thing, upload, get_slow, get_broken, get_limited, get_away),
    *(see, get_seen, hide, ping, put_document, look_at, show_shelf),
]
