"""Routes that sign URLs of objects and keep the ID3 tags that such URLs name."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

import msgspec
from litestar import delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from headrace.media.http.scopes import READ, WRITE
from headrace.media.service import Media
from headrace.media.service.tags import StoredTag


class UrlToSign(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a signed URL allows. `rate` in bytes a second; `grid_s`: the end is rounded up to a multiple of it."""

    key: str
    ttl_s: float | None = None
    grid_s: float = 1.0
    address: str | None = None
    rate: int | None = None
    tag: str | None = None
    trace: str | None = None


class SignedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A URL that is good until a moment."""

    key: str
    url: str
    expires_at: datetime


class TagToPut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An ID3 tag; `cover` is a JPEG or PNG file in base64."""

    title: str | None = None
    artist: str | None = None
    album: str | None = None
    cover: bytes | None = None
    buyer: str | None = None


class TagAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A stored tag; `size_bytes` is what it adds to a track."""

    id: str
    size_bytes: int
    title: str | None
    artist: str | None
    album: str | None
    buyer: str | None
    cover_bytes: int


@post(
    "/v1/media/sign",
    operation_id="signMediaUrl",
    summary="Make a signed URL of an object",
    opt=WRITE,
    status_code=200,
)
async def sign_url(media: NamedDependency[Media], data: JSONBody[UrlToSign]) -> SignedAnswer:
    """Make a URL that allows to read the object for `ttl_s` seconds (the setting `media.url_ttl`), stored or not."""
    given = msgspec.structs.asdict(data)
    signed = await media.sign(given.pop("key"), **given)
    return msgspec.convert(signed, SignedAnswer, from_attributes=True)


@post(
    "/v1/media/tags",
    operation_id="putMediaTag",
    summary="Store an ID3 tag",
    opt=WRITE,
)
async def put_tag(media: NamedDependency[Media], data: JSONBody[TagToPut]) -> TagAnswer:
    """Store a tag that signed URLs write in front of tracks; the same tag has the same id, so a call may be repeated."""
    return _shown(await media.tags.put(**msgspec.structs.asdict(data)))


@get(
    "/v1/media/tags/{id:str}",
    operation_id="getMediaTag",
    summary="Show an ID3 tag",
    opt=READ,
)
async def get_tag(
    media: NamedDependency[Media],
    id: FromPath[str],  # noqa: A002 - as it is called in the path
) -> TagAnswer:
    """Say what a stored tag says."""
    return _shown(await media.tags.get(id))


@delete(
    "/v1/media/tags/{id:str}",
    operation_id="deleteMediaTag",
    summary="Remove an ID3 tag",
    opt=WRITE,
)
async def delete_tag(
    media: NamedDependency[Media],
    id: FromPath[str],  # noqa: A002 - as it is called in the path
) -> None:
    """Remove a tag: URLs that name it find nothing from then on."""
    await media.tags.rm(id)


def _shown(found: StoredTag) -> TagAnswer:
    return msgspec.convert(found, TagAnswer, from_attributes=True)


ROUTES: Final[list[Any]] = [sign_url, put_tag, get_tag, delete_tag]
