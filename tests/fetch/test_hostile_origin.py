"""Hostile hosts through the whole room: each attack has its outcome, honest hosts are served.

One customer has only attacks, on 127.0.0.2, another has honest photos on 127.0.0.3. Only these
addresses are allowed. A canary on 127.0.0.1 and ::1 must never be connected to.
"""

from __future__ import annotations

import gzip
import struct
import zlib

import pytest
from forbidden import FORBIDDEN_ADDRESSES, LOOPBACK_HOSTS
from origin import Answer, Origin, photo, redirect
from tests.kit.waiting import wait_true

from headrace.engines.sql import compile_query
from headrace.fetch import FetchConfig

pytestmark = pytest.mark.slow
HURRY = compile_query(
    "hurry",
    "-- What waits for its backoff is due, except a call's own class: no attempt is spared.\n"
    "WITH ready AS (UPDATE headrace.job_ready SET run_at = now() WHERE run_at > now() RETURNING 1),"
    " lanes AS (UPDATE headrace.lane_job SET run_at = now() WHERE run_at > now() RETURNING 1)"
    " SELECT (SELECT count(*) FROM ready) + (SELECT count(*) FROM lanes)",
)
LINKS = compile_query(
    "links", "-- What became of each link.\nSELECT url, outcome FROM headrace.fetch_link"
)
HEAD = b"HTTP/1.1 200 OK\r\n"
GOOD = photo("good")
SMALL_BYTES = 200_000
FAST_ITEMS = 20


def sized(body: bytes, length: int | None = None) -> bytes:
    """A whole response, perhaps with another Content-Length."""
    length = len(body) if length is None else length
    return HEAD + f"Content-Length: {length}\r\n\r\n".encode() + body


def chunked(*blocks: bytes) -> bytes:
    return b"".join(f"{len(block):x}\r\n".encode() + block + b"\r\n" for block in blocks)


