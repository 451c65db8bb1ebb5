"""Schemas: the fields that rows of a category must have, and validation by them.

    [fields.price]    type = "price", required = true, least = 1
    [fields.state]    type = "one_of", values = ["new", "used"]
    [fields.vin]      pattern = "[A-HJ-NPR-Z0-9]{17}"
    [fields.photos]   required = true, length_most = 10

A row is validated by the schema of its category, else by the schema `default`. Without either, it
needs a name, its price must be a number, and its url a link; a schema can override each of these
rules. Values are normalized: numbers to `1990.50`, dates to `2026-11-21`, booleans to `true`.

Patterns use RE2, whose time is linear in the text. With a backtracking engine, the pattern `(a+)+b`
and 30 letters would block a process for minutes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final, Literal, TypeAlias

import msgspec

from headrace.fetch.errors import InvalidSchema
from headrace.fetch.field_types import (
    CANONICAL,
    NUMBERS,
    Kind,
    invalid_code,
    is_bound,
    is_over,
    is_under,
    matcher,
    split_list,
)
from headrace.fetch.guard import Policy, refusal_reason
from headrace.fetch.model import COLUMNS_MAX
from headrace.fetch.readers import Fault, Value
from headrace.kernel.errors import FieldProblem, mismatch
from headrace.kernel.faults import find_faults

DEFAULT: Final = "default"
NAME_CHARACTERS_MAX: Final = 1000
CATEGORY_CHARACTERS_MAX: Final = 200
Bound: TypeAlias = int | float | str | None


class FieldRule(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The rule of one field.

    `least` and `most` limit numbers and dates. `length_least` and `length_most` limit the
    characters of a text or the entries of a list. `values` are the choices of a `one_of` or a list.
    """

    type: Kind = "text"
    required: bool = False
    least: Bound = None
    most: Bound = None
    length_least: int | None = None
    length_most: int | None = None
    pattern: str | None = None
    values: list[str] = msgspec.field(default_factory=list)


