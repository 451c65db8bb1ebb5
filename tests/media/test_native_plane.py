"""The native plane reads heads, URLs and digests as the Python plane does, or passes them on."""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import ipaddress
import os
import random
import shutil
import subprocess
import sys
import time
from ctypes import Structure, byref, c_char_p, c_int, c_int64, c_size_t, c_void_p
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.kit.processes import ROOT

from headrace.kernel.errors import HeadraceError
from headrace.media import signing
from headrace.media.cluster.hop import AnswerSpan, Hop, reply_of
from headrace.media.model import Shape
from headrace.media.native import FLAGS, FOLDER, WARNINGS, build_library, library_path
from headrace.media.ranges import decide
from headrace.media.requests import HeadReader, require_read

SECRET = "a root secret of over thirty-two characters"
KEYS = signing.Keys.derive(SECRET, ["another secret of over thirty-two characters"])
INCOMPLETE, PLAIN, OTHER = range(3)
SIZE_BYTES = 10_000_000


class Head(Structure):
    _fields_ = [
        ("target", c_void_p),
        ("target_bytes", c_size_t),
        ("bytes", c_size_t),
        ("has_range", c_int),
        ("first", c_int64),
        ("last", c_int64),
        ("texts", c_size_t * 10),
    ]


class Url(Structure):
    _fields_ = [
        ("key", c_void_p),
        ("key_bytes", c_size_t),
        ("expires_s", c_int64),
        ("rate", c_int64),
        ("network", c_void_p),
        ("network_bytes", c_size_t),
    ]


class NativeHop(Structure):
    _fields_ = [("key", c_void_p), ("mac", c_char_p), ("numbers", c_int64 * 4)]


@pytest.fixture(scope="module")
def plane():
    return ctypes.CDLL(str(library_path()))


def read_head(plane, data):
    """The result, and what the plane understood of a plain head."""
    head = Head()
    buffer = ctypes.create_string_buffer(data, len(data))
    result = plane.head_read(buffer, c_size_t(len(data)), 0, byref(head))
    target = ctypes.string_at(head.target, head.target_bytes) if result == PLAIN else b""
    return result, SimpleNamespace(
        target=target.decode("ascii"),
        bytes=head.bytes,
        span=(head.first, head.last) if head.has_range else None,
    )


FIELDS = st.sampled_from(
    [
        b"Host: media.example",
        b"Host: media.example:8081",
        b"host:media.example \t",
        b"Host: [::1]:80",
        b"Host: a b",
        b"Range: bytes=0-1023",
        b"Range: bytes=262144-",
        b"range: bytes=5-4",
        b"Range: bytes=-500",
        b"Range: bytes=0-0,5-9",
        b"Range: items=0-1",
        b"Range: bytes=9999999999999999999-",
        b"Connection: keep-alive",
        b"Connection: close",
        b"Connection: keep-alive, upgrade",
        b"Upgrade: h2c",
        b"Content-Length: 0",
        b"Content-Length: 5",
        b"Transfer-Encoding: chunked",
        b'If-Range: "abc"',
        b"If-None-Match: *",
        b"If-Modified-Since: Sun, 06 Nov 1994 08:49:37 GMT",
        b"Expect: 100-continue",
        b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        b"baggage: user=1",
        b"X-Headrace-Hop: 1;a;b;c;1;2;3;4;5",
        b"User-Agent: player/1.0 (a; b)",
        b"Accept: */*",
        b"Accept-Encoding: identity;q=1, *;q=0",
        b"Origin: https://shop.example",
        b"X-Obs: caf\xe9",
        b"X Space: 1",
        b"NoColon",
        b": empty",
        b"X-Folded: a\r\n b",
        b"X-Nul: a\0b",
        b"X-Cr: a\rb",
    ]
)
LINES = st.sampled_from(
    [
        b"GET /m/tracks/a.mp3 HTTP/1.1",
        b"GET /m/a?x=1&y=2 HTTP/1.1",
        b"GET http://media.example/m/a HTTP/1.1",
        b"GET  /m/a HTTP/1.1",
        b"GET /m/a  HTTP/1.1",
        b"GET /m/a HTTP/1.0",
        b"GET /m/a HTTP/1.1 ",
        b"GET /m/\x7f HTTP/1.1",
        b"GET /m/a#b HTTP/1.1",
        b"GET * HTTP/1.1",
        b"GET /m/a",
        b"get /m/a HTTP/1.1",
        b"HEAD /m/a HTTP/1.1",
        b"POST /m/a HTTP/1.1",
        b"\r\nGET /m/a HTTP/1.1",
    ]
)


