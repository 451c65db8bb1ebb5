"""X"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final, Literal, TypeAlias

import msgspec

from headrace.fetch.door import refusal
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
from headrace.fetch.guard import Policy
from headrace.fetch.model import COLUMNS_MAX
from headrace.fetch.readers import Fault, Value
from headrace.kernel.errors import FieldProblem

DEFAULT: Final = "default"
NAME_CHARACTERS_MAX: Final = 1000
CATEGORY_CHARACTERS_MAX: Final = 200
Bound: TypeAlias = int | float | str | None


class FieldRule(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """What one field must hold. `least` and `most` bound numbers and dates, `length_...` count the
    characters of a text or the entries of a list; `values` are those allowed in a one_of or a list."""

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
    """The fields of a category. `category_fields`, of the default schema, are those that say a row's
    category: the first whose value has a schema counts."""

    fields: dict[str, FieldRule] = msgspec.field(default_factory=dict)
    others: Literal["keep", "drop"] = "keep"
    category_fields: tuple[str, ...] = ("category", "category_name")


class CategorySchema(msgspec.Struct, frozen=True, kw_only=True):
    """A schema and whose it is."""

    category: str
    schema: Schema
    updated_at: datetime


ALWAYS: Final = {
    "name": FieldRule(required=True, length_most=NAME_CHARACTERS_MAX),
    "price": FieldRule(type="price"),
    "url": FieldRule(type="url"),
}
"""What holds of a field that a schema says nothing about."""


def plain_category(name: str) -> str:
    """A category in the form that categories are compared in."""
    return " ".join(name.split()).casefold()


class Schemas:
    """Every schema, ready to judge rows."""

    def __init__(self, schemas: Mapping[str, Schema], policy: Policy) -> None:
        plain = {plain_category(category): schema for category, schema in schemas.items()}
        default = plain.get(DEFAULT, Schema())
        self._category_fields = default.category_fields
        self._default = _Judge(default, policy)
        self._judges = {category: _Judge(schema, policy) for category, schema in plain.items()}
        encoded = msgspec.json.encode(sorted(plain.items()), order="sorted")
        self.digest = hashlib.sha256(encoded).digest()
        """Of all that judging depends on beside the policy."""

    def judge(self, values: dict[str, Value], photos: list[str]) -> list[Fault]:
        """What is wrong with a row; its `values` are brought to their forms."""
        return list(self._judge_of(values).judge(values, photos))

    def _judge_of(self, values: dict[str, Value]) -> _Judge:
        if len(self._judges) > 1 or DEFAULT not in self._judges:
            for name in self._category_fields:
                value = values.get(name)
                judge = isinstance(value, str) and self._judges.get(plain_category(value))
                if judge:
                    return judge
        return self._default


class _Judge:
    """One schema, compiled."""

    def __init__(self, schema: Schema, policy: Policy) -> None:
        self._policy = policy
        rules = {**ALWAYS, **schema.fields}
        self._photos = rules.pop("photos", None)
        self._rules = [_Rule(name, rule, policy) for name, rule in rules.items()]
        self._kept = None if schema.others == "keep" else {*rules, *schema.category_fields}

    def judge(self, values: dict[str, Value], photos: list[str]) -> Iterator[Fault]:
        for rule in self._rules:
            value = values.get(rule.name)
            if value is not None:
                found = rule.judge(value)
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


class _Rule:
    """A rule of one field, compiled."""

    def __init__(self, name: str, rule: FieldRule, policy: Policy) -> None:
        self.name = name
        self.is_required = rule.required
        self._rule = rule
        self._policy = policy
        self._canonical: Callable[[str], str | None] | None = CANONICAL.get(rule.type)
        self._matches = matcher(rule.pattern) if rule.pattern else None
        self._allowed = {value.casefold(): value for value in rule.values}

    def judge(self, value: Value) -> Value | Fault:
        """The value in its form, or what is wrong with it."""
        if self._rule.type == "list":
            return self._judge_list(split_list(value) if isinstance(value, str) else value)
        if isinstance(value, list):
            return Fault(self.name, "too_many", {"count": len(value), "most": 1})
        return self._judge_one(value)

    def _judge_one(self, text: str) -> str | Fault:
        rule = self._rule
        if self._canonical is not None:
            return self._judge_measure(text, self._canonical(text))
        if rule.type == "one_of":
            return self._judge_choice(text)
        if rule.type == "url" and (reason := self._url_fault(text)):
            return Fault(self.name, f"url_{reason}", {"value": text})
        return self._judge_text(text)

    def _judge_measure(self, text: str, found: str | None) -> str | Fault:
        rule = self._rule
        if found is None:
            return Fault(self.name, invalid_code(rule.type, text), {"value": text})
        if is_under(rule.type, found, rule.least):
            return Fault(self.name, "too_small", {"value": found, "least": str(rule.least)})
        if is_over(rule.type, found, rule.most):
            return Fault(self.name, "too_large", {"value": found, "most": str(rule.most)})
        return found

    def _judge_text(self, text: str) -> str | Fault:
        least, most = self._rule.length_least, self._rule.length_most
        if least is not None and len(text) < least:
            return Fault(self.name, "too_short", {"length": len(text), "least": least})
        if most is not None and len(text) > most:
            return Fault(self.name, "too_long", {"length": len(text), "most": most})
        return self._judge_form(text)

    def _judge_form(self, text: str) -> str | Fault:
        if self._matches is not None and not self._matches(text):
            form = self._rule.pattern or ""
            return Fault(self.name, "invalid_form", {"value": text, "form": form})
        return text

    def _judge_choice(self, text: str) -> str | Fault:
        found = self._allowed.get(text.casefold())
        if found is None:
            allowed = ", ".join(self._rule.values)
            return Fault(self.name, "invalid_value", {"value": text, "allowed": allowed})
        return found

    def _judge_list(self, entries: list[str]) -> Value | Fault:
        found: list[str] = []
        for entry in entries:
            judged = self._judge_choice(entry) if self._allowed else self._judge_form(entry)
            if isinstance(judged, Fault):
                return judged
            found.append(judged)
        fault = next(_count_faults(self.name, len(found), self._rule), None)
        return fault or found

    def _url_fault(self, text: str) -> str | None:
        """Why the link to an item's page cannot be one; where it leads does not matter, it is not asked."""
        reason = refusal(text, self._policy)
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
    """The name of a category in one spelling of its spaces. Raises: InvalidSchema."""
    plain = " ".join(name.split())
    if not plain or len(plain) > CATEGORY_CHARACTERS_MAX or not plain.isprintable():
        raise InvalidSchema(
            f"category {name[:40]!r} cannot be one: use 1 to {CATEGORY_CHARACTERS_MAX} printed characters,"
            " as the rows write it"
        )
    return plain


