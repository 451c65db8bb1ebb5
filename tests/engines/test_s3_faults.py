"""S3 that fails: short faults are passed over, long ones end in time with their reason.

What is stored afterwards is the old or the new object, never a part of one.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time

import pytest
from tests.kit import own_s3
from tests.kit.own_s3 import closed, cut_after, done_then, error, reset, stalled, with_etag
from tests.kit.processes import free_ports

from headrace.cli import doctor
from headrace.cli.doctor import check_blobs
from headrace.cli.doctor_engines import KEYS_FIX, store_fault
from headrace.engines import joined_objects
from headrace.engines.backup.archive import Archive, BackupConfig
from headrace.engines.backup.archive_store import ArchiveDown
from headrace.engines.blobs import BlobChanged, BlobMissing, Blobs, BlobsConfig, BlobsDown
from headrace.engines.joined_objects import BlobCorrupt
from headrace.kernel.config import InvalidConfig

pytestmark = pytest.mark.slow
TIMEOUT_S = 4.0
OLD, NEW = b"old" * 50_000, b"new" * 60_000
FAULTS = {
    "500": error(500, "InternalError"),
    "SlowDown": error(503, "SlowDown", Retry_After="1"),
    "reset": reset,
    "500 after the effect": done_then(error(500, "InternalError")),
    "reset after the effect": done_then(reset),
    "a truncated body": cut_after(1000, closed),
    "a body that is reset": cut_after(1000, reset),
    "stalled": stalled,
    "a stalled body": cut_after(1000, stalled),
}
STALLS = ("stalled", "a stalled body")
READS = {
    "get": lambda store, key: store.get(key),
    "read": lambda store, key: store.read(key),
    "part": lambda store, key: store.read_part(key, 10, 100_000),
    "info": lambda store, key: store.info(key),
}
EXPECTED = {
    "get": lambda found: found == OLD,
    "read": lambda found: found[0] == OLD,
    "part": lambda found: found[1] == OLD[10:100_010],
    "info": lambda found: found.size_bytes == len(OLD),
}
WRITES = {
    "put": lambda store, key: store.put(key, NEW),
    "put_if": lambda store, key: store.put_if(f"{key}.new", NEW, etag=None),
    "delete": lambda store, key: store.delete(key),
}


def short(names, *chosen):
    """Parameters of which only the chosen ones run outside `make soak`."""
    return [
        name if name in chosen else pytest.param(name, marks=pytest.mark.soak) for name in names
    ]


@pytest.fixture
async def store(s3, s3_proxy):
    store = Blobs(s3.url, BlobsConfig(timeout_s=TIMEOUT_S))
    yield store
    await store.close()


@pytest.fixture
async def make_key(store):
    """`await make_key()`: the key of a new object."""

    async def make():
        key = f"faults/{secrets.token_hex(8)}.bin"
        await store.put(key, OLD)
        return key

    return make


async def outcome_of(call):
    """The result or error of a call, and the seconds it took."""
    began_s = time.monotonic()
    try:
        found = await call
    except Exception as error:  # noqa: BLE001 - judged by the test
        found = error
    return found, time.monotonic() - began_s


BRIEF = [name for name in FAULTS if name not in STALLS]


@pytest.mark.parametrize("fault", short(BRIEF, "500", "reset after the effect", "a truncated body"))
async def test_two_failures_are_passed_over(store, s3_proxy, make_key, fault):
    for name, read in READS.items():
        key = await make_key()
        s3_proxy.fail(FAULTS[fault], times=2)
        found, _ = await outcome_of(read(store, key))
        s3_proxy.heal()
        assert not isinstance(found, Exception), (name, found)
        assert EXPECTED[name](found), name
    for name, write in WRITES.items():
        key = await make_key()
        s3_proxy.fail(FAULTS[fault], times=2)
        found, _ = await outcome_of(write(store, key))
        s3_proxy.heal()
        # A write whose answer is lost may have had its effect.
        assert found is None or isinstance(found, BlobsDown | BlobChanged), (name, found)
        await require_whole(store, key, name, is_done=found is None)


async def require_whole(store, key, name, *, is_done):
    """The objects of a write are the old or the new ones."""
    new = f"{key}.new" if name == "put_if" else key
    try:
        found = await store.get(new)
    except BlobMissing:
        assert name != "put"
        found = None
    wanted = {"put": NEW, "put_if": NEW, "delete": None}[name]
    before = None if name == "put_if" else OLD
    assert found == wanted if is_done else found in (wanted, before), name


@pytest.mark.parametrize("fault", short(FAULTS, "SlowDown", "a stalled body"))
async def test_a_lasting_fault_ends_in_time_with_its_reason(store, s3_proxy, make_key, fault):
    calls = {name: (call, await make_key()) for name, call in {**READS, **WRITES}.items()}
    s3_proxy.fail(FAULTS[fault])
    ends = await asyncio.gather(*[outcome_of(call(store, key)) for call, key in calls.values()])
    s3_proxy.heal()
    for (name, (_, key)), (found, took_s) in zip(calls.items(), ends, strict=True):
        assert took_s < TIMEOUT_S + 2, (name, took_s)
        is_body = fault in ("a truncated body", "a body that is reset", "a stalled body")
        if is_body and (name == "info" or name in WRITES):
            # Their answers have no body.
            assert not isinstance(found, BlobMissing), name
        else:
            assert isinstance(found, BlobsDown | BlobChanged), (name, found)
        if name in WRITES:
            await require_whole(store, key, name, is_done=found is None)
        else:
            assert EXPECTED[name](await READS[name](store, key)), name


async def test_an_error_names_the_answer_of_the_store(store, s3_proxy, make_key):
    key = await make_key()
    for status, code in ((403, "AccessDenied"), (400, "ExpiredToken"), (404, "NoSuchBucket")):
        s3_proxy.fail(error(status, code))
        for call in (store.get(key), store.put(key, NEW)):
            with pytest.raises(BlobsDown, match=f"{status} {code}"):
                await call
        s3_proxy.heal()


async def test_bytes_of_another_version_are_told_apart_by_their_etag(store, s3_proxy, make_key):
    key = await make_key()
    etag = (await store.info(key)).etag
    s3_proxy.fail(with_etag("another"))
    info, data = await store.read_part(key, 0, 100)
    assert (info.etag, data) == ("another", OLD[:100])
    assert info.etag != etag


async def test_of_two_writers_one_creates_an_object_through_faults(store, s3_proxy):
    """A writer that receives BlobChanged may have succeeded: its answer was lost."""
    key = f"faults/{secrets.token_hex(8)}.bin"
    s3_proxy.fail(done_then(error(500, "InternalError")), times=1)
    ends = await asyncio.gather(
        *[store.put_if(key, b"%d" % n * 1000, etag=None) for n in range(6)], return_exceptions=True
    )
    winners = [n for n, end in enumerate(ends) if end is None]
    assert len(winners) <= 1
    assert all(end is None or isinstance(end, BlobChanged) for end in ends)
    data = await store.get(key)
    assert data in [b"%d" % n * 1000 for n in (winners or range(6))]


@pytest.fixture
async def parts(store):
    """Keys and bytes of four parts."""
    folder = f"parts/{secrets.token_hex(8)}"
    made = {f"{folder}/{n}": bytes([n]) * 6_000_000 for n in range(4)}
    for key, data in made.items():
        await store.put(key, data)
    return made


JOIN_FAULTS = {
    "500 of a part": (error(500, "InternalError"), b"partNumber=2", own_s3.FOREVER),
    "403 of a part": (error(403, "AccessDenied"), b"partNumber=2", 1),
    "a stalled part": (stalled, b"partNumber=2", own_s3.FOREVER),
    "403 at the end": (error(403, "AccessDenied"), b"?uploadId=", 1),
    "a lost end": (done_then(stalled), b"?uploadId=", 1),
    "403 after the end": (done_then(error(403, "AccessDenied")), b"?uploadId=", 1),
    "403 of a source": (error(403, "AccessDenied"), b"/2 HTTP", 1),
}


ENDED = ("a lost end", "403 after the end")


@pytest.fixture
async def joiner(s3, s3_proxy, monkeypatch):
    """A store whose requests end after 8 s: 3 s, and a second per MiB of a part."""
    monkeypatch.setattr(joined_objects, "CHUNKS_AT_ONCE", 1)
    monkeypatch.setattr(joined_objects, "CHUNK_BYTES_MIN", 5 * 2**20)
    joiner = Blobs(s3.url, BlobsConfig(timeout_s=3.0))
    yield joiner
    await joiner.close()


@pytest.mark.parametrize("fault", short(JOIN_FAULTS, "500 of a part", "403 after the end"))
async def test_a_join_that_fails_shows_nothing_and_leaves_nothing(
    s3, joiner, s3_proxy, parts, fault
):
    key, whole = f"joined/{secrets.token_hex(8)}.bin", b"".join(parts.values())
    await joiner.put(key, OLD)
    how, when, times = JOIN_FAULTS[fault]
    s3_proxy.fail(how, when=when, times=times)
    with pytest.raises(BlobsDown):
        await joiner.join(key, [*parts], size_bytes=len(whole))
    s3_proxy.heal()
    assert await joiner.get(key) == (whole if fault in ENDED else OLD)
    assert not await asyncio.to_thread(s3.has_unfinished, key)
    await joiner.join(key, [*parts], size_bytes=len(whole))
    assert await joiner.get(key) == whole


async def test_a_join_of_other_bytes_leaves_nothing(s3, store, parts):
    key = f"joined/{secrets.token_hex(8)}.bin"
    with pytest.raises(BlobCorrupt):
        await store.join(key, [*parts], size_bytes=24_000_000, sha256="0" * 64)
    assert not await asyncio.to_thread(s3.has_unfinished, key)


async def test_the_doctor_finds_a_store_that_ignores_or_refuses_conditions(store, s3_proxy):
    assert [one.state for one in await check_blobs(store)] == ["ok"]

    async def unconditional(exchange):
        exchange.head = exchange.head.replace(b"if-none-match", b"x-none").replace(
            b"if-match", b"x-match"
        )
        await own_s3.passed(exchange)

    async def refused(exchange):
        is_matched = b"\r\nif-match:" in exchange.head.lower()
        await (error(412, "PreconditionFailed") if is_matched else own_s3.passed)(exchange)

    expected = {
        unconditional: "the store ignores If-None-Match or If-Match",
        refused: "the store refuses If-Match also with the right ETag",
    }
    for fault, text in expected.items():
        s3_proxy.fail(fault)
        [found] = await check_blobs(store)
        s3_proxy.heal()
        assert (found.state, found.text.split(":")[0]) == ("fail", text)


async def test_the_doctor_names_address_and_fix_of_a_store_that_fails(
    store, s3, s3_proxy, monkeypatch
):
    monkeypatch.setattr(doctor, "STORE_S", 2.0)
    faults = {
        error(403, "SignatureDoesNotMatch"): ("answered 403 SignatureDoesNotMatch", KEYS_FIX),
        error(404, "NoSuchBucket"): ("answered 404 NoSuchBucket", "create the bucket"),
        stalled: ("does not answer requests", "if this lasts, see its log"),
    }
    assert store.endpoint is not None
    for fault, (text, fix) in faults.items():
        s3_proxy.fail(fault)
        [found] = await check_blobs(store)
        s3_proxy.heal()
        assert found.state == "fail"
        assert f"at {store.endpoint.url} " in found.text
        assert text in found.text
        assert found.fix.startswith(fix)
    [port] = free_ports(1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    [found] = await check_blobs(Blobs(s3.url, BlobsConfig(timeout_s=TIMEOUT_S)))
    assert f"at http://127.0.0.1:{port} accepts no connection" in found.text
    assert found.fix == "start it, or correct AWS_ENDPOINT_URL"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"AWS_ENDPOINT_URL": "10.0.0.4:9000"}, "set AWS_ENDPOINT_URL=http://10.0.0.4:9000 and"),
        ({"AWS_ENDPOINT_URL": ""}, "AWS_ENDPOINT_URL is '', expected a URL with http"),
        ({"AWS_ENDPOINT_URL_S3": "http:10"}, "AWS_ENDPOINT_URL_S3 is 'http:10', expected"),
        ({"AWS_ALLOW_HTTP": "no"}, "AWS_ALLOW_HTTP is no: requests without TLS are refused. Set"),
    ],
)
async def test_an_unusable_endpoint_is_refused_at_configuration(
    s3, s3_proxy, monkeypatch, changes, text
):
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidConfig, match=re.escape(text)):
        Blobs(s3.url)


async def test_a_refused_write_to_an_archive_is_named_with_its_fix(s3, s3_proxy, tmp_path):
    archive = Archive(BackupConfig(url=s3.url), tmp_path)
    s3_proxy.fail(error(403, "AccessDenied"))
    with pytest.raises(ArchiveDown, match=r"\(403 AccessDenied\): they need the rights to get"):
        await store_fault(archive.store)
    await archive.close()
