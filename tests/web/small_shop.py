"""Routes and a service of a small room, for tests of the web server."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from litestar import Request, delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody

from headrace.kernel.errors import LimitExceeded


class Thing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An item of a body."""

    url: str
    position: int = 1


class NewThings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A body."""

    things: list[Thing]
    payload: Any = None


class Shop:
    """A service that handlers ask for by name; `reached` is set when a slow one begins."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()


@post("/v1/things", operation_id="addThings", opt={"scope": "jobs:write"})
async def add_things(data: JSONBody[NewThings], shop: NamedDependency[Shop]) -> dict[str, int]:
    """Count the things."""
    return {"things": len(data.things)}


@get("/v1/things/{thing_id:int}", operation_id="getThing", opt={"scope": "jobs:read"})
async def get_thing(
    thing_id: FromPath[int], limit: FromQuery[int] = 10, name: FromQuery[list[str] | None] = None
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
    """Fail as nobody expected."""
    raise RuntimeError("secret inside")


@get("/v1/limited", operation_id="getLimited", opt={"scope": None})
async def get_limited() -> None:
    """Fail with a HeadraceError."""
    raise LimitExceeded("too many calls: wait", retry_after_s=2.4)


ROUTES = [add_things, get_thing, delete_thing, upload, get_slow, get_broken, get_limited]