def parse_schema(data: Any) -> Schema:
    """The schema that decoded JSON or TOML describes. Raises: InvalidSchema."""
    try:
        schema = msgspec.convert(data, Schema)
    except msgspec.ValidationError as error:
        text = str(error).replace("`", "")
        raise InvalidSchema(f"the schema is not valid: {text[:1].lower()}{text[1:]}") from None
    return require_schema(schema)


def require_schema(schema: Schema) -> Schema:
    """`schema`, if it can be meant. Raises: InvalidSchema, with every fault."""
    problems = tuple(_faults(schema))
    if problems:
        said = "; ".join(f"{p.pointer}: {p.text}" for p in problems[:3])
        raise InvalidSchema(f"the schema is not valid: {said}", problems=problems)
    return schema


def _faults(schema: Schema) -> Iterator[FieldProblem]:
    if schema == Schema():
        text = "nothing is asked: name the fields, such as [fields.price] with required = true"
        yield FieldProblem("/fields", "missing", text)
    if len(schema.fields) > COLUMNS_MAX:
        yield FieldProblem("/fields", "too_many", f"more than {COLUMNS_MAX} fields")
    if not 1 <= len(schema.category_fields) <= 10 or not all(map(_is_name, schema.category_fields)):
        yield FieldProblem("/category_fields", "invalid", "expected 1 to 10 names of fields")
    for name, rule in schema.fields.items():
        # Half a letter cannot even be printed.
        pointer = f"/fields/{name[:40] if name.isprintable() else ascii(name[:40])[1:-1]}"
        if not _is_name(name) or name == "id":
            text = "expected a name of 1 to 200 printed characters; the id has a rule of its own"
            yield FieldProblem(pointer, "invalid", text)
        elif name == "photos":
            yield from _photos_faults(rule, pointer)
        else:
            yield from _rule_faults(rule, pointer)


