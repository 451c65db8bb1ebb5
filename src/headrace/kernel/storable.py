"""Values of JSON documents that can be stored: one rule for HTTP, Python and commands.

PostgreSQL stores no NUL character, neither in a text nor in `jsonb`, and JSON has neither NaN nor
Infinity. A payload with such a value would be accepted and then fail in the first query that reads
it, so each interface refuses it where it enters.

Callers first search the encoded bytes for `NUL`, because a walk costs far more than the encoding.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any, Final

from headrace.kernel.errors import FieldProblem

NUL: Final = b"\\u0000"
"""A NUL character in encoded JSON; an escaped backslash before `u0000` looks the same."""


def find_unstorable(
    value: Any, pointer: str = "", *, integer_max: int | None = None
) -> Iterator[FieldProblem]:
    """The faults of a decoded document, with their JSON pointers.

    `integer_max` limits integers in addition.
    """
    if _is_storable(value, integer_max):
        return
    if isinstance(value, dict):
        for key, child in value.items():
            step = f"{pointer}/{escape_step(str(key))}"
            yield from find_unstorable(key, pointer, integer_max=integer_max)
            yield from find_unstorable(child, step, integer_max=integer_max)
    elif isinstance(value, list | tuple):
        for index, child in enumerate(value):
            yield from find_unstorable(child, f"{pointer}/{index}", integer_max=integer_max)
    else:
        yield FieldProblem(pointer, "invalid", _fault_of(value, integer_max) or "")


def escape_step(step: str) -> str:
    """One escaped step of a JSON pointer (RFC 6901)."""
    return step.replace("~", "~0").replace("/", "~1")


def _is_storable(tree: Any, integer_max: int | None) -> bool:
    left = [tree]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left += value
            left += value.values()
        elif isinstance(value, list | tuple):
            left += value
        elif _fault_of(value, integer_max) is not None:
            return False
    return True


def _fault_of(value: Any, integer_max: int | None) -> str | None:
    match value:
        case str() if "\x00" in value:
            return "expected text without NUL characters"
        case int() if integer_max is not None and abs(value) > integer_max:
            return "expected an integer of 64 bits"
        case float() if not math.isfinite(value):
            return f"expected a finite number, got {value}: JSON has neither NaN nor Infinity"
    return None


def is_model(kind: Any) -> bool:
    """Whether `kind` is a class of pydantic models; pydantic is never imported for this."""
    pydantic = sys.modules.get("pydantic.main")
    return pydantic is not None and isinstance(kind, type) and issubclass(kind, pydantic.BaseModel)


def plain_model(value: Any) -> Any:
    """A pydantic model as JSON values. Raises: TypeError for other types."""
    if is_model(type(value)):
        return value.model_dump(mode="json", by_alias=True)
    raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")
