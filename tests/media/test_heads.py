"""Parsing heads: what is refused, what is read, independent of how the bytes are split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refused_heads import GET, HOST, REFUSED

from headrace.kernel.errors import HeadraceError
from headrace.media.errors import ObjectUnknown
from headrace.media.requests import HeadReader, key_of, parse_head


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


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("step", [100_000, 1])
def test_what_could_be_read_in_two_ways_is_refused(name, step):
    status, data = REFUSED[name]
    requests, error = read_all(data, step)
    assert requests == []
    assert error is not None
    assert error.status == status


def test_a_plain_request():
    data = GET + b"hOsT: a:80\r\nRange:  bytes=0-1 \r\nX: 1\r\nx: 2\r\n\r\n"
    [request], error = read_all(data, 7)
    assert error is None
    assert (request.method, request.target, request.keeps_alive) == ("GET", "/m/k", True)
    assert request.fields == {"host": "a:80", "range": "bytes=0-1", "x": "1, 2"}


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
def test_who_may_stay(head, keeps_alive):
    [request], error = read_all(head, 1)
    assert error is None
    assert request.keeps_alive is keeps_alive


def test_the_absolute_form_is_a_path_when_its_host_is_right():
    [request], _ = read_all(b"GET http://A/m/k?x HTTP/1.1\r\nHost: a\r\n\r\n", 100)
    assert request.target == "/m/k?x"


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_pipelined_requests_are_the_same_however_the_bytes_are_cut(cuts):
    data = b"".join(b"GET /m/%d HTTP/1.1\r\nHost: a\r\n\r\n" % n for n in range(20))
    reader, targets, start = HeadReader(), [], 0
    for length in [*cuts, len(data)]:
        reader.feed(data[start : start + length])
        start += length
        while (request := reader.take()) is not None:
            targets.append(request.target)
    assert targets == [f"/m/{n}" for n in range(20)]
    assert not reader.begun


@given(st.binary(max_size=200))
def test_any_bytes_raise_nothing_but_our_errors(data):
    read_all(data, 50)
    read_all(GET + data + b"\r\n\r\n", 1000)


@pytest.mark.parametrize(
    "target",
    [
        "/m/../etc/passwd",
        "/m/%2e%2e/etc/passwd",
        "/m/photos/..%2f..%2fetc",
        "/m/a%252e",
        "/m//etc/passwd",
        "/m/",
        "/m",
        "/",
        "*",
        "/m/a//b",
        "/m/a/",
        "/m/.hidden",
        "/m/a%00.jpg",
        "/m/a%0d%0aX:y",
        "/m/a\\b",
        "/m/" + "a" * 600,
        "/m/%ff",
        "/m/caf%C3%A9",
        "/m/a%",
        "/n/a",
        "/M/a",
        "/m/a;x",
        "/m/%2Fetc/passwd",
        "/m/a/%2e/b",
    ],
)
def test_a_path_that_is_no_key_names_nothing(target):
    with pytest.raises(ObjectUnknown):
        key_of(target)


def test_a_key_may_be_escaped_once_and_have_a_query():
    assert key_of("/m/photos/a%40b~c.jpg?v=2&x=../..") == "photos/a@b~c.jpg"


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
def test_a_head_seen_before_means_what_it_means_when_it_is_parsed(asked):
    for text, others in asked:
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
def test_a_head_is_read_as_if_no_other_had_come_before(lines):
    heads = [GET + HOST + line.encode() + b"\r\n\r\n" for line in (*lines, *lines)]
    requests, error = read_all(b"".join(heads), 100_000)
    assert error is None
    assert requests == [parse_head(head) for head in heads]
