"""Every fault of a decoded document, each with its place, its value and what is accepted.

msgspec stops at the first fault, and its message names neither the value nor, for a choice, the
accepted values. The type that the document must have contains them. So a caller can correct a
request without reading the reference.

Only a document that msgspec refused is searched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import date, datetime
from enum import Enum
from itertools import islice
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import msgspec

from headrace.kernel.errors import FieldProblem, describe_value, did_you_mean, mismatch
from headrace.kernel.storable import escape_step

FAULTS_MAX: Final = 50
Hook = Callable[[type[Any], Any], Any]
"""Converts a value to a type that msgspec does not support, such as a model of pydantic."""
_EXAMPLES: Final[dict[Any, str]] = {
    datetime: "a moment such as 2026-11-21T10:00:00Z",
    date: "a date such as 2026-11-21",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
}


def find_faults(
    value: Any, kind: Any, pointer: str = "", *, hook: Hook | None = None
) -> Iterator[FieldProblem]:
    """Every fault of a decoded `value` as a `kind`, in each field and item."""
    try:
        # The keys of a JSON object are texts, also where `kind` has numbers.
        msgspec.convert(value, kind, str_keys=True, dec_hook=hook)
    except msgspec.ValidationError as error:
        found = _inner_faults(value, _arm_of(kind, value), pointer, hook)
        yield from list(islice(found, FAULTS_MAX)) or [
            _value_fault(str(error), value, kind, pointer)
        ]


def _inner_faults(value: Any, kind: Any, pointer: str, hook: Hook | None) -> Iterator[FieldProblem]:
    if isinstance(value, dict) and _is_struct(kind):
        yield from _field_faults(value, kind, pointer, hook)
    elif isinstance(value, list) and get_origin(kind) in (list, tuple, set):
        item = get_args(kind)[0]
        for index, child in enumerate(value):
            yield from find_faults(child, item, f"{pointer}/{index}", hook=hook)
    elif isinstance(value, dict) and get_origin(kind) is dict:
        for key, child in value.items():
            where = f"{pointer}/{escape_step(key)}"
            yield from find_faults(child, get_args(kind)[1], where, hook=hook)


def _field_faults(
    value: dict[str, Any], kind: Any, pointer: str, hook: Hook | None
) -> Iterator[FieldProblem]:
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    for name, field in fields.items():
        where = f"{pointer}/{escape_step(name)}"
        if name in value:
            yield from find_faults(value[name], field.type, where, hook=hook)
        elif field.required:
            yield FieldProblem(where, "missing", "the field is missing")
    if kind.__struct_config__.forbid_unknown_fields:
        for name in value.keys() - fields.keys() - {kind.__struct_config__.tag_field}:
            text = f"no such field{did_you_mean(name, fields)}"
            yield FieldProblem(f"{pointer}/{escape_step(name)}", "unknown", text)


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _value_fault(message: str, value: Any, kind: Any, pointer: str) -> FieldProblem:
    """The fault of one value, which msgspec does not name, with the accepted values."""
    fault = fault_of_message(message, pointer)
    expected = expectation_of(kind)
    if fault.pointer != pointer:
        inner = _value_at(value, fault.pointer.removeprefix(pointer))
        shown = f" {describe_value(inner)}" if isinstance(inner, str | int | float) else ""
        return FieldProblem(fault.pointer, fault.code, fault.text + shown)
    if isinstance(value, dict | list):
        return fault
    if fault.code == "wrong_type" and value is not None:
        return FieldProblem(pointer, fault.code, f"{fault.text} {describe_value(value)}")
    if expected is None or fault.code == "wrong_type":
        return fault
    return FieldProblem(pointer, fault.code, mismatch(expected, value))


def _value_at(value: Any, pointer: str) -> Any:
    """The value inside of `value`; None if msgspec's path does not name it exactly."""
    for step in pointer.split("/")[1:]:
        if isinstance(value, dict):
            value = value.get(step.replace("~1", "/").replace("~0", "~"))
        elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        else:
            return None
    return value


def fault_of_message(message: str, pointer: str) -> FieldProblem:
    """The fault in msgspec's message, such as `Expected `str` - at `$.jobs[0].url``."""
    text, _, path = message.partition(" - at `$")
    steps = re.findall(r"\.([^.\[`]+)|\[(\d+|\.\.\.)\]", path)
    inner = "".join(f"/{escape_step(name or index)}" for name, index in steps)
    code = "wrong_type" if text.startswith("Expected `") and "got" in text else "invalid"
    # A message that begins with the name of a field is of a model's own code.
    if not text.split(" ", 1)[0].endswith(":"):
        text = text[:1].lower() + text[1:].replace("`", "")
    return FieldProblem(pointer + inner, code, text)


def _arm_of(kind: Any, value: Any) -> Any:
    """The member of a union that an object or a list is meant for, otherwise `kind`."""
    for one in get_args(kind) if get_origin(kind) in (Union, UnionType) else ():
        if isinstance(value, dict) and (_is_struct(one) or get_origin(one) is dict):
            return one
        if isinstance(value, list) and get_origin(one) in (list, tuple, set):
            return one
    return kind


def expectation_of(
    kind: Any,
    *,
    least: float | None = None,
    most: float | None = None,
    characters_max: int | None = None,
) -> str | None:
    """The values that `kind` accepts within the bounds, in words; None: no simple description."""
    kind = _plain_kind(kind)
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of {', '.join(str(member.value) for member in kind)}"
    if kind is str and characters_max is not None:
        return f"at most {characters_max} characters"
    text = _EXAMPLES.get(kind)
    if text is None or (least is None and most is None):
        return text
    if most is None:
        return f"{text} of at least {least}"
    return f"{text} of at most {most}" if least is None else f"{text} from {least} to {most}"


def _plain_kind(kind: Any) -> Any:
    """`kind` without metadata and without None."""
    if get_origin(kind) is Annotated:
        return _plain_kind(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        kinds = [one for one in get_args(kind) if one is not NoneType]
        return _plain_kind(kinds[0]) if len(kinds) == 1 else kind
    return kind
