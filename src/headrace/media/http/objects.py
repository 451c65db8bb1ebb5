"""Routes about stored objects."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Final

import msgspec
from litestar import Request, delete, get, put
from litestar.di import NamedDependency
from litestar.openapi.spec import (
    OpenAPIFormat,
    OpenAPIMediaType,
    OpenAPIType,
    Operation,
    RequestBody,
    Schema,
)
from litestar.params import FromPath, FromQuery, QueryParameter

from headrace.media.http.scopes import READ, WRITE
from headrace.media.model import LIST_OBJECTS_MAX, MediaObject
from headrace.media.service import Media

UPLOAD_BYTES_MAX: Final = 64 * 2**20
"""Of an upload over HTTP, which is held in memory; larger ones go to the object store by themselves."""


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


@dataclass
class UploadOperation(Operation):
    """An operation whose body is an object's bytes, which no parameter of the handler shows."""

    def __post_init__(self) -> None:
        """Describe the body."""
        file = OpenAPIMediaType(schema=Schema(type=OpenAPIType.STRING, format=OpenAPIFormat.BINARY))
        self.request_body = RequestBody(
            content={"application/octet-stream": file},
            description="The object's bytes. What it is served as follows from the key's extension.",
            required=True,
        )


@get(
    "/v1/media/objects",
    operation_id="listMediaObjects",
    summary="List the objects in a folder",
    opt=READ,
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
    opt=READ,
)
async def get_object(media: NamedDependency[Media], key: FromPath[str]) -> ObjectAnswer:
    """Say what is stored under `key` and where it is served."""
    return _shown(await media.info(key.removeprefix("/")))


@put(
    "/v1/media/objects/{key:path}",
    operation_id="putMediaObject",
    summary="Store an object",
    opt=WRITE,
    request_max_body_size=UPLOAD_BYTES_MAX,
    operation_class=UploadOperation,
)
async def put_object(
    request: Request[Any, Any, Any], media: NamedDependency[Media], key: FromPath[str]
) -> ObjectAnswer:
    """Store the body under `key`, durably; an object of that key is replaced. At most 64 MiB."""
    return _shown(await media.put(key.removeprefix("/"), await request.body()))


@delete(
    "/v1/media/objects/{key:path}",
    operation_id="removeMediaObject",
    summary="Remove an object",
    opt=WRITE,
)
async def remove_object(media: NamedDependency[Media], key: FromPath[str]) -> None:
    """Remove the object. Nodes forget it within a minute, or at once after a purge of `key`."""
    await media.rm(key.removeprefix("/"))


def _shown(found: MediaObject) -> ObjectAnswer:
    return msgspec.convert(found, ObjectAnswer, from_attributes=True)


ROUTES: Final[list[Any]] = [list_objects, get_object, put_object, remove_object]
