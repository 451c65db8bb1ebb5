"""Forms with a file: a multipart body that is written to disk while it arrives.

The parser gets the body a block at a time. The file goes to a path; all other fields together have
the limit of an ordinary form, so no body fills the memory.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any, Final

from multipart import MultipartError, MultipartSegment, PushMultipartParser

from headrace.console.model import BODY_BYTES_MAX, FieldsInvalid
from headrace.kernel.errors import HeadraceError, TooLarge

FILE: Final = "file"
"""The field with the file; a form has at most one."""
FIELDS_MAX: Final = 50
_BOUNDARY: Final = re.compile(
    r'multipart/form-data;.*boundary="?([^",;\s]{1,200})"?', re.IGNORECASE
)


class UploadTooLarge(TooLarge):
    """The uploaded file, or the other fields of its form, are over their limit."""

    code = "console.upload_too_large"


def malformed(detail: str) -> HeadraceError:
    """The error for a body that is not a form with a file."""
    return FieldsInvalid(f"expected a form with a file (multipart/form-data): {detail}")


async def receive_form(request: Any, path: Path, *, bytes_max: int) -> dict[str, str]:
    """Write the file of a form to `path`; return all fields, with the name of the file.

    Raises: UploadTooLarge, FieldsInvalid.
    """
    found = _BOUNDARY.match(request.headers.get("content-type", ""))
    if found is None:
        raise malformed("the content type is another one")
    values: dict[str, bytearray] = {}
    names: dict[str, str] = {}
    name, size_bytes, others_bytes = "", 0, 0
    try:
        with (
            path.open("wb") as file,
            PushMultipartParser(found[1], max_segment_count=FIELDS_MAX) as parser,
        ):
            async for block in request.stream():
                for part in parser.parse(block):
                    if isinstance(part, MultipartSegment):
                        name = part.name
                        names[name] = part.filename or ""
                        values[name] = bytearray()
                    elif part and name == FILE and names[FILE]:
                        size_bytes += len(part)
                        _require_at_most(size_bytes, bytes_max, "the file")
                        await asyncio.to_thread(file.write, part)
                    elif part:
                        others_bytes += len(part)
                        _require_at_most(others_bytes, BODY_BYTES_MAX, "the form without its file")
                        values[name] += part
    except MultipartError as error:
        raise malformed(str(error)) from error
    given = {key: value.decode("utf-8", "replace") for key, value in values.items()}
    return {**given, FILE: names.get(FILE, "")}


def _require_at_most(size_bytes: int, bytes_max: int, what: str) -> None:
    if size_bytes > bytes_max:
        raise UploadTooLarge(
            f"{what} is larger than {bytes_max:,} bytes: split it, or compress it with gzip"
        )