@st.composite
def heads(draw):
    lines = [draw(LINES), *draw(st.lists(FIELDS, max_size=6))]
    data = bytearray(b"\r\n".join(lines) + b"\r\n\r\n" + draw(st.sampled_from([b"", b"GET /m/b"])))
    for _ in range(draw(st.integers(0, 2))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data)


@given(heads())
@example(b"GET /m/a HTTP/1.1\r\nHost: h\r\n\r\n")
@example(b"GET /m/a HTTP/1.1\r\nHost: h\r\nHost: h\r\n\r\n")
@example(b"GET /m/a HTTP/1.1\r\nHost : h\r\n\r\n")
@settings(max_examples=1500)
def test_a_plain_head_has_one_meaning(plane, data):
    """What the native plane answers itself, the Python plane reads alike; it never accepts more."""
    result, found = read_head(plane, data)
    if result != PLAIN:
        return
    reader = HeadReader()
    reader.feed(data[: found.bytes])
    request = reader.take()
    require_read(request)
    assert not reader.begun
    assert (request.method, request.target, request.keeps_alive) == ("GET", found.target, True)
    assert not request.is_http_1_0
    decision = decide("GET", request.fields, Shape(SIZE_BYTES, "e", 0, is_immutable=False))
    if found.span is None:
        assert decision == (200, 0, SIZE_BYTES)
    else:
        first, last = found.span
        end = SIZE_BYTES if last < 0 else min(SIZE_BYTES, last + 1)
        assert decision == ((206, first, end - first) if first < end else (416, 0, 0))


def test_players_heads_are_plain(plane):
    """The requests of common players are answered natively, however they arrive."""
    data = (
        b"GET /m/tracks/ab/cd.mp3?e=1&k=2&s=3 HTTP/1.1\r\nHost: media.example\r\n"
        b"Connection: keep-alive\r\nAccept-Encoding: identity;q=1, *;q=0\r\nRange: bytes=0-\r\n"
        b"User-Agent: Mozilla/5.0 (X11; Linux x86_64)\r\nAccept: */*\r\nSec-Fetch-Dest: audio\r\n"
        b"Referer: https://shop.example/\r\nAccept-Language: en,de;q=0.9\r\n\r\n"
    )
    assert read_head(plane, data)[0] == PLAIN
    for end in range(len(data)):
        assert read_head(plane, data[:end])[0] == INCOMPLETE, end


def test_a_head_that_can_not_become_plain_is_passed_on_at_once(plane):
    for data in (b"POST", b"HEAD /m/a", b"GET /m/a HTTP/1.1\r\nX: \0", b"\r\n", b"\x16\x03\x01"):
        assert read_head(plane, data)[0] == OTHER, data
    assert read_head(plane, b"GET /" + b"a" * 17_000)[0] == OTHER


