"""What a schema asks of rows, and what may be a schema."""

from __future__ import annotations

import time

import pytest

from headrace.fetch.errors import InvalidSchema
from headrace.fetch.field_types import matcher
from headrace.fetch.guard import Policy
from headrace.fetch.i18n import Texts, languages
from headrace.fetch.model import RowProblem
from headrace.fetch.readers import RawRow
from headrace.fetch.schemas import Schema, Schemas, parse_schema, require_category
from headrace.fetch.validation import Rules, validate_row


def judged(rule: dict, value):
    """(code, value in its form) of a field under one rule."""
    schemas = Schemas({"default": parse_schema({"fields": {"f": rule}})}, Policy())
    values = {"name": "A", "f": value} if value is not None else {"name": "A"}
    faults = schemas.validate(values, [])
    return faults[0].code if faults else None, values.get("f")


@pytest.mark.parametrize(
    ("rule", "value", "code", "form"),
    [
        ({}, "any text", None, "any text"),
        ({}, ["a", "b"], "too_many", ["a", "b"]),
        ({"required": True}, None, "missing", None),
        ({}, None, None, None),
        ({"length_least": 3}, "ab", "too_short", "ab"),
        ({"length_most": 3}, "abcd", "too_long", "abcd"),
        ({"length_most": 3}, "Это", None, "Это"),
        ({"pattern": "[A-Z]{3}"}, "ABC", None, "ABC"),
        ({"pattern": "[A-Z]{3}"}, "ABCD", "invalid_form", "ABCD"),
        ({"pattern": "a|b"}, "ab", "invalid_form", "ab"),
        ({"type": "integer"}, "1 000", None, "1000"),
        ({"type": "integer"}, "5.0", None, "5"),
        ({"type": "integer"}, "-7", None, "-7"),
        ({"type": "integer"}, "5.5", "invalid_integer", "5.5"),
        ({"type": "integer"}, "9" * 30, "invalid_integer", "9" * 30),
        ({"type": "number"}, "-1,50", None, "-1.50"),
        ({"type": "number"}, "1,234,567.5", None, "1234567.5"),
        ({"type": "number"}, "-1,500", "ambiguous_number", "-1,500"),
        ({"type": "number"}, "-1.500", None, "-1.500"),
        ({"type": "number"}, "1,2,3", "invalid_number", "1,2,3"),
        ({"type": "number"}, "NaN", "invalid_number", "NaN"),
        ({"type": "number"}, "٣", "invalid_number", "٣"),
        ({"type": "price"}, "1 990,50", None, "1990.50"),
        ({"type": "price"}, "007", None, "7"),
        ({"type": "price"}, "-5", "invalid_number", "-5"),
        ({"type": "price", "least": 1, "most": 9.5}, "9.5", None, "9.5"),
        ({"type": "price", "least": 1, "most": 9.5}, "9.51", "too_large", "9.51"),
        ({"type": "price", "least": 1}, "0.99", "too_small", "0.99"),
        ({"type": "boolean"}, "Yes", None, "true"),
        ({"type": "boolean"}, "нет", None, "false"),
        ({"type": "boolean"}, "maybe", "invalid_boolean", "maybe"),
        ({"type": "date"}, "2026-11-21", None, "2026-11-21"),
        ({"type": "date"}, "21.11.2026", None, "2026-11-21"),
        ({"type": "date"}, "2026-11-21 10:30", None, "2026-11-21T10:30:00"),
        ({"type": "date"}, "2026-11-21T10:30:00Z", None, "2026-11-21T10:30:00+00:00"),
        ({"type": "date"}, "2026-02-30", "invalid_date", "2026-02-30"),
        ({"type": "date"}, "20261121", "invalid_date", "20261121"),
        ({"type": "date", "least": "2026-01-01"}, "31.12.2025", "too_small", "31.12.2025"),
        ({"type": "date", "most": "2026-01-01"}, "2026-01-01T23:59", None, "2026-01-01T23:59:00"),
        ({"type": "url"}, "https://shop.example/1", None, "https://shop.example/1"),
        ({"type": "url"}, "http://10.0.0.1/intranet", None, "http://10.0.0.1/intranet"),
        ({"type": "url"}, "ftp://x/1", "url_scheme", "ftp://x/1"),
        ({"type": "one_of", "values": ["New", "used"]}, "new", None, "New"),
        ({"type": "one_of", "values": ["New", "used"]}, "old", "invalid_value", "old"),
        ({"type": "list"}, "a| b;c\nd", None, ["a", "b", "c", "d"]),
        ({"type": "list", "length_most": 2}, ["a", "b", "c"], "too_many", ["a", "b", "c"]),
        ({"type": "list", "length_least": 2}, "a", "too_few", "a"),
        ({"type": "list", "values": ["S", "M"]}, ["s", "m"], None, ["S", "M"]),
        ({"type": "list", "values": ["S", "M"]}, ["s", "x"], "invalid_value", ["s", "x"]),
        ({"type": "list", "pattern": "[a-z]+"}, ["a", "1"], "invalid_form", ["a", "1"]),
        ({"type": "list", "required": True}, "|", "missing", "|"),
    ],
)
def test_a_field_is_judged_and_brought_to_its_form(rule, value, code, form):
    assert judged(rule, value) == (code, form)


