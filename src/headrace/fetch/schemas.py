"""Schemas: what a row of a category must hold, as data, and the judge of rows by them.

    [fields.price]    type = "price", required = true, least = 1
    [fields.state]    type = "one_of", values = ["new", "used"]
    [fields.vin]      pattern = "[A-HJ-NPR-Z0-9]{17}"
    [fields.photos]   required = true, length_most = 10

A row is judged by the schema of its category, else by the one named `default`, else by what always holds
(a name, a price that is a number, a page that is a link); a schema may say otherwise for each of these. What
a field holds is brought to one form: numbers as `1990.50`, dates as `2026-11-21`, truth as `true`.

Patterns are of RE2, which takes time in proportion to the text whatever the pattern: with a backtracking
engine `(a+)+b` and a text of 30 letters stop a process for minutes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Final, Literal, TypeAlias

import msgspec

from headrace.fetch.guard import Policy, refusal_reason
from headrace.fetch.kinds import (
    CANONICAL,
    Kind,
    invalid_code,
    is_over,
    is_under,
    matcher,
    split_list,
)
from headrace.fetch.readers import Fault, Value

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
        reason = refusal_reason(text, self._policy)
        return None if reason in ("forbidden_address", "port") else reason


def _count_faults(name: str, count: int, rule: FieldRule) -> Iterator[Fault]:
    if rule.required and count == 0:
        yield Fault(name, "missing")
    elif rule.length_least is not None and count < rule.length_least:
        yield Fault(name, "too_few", {"count": count, "least": rule.length_least})
    elif rule.length_most is not None and count > rule.length_most:
        yield Fault(name, "too_many", {"count": count, "most": rule.length_most})
