"""Rows on their way in.

What no row may hold, how prices and photos are taken, and what faults say.
"""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.fetch.errors import UrlRefused
from headrace.fetch.guard import Policy, judge_url, refusal_reason
from headrace.fetch.readers import Fault, RawRow, Truncated
from headrace.fetch.validation import Rules, read_chunk, validate_row

RULES = Rules(Policy())


def judge(values: dict, photos=()):
    """(row, faults) of a row of these values."""
    raw = RawRow(3, 7, {"id": "1", "name": "A", **values}, list(photos))
    return validate_row(raw, RULES)


@pytest.mark.parametrize(
    ("values", "field", "code"),
    [
        ({"id": ""}, "id", "missing"),
        ({"id": "a\u200bb"}, "id", "invalid_id"),
        ({"id": "x" * 201}, "id", "invalid_id"),
        ({"id": "\ud800"}, "id", "invalid_id"),
        ({"name": ""}, "name", "missing"),
        ({"name": "x" * 1001}, "name", "too_long"),
        ({"text": "a\x00b"}, "text", "invalid_text"),
        ({"text": "\udfff"}, "text", "invalid_text"),
        ({"text": ["a", "\ud800"]}, "text", "invalid_text"),
        ({"te\x00xt": "a"}, "te\N{REPLACEMENT CHARACTER}xt", "invalid_text"),
        ({"te\ud800xt": "a"}, "te\N{REPLACEMENT CHARACTER}xt", "invalid_text"),
        ({"x" * 201: "a"}, "x" * 200, "field_name"),
        ({"text": "x" * 65_537}, "text", "field_too_large"),
        ({"text": ["x" * 1000] * 66}, "text", "field_too_large"),
        ({f"f{n}": "x" * 60_000 for n in range(5)}, "row", "row_too_large"),
        ({f"f{n}": "x" for n in range(500)}, "row", "too_many_fields"),
        ({"price": "five"}, "price", "invalid_number"),
        ({"price": "5 EUR or 6 USD"}, "price", "invalid_number"),
        ({"url": "http://user:pass@x/"}, "url", "url_userinfo"),
    ],
)
def test_a_fault_has_its_field_and_code_and_can_be_kept(values, field, code):
    raw = RawRow(3, 7, {"id": "1", "name": "A", **values})
    if not values.get("name", "A"):
        del raw.values["name"]
    chunk = read_chunk(iter([raw]), RULES)
    problem = chunk.problems[0]
    assert (problem.row, problem.line, problem.field, problem.code) == (3, 7, field, code)
    assert b"\\u0000" not in msgspec.json.encode(problem)
    assert not any(row.hash for row in chunk.rows)


@pytest.mark.parametrize(
    ("price", "kept"),
    [
        ("1990.50", {"price": "1990.50"}),
        ("19.90 EUR", {"price": "19.90", "currency": "EUR"}),
        ("USD 1,299.00", {"price": "1299.00", "currency": "USD"}),
        ("1 990 RUB", {"price": "1990", "currency": "RUB"}),
    ],
)
def test_a_price_may_say_its_currency(price, kept):
    row, faults = judge({"price": price})
    assert (msgspec.json.decode(row.fields), faults) == ({"name": "A", **kept}, [])


def test_a_currency_of_its_own_counts():
    row, _ = judge({"price": "5 EUR", "currency": "CHF"})
    assert msgspec.json.decode(row.fields) == {"name": "A", "price": "5", "currency": "CHF"}


def test_photos_keep_their_order_and_each_counts_once():
    links = ["http://a.example/2", "http://a.example/1", "http://a.example/2", "ftp://a/3"]
    row, faults = judge({}, links)
    assert row.photos == ["http://a.example/2", "http://a.example/1", "ftp://a/3"]
    assert row.refused == {"ftp://a/3": "scheme"}
    assert faults == [Fault("photos[2]", "scheme", {"value": "ftp://a/3"})]
    assert row.hash, "a bad link does not spoil its row"


@pytest.mark.parametrize("link", ["http://a/\ud800", "http://a/\x00", "http://a/" + "x" * 3000])
def test_a_link_that_cannot_be_kept_is_left_out(link):
    row, faults = judge({}, ["http://a.example/1", link])
    assert row.photos == ["http://a.example/1"]
    assert [fault.field for fault in faults] == ["photos[1]"]
    assert row.refused == {}


def test_a_row_that_could_not_be_read_keeps_its_item():
    fault = Fault("row", "column_count", {"count": 2, "most": 3})
    row, faults = validate_row(RawRow(1, 2, {"id": "a"}, fault=fault), RULES)
    assert (row.item, row.hash, faults) == ("a", None, [fault])
    assert validate_row(RawRow(1, 2, {}, fault=fault), RULES) == (None, [fault])


def test_equal_rows_have_equal_hashes_whatever_the_order_of_their_fields():
    one, _ = judge({"a": "1", "b": ["2", "3"]}, ["http://a/1"])
    same, _ = judge({"b": ["2", "3"], "a": "1"}, ["http://a/1"])
    other, _ = judge({"a": "1", "b": ["3", "2"]}, ["http://a/1"])
    photos, _ = judge({"a": "1", "b": ["2", "3"]}, ["http://a/2"])
    assert one.hash == same.hash
    assert len({one.hash, other.hash, photos.hash}) == 3


def test_a_truncated_file_ends_a_chunk_with_what_came_before():
    def rows():
        yield RawRow(1, 1, {"id": "1", "name": "A"})
        raise Truncated("line 2: cut")

    chunk = read_chunk(rows(), RULES)
    assert (len(chunk.rows), chunk.is_last, chunk.truncated) == (1, True, "line 2: cut")


POLICIES = st.sampled_from([Policy(), Policy.of(("127.0.0.0/8",), (80, 8080))])
HOSTS = st.sampled_from(
    [
        *(
            "shop.example",
            "SHOP.example.",
            "a..b",
            "-a",
            "127.0.0.1",
            "127.1",
            "0x7f.1",
            "2130706433",
        ),
        *(
            "localhost",
            "a.localhost",
            "8.8.8.8",
            "x" * 64,
            ".".join("a" * 130),
            "shop.example:8080",
            "",
        ),
        *(
            "shop.example:81",
            "[::1]",
            "user@shop.example",
            "лампа.example",
            "\uff11\uff12\uff17.0.0.1",
            "a_b.example",
        ),
    ]
)
PATHS = st.text(st.sampled_from("aZ0/?&=%:@!$'()*+,;[]~-._|#\\ \"<>{}\u00e9\n"), max_size=12)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(
    scheme=st.sampled_from(["http://", "https://", "HTTP://", "ftp://", "http:/", "//"]),
    host=HOSTS,
    path=PATHS.map(lambda path: f"/{path}") | st.just("") | st.just("/" + "x" * 2100),
    policy=POLICIES,
)
@example(scheme="http://", host="shop.example", path="/" + "x" * 1880, policy=Policy())
def test_the_door_says_what_the_guard_says(*, scheme, host, path, policy):
    link = scheme + host + path
    try:
        judge_url(link, policy)
    except UrlRefused as error:
        expected = error.reason
    else:
        expected = None
    assert [refusal_reason(link, policy) for _ in range(2)] == [expected, expected]
