"""Routes about objects: store, sign, tag, purge, warm, trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
from litestar import Request, delete, get, post, put
from litestar.di import NamedDependency
from litestar.openapi.spec import (
    OpenAPIFormat,
    OpenAPIMediaType,
    OpenAPIType,
    Operation,
    RequestBody,
    Schema,
)
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from headrace.media.model import LIST_OBJECTS_MAX, MediaFolder, MediaObject
from headrace.media.service import Media
from headrace.media.service.objects import Purged, SignedUrl, StoredTag
from headrace.media.service.warming import Warmed
from headrace.media.tracing import Watch

READ: Final = {"scope": "media:read"}
WRITE: Final = {"scope": "media:write"}


UPLOAD_BYTES_MAX: Final = 64 * 2**20
"""Limit of an upload over HTTP, which is held in memory.

Put larger objects directly into the store.
"""
KEYS_MAX: Final = 1000
Keys = Annotated[list[str], msgspec.Meta(max_length=KEYS_MAX)]


class ObjectsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Objects of one folder; `is_cut`: there are more than requested."""

    objects: list[MediaObject]
    is_cut: bool


@dataclass
class UploadOperation(Operation):
    """An operation with an object's bytes as body, which no parameter of the handler shows."""

    def __post_init__(self) -> None:
        """Describe the body."""
        file = OpenAPIMediaType(schema=Schema(type=OpenAPIType.STRING, format=OpenAPIFormat.BINARY))
        self.request_body = RequestBody(
            content={"application/octet-stream": file},
            description="The object's bytes. The key's extension selects the content type.",
            required=True,
        )


@get("/v1/media/objects", opt=READ)
async def list_media_objects(
    media: NamedDependency[Media],
    prefix: FromQuery[str] = "",
    limit: Annotated[int, QueryParameter(ge=1, le=LIST_OBJECTS_MAX - 1)] = 100,
) -> ObjectsAnswer:
    """The objects in the folder `prefix`, in no order, at most `limit`."""
    found = await media.objects.ls(prefix, objects_max=limit + 1)
    return ObjectsAnswer(objects=found[:limit], is_cut=len(found) > limit)


@get("/v1/media/folders", opt=READ)
async def list_media_folder(
    media: NamedDependency[Media],
    prefix: FromQuery[str] = "",
    after: FromQuery[str] = "",
    limit: Annotated[int, QueryParameter(ge=1, le=LIST_OBJECTS_MAX)] = 100,
) -> MediaFolder:
    """The subfolders and objects directly in the folder `prefix`, by name, at most `limit`.

    The next page is behind the name `next_after`.
    """
    return await media.objects.folder(prefix, after=after, entries_max=limit)


@get("/v1/media/objects/{key:path}", opt=READ)
async def get_media_object(media: NamedDependency[Media], key: FromPath[str]) -> MediaObject:
    """Describe the object stored under `key`, and its URL."""
    return await media.objects.info(key.removeprefix("/"))


@put(
    "/v1/media/objects/{key:path}",
    opt=WRITE,
    request_max_body_size=UPLOAD_BYTES_MAX,
    operation_class=UploadOperation,
)
async def put_media_object(
    request: Request[Any, Any, Any], media: NamedDependency[Media], key: FromPath[str]
) -> MediaObject:
    """Store the body durably under `key`, replacing an existing object. At most 64 MiB."""
    return await media.objects.put(key.removeprefix("/"), await request.body())


@delete("/v1/media/objects/{key:path}", opt=WRITE)
async def remove_media_object(media: NamedDependency[Media], key: FromPath[str]) -> None:
    """Remove the object. Nodes drop it within a minute, or at once after a purge of `key`."""
    await media.objects.rm(key.removeprefix("/"))