def png_of(width: int, height: int) -> bytes:
    """The header of a PNG of that size, and an end."""

    def part(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", header) + part(b"IDAT", b"") + part(b"IEND", b"")


CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
BOMB = gzip.compress(bytes(20_000_000))
CASES = {
    # It never comes to an end
    "hangs-before-the-head": (Answer(hangs=True), "failed:timeout"),
    "hangs-in-the-head": (Answer(hangs=True, raw=HEAD + b"Content-Le"), "failed:timeout"),
    "hangs-after-the-head": (Answer(hangs=True, raw=sized(b"", 5000)), "failed:timeout"),
    "hangs-in-the-body": (Answer(hangs=True, raw=sized(GOOD[:300], 5000)), "failed:timeout"),
    "hangs-in-a-chunk": (Answer(hangs=True, raw=CHUNKED + b"1000\r\nabc"), "failed:timeout"),
    "drips-its-head": (Answer(drip_s=0.02, raw=HEAD + b"X: " + b"y" * 900), "failed:timeout"),
    "drips-its-body": (Answer(drip_s=0.02, raw=sized(GOOD)), "failed:timeout"),
    "body-without-end": (Answer(raw=HEAD + b"\r\n", repeats=b"x" * 60_000), "refused:too_large"),
    "chunks-without-end": (Answer(raw=CHUNKED, repeats=chunked(b"x" * 9000)), "refused:too_large"),
    "headers-without-end": (
        Answer(raw=HEAD, repeats=b"X-More: " + b"y" * 900 + b"\r\n"),
        "refused:headers_too_large",
    ),
    "continues-without-end": (
        Answer(repeats=b"HTTP/1.1 100 Continue\r\nX: yyyyyyyyyyyy\r\n\r\n" * 50),
        "refused:headers_too_large",
    ),
    # It lies about lengths
    "shorter-than-announced": (Answer(raw=sized(GOOD[:500], 5000)), "failed:truncated"),
    "chunk-cut-off": (Answer(raw=CHUNKED + b"5000\r\nabc"), "failed:truncated"),
    "no-last-chunk": (Answer(raw=CHUNKED + chunked(GOOD)), "failed:truncated"),
    "announced-too-short": (Answer(raw=sized(GOOD, 400)), "failed:truncated"),
    "half-a-photo": (Answer(200, GOOD[:600]), "failed:truncated"),
    "a-length-of-99-GB": (Answer(raw=sized(b"", 99_000_000_000)), "refused:too_large"),
    "two-lengths": (
        Answer(raw=HEAD + b"Content-Length: 5\r\nContent-Length: 900\r\n\r\nabcde"),
        "failed:protocol",
    ),
    "a-length-below-zero": (Answer(raw=sized(GOOD, -1)), "failed:protocol"),
    "nothing": (Answer(raw=b""), "failed:reset"),
    "another-protocol": (Answer(raw=b"SSH-2.0-OpenSSH_9.2\r\n"), "failed:protocol"),
    # It is another thing than a photo
    "gzip-bomb": (Answer(200, BOMB, {"Content-Encoding": "gzip"}), "refused:encoding"),
    "gzip-bomb-as-it-is": (Answer(200, BOMB), "refused:not_an_image"),
    "pixel-bomb": (Answer(200, png_of(60_000, 60_000)), "refused:too_many_pixels"),
    "no-pixels": (Answer(200, png_of(0, 10)), "refused:not_an_image"),
    "page": (Answer(200, b"<html>", {"Content-Type": "image/jpeg"}), "refused:not_an_image"),
    "svg": (Answer(200, b"<svg onload='x'/>"), "refused:not_an_image"),
    "empty": (Answer(200, b""), "refused:empty"),
    "long-header": (
        Answer(200, GOOD, {"X-Long": "y" * 40_000}),
        "refused:headers_too_large",
    ),
    # It sends us elsewhere
    "to-itself": (redirect("/to-itself"), "refused:redirect_loop"),
    "there": (redirect("/and-back"), "refused:redirect_loop"),
    "hop-1": (redirect("/hop-2"), "refused:redirect_limit"),
    "to-a-file": (redirect("file:///etc/passwd"), "refused:redirect_scheme"),
    "to-another-protocol": (redirect("gopher://127.0.0.2/"), "refused:redirect_scheme"),
    "with-a-password": (redirect("http://u:p@127.0.0.2/"), "refused:redirect_userinfo"),
    "to-another-port": (redirect("http://127.0.0.2:22/"), "refused:redirect_port"),
    "back-with-308": (redirect("?again", 308), "refused:redirect_loop"),
    "to-a-mapped-address": (redirect("//[::ffff:10.0.0.1]/"), "refused:forbidden_address"),
    "to-a-long-url": (redirect("/x" * 3000), "refused:redirect_length"),
    "to-a-broken-url": (redirect("http://[::1"), "refused:redirect_syntax"),
    "nowhere": (Answer(302), "refused:redirect_without_location"),
    # It only responds no
    "missing": (Answer(404), "failed:http_404"),
    "missing-with-a-long-page": (Answer(404, b"x" * 100_000), "failed:http_404"),
    "removed": (Answer(410), "failed:http_410"),
    "forbidden": (Answer(403), "failed:http_403"),
    "broken": (Answer(500), "failed:http_500"),
    "unasked-for": (Answer(304), "failed:http_304"),
    "part": (Answer(206, GOOD), "failed:http_206"),
}
BEHIND = {"and-back": redirect("/there"), "back-with-308?again": redirect("/back-with-308")}
BEHIND |= {f"hop-{n}": redirect(f"/hop-{n + 1}") for n in range(2, 9)}


@pytest.fixture
async def origin():
    """The hostile one."""
    origin = Origin()
    await origin.start("127.0.0.2")
    for name, answer in {**{n: case[0] for n, case in CASES.items()}, **BEHIND}.items():
        origin.answers[f"/{name}"] = [answer]
    yield origin
    await origin.close()


@pytest.fixture
async def honest():
    """A host that does no harm."""
    origin = Origin()
    await origin.start("127.0.0.3")
    yield origin
    await origin.close()


@pytest.fixture
def config(origin, honest, canary, names):
    """Two addresses are open, and every port that somebody listens on."""
    return FetchConfig(
        allow_networks=("127.0.0.2/32", "127.0.0.3/32"),
        allow_ports=(origin.port, honest.port, canary.port),
        classes=(0.2, 0.8),
        photo_max_bytes=SMALL_BYTES,
        host_connections=100,
        name_servers=f"127.0.0.1:{names.port}",
    )


class Market:
    """Both customers' catalogues, and what became of their links."""

    def __init__(self, shop) -> None:
        self._shop = shop

    async def offer(self, customer: str, urls: list[str]):
        """One item a link."""
        await self._shop.fetch.customers.set(
            customer, starts_max=100_000, window_s=60, connections=300
        )
        rows = [f"{customer}-{n},Item {n},5,{url}" for n, url in enumerate(urls)]
        path = self._shop.folder / f"{customer}.csv"
        path.write_text("\n".join(["id,name,price,photos", *rows, ""]))
        return await self._shop.fetch.run_catalogue(path, customer)

    async def outcomes(self) -> dict[str, str]:
        """By link, as far as known."""
        return {row["url"]: row["outcome"] for row in await self._shop.postgres.all(LINKS)}

    async def wait_decided(self, run, *, hurries: bool = True):
        """The run when each of its photos is decided; waits for backoff are cut short where it
        hurries.
        """

        async def ask():
            if hurries:
                await self._shop.postgres.value(HURRY)
            found = await self._shop.fetch.runs.get(run.run)
            return found if found.photos_pending == 0 else None

        return await wait_true(ask, what="every photo decided")


@pytest.fixture
def market(shop, worker):
    """Offers catalogues to a room that works."""
    return Market(shop)


async def test_each_attack_ends_in_its_outcome_and_honest_hosts_are_served(market, origin, honest):
    attack = await market.offer("attacker", [origin.url(f"/{name}") for name in CASES])
    urls = [honest.url(f"/photo/{n}") for n in range(FAST_ITEMS)]
    fast = await market.offer("honest", urls)
    # Nobody hurries, so what hangs waits for its backoffs, 17 s at least.
    done = await market.wait_decided(fast, hurries=False)
    assert done.photos_by_outcome == {"stored": FAST_ITEMS}
    beside = await market.outcomes()
    hanging = [name for name, case in CASES.items() if case[1] == "failed:timeout"]
    assert not any(origin.url(f"/{name}") in beside for name in hanging), "those still hang"
    done = await market.wait_decided(attack)
    found = await market.outcomes()
    expected = {name: outcome for name, (_, outcome) in CASES.items()}
    assert {name: found[origin.url(f"/{name}")] for name in CASES} == expected
    assert sum(done.photos_by_outcome.values()) == done.photos == len(CASES)


async def test_no_link_connects_to_a_forbidden_address(market, origin, honest, canary, names):
    """Literals, redirects, names, aliases; rebinding names are judged at each lookup."""
    port = canary.port
    names.records = {f"n{n}.test": [address] for n, address in enumerate(FORBIDDEN_ADDRESSES)}
    names.records |= {f"both{n}.test": ["127.0.0.3", a] for n, a in enumerate(FORBIDDEN_ADDRESSES)}
    names.records |= {"inner.test": ["127.0.0.1"], "alias.test": ["inner.test"]}
    bad = [f"http://{host}:{port}/x" for host in (*LOOPBACK_HOSTS, *names.records)]
    for number, url in enumerate(filter(str.isascii, bad[:])):
        origin.answers[f"/to/{number}"] = [redirect(url)]
        bad.append(origin.url(f"/to/{number}"))
    names.turns = {
        "turns.test": [["127.0.0.3"], ["127.0.0.1"]],
        "back.test": [["127.0.0.1"], ["127.0.0.3"]],
        "by-turns.test": [["127.0.0.3"], ["127.0.0.1"], ["127.0.0.3"], ["127.0.0.1"]],
    }
    turning = [f"http://{name}:{honest.port}/photo/{n}" for name in names.turns for n in range(5)]
    for name in names.turns:
        origin.answers[f"/{name}"] = [redirect(f"http://{name}:{port}/inward")]
        turning += [f"http://{name}:{port}/inward", origin.url(f"/{name}")]
    run = await market.offer("attacker", bad + turning)
    fast = await market.offer("honest", [honest.url("/photo/honest")])
    done = await market.wait_decided(run)
    assert (await market.wait_decided(fast)).photos_by_outcome == {"stored": 1}
    found = await market.outcomes()
    assert {found[url] for url in bad if url in found} == {"refused:forbidden_address"}
    assert done.photos_by_outcome["refused:forbidden_address"] >= len(bad)
    kinds = {found[url] for url in turning}
    assert kinds <= {"stored", "refused:forbidden_address", "failed:connect"}, kinds
    assert sum(done.photos_by_outcome.values()) == len(bad) + len(turning)
    assert canary.connections == 0
