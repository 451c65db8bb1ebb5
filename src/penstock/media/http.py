"""Routes about objects under `/v1/media`. The bytes themselves are served by the media role at `/m/`."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Final

import msgspec
from litestar import get
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, QueryParameter

from penstock.media.model import LIST_OBJECTS_MAX, MediaObject
from penstock.media.service import Media


class ObjectAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One stored object."""

    key: str
    size_bytes: int
    etag: str
    modified_at: datetime
    content_type: str
    url: str


class ObjectsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Objects of one folder; `is_cut` when there are more than were asked for."""

    objects: list[ObjectAnswer]
    is_cut: bool


@get(
    "/v1/media/objects",
    operation_id="listMediaObjects",
    summary="List the objects in a folder",
    opt={"scope": "media:read"},
)
async def list_objects(
    media: NamedDependency[Media],
    prefix: FromQuery[str] = "",
    limit: Annotated[int, QueryParameter(ge=1, le=LIST_OBJECTS_MAX - 1)] = 100,
) -> ObjectsAnswer:
    """List the objects in the folder `prefix`, in no order, at most `limit`."""
    found = await media.ls(prefix, objects_max=limit + 1)
    objects = [_shown(item) for item in found[:limit]]
    return ObjectsAnswer(objects=objects, is_cut=len(found) > limit)


@get(
    "/v1/media/objects/{key:path}",
    operation_id="getMediaObject",
    summary="Describe one object",
    opt={"scope": "media:read"},
)
async def get_object(media: NamedDependency[Media], key: FromPath[str]) -> ObjectAnswer:
    """Say what is stored under `key` and where it is served."""
    return _shown(await media.info(key.removeprefix("/")))


def _shown(found: MediaObject) -> ObjectAnswer:
    return msgspec.convert(found, ObjectAnswer, from_attributes=True)


ROUTES: Final[list[Any]] = [list_objects, get_object]