def row(values: dict, photos=()) -> RawRow:
    return RawRow(1, 2, {"id": "1", "name": "A", **values}, list(photos))


CARS = {
    "fields": {
        "vin": {"pattern": "[A-HJ-NPR-Z0-9]{17}", "required": True},
        "year": {"type": "integer", "least": 1900},
        "photos": {"required": True, "length_most": 2},
    }
}


def codes(rules: Rules, raw: RawRow) -> list[tuple[str, str]]:
    return [(fault.field, fault.code) for fault in validate_row(raw, rules)[1]]


def test_rows_are_judged_by_the_schema_of_their_category():
    rules = Rules(Policy(), {"Cars  For Sale": parse_schema(CARS)})
    for category in ("cars for sale", " CARS for  sale"):
        found = codes(rules, row({"category": category, "year": "1850"}))
        assert found == [("vin", "missing"), ("year", "too_small"), ("photos", "missing")]
    assert codes(rules, row({"category": "boats", "year": "1850"})) == []
    by_name = row({"category": "5", "category_name": "Cars for sale"})
    assert ("vin", "missing") in codes(rules, by_name)
    many = row({"category": "cars for sale", "vin": "1" * 17}, [f"http://a/{n}" for n in range(3)])
    assert codes(rules, many) == [("photos", "too_many")]


def test_other_categories_are_judged_by_the_default_schema():
    default = {"category_fields": ["kind"], "fields": {"brand": {"required": True}}}
    rules = Rules(Policy(), {"Default": parse_schema(default), "cars": parse_schema(CARS)})
    assert codes(rules, row({"category": "cars"})) == [("brand", "missing")]
    assert ("vin", "missing") in codes(rules, row({"kind": "cars"}))
    assert codes(rules, row({"kind": ["cars"], "brand": "x"})) == []


def test_what_always_holds_can_be_asked_otherwise():
    always = Rules(Policy())
    assert codes(always, RawRow(1, 1, {"id": "1", "price": "x", "url": "y"})) == [
        *(("name", "missing"), ("price", "invalid_number"), ("url", "url_scheme"))
    ]
    free = parse_schema({"fields": {"name": {}, "price": {}, "url": {}}})
    values = {"id": "1", "price": "ask", "url": "y"}
    assert codes(Rules(Policy(), {"default": free}), RawRow(1, 1, values)) == []


def test_others_may_be_dropped():
    schema = parse_schema({"others": "drop", "fields": {"size": {"type": "integer"}}})
    rules = Rules(Policy(), {"default": schema})
    found, faults = validate_row(row({"size": "1 0", "junk": "x", "category": "c"}), rules)
    assert (found.fields, faults) == (b'{"category":"c","name":"A","size":"10"}', [])


def test_the_digest_tells_rules_apart():
    plain, cars = Rules(Policy()), Rules(Policy(), {"cars": parse_schema(CARS)})
    opened = Rules(Policy.of(("10.0.0.0/8",), (80,)))
    assert len({plain.digest, cars.digest, opened.digest}) == 3
    assert Rules(Policy(), {"Cars": parse_schema(CARS)}).digest == cars.digest
    assert Rules(Policy()).digest == plain.digest


