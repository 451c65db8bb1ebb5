"""JSON request bodies: limited before they are read, decoded strictly, with all faults reported.

Litestar converts bodies leniently (`"5"` passes for 5) and reports the first fault. `JsonBody`
replaces that as the data transfer object of every handler. A valid body takes one pass of msgspec
into the handler's type, and one of the standard library that refuses what parsers read differently:
repeated keys and deep nesting. Only a rejected body is searched for all of its faults.

A body over OFF_LOOP_FROM_BYTES is decoded in a thread, after its items were counted.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec
from litestar.connection import ASGIConnection
from litestar.dto import AbstractDTO
from litestar.handlers import BaseRouteHandler
from litestar.openapi.spec import Reference, Schema
from litestar.typing import FieldDefinition

from headrace.kernel.errors import FieldProblem
from headrace.kernel.faults import FAULTS_MAX, fault_of_message, find_faults
from headrace.kernel.routes import ItemsMax
from headrace.kernel.storable import NUL, find_unstorable
from headrace.web.auth import FOR_PAGES
from headrace.web.model import BodyInvalid, BodyMalformed, BodyTooLarge, MediaTypeRefused

PAGE_BODY_BYTES_MAX: Final = 64 * 1024
"""Largest body with a publishable key."""
DOCUMENT_BYTES_MAX: Final = 2 * 1024 * 1024
"""Largest body of one document; `web.body_max` limits lists and routes with LARGE_BODY."""
OFF_LOOP_FROM_BYTES: Final = 64 * 1024
VALUES_MAX: Final = 500_000
"""Most values in one document or list item: a parser holds the GIL until the item ends."""
ITEMS_MAX: Final = "items_max"
"""Key in a handler's `opt`: an `ItemsMax`."""
LARGE_BODY: Final = "large_body"
"""Key in a handler's `opt`: one document may be as large as `web.body_max`."""
DECODED: Final = "headrace.web.decoded"
"""Key in an ASGI scope: the body that a thread decoded."""
DEPTH_MAX: Final = 32
_INT64_MAX: Final = 2**63 - 1
_LONG: Final = re.compile(rb"[0-9]{19}")
"""Possible integers over 64 bits, which PostgreSQL cannot store."""
_DECODERS: Final = ThreadPoolExecutor(2, thread_name_prefix="json")


class JsonBody(AbstractDTO[Any]):
    """Decodes the `data` of every handler; a Litestar data transfer object."""

    @classmethod
    def create_for_field_definition(
        cls,
        field_definition: FieldDefinition,
        handler_id: str,
        backend_cls: Any = None,
    ) -> None:
        """Create nothing: each handler has the type of its `data`."""

    @classmethod
    def create_openapi_schema(
        cls,
        field_definition: FieldDefinition,
        handler_id: str,  # noqa: ARG003  (Litestar's signature)
        schema_creator: Any,
    ) -> Reference | Schema:
        """The schema of the type itself."""
        schema: Reference | Schema = schema_creator.for_field_definition(field_definition)
        return schema

    def decode_bytes(self, value: bytes) -> Any:
        """The body as the handler's type. Raises: BodyMalformed, BodyInvalid."""
        scope: Any = self.asgi_connection.scope
        if DECODED in scope:
            return scope.pop(DECODED)
        return decode_body(value, scope["route_handler"].parsed_data_field.annotation)


async def require_json(
    connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler
) -> None:
    """Require one uncompressed JSON document for a handler with `data`; a Litestar guard.

    Raises: MediaTypeRefused, BodyMalformed.
    """
    if handler.parsed_data_field is None:
        return
    headers = connection.headers
    encoding = headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise MediaTypeRefused(f"the body is encoded as {encoding[:40]!r}: send it unencoded")
    if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
        raise BodyMalformed("the body is empty: expected a JSON document")
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    # `navigator.sendBeacon` sends this type without a preflight.
    is_beacon = media_type == "text/plain" and handler.opt.get(FOR_PAGES)
    if media_type != "application/json" and not is_beacon:
        raise MediaTypeRefused(
            f"the body is of type {media_type[:80]!r}: send it with Content-Type: application/json"
        )


class BodyGuard:
    """Limits bodies before they are read and decodes large bodies in a thread; a Litestar guard."""

    def __init__(self, body_bytes_max: int) -> None:
        self._bytes_max = body_bytes_max

    async def __call__(
        self, connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler
    ) -> None:
        """Check one request.

        Raises: BodyTooLarge, BodyMalformed, BodyInvalid, `ItemsMax` errors.
        """
        request: Any = connection
        field = handler.parsed_data_field
        bytes_max = None if field is None else self._bound_of(handler)
        if getattr(request.scope.get("auth"), "is_publishable", False):
            bytes_max = PAGE_BODY_BYTES_MAX
        if bytes_max is None:
            return
        length = request.headers.get("content-length")
        if length is None:
            request.receive = _bounded(request.receive, bytes_max)
        elif int(length) > bytes_max:
            raise _too_large(bytes_max)
        if field is not None and (length is None or int(length) > OFF_LOOP_FROM_BYTES):
            body = await request.body()
            if len(body) > OFF_LOOP_FROM_BYTES:
                request.scope[DECODED] = await asyncio.get_running_loop().run_in_executor(
                    _DECODERS,
                    _decode_long,
                    body,
                    field.annotation,
                    handler.opt.get(ITEMS_MAX),
                )

    def _bound_of(self, handler: BaseRouteHandler) -> int:
        if ITEMS_MAX in handler.opt or handler.opt.get(LARGE_BODY):
            return self._bytes_max
        return min(self._bytes_max, DOCUMENT_BYTES_MAX)


