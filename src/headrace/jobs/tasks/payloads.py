"""Payloads: the type that a task decodes its payloads as, derived from its handler.

A single parameter of a record type is the whole payload. All other parameters are its fields.
Record types are structs of msgspec, dataclasses, typed dicts, and models of pydantic, which is
never imported here: an application that has a model has loaded it.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any, Final

import msgspec

from headrace.jobs.errors import InvalidTask
from headrace.jobs.job_context import Batch, JobContext
from headrace.jobs.tasks.options import OWN_OPTIONS, JobOptions
from headrace.kernel.errors import FieldProblem, describe_value
from headrace.kernel.faults import fault_of_message, find_faults
from headrace.kernel.storable import is_model

OPTIONS_OF_OTHERS: Final = {"countdown": "after_s", "delay": "after_s", "eta": "at"}
"""Options of `enqueue` by their names in other libraries."""


def _model_of(kind: type[Any], value: Any) -> Any:
    """The model of a decoded value, for msgspec. Raises: ValidationError, TypeError."""
    if not is_model(kind):
        raise TypeError(f"payloads of type {kind.__name__} are not supported")
    return _read_model(kind, msgspec.json.encode(value))


def _read_model(kind: Any, payload: bytes) -> Any:
    """The model of a JSON document. Raises: ValidationError with every problem in one line."""
    try:
        return kind.model_validate_json(payload)
    except ValueError as error:
        problems = getattr(error, "errors", None)
        if problems is None:
            raise
        lines = map(_problem_line, problems(include_url=False, include_context=False))
        raise msgspec.ValidationError("; ".join(lines)) from error


def _problem_line(problem: dict[str, Any]) -> str:
    """A problem of a model, with its field, and its value if that is no object or list."""
    place = ".".join(map(str, problem["loc"])) or "the payload"
    value = problem["input"]
    shown = "" if isinstance(value, dict | list) else f", got {describe_value(value)}"
    return f"{place}: {problem['msg']}{shown}"


class Payloads:
    """The payload type of a task, derived from its handler."""

    def __init__(
        self, owner: str, handler: Callable[..., Any], *, given: Any, is_batch: bool
    ) -> None:
        self.takes_fields = False
        self.takes_job = False
        self.type = self._found_type(owner, handler, given, is_batch=is_batch)
        self._decode: Callable[[bytes], Any] = (
            partial(_read_model, self.type)
            if is_model(self.type)
            else msgspec.json.Decoder(self.type, dec_hook=_model_of).decode
        )

    def decode(self, payload: bytes) -> Any:
        """Decode a payload as the handler's type; null means no fields. Raises: ValueError."""
        is_empty = self.takes_fields and payload == b"null"
        return self._decode(b"{}" if is_empty else payload)

    def faults(self, payload: bytes, pointer: str = "") -> list[FieldProblem]:
        """Where `payload` does not fit the handler's type, with what is expected.

        Empty if it fits, or if its type's own code fails, which may only work where handlers run.
        """
        try:
            self.decode(payload)
        except msgspec.ValidationError as error:
            message = str(error)
        except Exception:  # noqa: BLE001 - a type's own code
            return []
        else:
            return []
        if is_model(self.type):
            return [FieldProblem(pointer, "invalid", message)]
        value = msgspec.json.decode(payload)
        if self.takes_fields and value is None:
            value = {}
        try:
            found = list(find_faults(value, self.type, pointer, hook=_model_of))
        except Exception:  # noqa: BLE001 - a type's own code
            found = []
        return found or [fault_of_message(message, pointer)]

    def decode_all(self, payloads: Sequence[bytes]) -> list[Any]:
        """Decode the payloads of a batch. Raises: ValueError if one does not fit."""
        return list(map(self._decode, payloads))

    def upgrade(
        self, payload: bytes, version: int, steps: Mapping[int, Callable[[Any], Any]]
    ) -> Any:
        """Upgrade an older payload to the handler's type. Raises: ValueError; errors of a step."""
        value = msgspec.json.decode(payload)
        for at in sorted(step for step in steps if step >= version):
            value = steps[at](value)
        if self.takes_fields and value is None:
            value = {}
        if is_model(self.type):
            return self._decode(msgspec.json.encode(value))
        return msgspec.convert(value, self.type, builtin_types=(), dec_hook=_model_of)

    def _found_type(
        self, owner: str, handler: Callable[..., Any], given: Any, *, is_batch: bool
    ) -> Any:
        """The type to decode against. Also decides whether fields become arguments."""
        parameters = _named_parameters(owner, handler)
        if given is not None and (is_batch or len(parameters) == 1):
            return given
        hints = _hints(owner, handler)
        first = hints.get(parameters[0].name, Any) if parameters else Any
        if is_batch:
            return _type_in_batch(owner, first)
        if len(parameters) == 1 and typing.get_origin(first) is JobContext:
            self.takes_job = True
            return typing.get_args(first)[0]
        if len(parameters) == 1 and _is_whole_payload(first):
            return first
        self.takes_fields = True
        _require_free_names(owner, parameters)
        fields = [
            (p.name, hints.get(p.name, Any))
            if p.default is p.empty
            else (p.name, hints.get(p.name, Any), p.default)
            for p in parameters
        ]
        return msgspec.defstruct("Arguments", fields, kw_only=True, forbid_unknown_fields=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Fields:
    """The fields that a handler takes by name."""

    signature: inspect.Signature
    names: frozenset[str]
    required: frozenset[str]

    @classmethod
    def of(cls, handler: Callable[..., Any]) -> Fields:
        """The fields of `handler`."""
        signature = inspect.signature(handler)
        single = [
            p
            for p in signature.parameters.values()
            if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        return cls(
            signature,
            names=frozenset(p.name for p in single if p.kind is not p.POSITIONAL_ONLY),
            required=frozenset(p.name for p in single if p.default is p.empty),
        )

    def fit(self, payload: dict[str, Any]) -> bool:
        """Whether the field names fit."""
        names = payload.keys()
        return names <= self.names and self.required <= names

    @property
    def text(self) -> str:
        """The names in order, with optional ones marked."""
        names = [name for name in self.signature.parameters if name in self.names]
        return ", ".join(n if n in self.required else f"{n} (optional)" for n in names) or "none"

    def misfit(self, payload: dict[str, Any]) -> str:
        """Unknown and missing fields of a payload, and the fields that the handler takes."""
        unknown = sorted(map(str, payload.keys() - self.names))
        missing = [
            name for name in self.signature.parameters if name in self.required - payload.keys()
        ]
        parts = []
        for name in unknown:
            meant = ""
            if near := get_close_matches(name, self.names, n=1):
                meant = f" (did you mean {near[0]!r}?)"
            else:
                meant = option_meant(name)
            parts.append(f"unknown field {name!r}{meant}")
        parts += [f"missing field {name!r}" for name in missing]
        return f"{', '.join(parts)}; its handler takes: {self.text}"


def option_meant(name: str) -> str:
    """` (did you mean the option X?)` with the option like `name`, or an empty text."""
    near = get_close_matches(name, [*JobOptions.__annotations__, *OWN_OPTIONS], n=1)
    option = OPTIONS_OF_OTHERS.get(name) or (near[0] if near else None)
    return f" (did you mean the option {option!r}?)" if option else ""


def is_async(code: Callable[..., Any]) -> bool:
    """Whether `code` is a coroutine function, or an object with an async `__call__`."""
    return inspect.iscoroutinefunction(code) or inspect.iscoroutinefunction(
        getattr(code, "__call__", None)  # noqa: B004 - it is inspected, not called
    )


def _named_parameters(owner: str, handler: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters that a payload can fill. Raises: InvalidTask."""
    given = inspect.signature(handler).parameters.values()
    named = [p for p in given if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if given and not named:
        raise InvalidTask(
            f"task {owner!r}: its handler takes only {', '.join(map(str, given))}, which does not"
            " describe the payload: name its parameters, and use functools.wraps in decorators"
        )
    return named


def _type_in_batch(owner: str, hint: Any) -> Any:
    """The payload type of a batch handler's first parameter. Raises: InvalidTask."""
    if typing.get_origin(hint) is Batch:
        return typing.get_args(hint)[0]
    if hint is Any or hint is Batch:
        return Any
    name = getattr(hint, "__name__", hint)
    raise InvalidTask(
        f"task {owner!r}: with batch= its handler takes a Batch[...], not {name}: write"
        " `jobs: Batch[...]` with the payload's type, or leave batch out"
    )


def _require_free_names(owner: str, parameters: Sequence[inspect.Parameter]) -> None:
    """Refuse fields named like an option of `enqueue`. Raises: InvalidTask."""
    taken = {*JobOptions.__annotations__, *OWN_OPTIONS}
    found = [p.name for p in parameters if p.name in taken]
    if found:
        raise InvalidTask(
            f"task {owner!r}: its handler takes {', '.join(found)}, options of"
            " `enqueue`: rename the field, or take the whole payload (a Struct, dataclass,"
            " pydantic model or dict)"
        )


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
    if kind in (typing.Union, types.UnionType):
        # `Photo | None` is a payload that may be left out; `str | None` is a field.
        return any(map(_is_whole_payload, typing.get_args(hint)))
    if not isinstance(kind, type):
        return hint is not Any
    is_record = issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind) or is_model(kind)
    return is_record or issubclass(kind, dict | list | tuple) or typing.is_typeddict(kind)
