"""Routes that tell caches what to forget and what to fetch."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from litestar import post
from litestar.di import NamedDependency
from litestar.params import JSONBody

from headrace.media.http.scopes import WRITE
from headrace.media.service import Media
from headrace.media.service.purging import Purged
from headrace.media.service.warming import Warmed

KEYS_MAX: Final = 1000
Keys = Annotated[list[str], msgspec.Meta(max_length=KEYS_MAX)]


class ToPurge(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys, or a prefix; the empty prefix is everything."""

    keys: Keys = []
    prefix: str | None = None
    dry_run: bool = False


class ToWarm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of stored objects."""

    keys: Annotated[list[str], msgspec.Meta(min_length=1, max_length=KEYS_MAX)]


@post(
    "/v1/media/purge",
    operation_id="purgeMedia",
    summary="Let every node forget keys or a prefix",
    opt=WRITE,
    status_code=200,
)
async def purge(media: NamedDependency[Media], data: JSONBody[ToPurge]) -> Purged:
    """Let the caches of all nodes forget `keys`, or all keys of `prefix`, within 2 seconds. May be repeated."""
    return await media.purges.purge(data.keys, prefix=data.prefix, is_dry_run=data.dry_run)


@post(
    "/v1/media/warm",
    operation_id="warmMedia",
    summary="Have the owners of keys fetch them now",
    opt=WRITE,
    status_code=200,
)
async def warm(media: NamedDependency[Media], data: JSONBody[ToWarm]) -> Warmed:
    """Have every node that owns one of `keys` read it whole; answered when all have, or could not. May be repeated."""
    return await media.warm(data.keys)


ROUTES: Final[list[Any]] = [purge, warm]