def admit(plane, target, now_s, *, is_required=True, address="127.0.0.1"):
    """Key and expiry of a target that the plane answers, or None."""
    keys = ctypes.create_string_buffer(64 * 1024)
    ctypes.memmove(keys, ctypes.byref(c_int(len(KEYS.accepted))), 4)
    for number, key in enumerate(KEYS.accepted.values()):
        ctypes.memmove(ctypes.addressof(keys) + 4 + 8 * number, key.id.encode(), 8)
        at = ctypes.addressof(keys) + 4 + 8 * 64 + 64 * number
        plane.hmac_key_set(c_void_p(at), c_char_p(key.secret), c_size_t(len(key.secret)))
    url, data = Url(), target.encode("latin-1")
    buffer = ctypes.create_string_buffer(data, len(data))
    is_ok = plane.url_read(
        buffer, c_size_t(len(data)), keys, int(is_required), c_int64(now_s), byref(url)
    )
    packed = ipaddress.ip_address(address).packed
    mapped = b"\1" + (bytes(10) + b"\xff\xff" + packed if len(packed) == 4 else packed)
    if not is_ok or not plane.url_allows(byref(url), c_char_p(mapped)):
        return None
    return ctypes.string_at(url.key, url.key_bytes).decode(), url.expires_s or None


def test_signed_urls_are_judged_alike(plane):
    """Valid ones are answered; each tampered, expired or unusual one is passed on."""
    now_s = int(time.time())
    path = "/m/tracks/a.mp3"
    query = signing.sign(KEYS, path, expires_at=now_s + 60)
    target = f"{path}?{query}"
    assert admit(plane, target, now_s) == ("tracks/a.mp3", now_s + 60)
    assert admit(plane, target, now_s + 60) is None
    assert admit(plane, path, now_s) is None
    assert admit(plane, path, now_s, is_required=False) == ("tracks/a.mp3", None)
    other = signing.sign(
        signing.Keys.derive("a third secret of over thirty-two characters"),
        path,
        expires_at=now_s + 60,
    )
    assert admit(plane, f"{path}?{other}", now_s) is None
    for more in ({"tag": "a" * 64}, {"trace": "user=1"}, {"address": "127.0.0.2"}):
        query = signing.sign(KEYS, path, expires_at=now_s + 60, **more)
        assert admit(plane, f"{path}?{query}", now_s) is None, more
    letters = "ABCabc019-_&=?./%\x00\x80"
    dice = random.Random(7)
    for at in range(len(target)):
        for letter in dice.sample(letters, 4):
            tampered = target[:at] + letter + target[at + 1 :]
            found = admit(plane, tampered, now_s)
            if tampered != target and found is not None:
                with pytest.raises(HeadraceError):
                    signing.check(KEYS, *tampered.split("?", 1), now_s=now_s, address="")
                pytest.fail(f"a tampered URL was accepted: {tampered}")


@pytest.mark.parametrize(
    "place",
    ["127.0.0.1", "127.0.0.0/8", "10.0.0.0/7", "2001:db8::/33", "2001:db8::1", "::ffff:1.2.3.4"],
)
def test_urls_of_an_address_are_judged_alike(plane, place):
    now_s = int(time.time())
    path = "/m/a"
    query = signing.sign(KEYS, path, expires_at=now_s + 60, address=place, rate=7000)
    for address in ("127.0.0.1", "127.255.0.3", "11.1.1.1", "12.0.0.1", "2001:db8::1", "1.2.3.4"):
        try:
            signing.check(KEYS, path, query, now_s=now_s, address=address)
            expected = ("a", now_s + 60)
        except signing.SignatureInvalid:
            expected = None
        assert admit(plane, f"{path}?{query}", now_s, address=address) == expected, address


@given(st.binary(min_size=1, max_size=400), st.binary(max_size=64))
def test_digests(plane, message, secret):
    state, out = ctypes.create_string_buffer(128), ctypes.create_string_buffer(64)
    plane.blake2b_key_set(state, secret, c_size_t(len(secret)), 20)
    plane.blake2b(state, message, c_size_t(len(message)), out)
    assert out.raw[:20] == hashlib.blake2b(message, key=secret, digest_size=20).digest()
    plane.hmac_key_set(state, secret, c_size_t(len(secret)))
    plane.hmac_sha256(state, message, c_size_t(len(message)), out)
    assert out.raw[:32] == hmac.digest(secret, message, "sha256")


