"""Media: raw bytes to a running node, ranges, signed URLs and fields of other nodes.

The node is the command `headrace media serve` with its native data plane; long runs build that with
sanitizers, which end it at the first fault. Bytes of an object are always the right ones.
"""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
from types import SimpleNamespace

import pytest
from hypothesis import strategies as st
from tests.fuzz.budget import FUZZ_S, fuzz
from tests.fuzz.mutations import damaged
from tests.kit.processes import HeadraceProcess, free_ports, is_alive, wait_until

from headrace.engines.blobs import Blobs
from headrace.kernel.errors import HeadraceError
from headrace.kernel.signing import derive_key
from headrace.media import signing
from headrace.media.cluster.hop import (
    HOP_FIELD,
    KEY_USE,
    HopGuard,
    HopRefused,
    HopSigner,
    covered_by,
)
from headrace.media.native import build_library, library_path
from headrace.media.requests import parse_head

SECRET = "a root secret of over thirty-two characters"
KEY = "tracks/a.mp3"
DATA = random.Random(7).randbytes(300_000)
EXPIRES_AT = 4_000_000_000
SANITIZERS = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
PATIENCE_S = 60
SERVER_FAULTS = {500, 502, 503, 504}
"""501 and 505 are right answers to an encoding or a version that does not exist."""


