"""No way leads to a forbidden address: each form, by literal, name, redirect or kept connection.

Only 127.0.0.2 is allowed. A canary listens on 127.0.0.1 and ::1, on an allowed port, and must
never be connected to.
"""

from __future__ import annotations

import asyncio
import ipaddress

import pycurl
import pytest
from forbidden import FORBIDDEN_ADDRESSES, LOOPBACK_HOSTS
from origin import Answer, Origin, redirect

from headrace.fetch import FetchConfig
from headrace.fetch.curl import Bounds, Exchange, Validators
from headrace.fetch.download import Downloader, _Attempt
from headrace.fetch.guard import Policy, judge_url
from headrace.fetch.limits import RateTokens

BOUNDS = Bounds(5.0, 1_000_000)
REFUSED = "refused:forbidden_address"


@pytest.fixture
async def origin():
    """The only allowed host."""
    origin = Origin()
    await origin.start("127.0.0.2")
    yield origin
    await origin.close()


@pytest.fixture
async def downloader(origin, names, canary):
    """Everything is forbidden but 127.0.0.2; the canary's port is allowed."""
    downloader = Downloader(
        FetchConfig(
            allow_networks=("127.0.0.2/32",),
            allow_ports=(origin.port, canary.port, 80),
            classes=(5.0,),
            name_servers=f"127.0.0.1:{names.port}",
        )
    )
    yield downloader
    await downloader.close()
    assert canary.connections == 0


def literal(address: str) -> str:
    return f"[{address}]" if ":" in address else address


async def test_no_literal_leads_there_even_with_a_proxy(downloader, origin, canary, monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, canary.url(""))
    for host in (*LOOPBACK_HOSTS, *map(literal, FORBIDDEN_ADDRESSES)):
        found = await downloader.download(f"http://{host}:{canary.port}/a.jpg")
        assert (found.outcome, found.requests) == (REFUSED, 0), host
    found = await downloader.download(origin.url("/photo/1"))
    assert found.outcome == "received", "the proxy is not used"
    assert canary.log == []


async def test_no_redirect_of_any_hop_leads_there(downloader, origin, canary):
    for hops in (1, 3):
        for n in range(1, hops):
            origin.answers[f"/{n}"] = [redirect(f"/{n + 1}")]
        for host in (*map(literal, FORBIDDEN_ADDRESSES), *filter(str.isascii, LOOPBACK_HOSTS)):
            origin.answers[f"/{hops}"] = [redirect(f"http://{host}:{canary.port}/x", 307)]
            found = await downloader.download(origin.url("/1"))
            assert found.outcome == REFUSED, (host, found.text)
            assert {step.address for step in found.steps} == {"127.0.0.2"}
            assert found.requests == hops


async def test_no_name_leads_there_alone_beside_a_good_answer_or_by_an_alias(
    downloader, origin, names, canary
):
    names.records["inner.example"] = ["127.0.0.1"]
    lists = [["inner.example"]]
    for address in FORBIDDEN_ADDRESSES:
        lists += [[address], ["127.0.0.2", address], [address, "127.0.0.2"]]
    for number, answers in enumerate(lists):
        names.records[f"n{number}.example"] = answers
        url = f"http://n{number}.example:{canary.port}/x"
        origin.answers["/to-name"] = [redirect(url)]
        for begin in (url, origin.url("/to-name")):
            found = await downloader.download(begin)
            assert found.outcome == REFUSED, (answers, found.text)
    assert {path for path, _ in origin.log} == {"/to-name"}


async def test_a_rebound_name_is_connected_where_it_was_judged(downloader, origin, names):
    """The answer that was judged is used while it is cached; each later answer is judged."""
    names.turns["turns.example"] = [["127.0.0.2"], ["127.0.0.1"]]
    begin = f"http://turns.example:{origin.port}/1"
    origin.answers["/1"] = [redirect("/2")]
    origin.answers["/2"] = [Answer(404)]
    for _ in range(2):
        assert (await downloader.download(begin)).outcome == "failed:http_404"
    assert origin.headers["/2"]["host"] == f"turns.example:{origin.port}"
    downloader._dns._cache.clear()
    assert (await downloader.download(begin)).outcome == REFUSED
    assert len(origin.log) == 4


