"""The parser: reads of any size give the same requests, and bytes of any kind a refusal or none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.kernel.errors import HeadraceError
from headrace.web.model import HEAD_BYTES_MAX, TARGET_BYTES_MAX
from headrace.web.parsing import RequestParser

HOST = b"Host: localhost\r\n"
PARTS = [
    b"GET /a?b=c HTTP/1.1\r\n" + HOST + b"\r\n",
    b"POST /a HTTP/1.1\r\n" + HOST + b"Content-Length: 5\r\n\r\nhello",
    b"POST /a HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n",
    b"3\r\nabc\r\n",
    b"0\r\n",
    b"0\r\nX-A: b\r\n\r\n",
    b"GET / HTTP/1.0\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + HOST + b"Connection: upgrade\r\nUpgrade: h2c\r\n\r\n",
    b"CONNECT localhost:1 HTTP/1.1\r\n\r\n",
    b"GET http://localhost/ HTTP/1.1\r\n" + HOST + b"\r\n",
    b"Transfer-Encoding: identity\r\n",
    b"Content-Length: 1\r\n",
    b"X-A: " + b"a" * 9000 + b"\r\n",
    b"\r\n",
    b"\n",
    b"\0",
]


class Found:
    """What a parser passed on."""

    def __init__(self):
        self.requests = []

    def take_head(self, head):
        self.requests.append([head.method, head.target, tuple(head.fields), b"", False])

    def take_body(self, data):
        self.requests[-1][3] += data

    def take_end(self):
        self.requests[-1][4] = True


def parsed(pieces):
    """The requests in `pieces`, and the code of the refusal."""
    found = Found()
    parser = RequestParser(found)
    for piece in pieces:
        try:
            parser.feed(piece)
        except HeadraceError as error:
            return found.requests, error.code
    return found.requests, None


@given(st.lists(st.sampled_from(PARTS) | st.binary(max_size=9), max_size=6), st.data())
def test_reads_of_any_size_give_the_same_requests(parts, data):
    whole = b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=4)))
    edges = zip([0, *cuts], [*cuts, len(whole)], strict=True)
    pieces = [whole[start:end] for start, end in edges if end > start]
    assert parsed(pieces) == parsed([whole] if whole else [])


def test_a_body_without_content_is_bounded():
    most = HEAD_BYTES_MAX + TARGET_BYTES_MAX
    for end in (b"0\r\nX-A: ", b"5;"):
        pieces = [PARTS[2] + end, *[b"a" * 8192] * (most // 8192 + 1)]
        assert parsed(pieces)[1] == "web.head_too_large"
    content = [PARTS[2], *[b"2000\r\n" + b"a" * 8192 + b"\r\n"] * 9]
    assert parsed(content)[1] is None