def _photos_faults(rule: FieldRule, pointer: str) -> Iterator[FieldProblem]:
    told = {"type": "text", "required": False, "length_least": None, "length_most": None}
    plain = msgspec.structs.replace(rule, **told)
    if rule.type not in ("text", "list") or plain != FieldRule():
        text = "of photos only `required`, `length_least` and `length_most` can be asked"
        yield FieldProblem(pointer, "invalid", text)
    yield from _length_faults(rule, pointer)


def _rule_faults(rule: FieldRule, pointer: str) -> Iterator[FieldProblem]:
    yield from _bound_faults(rule, pointer)
    yield from _length_faults(rule, pointer)
    if (rule.length_least is not None or rule.length_most is not None) and rule.type not in (
        *("text", "url", "list"),
    ):
        text = f"a length bounds text, url and list, not {rule.type}"
        yield FieldProblem(pointer, "invalid", text)
    if rule.pattern is not None:
        if rule.type not in ("text", "url", "list"):
            text = f"a pattern is for text, url and list, not {rule.type}"
            yield FieldProblem(f"{pointer}/pattern", "invalid", text)
        try:
            matcher(rule.pattern)
        except ValueError as error:
            text = f"{rule.pattern[:40]!r} is no pattern of RE2: {error}"
            yield FieldProblem(f"{pointer}/pattern", "invalid", text)
    if (rule.type == "one_of" and not rule.values) or (
        rule.values and rule.type not in ("one_of", "list")
    ):
        text = "`values` belong to one_of, which needs them, and to list"
        yield FieldProblem(f"{pointer}/values", "invalid", text)
    if _HALVES.search("".join(rule.values)):
        yield FieldProblem(f"{pointer}/values", "invalid", "a value holds half a letter")
    if len(rule.values) > VALUES_MAX or any(len(v) > CATEGORY_CHARACTERS_MAX for v in rule.values):
        text = f"at most {VALUES_MAX} values of {CATEGORY_CHARACTERS_MAX} characters"
        yield FieldProblem(f"{pointer}/values", "too_many", text)


def _bound_faults(rule: FieldRule, pointer: str) -> Iterator[FieldProblem]:
    for name, bound in (("least", rule.least), ("most", rule.most)):
        if bound is not None and not is_bound(rule.type, bound):
            text = f"{str(bound)[:40]!r} bounds no {rule.type}: expected a number for {', '.join(NUMBERS)},"
            yield FieldProblem(f"{pointer}/{name}", "invalid", f"{text} or a day as 2026-11-21")
            return
    if rule.least is not None and rule.most is not None and rule.least > rule.most:  # type: ignore[operator]
        yield FieldProblem(f"{pointer}/least", "invalid", "`least` is over `most`")


def _length_faults(rule: FieldRule, pointer: str) -> Iterator[FieldProblem]:
    least, most = rule.length_least, rule.length_most
    for bound in (least, most):
        if bound is not None and not 0 <= bound <= LENGTH_MAX:
            text = f"a length is 0 to {LENGTH_MAX:,}"
            yield FieldProblem(f"{pointer}/length_least", "invalid", text)
            return
    if least is not None and most is not None and least > most:
        text = "`length_least` is over `length_most`"
        yield FieldProblem(f"{pointer}/length_least", "invalid", text)


def _is_name(name: str) -> bool:
    return 0 < len(name) <= FIELD_NAME_CHARACTERS_MAX and name.isprintable() and bool(name.strip())