class Schema(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The fields of a category.

    `category_fields`, used from the default schema, are the fields with the category of a row. The
    first one whose value has a schema decides.
    """

    fields: dict[str, FieldRule] = msgspec.field(default_factory=dict)
    others: Literal["keep", "drop"] = "keep"
    category_fields: tuple[str, ...] = ("category", "category_name")


class CategorySchema(msgspec.Struct, frozen=True, kw_only=True):
    """A stored schema with its category."""

    category: str
    schema: Schema
    updated_at: datetime


ALWAYS: Final = {
    "name": FieldRule(required=True, length_most=NAME_CHARACTERS_MAX),
    "price": FieldRule(type="price"),
    "url": FieldRule(type="url"),
}
"""The rules of fields that a schema does not mention."""


def plain_category(name: str) -> str:
    """A category in normalized form, in which categories are compared."""
    return " ".join(name.split()).casefold()


class Schemas:
    """All schemas, compiled to validate rows."""

    def __init__(self, schemas: Mapping[str, Schema], policy: Policy) -> None:
        plain = {plain_category(category): schema for category, schema in schemas.items()}
        default = plain.get(DEFAULT, Schema())
        self._category_fields = default.category_fields
        self._default = _CompiledSchema(default, policy)
        self._by_category = {
            category: _CompiledSchema(schema, policy) for category, schema in plain.items()
        }
        encoded = msgspec.json.encode(sorted(plain.items()), order="sorted")
        self.digest = hashlib.sha256(encoded).digest()
        """A digest of all schemas."""

    def validate(self, values: dict[str, Value], photos: list[str]) -> list[Fault]:
        """Validate a row and normalize its `values` in place; return its faults."""
        return list(self._compiled_for(values).validate(values, photos))

    def _compiled_for(self, values: dict[str, Value]) -> _CompiledSchema:
        if len(self._by_category) > 1 or DEFAULT not in self._by_category:
            for name in self._category_fields:
                value = values.get(name)
                found = isinstance(value, str) and self._by_category.get(plain_category(value))
                if found:
                    return found
        return self._default


class _CompiledSchema:
    """One schema, prepared to validate rows."""

    def __init__(self, schema: Schema, policy: Policy) -> None:
        self._policy = policy
        rules = {**ALWAYS, **schema.fields}
        self._photos = rules.pop("photos", None)
        self._rules = [CompiledRule(name, rule, policy) for name, rule in rules.items()]
        self._kept = None if schema.others == "keep" else {*rules, *schema.category_fields}

    def validate(self, values: dict[str, Value], photos: list[str]) -> Iterator[Fault]:
        for rule in self._rules:
            value = values.get(rule.name)
            if value is not None:
                found = rule.check(value)
                if isinstance(found, Fault):
                    yield found
                else:
                    values[rule.name] = found
            elif rule.is_required:
                yield Fault(rule.name, "missing")
        if self._photos is not None:
            yield from _count_faults("photos", len(photos), self._photos)
        if self._kept is not None:
            for name in values.keys() - self._kept:
                del values[name]


class CompiledRule:
    """The rule of one field, prepared to check values."""

    def __init__(self, name: str, rule: FieldRule, policy: Policy) -> None:
        self.name = name
        self.is_required = rule.required
        self._rule = rule
        self._policy = policy
        self._canonical: Callable[[str], str | None] | None = CANONICAL.get(rule.type)
        self._matches = matcher(rule.pattern) if rule.pattern else None
        self._allowed = {value.casefold(): value for value in rule.values}

    def check(self, value: Value) -> Value | Fault:
        """The normalized value, or its fault."""
        if self._rule.type == "list":
            return self._check_list(split_list(value) if isinstance(value, str) else value)
        if isinstance(value, list):
            return Fault(self.name, "too_many", {"count": len(value), "most": 1})
        return self._check_one(value)

    def _check_one(self, text: str) -> str | Fault:
        rule = self._rule
        if self._canonical is not None:
            return self._check_measure(text, self._canonical(text))
        if rule.type == "one_of":
            return self._check_choice(text)
        if rule.type == "url" and (reason := self._url_fault(text)):
            return Fault(self.name, f"url_{reason}", {"value": text})
        return self._check_text(text)

    def _check_measure(self, text: str, found: str | None) -> str | Fault:
        rule = self._rule
        if found is None:
            return Fault(self.name, invalid_code(rule.type, text), {"value": text})
        if is_under(rule.type, found, rule.least):
            return Fault(self.name, "too_small", {"value": found, "least": str(rule.least)})
        if is_over(rule.type, found, rule.most):
            return Fault(self.name, "too_large", {"value": found, "most": str(rule.most)})
        return found

    def _check_text(self, text: str) -> str | Fault:
        least, most = self._rule.length_least, self._rule.length_most
        if least is not None and len(text) < least:
            return Fault(self.name, "too_short", {"length": len(text), "least": least})
        if most is not None and len(text) > most:
            return Fault(self.name, "too_long", {"length": len(text), "most": most})
        return self._check_form(text)

    def _check_form(self, text: str) -> str | Fault:
        if self._matches is not None and not self._matches(text):
            form = self._rule.pattern or ""
            return Fault(self.name, "invalid_form", {"value": text, "form": form})
        return text

    def _check_choice(self, text: str) -> str | Fault:
        found = self._allowed.get(text.casefold())
        if found is None:
            allowed = ", ".join(self._rule.values)
            return Fault(self.name, "invalid_value", {"value": text, "allowed": allowed})
        return found

    def _check_list(self, entries: list[str]) -> Value | Fault:
        found: list[str] = []
        for entry in entries:
            checked = self._check_choice(entry) if self._allowed else self._check_form(entry)
            if isinstance(checked, Fault):
                return checked
            found.append(checked)
        fault = next(_count_faults(self.name, len(found), self._rule), None)
        return fault or found

    def _url_fault(self, text: str) -> str | None:
        """Why a link to a product page is invalid.

        No request is sent, so any address is allowed.
        """
        reason = refusal_reason(text, self._policy)
        return None if reason in ("forbidden_address", "port") else reason


def _count_faults(name: str, count: int, rule: FieldRule) -> Iterator[Fault]:
    if rule.required and count == 0:
        yield Fault(name, "missing")
    elif rule.length_least is not None and count < rule.length_least:
        yield Fault(name, "too_few", {"count": count, "least": rule.length_least})
    elif rule.length_most is not None and count > rule.length_most:
        yield Fault(name, "too_many", {"count": count, "most": rule.length_most})


FIELD_NAME_CHARACTERS_MAX: Final = 200
VALUES_MAX: Final = 1000
LENGTH_MAX: Final = 65_536
_HALVES: Final = re.compile("[\ud800-\udfff]")


def require_category(name: str) -> str:
    """Return the name of a category with normalized spaces. Raises: InvalidSchema."""
    plain = " ".join(name.split())
    if not plain or len(plain) > CATEGORY_CHARACTERS_MAX or not plain.isprintable():
        raise InvalidSchema(
            f"category {name[:40]!r} is not valid: use 1 to {CATEGORY_CHARACTERS_MAX} printable"
            " characters, as in the rows"
        )
    return plain


def parse_schema(data: Any) -> Schema:
    """The schema in decoded JSON or TOML. Raises: InvalidSchema."""
    try:
        schema = msgspec.convert(data, Schema)
    except msgspec.ValidationError:
        InvalidSchema.require_none(find_faults(data, Schema), "the schema is not valid")
        raise
    return require_schema(schema)


def require_schema(schema: Schema) -> Schema:
    """Return `schema` if it is valid. Raises: InvalidSchema, with every fault."""
    InvalidSchema.require_none(_faults(schema), "the schema is not valid", shown_max=3)
    return schema


def _faults(schema: Schema) -> Iterator[FieldProblem]:
    if schema == Schema():
        text = "the schema is empty: add fields, such as [fields.price] with required = true"
        yield FieldProblem("/fields", "missing", text)
    if len(schema.fields) > COLUMNS_MAX:
        yield FieldProblem("/fields", "too_many", f"more than {COLUMNS_MAX} fields")
    if not 1 <= len(schema.category_fields) <= 10 or not all(map(_is_name, schema.category_fields)):
        yield FieldProblem("/category_fields", "invalid", "expected 1 to 10 field names")
    for name, rule in schema.fields.items():
        # A name with a lone surrogate cannot be printed.
        pointer = f"/fields/{name[:40] if name.isprintable() else ascii(name[:40])[1:-1]}"
        if not _is_name(name) or name == "id":
            text = "expected a name of 1 to 200 printable characters other than `id`"
            yield FieldProblem(pointer, "invalid", text)
        elif name == "photos":
            yield from _photos_faults(rule, pointer)
        else:
            yield from _rule_faults(rule, pointer)


def _photos_faults(rule: FieldRule, pointer: str) -> Iterator[FieldProblem]:
    allowed = {"type": "text", "required": False, "length_least": None, "length_most": None}
    others = msgspec.structs.replace(rule, **allowed)
    if rule.type not in ("text", "list") or others != FieldRule():
        text = "photos accept only `required`, `length_least` and `length_most`"
        yield FieldProblem(pointer, "invalid", text)
    yield from _length_faults(rule, pointer)


def _rule_faults(rule: FieldRule, pointer: str) -> Iterator[FieldProblem]:
    yield from _bound_faults(rule, pointer)
    yield from _length_faults(rule, pointer)
    if (rule.length_least is not None or rule.length_most is not None) and rule.type not in (
        *("text", "url", "list"),
    ):
        text = f"a length limits text, url and list, not {rule.type}"
        yield FieldProblem(pointer, "invalid", text)
    if rule.pattern is not None:
        if rule.type not in ("text", "url", "list"):
            text = f"a pattern is for text, url and list, not {rule.type}"
            yield FieldProblem(f"{pointer}/pattern", "invalid", text)
        try:
            matcher(rule.pattern)
        except ValueError as error:
            text = f"{rule.pattern[:40]!r} is not an RE2 pattern: {error}"
            yield FieldProblem(f"{pointer}/pattern", "invalid", text)
    if (rule.type == "one_of" and not rule.values) or (
        rule.values and rule.type not in ("one_of", "list")
    ):
        text = "one_of needs `values`, list accepts them, other types do not"
        yield FieldProblem(f"{pointer}/values", "invalid", text)
    if _HALVES.search("".join(rule.values)):
        yield FieldProblem(f"{pointer}/values", "invalid", "a value has an incomplete character")
    if len(rule.values) > VALUES_MAX or any(len(v) > CATEGORY_CHARACTERS_MAX for v in rule.values):
        text = f"at most {VALUES_MAX} values of {CATEGORY_CHARACTERS_MAX} characters"
        yield FieldProblem(f"{pointer}/values", "too_many", text)


def _bound_faults(rule: FieldRule, pointer: str) -> Iterator[FieldProblem]:
    for name, bound in (("least", rule.least), ("most", rule.most)):
        if bound is not None and not is_bound(rule.type, bound):
            text = (
                f"{str(bound)[:40]!r} cannot limit a field of type {rule.type}: expected a number"
                f" for {', '.join(NUMBERS)}, or a day such as 2026-11-21 for date"
            )
            yield FieldProblem(f"{pointer}/{name}", "invalid", text)
            return
    if rule.least is not None and rule.most is not None and rule.least > rule.most:  # type: ignore[operator]
        yield FieldProblem(f"{pointer}/least", "invalid", "`least` is greater than `most`")


def _length_faults(rule: FieldRule, pointer: str) -> Iterator[FieldProblem]:
    least, most = rule.length_least, rule.length_most
    for name, bound in (("length_least", least), ("length_most", most)):
        if bound is not None and not 0 <= bound <= LENGTH_MAX:
            text = mismatch(f"a length from 0 to {LENGTH_MAX:,}", bound)
            yield FieldProblem(f"{pointer}/{name}", "invalid", text)
            return
    if least is not None and most is not None and least > most:
        text = f"`length_least` {least} is greater than `length_most` {most}"
        yield FieldProblem(f"{pointer}/length_least", "invalid", text)


def _is_name(name: str) -> bool:
    return 0 < len(name) <= FIELD_NAME_CHARACTERS_MAX and name.isprintable() and bool(name.strip())