class ToPurge(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys, or a prefix; the empty prefix means everything."""

    keys: Keys = []
    prefix: str | None = None
    dry_run: bool = False


class VariantFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A variant of an image: the most pixels, `inside`, `cover` or `contain`, the format."""

    w: int | None = None
    h: int | None = None
    fit: str | None = None
    fm: str | None = None


class ToWarm(VariantFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of stored objects. With `w` or `h` their variants are made."""

    keys: Annotated[list[str], msgspec.Meta(min_length=1, max_length=KEYS_MAX)]


@post("/v1/media/purge", opt=WRITE, status_code=200)
async def purge_media(media: NamedDependency[Media], data: JSONBody[ToPurge]) -> Purged:
    """Purge `keys`, or all keys with `prefix`, from all caches within 2 seconds. Idempotent."""
    return await media.purges.purge(data.keys, prefix=data.prefix, is_dry_run=data.dry_run)


@post("/v1/media/warm", opt=WRITE, status_code=200)
async def warm_media(media: NamedDependency[Media], data: JSONBody[ToWarm]) -> Warmed:
    """Have every node that owns one of `keys` read it completely. Idempotent.

    The answer is sent when all nodes have finished or failed.
    """
    given = msgspec.structs.asdict(data)
    return await media.warming.warm(given.pop("keys"), **given)


class UrlToSign(VariantFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The permissions of a signed URL. `rate` is in bytes per second. `w` or `h`: of a variant.

    The expiry is rounded up to a multiple of `grid_s`.
    """

    key: str
    ttl_s: float | None = None
    grid_s: float = 1.0
    address: str | None = None
    rate: int | None = None
    tag: str | None = None
    trace: str | None = None
    prefer: str | None = None


class TagToPut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An ID3 tag. `cover` is a JPEG or PNG file in base64."""

    title: str | None = None
    artist: str | None = None
    album: str | None = None
    cover: bytes | None = None
    buyer: str | None = None


@post("/v1/media/sign", opt=WRITE, status_code=200)
async def sign_media_url(media: NamedDependency[Media], data: JSONBody[UrlToSign]) -> SignedUrl:
    """A URL that allows reading the object for `ttl_s` seconds (default: `media.url_ttl`).

    The object need not be stored.
    """
    given = msgspec.structs.asdict(data)
    return await media.objects.sign(given.pop("key"), **given)


@post("/v1/media/tags", opt=WRITE)
async def put_media_tag(media: NamedDependency[Media], data: JSONBody[TagToPut]) -> StoredTag:
    """Store a tag that signed URLs put in front of tracks. Equal tags have equal ids."""
    return await media.tags.put(**msgspec.structs.asdict(data))


@get("/v1/media/tags/{tag:str}", opt=READ)
async def get_media_tag(media: NamedDependency[Media], tag: FromPath[str]) -> StoredTag:
    """The contents of a stored tag."""
    return await media.tags.get(tag)


@delete("/v1/media/tags/{tag:str}", opt=WRITE)
async def delete_media_tag(media: NamedDependency[Media], tag: FromPath[str]) -> None:
    """Remove a tag. URLs with this tag get 404."""
    await media.tags.rm(tag)


class TraceToStart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The requests to log and for how long.

    `tag` is `user=42`, `request=r7`, `object=tracks/a.mp3` or `trace=<32 hex digits>`.
    """

    tag: str
    for_s: float = 600.0


@get("/v1/media/traces", opt=READ)
async def list_media_traces(media: NamedDependency[Media]) -> Sequence[Watch]:
    """The requests that all nodes log, and until when."""
    return await media.traces.list()


@post("/v1/media/traces", opt=WRITE, status_code=200)
async def start_media_trace(media: NamedDependency[Media], data: JSONBody[TraceToStart]) -> Watch:
    """Have all nodes log the requests with this tag, one line per answer.

    If it is traced already, the new end applies.
    """
    return await media.traces.start(data.tag, for_s=data.for_s)


@delete("/v1/media/traces", opt=WRITE, status_code=200)
async def stop_media_traces(
    media: NamedDependency[Media], tag: FromQuery[str | None] = None
) -> Sequence[Watch]:
    """Stop the trace of `tag`, or all traces. The answer lists the stopped ones."""
    return await media.traces.stop(tag)
