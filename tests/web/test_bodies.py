"""Decoding of JSON bodies: malformed ones, and invalid ones with every fault."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.kernel.faults import FAULTS_MAX
from headrace.web.bodies import DEPTH_MAX, decode_body
from headrace.web.model import BodyInvalid, BodyMalformed


class Item(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    position: int = 1


class Order(msgspec.Struct, forbid_unknown_fields=True):
    items: list[Item]
    labels: dict[str, int] = {}
    payload: object = None


MALFORMED = {
    "truncated": b'{"items": [',
    "NaN": b'{"items": [], "payload": NaN}',
    "Infinity": b'{"items": [], "payload": -Infinity}',
    "byte order mark": b'\xef\xbb\xbf{"items": []}',
    "not UTF-8": b'{"items": [], "payload": "\xff"}',
    "lone surrogate": b'{"items": [], "payload": "\\ud800"}',
    "doubled key": b'{"items": [], "items": []}',
    "doubled key inside": b'{"items": [], "payload": [{"a": 1, "a": 2}]}',
    "too deep": b'{"items": [], "payload": ' + b"[" * DEPTH_MAX + b"]" * DEPTH_MAX + b"}",
    "far too deep": b'{"items": [], "payload": ' + b"[" * 9000 + b"]" * 9000 + b"}",
    "two documents": b'{"items": []} {}',
    "text": b"items=1",
}
INVALID = {
    "wrong type": (b'{"items": [{"url": 5}]}', "/items/0/url", "wrong_type"),
    "a number as text": (
        b'{"items": [{"url": "a", "position": "5"}]}',
        "/items/0/position",
        "wrong_type",
    ),
    "missing": (b'{"items": [{}]}', "/items/0/url", "missing"),
    "unknown": (b'{"items": [], "a/b": 1}', "/a~1b", "unknown"),
    "beyond 64 bits": (
        b'{"items": [{"url": "a", "position": 9223372036854775808}]}',
        "/items/0/position",
        "invalid",
    ),
    "4,301 digits": (b'{"items": [], "payload": ' + b"9" * 4301 + b"}", "/payload", "invalid"),
    "NUL": (b'{"items": [{"url": "a\\u0000b"}]}', "/items/0/url", "invalid"),
    "NUL in a key": (b'{"items": [], "payload": {"\\u0000": 1}}', "/payload", "invalid"),
    "in a map": (b'{"items": [], "labels": {"x": "y"}}', "/labels/x", "wrong_type"),
    "the whole": (b"[]", "", "wrong_type"),
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
def test_invalid_json_is_malformed(body):
    with pytest.raises(BodyMalformed) as caught:
        decode_body(body, Order)
    assert len(caught.value.text) < 300


@pytest.mark.parametrize(("body", "pointer", "code"), INVALID.values(), ids=INVALID)
def test_an_invalid_value_is_reported_with_its_pointer(body, pointer, code):
    with pytest.raises(BodyInvalid) as caught:
        decode_body(body, Order)
    assert [(p.pointer, p.code) for p in caught.value.problems] == [(pointer, code)]


def test_an_unknown_field_is_answered_with_the_closest_known_one():
    with pytest.raises(BodyInvalid, match="no such field, did you mean items"):
        decode_body(b'{"items": [], "itms": 1}', Order)


def test_all_faults_are_reported_up_to_a_limit():
    body = b'{"items": [{"url": 1, "position": "x"}, {"nope": 1}], "labels": 5}'
    with pytest.raises(BodyInvalid) as caught:
        decode_body(body, Order)
    assert {p.pointer for p in caught.value.problems} == {
        "/items/0/url",
        "/items/0/position",
        "/items/1/url",
        "/items/1/nope",
        "/labels",
    }
    with pytest.raises(BodyInvalid) as caught:
        decode_body(b'{"items": [' + b"{}," * 500 + b"{}]}", Order)
    assert len(caught.value.problems) == FAULTS_MAX


class Hit(msgspec.Struct):
    id: str
    traffic: Literal["human", "bot"] = msgspec.field(default="human", name="class")
    n: int | None = None
    at: datetime | None = None


@pytest.mark.parametrize(
    ("hit", "pointer", "text"),
    [
        ('{"id": "a", "class": "alien"}', "/1/class", "expected one of human, bot, got 'alien'"),
        ('{"id": "a", "n": "5"}', "/1/n", "expected int | null, got str '5'"),
        ('{"id": "a", "at": "x"}', "/1/at", "expected a moment such as 2026-11-21T10:00:00Z"),
    ],
)
def test_a_fault_has_the_value_and_what_is_accepted(hit, pointer, text):
    with pytest.raises(BodyInvalid) as caught:
        decode_body(f'["ad:1", {hit}]'.encode(), list[Hit | str])
    [problem] = caught.value.problems
    assert problem.pointer == pointer
    assert problem.text.startswith(text)


def test_escaped_text_that_looks_rare_passes():
    order = decode_body(b'{"items": [{"url": "\\\\u0000 12345678901234567890"}]}', Order)
    assert order.items[0].url == "\\u0000 12345678901234567890"


@given(st.binary(max_size=60) | st.text(alphabet='{}[]":,0e-\\u1', max_size=60).map(str.encode))
def test_any_bytes_are_a_value_or_our_error(body):
    try:
        decode_body(body, object)
    except (BodyMalformed, BodyInvalid) as error:
        assert error.text  # noqa: PT017