async def test_concurrent_lookups_of_a_name_share_one_query(downloader, origin, names):
    names.records = {"shop.example": ["127.0.0.2"]}
    urls = [f"http://shop.example:{origin.port}/photo/{n}" for n in range(30)]
    found = await asyncio.gather(*(downloader.download(url) for url in urls))
    assert {f.outcome for f in found} == {"received"}
    assert names.queries.count("shop.example") <= 2, "one A and one AAAA"
    none = await downloader.download(f"http://none.example:{origin.port}/x")
    assert none.outcome == "failed:dns"


async def test_lost_and_failed_queries_are_repeated_until_the_name_is_judged(
    downloader, names, canary
):
    """The server was quick before, so c-ares waits a quarter of a second alone for each reply."""
    quick = {f"quick{n}.example": ["127.0.0.1"] for n in range(8)}
    names.records = {**quick, "lost.example": ["127.0.0.1"], "broken.example": ["127.0.0.1"]}
    names.lost = {"lost.example": 6}
    for name in [*quick, "lost.example"]:
        found = await downloader.download(f"http://{name}:{canary.port}/a.jpg")
        assert found.outcome == REFUSED, found.text
    assert names.lost == {"lost.example": 0}
    for broken, outcome in ((100, "failed:dns"), (0, REFUSED)):
        names.broken = {"broken.example": broken}
        found = await downloader.download(f"http://broken.example:{canary.port}/a.jpg")
        assert found.outcome == outcome, found.text


async def test_each_request_is_judged_at_its_socket(downloader, origin, canary):
    """A URL judged by a wrong policy is refused by the hooks of a new and of a kept connection."""
    assert (await downloader.download(origin.url("/photo/1"))).outcome == "received"
    opened = Policy.of(("127.0.0.0/8",), (origin.port, canary.port))
    targets = [judge_url(url, opened) for url in (origin.url("/photo/2"), canary.url("/a.jpg"))]
    downloader.policy = Policy(ports=opened.ports)
    for target in targets:
        with pytest.raises(Exception, match="use a public host") as ended:
            await downloader._request(target, _Attempt(Validators(), BOUNDS, RateTokens()))
        assert ended.value.outcome == REFUSED
    assert [path for path, _ in origin.log] == ["/photo/1"]


def test_both_hooks_refuse_every_form_and_what_is_no_address():
    for address in FORBIDDEN_ADDRESSES:
        hop = Exchange(Policy(), BOUNDS, RateTokens())
        assert hop.before_request(address, "", 80, 0) == pycurl.PREREQFUNC_ABORT
        assert not hop.is_sent
        hop = Exchange(Policy(), BOUNDS, RateTokens())
        family = ipaddress.ip_address(address).version
        assert hop.open_socket(0, (family, 1, 6, (address.encode(), 80))) == pycurl.SOCKET_BAD
        assert hop.stopped[0] == REFUSED
    hop = Exchange(Policy(), BOUNDS, RateTokens())
    assert hop.before_request("", "", 80, 0) == pycurl.PREREQFUNC_ABORT


async def test_the_canary_would_see_a_connection(names, canary):
    """A downloader that allows everything reaches it: the checks above can fail."""
    names.records = {"inner.example": ["127.0.0.1"]}
    careless = Downloader(
        FetchConfig(
            allow_networks=("127.0.0.0/8", "::1/128"),
            allow_ports=(canary.port,),
            name_servers=f"127.0.0.1:{names.port}",
        )
    )
    for number, host in enumerate(("127.0.0.1", "[::1]", "inner.example"), 1):
        found = await careless.download(f"http://{host}:{canary.port}/photo/1")
        assert found.outcome == "received", found.text
        assert 1 <= canary.connections <= number
    await careless.close()
