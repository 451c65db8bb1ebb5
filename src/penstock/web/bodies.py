"""JSON in: strictly decoded, all faults told at once with their JSON pointers.

Litestar converts bodies leniently (`"5"` passes for 5) and reports the first fault; this takes its place
as the data transfer object of every handler. A good body costs one pass of msgspec straight into the
handler's type, and one of the standard library that refuses what parsers disagree about: doubled keys
and deep nesting; the second costs several times the first. Only a bad body is walked again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, ClassVar, Final, get_args, get_origin

import msgspec
from litestar.connection import ASGIConnection
from litestar.dto import AbstractDTO
from litestar.handlers import BaseRouteHandler
from litestar.openapi.spec import Reference, Schema
from litestar.typing import FieldDefinition

from penstock.kernel.errors import FieldProblem
from penstock.web.auth import FOR_PAGES
from penstock.web.model import BodyInvalid, BodyMalformed, MediaTypeRefused

DEPTH_MAX: Final = 32
FAULTS_MAX: Final = 50
_INT64_MAX: Final = 2**63 - 1
_RARE: Final = re.compile(rb"\\u0000|[0-9]{19}")
"""What may be a NUL, which PostgreSQL cannot store, or an integer beyond its bigint."""


class JsonBody(AbstractDTO[Any]):
    """Decodes the `data` of every handler; Litestar knows it as a data transfer object."""

    _types: ClassVar[dict[str, Any]] = {}

    @classmethod
    def create_for_field_definition(
        cls,
        field_definition: FieldDefinition,
        handler_id: str,
        backend_cls: Any = None,  # noqa: ARG003  (Litestar's signature)
    ) -> None:
        """Remember what type the handler takes."""
        cls._types[handler_id] = field_definition.annotation

    @classmethod
    def create_openapi_schema(
        cls,
        field_definition: FieldDefinition,
        handler_id: str,  # noqa: ARG003  (Litestar's signature)
        schema_creator: Any,
    ) -> Reference | Schema:
        """The schema of the type itself: nothing is renamed or left out."""
        schema: Reference | Schema = schema_creator.for_field_definition(field_definition)
        return schema

    def decode_bytes(self, value: bytes) -> Any:
        """The body as the handler's type. Raises: BodyMalformed, BodyInvalid."""
        handler: Any = self.asgi_connection.scope["route_handler"]
        return decode_body(value, self._types[handler.handler_id])


async def require_json(
    connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler
) -> None:
    """A Litestar guard: a handler with `data` takes one plain JSON document.

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
    # The only type in which a page may send without being asked beforehand (`navigator.sendBeacon`).
    is_beacon = media_type == "text/plain" and handler.opt.get(FOR_PAGES)
    if media_type != "application/json" and not is_beacon:
        raise MediaTypeRefused(
            f"the body is of type {media_type[:80]!r}: send it with Content-Type: application/json"
        )


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
        raise BodyMalformed(f"the body is no JSON document in UTF-8: {error}") from error
    return value


def require_plain(body: bytes) -> None:
    """Refuse doubled keys, deep nesting, NUL characters and integers beyond 64 bits.

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
    if _RARE.search(body):
        problems = tuple(_first(_unstorable(tree, "")))
        if problems:
            raise _faulty(problems)


def find_faults(value: Any, kind: Any, pointer: str = "") -> Iterator[FieldProblem]:
    """Every fault of a decoded `value` as a `kind`: of each field and each item, not only the first."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        inner = list(_first(_inner_faults(value, kind, pointer)))
        yield from inner or [_fault_of(str(error), pointer)]


def _inner_faults(value: Any, kind: Any, pointer: str) -> Iterator[FieldProblem]:
    if isinstance(value, dict) and _is_struct(kind):
        yield from _field_faults(value, kind, pointer)
    elif isinstance(value, list) and get_origin(kind) in (list, tuple, set):
        item = get_args(kind)[0]
        for index, child in enumerate(value):
            yield from find_faults(child, item, f"{pointer}/{index}")
    elif isinstance(value, dict) and get_origin(kind) is dict:
        for key, child in value.items():
            yield from find_faults(child, get_args(kind)[1], f"{pointer}/{_escaped(key)}")


def _field_faults(value: dict[str, Any], kind: Any, pointer: str) -> Iterator[FieldProblem]:
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    for name, field in fields.items():
        where = f"{pointer}/{_escaped(name)}"
        if name in value:
            yield from find_faults(value[name], field.type, where)
        elif field.required:
            yield FieldProblem(where, "missing", "expected a value, got none")
    if kind.__struct_config__.forbid_unknown_fields:
        for name in value.keys() - fields.keys() - {kind.__struct_config__.tag_field}:
            yield FieldProblem(f"{pointer}/{_escaped(name)}", "unknown", "no such field")


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _fault_of(message: str, pointer: str) -> FieldProblem:
    """`Expected `str`, got `int` - at `$.jobs[0].url`` below `pointer`."""
    text, _, path = message.partition(" - at `$")
    steps = re.findall(r"\.([^.\[`]+)|\[(\d+|\.\.\.)\]", path)
    inner = "".join(f"/{_escaped(name or index)}" for name, index in steps)
    code = "wrong_type" if text.startswith("Expected `") and "got" in text else "invalid"
    return FieldProblem(pointer + inner, code, text[:1].lower() + text[1:].replace("`", ""))


def _unstorable(value: Any, pointer: str) -> Iterator[FieldProblem]:
    match value:
        case dict():
            for key, child in value.items():
                yield from _unstorable(key, pointer)
                yield from _unstorable(child, f"{pointer}/{_escaped(key)}")
        case list():
            for index, child in enumerate(value):
                yield from _unstorable(child, f"{pointer}/{index}")
        case str() if "\x00" in value:
            yield FieldProblem(pointer, "invalid", "expected text without NUL characters")
        case int() if abs(value) > _INT64_MAX:
            yield FieldProblem(pointer, "invalid", "expected an integer of 64 bits")


def _invalid(body: bytes, kind: Any, first: str) -> BodyInvalid:
    try:
        faults = find_faults(msgspec.json.decode(body), kind)
        problems = tuple(_first(faults))
    except (msgspec.DecodeError, RecursionError):
        problems = ()
    return _faulty(problems or (_fault_of(first, ""),))


def _faulty(problems: tuple[FieldProblem, ...]) -> BodyInvalid:
    texts = "; ".join(f"{p.pointer or '(the whole)'}: {p.text}" for p in problems[:3])
    more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
    return BodyInvalid(f"the body is not valid: {texts}{more}", problems=problems)


def _first(faults: Iterator[FieldProblem]) -> Iterator[FieldProblem]:
    for _, fault in zip(range(FAULTS_MAX), faults, strict=False):
        yield fault


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _too_deep() -> BodyMalformed:
    return BodyMalformed(f"the body is nested deeper than {DEPTH_MAX} levels: flatten it")


def _escaped(step: str) -> str:
    """One step of a JSON pointer (RFC 6901)."""
    return step.replace("~", "~0").replace("/", "~1")
