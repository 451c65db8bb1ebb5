"""Ranges and conditions against an oracle and a table of exact answers."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.media.model import Shape
from headrace.media.ranges import Decision, decide, format_http_date, parse_http_date_s

MODIFIED_S = 784111777
DATE = "Sun, 06 Nov 1994 08:49:37 GMT"
LATER = "Sun, 06 Nov 1994 08:49:38 GMT"
EARLIER = "Sun, 06 Nov 1994 08:49:36 GMT"


def shape(size_bytes: int = 1000, *, is_immutable: bool = True) -> Shape:
    return Shape(size_bytes, "abc", MODIFIED_S, is_immutable)


def ask(text: str | None = None, size_bytes: int = 1000, method: str = "GET", **fields: str):
    named = {name.replace("_", "-"): value for name, value in fields.items()}
    if text is not None:
        named["range"] = text
    return decide(method, named, shape(size_bytes))


def oracle(first: str, last: str, size_bytes: int) -> tuple[int, list[int]]:
    """Status and positions, by checking every position."""
    positions = list(range(size_bytes))
    if not first and not last:
        return 200, positions
    if not first:
        kept = positions[-int(last) :] if int(last) else []
    elif last and int(last) < int(first):
        return 200, positions
    else:
        kept = [p for p in positions if p >= int(first) and (not last or p <= int(last))]
    return (206, kept) if kept else (416, [])


def test_every_small_range_is_what_the_oracle_says():
    numbers = ["", *map(str, range(15))]
    for size_bytes in range(13):
        for first in numbers:
            for last in numbers:
                decision = ask(f"bytes={first}-{last}", size_bytes)
                status, positions = oracle(first, last, size_bytes)
                got = list(range(decision.start, decision.start + decision.length_bytes))
                assert (decision.status, got) == (status, positions), (first, last, size_bytes)


@given(
    first=st.integers(0, 2**70),
    last=st.integers(0, 2**70),
    size_bytes=st.integers(0, 2**50),
    zeros=st.integers(0, 30),
)
def test_large_numbers_stay_inside_the_object(first, last, size_bytes, zeros):
    for text in (
        f"bytes={'0' * zeros}{first}-{last}",
        f"bytes={first}-",
        f"bytes=-{last}",
        f"bytes=0-{last}",
    ):
        decision = ask(text, size_bytes)
        end = decision.start + decision.length_bytes
        assert 0 <= decision.start <= end <= size_bytes
        assert (decision.status == 416) == (decision.length_bytes == 0 and decision.status != 200)
        a, b = re.fullmatch(r"bytes=(\d*)-(\d*)", text).groups()
        if decision.status == 206 and a:
            assert decision.start == int(a)
            assert end == (min(int(b), size_bytes - 1) + 1 if b else size_bytes)


@given(text=st.text(alphabet="bytes=BYTS0123456789-, \tx", max_size=20), size=st.integers(0, 12))
def test_any_text_gets_a_whole_or_a_part(text, size):
    decision = ask(text, size)
    assert decision.status in (200, 206, 416)
    if decision.status == 200:
        assert decision == Decision(200, 0, size)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bytes=0-0", (206, 0, 1)),
        ("bytes=0-", (206, 0, 1000)),
        ("bytes=-2000", (206, 0, 1000)),
        ("bytes=990-5000", (206, 990, 10)),
        ("BYTES=1-2", (206, 1, 2)),
        ("bytes= 1-2 ", (206, 1, 2)),
        ("bytes=1000-", (416, 0, 0)),
        ("bytes=-0", (416, 0, 0)),
        ("bytes=5-2", (200, 0, 1000)),
        ("bytes=a-b", (200, 0, 1000)),
        ("bytes=", (200, 0, 1000)),
        ("bytes=-", (200, 0, 1000)),
        ("items=0-1", (200, 0, 1000)),
        ("bytes 0-1", (200, 0, 1000)),
        ("bytes=0-0x1", (200, 0, 1000)),
        ("bytes=+1-2", (200, 0, 1000)),
        ("bytes=1-2-3", (200, 0, 1000)),
        ("bytes=\u0661-\u0662", (200, 0, 1000)),
        ("bytes=0-1,5-6", (200, 0, 1000)),
        ("bytes=0-1,", (200, 0, 1000)),
        ("bytes=" + "0-," * 2000, (200, 0, 1000)),
        ("bytes=0-99999999999999999999", (206, 0, 1000)),
        ("bytes=99999999999999999999-", (416, 0, 0)),
        ("bytes=-99999999999999999999", (206, 0, 1000)),
        ("bytes=0-" + "9" * 7000, (206, 0, 1000)),
    ],
)
def test_the_table_of_exact_answers(text, expected):
    assert ask(text) == Decision(*expected)


def test_a_range_means_nothing_on_head():
    assert ask("bytes=0-1", method="HEAD") == Decision(200, 0, 1000)


@pytest.mark.parametrize(
    ("condition", "status"),
    [
        ('"abc"', 206),
        ('W/"abc"', 200),
        ('"other"', 200),
        ("abc", 200),
        (DATE, 206),
        (EARLIER, 200),
        (LATER, 200),
        ("", 200),
        ("*", 200),
    ],
)
def test_if_range(condition, status):
    assert ask("bytes=0-1", if_range=condition).status == status
    assert ask("bytes=5000-", if_range=condition).status == (416 if status == 206 else 200)


def test_if_range_by_date_is_too_coarse_for_an_object_that_may_be_replaced():
    fields = {"range": "bytes=0-1", "if-range": DATE}
    assert decide("GET", fields, shape(is_immutable=False)).status == 200


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"if_none_match": '"abc"'}, 304),
        ({"if_none_match": 'W/"abc"'}, 304),
        ({"if_none_match": '"x", "a,b", "abc"'}, 304),
        ({"if_none_match": "*"}, 304),
        ({"if_none_match": '"x"'}, 206),
        ({"if_none_match": "abc"}, 206),
        ({"if_match": '"abc"'}, 206),
        ({"if_match": "*"}, 206),
        ({"if_match": '"x"'}, 412),
        ({"if_match": 'W/"abc"'}, 412),
        ({"if_match": '"x"', "if_none_match": '"abc"'}, 412),
        ({"if_unmodified_since": EARLIER}, 412),
        ({"if_unmodified_since": DATE}, 206),
        ({"if_match": '"abc"', "if_unmodified_since": EARLIER}, 206),
        ({"if_modified_since": DATE}, 304),
        ({"if_modified_since": LATER}, 304),
        ({"if_modified_since": EARLIER}, 206),
        ({"if_modified_since": "yesterday"}, 206),
        ({"if_none_match": '"x"', "if_modified_since": DATE}, 206),
    ],
)
def test_conditions_in_the_order_of_the_rfc(fields, status):
    assert ask("bytes=0-1", **fields).status == status


def test_dates_in_all_three_forms():
    for text in (DATE, "Sunday, 06-Nov-94 08:49:37 GMT", "Sun Nov  6 08:49:37 1994"):
        assert parse_http_date_s(text) == MODIFIED_S
    assert format_http_date(MODIFIED_S) == DATE


@given(st.text(max_size=40))
def test_a_date_of_any_text_raises_nothing(text):
    parse_http_date_s(text)
