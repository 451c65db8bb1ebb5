"""Downloads from hosts that misbehave: each ends in its outcome, and no forbidden socket is
opened.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from forbidden import LOOPBACK_HOSTS
from origin import Answer, Origin, photo
from tests.kit.waiting import wait_true

from headrace.fetch import FetchConfig
from headrace.fetch.curl import Bounds, Validators
from headrace.fetch.download import Downloader, _Attempt, _retry_after_s
from headrace.fetch.limits import RateTokens


@pytest.fixture
async def downloader(config):
    downloader = Downloader(config)
    yield downloader
    await downloader.close()


@pytest.fixture
async def canary():
    """Something that must never be connected to; its `connections` must stay 0."""
    canary = Origin()
    await canary.start()
    yield canary
    await canary.close()


async def test_a_photo_arrives_whole_with_its_validators(downloader, origin):
    origin.answers["/a.jpg"] = [
        Answer(200, photo("a"), {"ETag": '"x"', "Last-Modified": "Sat, 01 Nov 2025 10:00:00 GMT"})
    ]
    found = await downloader.download(origin.url("/a.jpg"))
    assert found.outcome == "received"
    with found.body:
        assert found.body.read() == photo("a")
    assert found.etag == '"x"'
    sent = origin.headers["/a.jpg"]
    assert sent["user-agent"].startswith("headracefetch/")
    assert sent["accept-encoding"] == "identity"
    assert not {"cookie", "authorization", "if-none-match"} & sent.keys()


async def test_a_known_photo_is_asked_conditionally(downloader, origin):
    first = await downloader.download(origin.url("/photo/1"))
    again = await downloader.download(origin.url("/photo/1"), Validators(first.etag))
    assert again.outcome == "unchanged"
    assert origin.requests("/photo/1") == [200, 304]


def redirect(to: str, status: int = 302) -> Answer:
    return Answer(status, b"x" * 100, {"Location": to})


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (Answer(404), "failed:http_404"),
        (Answer(410), "failed:http_410"),
        (Answer(403), "failed:http_403"),
        (Answer(500), "failed:http_500"),
        (Answer(503), "failed:http_503"),
        (Answer(429), "failed:rate_limited"),
        (Answer(206, b"part"), "failed:http_206"),
        (Answer(304), "failed:http_304"),
        (Answer(404, b"x" * 100_000), "failed:http_404"),
        (Answer(200, b"x", {"Content-Encoding": "gzip"}), "refused:encoding"),
        (Answer(200, b"x", {"X-Long": "y" * 40_000}), "refused:headers_too_large"),
        (Answer(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc"), "failed:truncated"),
        (
            Answer(raw=b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc"),
            "failed:truncated",
        ),
        (
            Answer(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 99000000000\r\n\r\n"),
            "refused:too_large",
        ),
        (Answer(raw=b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 300_000), "refused:too_large"),
        (Answer(raw=b"SSH-2.0-OpenSSH_9.2\r\n"), "failed:protocol"),
        (Answer(raw=b""), "failed:reset"),
        (redirect("http://169.254.169.254/"), "refused:forbidden_address"),
        (redirect("//[::ffff:10.0.0.1]/"), "refused:forbidden_address"),
        (redirect("file:///etc/passwd"), "refused:redirect_scheme"),
        (redirect("http://u:p@127.0.0.1/"), "refused:redirect_userinfo"),
        (redirect("http://127.0.0.1:1/"), "refused:redirect_port"),
        (redirect("/x" * 3000), "refused:redirect_length"),
        (redirect("http://[::1"), "refused:redirect_syntax"),
        (Answer(302), "refused:redirect_without_location"),
        (redirect("/odd"), "refused:redirect_loop"),
        (redirect("?again", 308), "refused:redirect_loop"),
    ],
)
async def test_each_misbehaviour_has_its_outcome(config, origin, answer, outcome):
    small = FetchConfig(
        allow_networks=config.allow_networks,
        allow_ports=config.allow_ports,
        classes=(5.0,),
        photo_max_bytes=200_000,
    )
    downloader = Downloader(small)
    origin.answers["/odd"] = [answer]
    origin.answers["/odd?again"] = [redirect("/odd")]
    try:
        found = await downloader.download(origin.url("/odd"))
        assert found.outcome == outcome, found.text
        assert found.body is None
        assert found.text
        good = await downloader.download(origin.url("/photo/after"))
        assert good.outcome == "received"
    finally:
        await downloader.close()


async def test_redirects_are_followed_five_times_and_no_more(downloader, origin):
    for n in range(6):
        origin.answers[f"/hop{n}"] = [redirect(f"/hop{n + 1}")]
    origin.answers["/hop6"] = [Answer(200, photo("far"))]
    assert (await downloader.download(origin.url("/hop0"))).outcome == "refused:redirect_limit"
    found = await downloader.download(origin.url("/hop1"))
    assert found.outcome == "received"
    assert len(found.hops) == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "answer",
    [
        Answer(hangs=True),
        Answer(hangs=True, raw=b"HTTP/1.1 200 OK\r\nContent-Le"),
        Answer(hangs=True, raw=b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc"),
    ],
)
async def test_a_host_that_hangs_is_left_in_time(config, origin, answer):
    quick = FetchConfig(
        allow_networks=config.allow_networks, allow_ports=config.allow_ports, classes=(0.4,)
    )
    downloader = Downloader(quick)
    origin.answers["/hangs"] = [answer]
    try:
        found = await asyncio.wait_for(downloader.download(origin.url("/hangs")), 60)
        assert found.outcome == "failed:timeout"
    finally:
        await downloader.close()


@pytest.mark.slow
async def test_time_in_which_this_process_was_too_busy_to_look_is_not_the_hosts(config, origin):
    """It spins for longer than the class is, again and again; the photo comes all the same."""
    downloader = Downloader(replace(config, classes=(1.0,)))

    def spin(times: int = 2) -> None:
        ends_s = time.monotonic() + 0.5
        while time.monotonic() < ends_s:
            pass
        if times:
            asyncio.get_running_loop().call_soon(spin, times - 1)

    try:
        asyncio.get_running_loop().call_later(0.001, spin)
        found = await downloader.download(origin.url("/photo/1"))
        assert found.outcome == "received", found.text
    finally:
        await downloader.close()


@pytest.mark.slow
async def test_a_silent_host_is_left_however_busy_this_process_is(config, origin):
    """It never stops to spin, so hardly any time is the host's by our clock."""
    downloader = Downloader(replace(config, classes=(0.1,)))
    origin.answers["/never"] = [Answer(hangs=True)]

    def spin() -> None:
        ends_s = time.monotonic() + 0.03
        while time.monotonic() < ends_s:
            pass
        if not asking.done():
            asyncio.get_running_loop().call_soon(spin)

    try:
        asking = asyncio.create_task(downloader.download(origin.url("/never")))
        await wait_true(lambda: origin.requests("/never"), what="it is requested")
        spin()
        found = await asyncio.wait_for(asking, 60)
        assert found.outcome == "failed:timeout"
    finally:
        await downloader.close()