@pytest.mark.parametrize("length", [1, 64, 1000, 3000])
def test_an_answer_to_another_node_is_signed_whatever_its_etag(plane, length):
    key, etag = KEYS.signing, "e" * length
    state, out = ctypes.create_string_buffer(64), ctypes.create_string_buffer(65)
    plane.hmac_key_set(state, c_char_p(key.secret), c_size_t(len(key.secret)))
    asked = NativeHop(key=ctypes.addressof(state), mac=b"ab" * 32)
    plane.hop_sign_reply(byref(asked), etag.encode(), c_int64(5), c_int64(10), out)
    expected = reply_of(Hop("a", 0, key, "ab" * 32), AnswerSpan(etag, 5, 10))
    assert out.value.decode() == expected


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_it_compiles_without_warnings(tmp_path):
    command = ["cc", *FLAGS, *WARNINGS, "-o", str(tmp_path / "plane.so")]
    sources = [str(path) for path in sorted(FOLDER.glob("*.c"))]
    made = subprocess.run([*command, *sources], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr


SANITIZERS = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
needs_sanitizers = pytest.mark.skipif(
    shutil.which("gcc") is None, reason="gcc with its sanitizers is not installed"
)


@needs_sanitizers
@pytest.mark.parametrize("seconds", [3, pytest.param(600, marks=pytest.mark.soak)])
def test_mutated_heads_are_read_without_a_fault(tmp_path, seconds):
    """Millions of heads, each in memory of its exact size; sanitizers end at the first fault."""
    program = tmp_path / "fuzz"
    read = [str(FOLDER / f"{name}.c") for name in ("head", "url", "hop", "digest", "peer_head")]
    sources = [str(Path(__file__).with_name("fuzz_heads.c")), *read]
    flags = [flag for flag in FLAGS if flag not in ("-shared", "-fPIC", "-O2")]
    command = ["gcc", *flags, *SANITIZERS, f"-I{FOLDER}", "-o", str(program), *sources]
    subprocess.run(command, check=True)
    run = [str(program), str(seconds), str(random.randrange(2**32))]
    made = subprocess.run(run, capture_output=True, text=True, check=False)
    assert made.returncode == 0, f"{run}: {made.stderr}"
    assert int(made.stdout.split()[0]) > 1000


@needs_sanitizers
@pytest.mark.soak
def test_the_answers_of_all_kinds_of_nodes_hold_with_sanitizers(tmp_path):
    name = library_path().name
    build_library(tmp_path / "headrace" / name, *SANITIZERS)
    preloaded = [
        subprocess.check_output(["gcc", f"-print-file-name={library}"], text=True).strip()
        for library in ("libasan.so", "libubsan.so")
    ]
    env = {
        **os.environ,
        "XDG_CACHE_HOME": str(tmp_path),
        "LD_PRELOAD": " ".join(preloaded),
        "ASAN_OPTIONS": "detect_leaks=0",  # those of Python would be reported
    }
    tests = [
        *("tests/media/test_media_serving.py", "tests/media/test_media_clients.py"),
        *("tests/media/test_media_tls.py", "tests/media/cluster/test_native_hops.py"),
    ]
    command = [sys.executable, "-m", "pytest", "-n", "0", *tests]
    made = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=3000, check=False
    )
    assert made.returncode == 0, made.stdout[-3000:] + made.stderr[-3000:]


@pytest.mark.skipif(find_spec("ziglang") is None, reason="ziglang is not installed")
@pytest.mark.slow
def test_the_compiler_from_a_wheel_is_used_also_for_another_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    ctypes.CDLL(str(build_library(tmp_path / "here.so")))
    other = build_library(tmp_path / "arm.so", "-target", "aarch64-linux-gnu.2.17")
    assert other.read_bytes()[18:20] == b"\xb7\0", "EM_AARCH64"