def _bounded(receive: Any, bytes_max: int) -> Any:
    """`receive` that refuses a body of more than `bytes_max`."""
    received = 0

    async def bounded() -> Any:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > bytes_max:
            raise _too_large(bytes_max)
        return message

    return bounded


def _too_large(bytes_max: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the body is over the limit of {bytes_max} bytes for this route and caller: send less per"
        " request"
    )


def _decode_long(body: bytes, kind: Any, items_max: ItemsMax | None) -> Any:
    commas = body.count(b",")
    if items_max is not None and commas >= items_max.most:
        require_items(body, items_max)
    if commas >= VALUES_MAX:
        require_few_values(body)
    return decode_body(body, kind)


def require_few_values(body: bytes) -> None:
    """Refuse a document or list item of more than VALUES_MAX values. Raises: BodyTooLarge.

    Call it after `require_items`. It counts commas, so commas in strings count as well.
    """
    try:
        items = msgspec.json.decode(body, type=list[msgspec.Raw])
    except msgspec.ValidationError:
        items = [msgspec.Raw(body)]
    except (msgspec.DecodeError, RecursionError):
        return  # Not JSON: decode_body reports the error.
    for index, item in enumerate(items):
        if (commas := bytes(item).count(b",")) >= VALUES_MAX:
            raise BodyTooLarge(
                f"item {index} of the body has about {commas + 1} values, at most {VALUES_MAX} are"
                " allowed: send less per request"
            )


def require_items(body: bytes, items_max: ItemsMax) -> None:
    """Refuse a JSON array of too many items, decoding at most that many.

    Raises: the error of `items_max`.
    """
    count = 0

    def note(_kind: Any, _item: Any) -> Any:
        nonlocal count
        count += 1
        if count > items_max.most:
            raise _Counted
        return _ITEM

    try:
        msgspec.json.decode(body, type=list[_Item], dec_hook=note)
    except _Counted:
        raise items_max.refuse(count) from None
    except (msgspec.DecodeError, RecursionError):
        return  # Not a JSON array: decode_body reports the error.


class _Item:
    """A counted item of an array."""


_ITEM: Final = _Item()


class _Counted(Exception):
    """Stops decoding at too many items."""


def decode_body(body: bytes, kind: Any) -> Any:
    """`body` as a value of type `kind`. Raises: BodyMalformed, BodyInvalid."""
    try:
        value = msgspec.json.decode(body, type=kind)
        require_plain(body)
    except msgspec.ValidationError as error:
        raise _invalid(body, kind, str(error)) from error
    except RecursionError as error:
        raise _too_deep() from error
    except (msgspec.DecodeError, ValueError) as error:
        raise BodyMalformed(f"the body is not a JSON document in UTF-8: {error}") from error
    return value


def require_plain(body: bytes) -> None:
    """Refuse repeated keys, deep nesting, NUL characters and integers over 64 bits.

    Raises: BodyMalformed, BodyInvalid, ValueError.
    """
    tree = json.loads(body, object_pairs_hook=_without_doubles)
    level, depth = [tree] if isinstance(tree, dict | list) else [], 0
    while level:
        depth += 1
        if depth > DEPTH_MAX:
            raise _too_deep()
        level = [
            child
            for node in level
            for child in (node.values() if type(node) is dict else node)
            if type(child) in (dict, list)
        ]
    if NUL in body or _LONG.search(body):
        faults = tuple(_first(find_unstorable(tree, integer_max=_INT64_MAX)))
        if faults:
            raise _faulty(faults)


def _invalid(body: bytes, kind: Any, first: str) -> BodyInvalid:
    try:
        faults = find_faults(msgspec.json.decode(body), kind)
        problems = tuple(_first(faults))
    except (msgspec.DecodeError, RecursionError):
        problems = ()
    return _faulty(problems or (fault_of_message(first, ""),))


def _faulty(problems: tuple[FieldProblem, ...]) -> BodyInvalid:
    texts = "; ".join(f"{p.pointer or '(body)'}: {p.text}" for p in problems[:3])
    more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
    return BodyInvalid(f"the body is not valid: {texts}{more}", problems=problems)


def _first(faults: Iterator[FieldProblem]) -> Iterator[FieldProblem]:
    for _, fault in zip(range(FAULTS_MAX), faults, strict=False):
        yield fault


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a repeated key")
    return found


def _too_deep() -> BodyMalformed:
    return BodyMalformed(f"the body is nested deeper than {DEPTH_MAX} levels: flatten it")