async def test_a_port_nobody_listens_on_and_a_name_that_is_none(config, origin):
    downloader = Downloader(config)
    url = origin.url("/a")
    await origin.close()
    try:
        assert (await downloader.download(url)).outcome == "failed:connect"
        port = origin.port if origin._server.sockets else config.allow_ports[0]
        nowhere = f"http://nowhere.invalid:{port}/"
        assert (await downloader.download(nowhere)).outcome == "failed:dns"
    finally:
        await downloader.close()


async def test_a_connection_to_one_host_at_a_time_is_bounded(config, origin):
    two = FetchConfig(
        allow_networks=config.allow_networks, allow_ports=config.allow_ports, host_connections=2
    )
    downloader = Downloader(two)
    try:
        urls = [origin.url(f"/photo/{n}") for n in range(20)]
        found = await asyncio.gather(*(downloader.download(url) for url in urls))
        assert {f.outcome for f in found} == {"received"}
        assert origin.connections <= 2
    finally:
        await downloader.close()


@pytest.mark.parametrize("host", LOOPBACK_HOSTS)
async def test_the_canary_is_never_reached(canary, host, monkeypatch):
    """Literal, by name and by redirect from an allowed network; also with a proxy in the
    environment.
    """
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, canary.url(""))
    public = Downloader(FetchConfig(allow_ports=(canary.port, 80), classes=(2.0,)))
    try:
        found = await public.download(f"http://{host}:{canary.port}/a.jpg")
        assert found.outcome == "refused:forbidden_address"
        assert canary.connections == 0
    finally:
        await public.close()


async def test_the_socket_hook_alone_keeps_a_forbidden_peer_away(canary):
    """Whatever was judged before: here the first judge was fooled, and the second one decides."""
    public = Downloader(FetchConfig(allow_ports=(canary.port,), classes=(2.0,)))
    opened = Downloader(FetchConfig(allow_networks=("127.0.0.0/8",), allow_ports=(canary.port,)))
    target = _judged(opened, canary.url("/a.jpg"))
    try:
        with pytest.raises(Exception, match="use a public host") as ended:
            await public._request(target, _Attempt(Validators(), Bounds(2.0, 1000), RateTokens()))
        assert ended.value.outcome == "refused:forbidden_address"
        assert canary.connections == 0
    finally:
        await public.close()


def _judged(downloader: Downloader, url: str):
    from headrace.fetch.guard import judge_url

    return judge_url(url, downloader.policy)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("120", 120.0),
        ("999999999999", 999_999_999.0),
        ("-1", None),
        ("abc", None),
        ("", None),
        (None, None),
        ("Thu, 01 Jan 1970 00:00:00 GMT", None),
    ],
)
def test_retry_after_means_seconds_or_nothing(value, seconds):
    assert _retry_after_s(value) == seconds
