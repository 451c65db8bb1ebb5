"""Named SQL: compilation of parameters, refusal of blocks without a purpose."""

from __future__ import annotations

import pytest

from headrace.engines.sql import compile_query, parse_queries


def test_parameters_are_numbered_in_order_of_first_use():
    query = compile_query("q", "-- Take some.\nSELECT :b, :a, :b WHERE x = ANY(:ids::bigint[])")
    assert query.text == "SELECT $1, $2, $1 WHERE x = ANY($3::bigint[])"
    assert query.parameters == ("b", "a", "ids")
    assert query.arguments({"a": 1, "b": 2, "ids": []}) == [2, 1, []]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT 'a :b ''quoted'' :c'",
        "SELECT x::text",
        "SELECT 1 -- not :this",
        "SELECT arr[2:3]",
        "f(a := 1)",
    ],
)
def test_what_only_looks_like_a_parameter_is_left_alone(sql):
    query = compile_query("q", f"-- Purpose.\n{sql}")
    assert query.text == sql
    assert query.parameters == ()


def test_a_block_without_a_purpose_is_refused():
    with pytest.raises(AssertionError, match="no line of purpose"):
        compile_query("q", "SELECT 1")


def test_a_wrong_argument_is_an_assertion_error():
    query = compile_query("q", "-- Purpose.\nSELECT :a")
    with pytest.raises(AssertionError, match=r"takes \['a'\], got \['b'\]"):
        query.arguments({"b": 1})


def test_a_file_gives_its_blocks():
    first = "-- name: one\n-- First.\nSELECT 1;\n\n"
    text = first + "-- name: two\n-- Second,\n-- in two lines.\nSELECT 2\n"
    one, two = parse_queries(text)
    assert (one.name, one.text, two.purpose) == ("one", "SELECT 1", "Second, in two lines.")
