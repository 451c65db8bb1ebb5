"""The answer to a GET or HEAD of an object: 200, 206, 304, 412 or 416, and which bytes.

Pure: header fields and the object's shape in, a decision out. The conditions are evaluated in the
order of RFC 9110 section 13.2.2: If-Match, If-Unmodified-Since, If-None-Match, If-Modified-Since,
Range with If-Range. Where the RFC leaves a choice, the answer sends too much rather than wrong
bytes:

- A Range that is malformed, has another unit or several ranges is ignored: the answer is 200 with
  the whole object. Sets of ranges allowed denial of service elsewhere (CVE-2011-3192).
- If-Range with a date counts for content-addressed objects only. A second cannot separate two
  versions of a replaced object (RFC 9110 section 8.8.2.2).
- Every Range of an empty object is unsatisfiable.
"""

from __future__ import annotations

import email.utils
import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from headrace.media.model import Shape

_SPEC: Final = re.compile(r"bytes=[ \t]*([0-9]*)-([0-9]*)[ \t]*", re.IGNORECASE)
_ENTITY_TAG: Final = re.compile(r'(W/)?"([\x21\x23-\x7e\x80-\xff]*)"')
_DIGITS_MAX: Final = 18
"""More digits than any offset has. Python refuses to parse numbers of over 4,300 digits."""


class Decision(NamedTuple):
    """A status and the span of the object to send; `length_bytes` is 0 without a body."""

    status: int
    start: int = 0
    length_bytes: int = 0


def decide(method: str, fields: Mapping[str, str], shape: Shape) -> Decision:
    """The answer to `method` (GET or HEAD) with `fields` (names in lower case) for an object."""
    if not _may_go_on(fields, shape):
        return Decision(412)
    if _is_unchanged(fields, shape):
        return Decision(304)
    text = fields.get("range")
    if text is None or method != "GET" or not _is_range_current(fields.get("if-range"), shape):
        return Decision(200, 0, shape.size_bytes)
    return _parse_range(text, shape.size_bytes) or Decision(200, 0, shape.size_bytes)


def parse_http_date_s(text: str) -> int | None:
    """Seconds of an HTTP date in any of its three formats, or None."""
    try:
        parsed = email.utils.parsedate_tz(text)
        return None if parsed is None else int(email.utils.mktime_tz(parsed))
    except (ValueError, OverflowError, TypeError, IndexError):
        return None


def format_http_date(moment_s: int) -> str:
    """An HTTP date: `Sun, 06 Nov 1994 08:49:37 GMT`."""
    return email.utils.formatdate(moment_s, usegmt=True)


def _may_go_on(fields: Mapping[str, str], shape: Shape) -> bool:
    tags = fields.get("if-match")
    if tags is not None:
        return _is_listed(tags, shape.etag, weak_counts=False)
    since = fields.get("if-unmodified-since")
    since_s = None if since is None else parse_http_date_s(since)
    return since_s is None or shape.modified_s <= since_s


def _is_unchanged(fields: Mapping[str, str], shape: Shape) -> bool:
    tags = fields.get("if-none-match")
    if tags is not None:
        return _is_listed(tags, shape.etag, weak_counts=True)
    since = fields.get("if-modified-since")
    since_s = None if since is None else parse_http_date_s(since)
    return since_s is not None and shape.modified_s <= since_s


def _is_listed(tags: str, etag: str, *, weak_counts: bool) -> bool:
    if tags.strip() == "*":
        return True
    return any(
        match[2] == etag and (weak_counts or not match[1]) for match in _ENTITY_TAG.finditer(tags)
    )


def _is_range_current(if_range: str | None, shape: Shape) -> bool:
    if if_range is None:
        return True
    if '"' in if_range:
        return if_range.strip() == f'"{shape.etag}"'
    return shape.is_immutable and parse_http_date_s(if_range) == shape.modified_s


def _parse_range(text: str, size_bytes: int) -> Decision | None:
    """206 or 416, or None for a Range to ignore."""
    match = _SPEC.fullmatch(text.strip())
    if match is None or not (match[1] or match[2]):
        return None
    if not match[1]:
        start, end = max(0, size_bytes - _number(match[2])), size_bytes
    else:
        start = _number(match[1])
        last = _number(match[2]) if match[2] else size_bytes
        if match[2] and _is_less(match[2], match[1]):
            return None
        end = min(size_bytes, last + 1)
    if start >= size_bytes or end <= start:
        return Decision(416)
    return Decision(206, start, end - start)


def _number(digits: str) -> int:
    """The number, or 10**18 for anything longer, which is past the end of every object."""
    digits = digits.lstrip("0")
    return int(digits or "0") if len(digits) <= _DIGITS_MAX else 10**_DIGITS_MAX


def _is_less(left: str, right: str) -> bool:
    left, right = left.lstrip("0"), right.lstrip("0")
    return (len(left), left) < (len(right), right)
