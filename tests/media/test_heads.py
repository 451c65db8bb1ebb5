"""Parsing heads: the same however the bytes are split and whichever heads came before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.kernel.errors import HeadraceError
from headrace.media.requests import HeadReader, parse_head

HOST = b"Host: a\r\n"
GET = b"GET /m/k HTTP/1.1\r\n"


def read_all(data: bytes, step: int):
    """Requests of `data` fed in pieces of `step`, and the error that ended it."""
    reader, requests = HeadReader(), []
    for start in range(0, len(data), step):
        reader.feed(data[start : start + step])
        try:
            while (request := reader.take()) is not None:
                requests.append(request)
        except HeadraceError as error:
            return requests, error
    return requests, None


@pytest.mark.parametrize(
    ("head", "keeps_alive"),
    [
        (b"GET / HTTP/1.0\r\n\r\n", False),
        (b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", True),
        (GET + HOST + b"Connection: close\r\n\r\n", False),
        (GET + HOST + b"Upgrade: h2c\r\nConnection: upgrade\r\n\r\n", False),
        (b"\r\n" + GET + HOST + b"\r\n", True),
    ],
)
def test_which_connections_stay_open(head, keeps_alive):
    [request], error = read_all(head, 1)
    assert error is None
    assert request.keeps_alive is keeps_alive


@given(st.binary(max_size=200))
def test_any_bytes_raise_only_typed_errors(data):
    read_all(data, 50)
    read_all(GET + data + b"\r\n\r\n", 1000)


RANGES = [None, "bytes=0-1", "bytes=-5", "bytes=5-", "bytes=0-1,3-4", "bytes=-", "items=1-2"]
OTHERS = ["X: 1", 'If-Range: "a"', "range: bytes=7-8", "Range: bytes=0-9", "Connection: close"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(RANGES), st.lists(st.sampled_from(OTHERS), max_size=3, unique=True)
        ),
        min_size=2,
        max_size=12,
    )
)
def test_a_head_seen_before_is_read_as_when_it_is_parsed(given_heads):
    for text, others in given_heads:
        lines = [f"Range: {text}"] if text is not None else []
        for fields in ([*lines, *others], [*others, *lines]):
            head = GET + HOST + "".join(f"{line}\r\n" for line in fields).encode() + b"\r\n"
            expected = outcome(lambda head=head: parse_head(head))
            assert outcome(lambda head=head: read_one(head)) == expected


def outcome(ask):
    """The result, or the error that it raises."""
    try:
        return ask()
    except HeadraceError as error:
        return type(error), error.text


def read_one(head: bytes):
    reader = HeadReader()
    reader.feed(head)
    return reader.take()


@pytest.mark.parametrize(
    "lines",
    [
        ("X-Headrace-Hop: 1;a", "X-Headrace-Hop: 1;b"),
        ("Range: bytes=0-1\r\nX-Headrace-Hop: 1;a", "Range: bytes=7-\r\nX-Headrace-Hop: 1;c"),
        ("X-Headrace-Hop: 1;a\r\nRange: bytes=-5", "X-Headrace-Hop: 1;a\r\nRange: bytes=9-9"),
        ("X-Headrace-Hop: 1;a", "X-Headrace-Hop: 1;a\r\nX-Headrace-Hop: 1;b"),
        ("X-Headrace-Hop: 1;a\r\nX-Headrace-Hop: 1;b", "X-Headrace-Hop: 1;a"),
        ("x-headrace-hop: 1;a", "X-Headrace-Hop: 1;b"),
        ("X-Headrace-Hop: 1; a", "X-Headrace-Hop:  1;b"),
        ("X: 1", "X-Headrace-Hop: 1;a"),
        ("X-Headrace-Hop: 1;a", "X: 1"),
    ],
)
def test_a_head_is_read_independently_of_earlier_heads(lines):
    heads = [GET + HOST + line.encode() + b"\r\n\r\n" for line in (*lines, *lines)]
    requests, error = read_all(b"".join(heads), 100_000)
    assert error is None
    assert requests == [parse_head(head) for head in heads]
