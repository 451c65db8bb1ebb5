"""How a payload finds its way into a handler's arguments.

A payload carries the version of its shape. One of an older version goes through the task's upgrades, one step
a version; one of a newer version is not for this code: it goes back, for newer code to take it.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from penstock.jobs.errors import InvalidTask
from penstock.jobs.inhand import Batch, JobInHand


class Payloads:
    """The shape of a task's payloads, read off its handler."""

    def __init__(
        self, owner: str, handler: Callable[..., Any], *, given: Any, is_batch: bool
    ) -> None:
        self.takes_fields = False
        self.takes_job = False
        self.type = self._found_type(owner, handler, given, is_batch=is_batch)
        self._decoder = msgspec.json.Decoder(self.type)

    def decode(self, payload: bytes) -> Any:
        """The payload as the handler's type; no payload is no fields. Raises: ValueError."""
        is_empty = self.takes_fields and payload == b"null"
        return self._decoder.decode(b"{}" if is_empty else payload)

    def decode_all(self, payloads: Sequence[bytes]) -> list[Any]:
        """Payloads of a batch, which has no fields. Raises: ValueError, where any does not fit."""
        return list(map(self._decoder.decode, payloads))

    def upgrade(
        self, payload: bytes, version: int, steps: Mapping[int, Callable[[Any], Any]]
    ) -> Any:
        """An older payload as the handler's type. Raises: whatever a step raises, ValueError."""
        value = msgspec.json.decode(payload)
        for at in sorted(step for step in steps if step >= version):
            value = steps[at](value)
        if self.takes_fields and value is None:
            value = {}
        return msgspec.convert(value, self.type, builtin_types=())

    def _found_type(
        self, owner: str, handler: Callable[..., Any], given: Any, *, is_batch: bool
    ) -> Any:
        """The type to decode payloads against; also decides whether fields become arguments."""
        parameters = [
            parameter
            for parameter in inspect.signature(handler).parameters.values()
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        if given is not None and (is_batch or len(parameters) == 1):
            return given
        hints = _hints(owner, handler)
        first = hints.get(parameters[0].name, Any) if parameters else Any
        if is_batch:
            return typing.get_args(first)[0] if typing.get_origin(first) is Batch else Any
        if len(parameters) == 1 and typing.get_origin(first) is JobInHand:
            self.takes_job = True
            return typing.get_args(first)[0]
        if len(parameters) == 1 and _is_whole_payload(first):
            return first
        self.takes_fields = True
        fields = [
            (p.name, hints.get(p.name, Any))
            if p.default is p.empty
            else (p.name, hints.get(p.name, Any), p.default)
            for p in parameters
        ]
        return msgspec.defstruct("Arguments", fields, kw_only=True, forbid_unknown_fields=True)


def fields_of(arguments: Any) -> dict[str, Any]:
    """The fields of a decoded payload as keyword arguments."""
    return {name: getattr(arguments, name) for name in arguments.__struct_fields__}


def _hints(owner: str, handler: Callable[..., Any]) -> dict[str, Any]:
    try:
        is_plain = inspect.isfunction(handler) or inspect.ismethod(handler)
        return typing.get_type_hints(handler if is_plain else type(handler).__call__)
    except (NameError, TypeError) as error:
        raise InvalidTask(
            f"task {owner!r}: the types of its handler cannot be read ({error}): define them"
            " at the top of a module, or pass payload=..."
        ) from error


def _is_whole_payload(hint: Any) -> bool:
    kind = typing.get_origin(hint) or hint
    if not isinstance(kind, type):
        return hint is not Any
    is_record = issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind)
    return is_record or issubclass(kind, dict | list | tuple) or typing.is_typeddict(kind)