def sanitized(folder) -> dict[str, str]:
    """The environment of a node whose data plane has sanitizers; none without gcc."""
    if not FUZZ_S or shutil.which("gcc") is None:
        return {}
    build_library(folder / "headrace" / library_path().name, *SANITIZERS)
    preloaded = [
        subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    return {
        "XDG_CACHE_HOME": str(folder),
        "LD_PRELOAD": " ".join(preloaded),
        "ASAN_OPTIONS": "detect_leaks=0",
    }


@pytest.fixture(scope="module", params=["off", "required"])
async def node(request, tmp_path_factory):
    """A node as a process, with one object in its store."""
    folder = tmp_path_factory.mktemp("node")
    url = (folder / "blobs").as_uri()
    blobs = Blobs(url)
    await blobs.put(KEY, DATA)
    await blobs.close()
    port = free_ports(1)[0]
    env = {
        "HEADRACE_BLOBS_URL": url,
        "HEADRACE_MEDIA_LISTEN": f"127.0.0.1:{port}",
        "HEADRACE_MEDIA_SIGNED": request.param,
        "HEADRACE_SECRET": SECRET,
        "HEADRACE_DATA_FOLDER": str(folder / "data"),
    }
    process = HeadraceProcess(["media", "serve"], folder=folder, env=env | sanitized(folder))
    keys = signing.Keys.derive(SECRET)
    query = signing.sign(keys, f"/m/{KEY}", expires_at=EXPIRES_AT)
    node = SimpleNamespace(port=port, process=process, target=f"/m/{KEY}?{query}")
    try:
        wait_until(lambda: _serves(node), what="the node serves")
        yield node
    finally:
        process.end()


def _serves(node) -> bool:
    assert is_alive(node.process.pid), node.process.err
    try:
        return exchange(node, head(node.target)).startswith(b"HTTP/1.1 200")
    except ConnectionRefusedError:
        return False


def head(target: str, *fields: str, method: str = "GET") -> bytes:
    """A request that ends its connection."""
    lines = "".join(f"{field}\r\n" for field in (*fields, "Connection: close"))
    return f"{method} {target} HTTP/1.1\r\nHost: media.test\r\n{lines}\r\n".encode()


def exchange(node, data: bytes) -> bytes:
    """Send bytes, end the stream, and return all that the node sends."""
    received = b""
    with socket.create_connection(("127.0.0.1", node.port), timeout=PATIENCE_S) as link:
        try:
            link.sendall(data)
            link.shutdown(socket.SHUT_WR)
            while block := link.recv(1 << 16):
                received += block
        except ConnectionError:
            pass
    return received


def check_answer(sent: bytes, received: bytes) -> None:
    """Require that the first answer to `sent` is right as far as it goes."""
    if not received:
        return
    first, _, rest = received.partition(b"\r\n\r\n")
    status_line, *lines = first.decode("latin-1").split("\r\n")
    assert status_line.startswith("HTTP/1.1 "), status_line
    status = int(status_line.split()[1])
    assert status not in SERVER_FAULTS, first
    fields = dict(line.lower().split(": ", 1) for line in lines)
    length = int(fields.get("content-length", "0"))
    # What follows the head of an answer to HEAD is the answer to the next request.
    body = b"" if sent.startswith(b"HEAD ") else rest[:length]
    is_object = fields.get("content-type") == "audio/mpeg"
    if status == 200 and is_object:
        assert body == (b"" if sent.startswith(b"HEAD ") else DATA)
    elif status == 206 and fields.get("content-range", "").startswith("bytes "):
        start, _, end = fields["content-range"][6:].partition("/")[0].partition("-")
        assert body == DATA[int(start) : int(end) + 1][: len(body)]
    elif status >= 400 and length:
        assert fields["content-type"] == "application/problem+json"
        assert b'"code":"' in body.replace(b" ", b"") or not body


@pytest.mark.slow
def test_damaged_heads_get_a_right_answer_or_none(node):
    seeds = [
        head(node.target),
        head(node.target, "Range: bytes=100-199", 'If-Range: "a"'),
        head(node.target, "Range: bytes=0-9,20-29,-5", "If-None-Match: *"),
        head(node.target, "X-Headrace-Hop: 1;3f2a9c10;a;b;1795302000000;0123456789abcdef;1;0;00"),
        head(node.target, "Content-Length: 5", method="POST") + b"hello",
        head(node.target, "Transfer-Encoding: chunked", method="PUT") + b"5\r\nhello\r\n0\r\n\r\n",
        head(node.target, method="HEAD") + head("/m/absent.mp3") + head("/healthz"),
    ]

    def check(data: bytes) -> None:
        check_answer(data, exchange(node, data))
        assert is_alive(node.process.pid)

    fuzz(damaged(seeds) | st.binary(max_size=100), check, examples=150, share=0.2)
    assert exchange(node, head(node.target)).endswith(DATA)
    assert "AddressSanitizer" not in node.process.err
    assert node.process.events("child_died") == []


NUMBERS = st.sampled_from(
    ["", "0", "1", "299999", "300000", "9" * 18, "9" * 19, "9" * 40, "-1", "a"]
)
SPANS = st.tuples(NUMBERS, NUMBERS).map("-".join)
RANGES = st.lists(SPANS, min_size=1, max_size=12).map(lambda spans: "bytes=" + ",".join(spans))


@pytest.mark.slow
def test_any_range_gets_the_right_bytes(node):
    def check(text: str) -> None:
        request = head(node.target, f"Range: {text}")
        check_answer(request, exchange(node, request))

    fuzz(RANGES, check, examples=60, share=0.1)


@pytest.mark.slow
def test_a_changed_url_is_not_served(node):
    data = node.target.encode()
    plain, _, _ = node.target.partition("?")

    def check(changed: bytes) -> None:
        received = exchange(node, head(changed.decode("latin-1")))
        if changed.split(b"#")[0] != data and b" 200 " in received.partition(b"\r\n")[0]:
            # Without a mark of a signature a node with plain URLs ignores the query.
            assert b"&s=" not in changed, changed
            assert changed.startswith(plain.encode()), changed
            assert node.is_open, changed

    node.is_open = exchange(node, head(plain)).startswith(b"HTTP/1.1 200")
    urls = damaged([data], 2).filter(lambda url: not set(url) & set(b" \r\n#"))
    fuzz(urls, check, examples=80, share=0.1)


def test_a_changed_hop_field_is_refused():
    key = derive_key(SECRET, KEY_USE)
    sequence = HopSigner([key], "a", lambda: 1_795_000_000.0).sequence()
    fields = {"range": "bytes=0-9", "if-match": '"e"'}
    value, _ = sequence.sign("b", covered_by("GET", f"/m/{KEY}", fields), 3)

    def head_with(text: bytes) -> bytes:
        lines = b'Host: a\r\nRange: bytes=0-9\r\nIf-Match: "e"\r\nX-Headrace-Hop: ' + text
        return f"GET /m/{KEY} HTTP/1.1\r\n".encode() + lines + b"\r\n\r\n"

    def judge(text: bytes) -> object:
        guard = HopGuard([key], "b", lambda: 1_795_000_000.0)
        return guard.judge(parse_head(head_with(text)))

    assert judge(value.encode()) is not None

    def check(text: bytes) -> None:
        try:
            request = parse_head(head_with(text))
        except HeadraceError:
            return
        if request.fields.get(HOP_FIELD) in (None, value):
            return
        with pytest.raises(HopRefused):
            judge(text)

    fuzz(damaged([value.encode()], 2), check, examples=200, share=0.1)
