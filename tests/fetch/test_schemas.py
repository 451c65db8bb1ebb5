"""What a schema requires of rows, and which schemas are valid."""

from __future__ import annotations

import re
import time
import tomllib
from pathlib import Path

import pytest

from headrace.fetch.errors import InvalidSchema
from headrace.fetch.field_types import matcher
from headrace.fetch.guard import Policy
from headrace.fetch.i18n import Texts, languages
from headrace.fetch.model import RowProblem
from headrace.fetch.readers import RawRow
from headrace.fetch.schemas import Schema, Schemas, parse_schema, require_category
from headrace.fetch.validation import Rules, validate_row

FIELDS = tomllib.loads(Path(__file__).with_name("fields.toml").read_text())
CARS = {
    "fields": {
        "vin": {"pattern": "[A-HJ-NPR-Z0-9]{17}", "required": True},
        "year": {"type": "integer", "least": 1900},
        "photos": {"required": True, "length_most": 2},
    }
}


@pytest.mark.parametrize(("rule", "value", "code", "form"), FIELDS["rules"])
def test_a_field_is_judged_and_normalized(rule, value, code, form):
    schemas = Schemas({"default": parse_schema({"fields": {"f": rule}})}, Policy())
    values = {"name": "A"} if value == "<none>" else {"name": "A", "f": value}
    faults = schemas.validate(values, [])
    found = (faults[0].code if faults else "", values.get("f", "<none>"))
    assert found == (code, form)


def row(values: dict, photos=()) -> RawRow:
    return RawRow(1, 2, {"id": "1", "name": "A", **values}, list(photos))


def codes(schemas: dict, raw: RawRow) -> list[tuple[str, str]]:
    rules = Rules(Policy(), {name: parse_schema(schema) for name, schema in schemas.items()})
    return [(fault.field, fault.code) for fault in validate_row(raw, rules)[1]]


def test_rows_are_judged_by_the_schema_of_their_category_or_the_default():
    cars = {"Cars  For Sale": CARS}
    missing = [("vin", "missing"), ("year", "too_small"), ("photos", "missing")]
    for category in ("cars for sale", " CARS for  sale"):
        assert codes(cars, row({"category": category, "year": "1850"})) == missing
    assert codes(cars, row({"category": "boats", "year": "1850"})) == []
    by_name = row({"category": "5", "category_name": "Cars for sale"})
    assert ("vin", "missing") in codes(cars, by_name)
    photos = [f"http://a/{n}" for n in range(3)]
    many = row({"category": "cars for sale", "vin": "1" * 17}, photos)
    assert codes(cars, many) == [("photos", "too_many")]
    default = {"category_fields": ["kind"], "fields": {"brand": {"required": True}}}
    both = {"Default": default, "cars": CARS}
    assert codes(both, row({"category": "cars"})) == [("brand", "missing")]
    assert ("vin", "missing") in codes(both, row({"kind": "cars"}))
    assert codes(both, row({"kind": ["cars"], "brand": "x"})) == []


def test_the_built_in_rules_can_be_replaced():
    raw = RawRow(1, 1, {"id": "1", "price": "x", "url": "y"})
    built_in = [("name", "missing"), ("price", "invalid_number"), ("url", "url_scheme")]
    assert codes({}, raw) == built_in
    assert codes({"default": {"fields": {"name": {}, "price": {}, "url": {}}}}, raw) == []
    assert Schemas({"default": Schema()}, Policy()).validate({"name": "A"}, []) == []
    schema = parse_schema({"others": "drop", "fields": {"size": {"type": "integer"}}})
    rules = Rules(Policy(), {"default": schema})
    found, faults = validate_row(row({"size": "1 0", "junk": "x", "category": "c"}), rules)
    assert (found.fields, faults) == (b'{"category":"c","name":"A","size":"10"}', [])


def test_the_digest_differs_between_rules():
    plain, cars = Rules(Policy()), Rules(Policy(), {"cars": parse_schema(CARS)})
    opened = Rules(Policy.of(("10.0.0.0/8",), (80,)))
    assert len({plain.digest, cars.digest, opened.digest}) == 3
    assert Rules(Policy(), {"Cars": parse_schema(CARS)}).digest == cars.digest
    assert Rules(Policy()).digest == plain.digest


NOT_IN_TOML = [
    *([], "schema", {}, {"fields": {}}, {"fields": {f"f{n}": {} for n in range(501)}}),
    {"fields": {"a": {"type": "number", "least": float("nan")}}},
    {"fields": {"a": {"type": "number", "most": float("inf")}}},
    {"fields": {"a": {"pattern": "x" * 501}}},
    {"fields": {"a": {"type": "list", "values": ["x" * 300]}}},
    {"fields": {"\ud800": {}}},
    {"fields": {"a": {"type": "one_of", "values": ["\ud800"]}}},
    {"fields": {"a": {"pattern": "\ud800"}}},
    {"category_fields": ["\ud800"]},
]


@pytest.mark.parametrize("document", FIELDS["bad_schemas"] + NOT_IN_TOML)
def test_an_invalid_schema_is_refused_in_words_that_can_be_printed(document):
    with pytest.raises(InvalidSchema, match=r"schema is (not valid|empty)") as refused:
        parse_schema(document)
    assert refused.value.text.encode()
    assert all(f"{one.pointer} {one.text}".encode() for one in refused.value.problems)


def test_every_fault_of_a_schema_is_reported_and_an_empty_one_may_have_options():
    with pytest.raises(InvalidSchema) as refused:
        parse_schema({"fields": {"a": {"pattern": "("}, "b": {"type": "one_of"}, "id": {}}})
    pointers = [problem.pointer for problem in refused.value.problems]
    assert pointers == ["/fields/a/pattern", "/fields/b/values", "/fields/id"]
    with pytest.raises(InvalidSchema, match=r"/fields/a/type: expected one of .*, got 'money'"):
        parse_schema({"fields": {"a": {"type": "money"}}})
    with pytest.raises(InvalidSchema, match=r"/fields/a/length_most: .* to 65,536, got -4"):
        parse_schema({"fields": {"a": {"length_most": -4}}})
    for data in ({"others": "drop"}, {"category_fields": ["kind"]}):
        assert not parse_schema(data).fields
    for name in ("", "  ", "x" * 201, "a\x00", "\ud800"):
        with pytest.raises(InvalidSchema, match="is not valid"):
            require_category(name)


def test_a_pattern_takes_time_in_proportion_to_the_text():
    matches = matcher("(a+)+(a|aa)+b")
    used_s = time.process_time()
    assert not matches("a" * 65_000)
    assert time.process_time() - used_s < 10, "half a second of this process, or for ever"


def test_every_fault_of_a_rule_has_a_sentence_in_every_language():
    seen = set()
    for rule, value, code, _ in FIELDS["rules"]:
        if not code or code in seen:
            continue
        seen.add(code)
        rules = Rules(Policy(), {"default": parse_schema({"fields": {"f": rule}})})
        _, [fault] = validate_row(row({} if value == "<none>" else {"f": value}), rules)
        problem = RowProblem(row=1, line=1, item="1", field="f", code=code, values=fault.values)
        for lang in languages():
            sentence = Texts.load(lang).of_row(problem)
            assert "f" in sentence.split(), sentence
            assert not re.search(r"\{[a-z]", sentence), "each value is filled in"
            assert not sentence.endswith(f": {code}"), "it has its own sentence"
    assert len(seen) >= 14