@pytest.mark.parametrize(
    "document",
    [
        {"fields": {"id": {}}},
        {"fields": {"": {}}},
        {"fields": {"a\n": {}}},
        {"fields": {"a": {"type": "uuid"}}},
        {"fields": {"a": {"typo": 1}}},
        {"fields": {"a": {"required": "yes"}}},
        {"fields": {"a": {"least": 5}}},
        {"fields": {"a": {"type": "integer", "least": "5"}}},
        {"fields": {"a": {"type": "number", "least": 5, "most": 4}}},
        {"fields": {"a": {"type": "number", "least": float("nan")}}},
        {"fields": {"a": {"type": "number", "most": float("inf")}}},
        {"fields": {"a": {"type": "date", "least": 5}}},
        {"fields": {"a": {"type": "date", "least": "01.01.2026"}}},
        {"fields": {"a": {"type": "date", "least": "2026-02-01", "most": "2026-01-01"}}},
        {"fields": {"a": {"length_least": -1}}},
        {"fields": {"a": {"length_least": 5, "length_most": 4}}},
        {"fields": {"a": {"type": "integer", "length_most": 4}}},
        {"fields": {"a": {"type": "date", "pattern": "x"}}},
        {"fields": {"a": {"pattern": "("}}},
        {"fields": {"a": {"pattern": "(?=a)"}}},
        {"fields": {"a": {"pattern": "(a)\\1"}}},
        {"fields": {"a": {"pattern": "((a{100}){100}){100}"}}},
        {"fields": {"a": {"pattern": "x" * 501}}},
        {"fields": {"a": {"pattern": "\ud800"}}},
        {"fields": {"a": {"type": "one_of"}}},
        {"fields": {"a": {"values": ["x"]}}},
        {"fields": {"a": {"type": "list", "values": ["x" * 300]}}},
        {"fields": {"photos": {"pattern": "x"}}},
        {"fields": {"photos": {"type": "integer"}}},
        {"fields": {f"f{n}": {} for n in range(501)}},
        {"category_fields": []},
        {"others": "refuse"},
        [],
        "schema",
    ],
)
def test_a_schema_that_cannot_be_meant_is_refused(document):
    with pytest.raises(InvalidSchema, match="schema is not valid"):
        parse_schema(document)


def test_every_fault_of_a_schema_is_told():
    with pytest.raises(InvalidSchema) as refused:
        parse_schema({"fields": {"a": {"pattern": "("}, "b": {"type": "one_of"}, "id": {}}})
    assert [problem.pointer for problem in refused.value.problems] == [
        *("/fields/a/pattern", "/fields/b/values", "/fields/id")
    ]


@pytest.mark.parametrize("name", ["", "  ", "x" * 201, "a\x00", "\ud800"])
def test_a_category_that_no_row_could_have_is_refused(name):
    with pytest.raises(InvalidSchema, match="is not valid"):
        require_category(name)


def test_a_pattern_takes_time_in_proportion_to_the_text():
    matches = matcher("(a+)+(a|aa)+b")
    used_s = time.process_time()
    assert not matches("a" * 65_000)
    assert time.process_time() - used_s < 10, "half a second of this process, or for ever"


def test_every_fault_of_a_schema_has_a_sentence_in_every_language():
    rules = {
        "a": ({"required": True}, None),
        "b": ({"length_most": 1}, "xx"),
        "c": ({"length_least": 2}, "x"),
        "d": ({"pattern": "y"}, "x"),
        "e": ({"type": "integer", "least": 5}, "1"),
        "f": ({"type": "integer", "most": 5}, "9"),
        "g": ({"type": "integer"}, "x"),
        "h": ({"type": "number"}, "x"),
        "i": ({"type": "boolean"}, "x"),
        "j": ({"type": "date"}, "x"),
        "k": ({"type": "one_of", "values": ["y"]}, "x"),
        "l": ({"type": "list", "length_most": 1}, "x|y"),
        "m": ({"type": "list", "length_least": 2}, "x"),
        "n": ({"type": "url"}, "ftp://x"),
    }
    schema = parse_schema({"fields": {name: rule for name, (rule, _) in rules.items()}})
    values = {name: value for name, (_, value) in rules.items() if value is not None}
    _, faults = validate_row(row(values), Rules(Policy(), {"default": schema}))
    assert {fault.field for fault in faults} == set(rules)
    for lang in languages():
        texts = Texts.load(lang)
        for fault in faults:
            problem = RowProblem(
                row=1, line=1, item="1", field=fault.field, code=fault.code, values=fault.values
            )
            sentence = texts.of_row(problem)
            assert fault.field in sentence
            assert "{" not in sentence
            assert not sentence.endswith(f": {fault.code}"), "it has no sentence of its own"


def test_a_schema_that_asks_nothing_is_refused_as_an_empty_file():
    for data in ({}, {"fields": {}}):
        with pytest.raises(InvalidSchema, match="the schema is empty"):
            parse_schema(data)
    for data in ({"others": "drop"}, {"category_fields": ["kind"]}):
        assert not parse_schema(data).fields


@pytest.mark.parametrize(
    "data",
    [
        {"fields": {"\ud800": {}}},
        {"fields": {"a": {"type": "one_of", "values": ["\ud800"]}}},
        {"fields": {"a": {"pattern": "\ud800"}}},
        {"category_fields": ["\ud800"]},
    ],
)
def test_half_a_letter_is_refused_in_words_that_can_be_printed(data):
    with pytest.raises(InvalidSchema) as refused:
        parse_schema(data)
    assert refused.value.text.encode()
    assert all(problem.pointer.encode() for problem in refused.value.problems)


def test_an_empty_schema_asks_what_always_holds():
    assert Schemas({"default": Schema()}, Policy()).validate({"name": "A"}, []) == []
