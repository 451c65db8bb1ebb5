"""What may be a schema: every fault of one that was written by hand, told at once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from headrace.fetch.errors import InvalidSchema
from headrace.fetch.kinds import NUMBERS, is_bound, matcher
from headrace.fetch.model import COLUMNS_MAX
from headrace.fetch.schemas import CATEGORY_CHARACTERS_MAX, FieldRule, Schema
from headrace.kernel.errors import FieldProblem

NAME_CHARACTERS_MAX: Final = 200
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
    return 0 < len(name) <= NAME_CHARACTERS_MAX and name.isprintable() and bool(name.strip())
