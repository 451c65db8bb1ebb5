"""Resumable uploads by tus 1.0.0 (https://tus.io/protocols/resumable-upload).

Core, creation, expiration and termination. The key of the object is the
field `key` of Upload-Metadata; the field `sha256`, if given, is required of the whole.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Mapping, Sequence
from email.utils import format_datetime
from typing import Any, Final

from litestar import Request, Response, delete, get, patch, post
from litestar.connection import ASGIConnection
from litestar.di import NamedDependency
from litestar.handlers import BaseRouteHandler
from litestar.params import FromPath

from headrace.kernel.errors import Malformed
from headrace.kernel.routes import OPTIONS_FIELDS, RESPONSE_FIELDS
from headrace.media.service import Media
from headrace.media.service.uploads import Upload, UploadAborted

VERSION: Final = "1.0.0"
CHUNK_TYPE: Final = "application/offset+octet-stream"
LENGTH_DIGITS_MAX: Final = 15
METADATA_CHARACTERS_MAX: Final = 4096
_FIELDS: Final = (
    (b"tus-version", VERSION.encode()),
    (b"tus-extension", b"creation,expiration,termination"),
)


def _options_fields(services: Mapping[str, Any]) -> Sequence[tuple[bytes, bytes]]:
    media: Media = services["media"]
    most = str(media.config.upload_max_bytes).encode()
    return (b"tus-resumable", VERSION.encode()), *_FIELDS, (b"tus-max-size", most)


TUS: Final[dict[str, Any]] = {"scope": "media:write", OPTIONS_FIELDS: _options_fields}


class UploadMalformed(Malformed):
    """A header field of an upload request is missing or invalid."""

    code = "media.upload_malformed"


class TusVersionUnknown(Malformed):
    """The request has no Tus-Resumable, or another version of tus than 1.0.0."""

    code, status = "media.tus_version_unknown", 412


class ChunkTypeRefused(Malformed):
    """The bytes of an upload are of another content type."""

    code, status = "media.chunk_type_refused", 415


async def require_tus(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
    """Require the version of tus, which every response carries; a Litestar guard.

    Raises: TusVersionUnknown.
    """
    found = connection.headers.get("tus-resumable")
    scope: Any = connection.scope
    scope[RESPONSE_FIELDS] = ((b"tus-resumable", VERSION.encode()),)
    if found != VERSION:
        scope[RESPONSE_FIELDS] += _FIELDS
        text = f"header Tus-Resumable: expected {VERSION}, got {found!r}: use a client of tus 1.0"
        raise TusVersionUnknown(text)


@post("/v1/media/uploads", opt=TUS, guards=[require_tus])
async def create_media_upload(
    request: Request[Any, Any, Any], media: NamedDependency[Media]
) -> Response[None]:
    """Begin a resumable upload of `Upload-Length` bytes, by tus 1.0; its URL is the Location.

    `Upload-Metadata` has the object's `key`, and optionally the `sha256` of its bytes, each in
    base64: `key dHJhY2tzL2EubXAz`.
    """
    size_bytes = _number(request, "upload-length")
    text = request.headers.get("upload-metadata", "")
    metadata = _metadata(text)
    if "key" not in metadata:
        raise UploadMalformed("Upload-Metadata: expected the field key with the object's key")
    upload = await media.uploads.create(
        metadata["key"], size_bytes, sha256=metadata.get("sha256"), metadata=text
    )
    location = {"location": f"/v1/media/uploads/{upload.id}"}
    return Response(None, status_code=201, headers={**location, **_headers(upload)})


@get(
    "/v1/media/uploads/{upload:str}",
    opt={**TUS, "scope": "media:read"},
    guards=[require_tus],
    status_code=200,
)
async def get_media_upload(media: NamedDependency[Media], upload: FromPath[str]) -> Response[None]:
    """The offset of an upload, in `Upload-Offset`; use HEAD."""
    found = await media.uploads.get(upload)
    headers = {"upload-length": str(found.size_bytes)}
    if found.metadata:
        headers["upload-metadata"] = found.metadata
    return Response(None, headers={**headers, **_headers(found)})


@patch(
    "/v1/media/uploads/{upload:str}",
    opt=TUS,
    guards=[require_tus],
    status_code=204,
    request_max_body_size=None,
)
async def append_to_media_upload(
    request: Request[Any, Any, Any], media: NamedDependency[Media], upload: FromPath[str]
) -> Response[None]:
    """Append the body at `Upload-Offset`. The answer's `Upload-Offset` is durable.

    The last byte stores the object: its answer takes as long as one copy of all bytes. The content
    type is `application/offset+octet-stream`.
    """
    if request.headers.get("content-type") != CHUNK_TYPE:
        raise ChunkTypeRefused(f"the body needs the Content-Type {CHUNK_TYPE}")
    start = _number(request, "upload-offset")
    offset = await media.uploads.append(upload, start, _chunks(request))
    return Response(None, status_code=204, headers={"upload-offset": str(offset)})


@delete("/v1/media/uploads/{upload:str}", opt=TUS, guards=[require_tus])
async def remove_media_upload(media: NamedDependency[Media], upload: FromPath[str]) -> None:
    """Remove an upload and its bytes. The object of a finished one stays."""
    await media.uploads.rm(upload)


def _headers(upload: Upload) -> dict[str, str]:
    return {
        "upload-offset": str(upload.offset_bytes),
        "upload-expires": format_datetime(upload.expires_at, usegmt=True),
    }


async def _chunks(request: Request[Any, Any, Any]) -> AsyncIterator[bytes]:
    """The body as it arrives. Raises: UploadAborted at the end of the connection."""
    while True:
        message: Any = await request.receive()
        if message["type"] == "http.disconnect":
            raise UploadAborted
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


def _number(request: Request[Any, Any, Any], name: str) -> int:
    text = request.headers.get(name, "")
    if not (text.isascii() and text.isdigit()) or len(text) > LENGTH_DIGITS_MAX:
        raise UploadMalformed(f"header {name.title()}: expected bytes in digits, got {text[:40]!r}")
    return int(text)


def _metadata(text: str) -> dict[str, str]:
    """The fields of Upload-Metadata. Raises: UploadMalformed."""
    found: dict[str, str] = {}
    parts = [part.strip().partition(" ") for part in text.split(",") if part.strip()]
    try:
        found = {name: base64.b64decode(value, validate=True).decode() for name, _, value in parts}
    except ValueError:
        found = {}
    if len(found) != len(parts) or len(text) > METADATA_CHARACTERS_MAX:
        raise UploadMalformed(
            "Upload-Metadata: expected different names with base64 values, separated by commas, at"
            f" most {METADATA_CHARACTERS_MAX} characters"
        )
    return found
