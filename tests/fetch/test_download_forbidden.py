"""No way leads to a forbidden address: every known form of one, on every hop, by literal, by name,
by a kept connection.

Only 127.0.0.2 is open. A canary listens on 127.0.0.1 and ::1, which many of the forms mean: it
must see nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress

import pycurl
import pytest
from forbidden import FORBIDDEN_ADDRESSES, LOOPBACK_HOSTS
from name_server import NameServer
from origin import Answer, Origin

from headrace.fetch import FetchConfig
from headrace.fetch.curl import Bounds, Exchange, Validators
from headrace.fetch.download import Downloader, _Attempt
from headrace.fetch.guard import Policy, judge_url
from headrace.fetch.limits import RateTokens

BOUNDS = Bounds(5.0, 1_000_000)


@pytest.fixture
async def names():
    """A name server on a free port."""
    transport, server = await asyncio.get_running_loop().create_datagram_endpoint(
        NameServer, local_addr=("127.0.0.1", 0)
    )
    yield server
    transport.close()


@pytest.fixture
async def origin():
    """The only allowed host."""
    origin = Origin()
    await origin.start("127.0.0.2")
    yield origin
    await origin.close()


@pytest.fixture
async def canaries(origin):
    """They must never be connected to; on the origin's port, so that no rule of ports protects
    them.
    """
    reached = []

    async def note(_reader, writer) -> None:
        reached.append(writer.get_extra_info("peername"))
        writer.close()

    servers = [await asyncio.start_server(note, host, origin.port) for host in ("127.0.0.1", "::1")]
    yield reached
    for server in servers:
        server.close()


@pytest.fixture
async def downloader(origin, names):
    """Everything is forbidden but 127.0.0.2."""
    config = FetchConfig(
        allow_networks=("127.0.0.2/32",),
        allow_ports=(origin.port,),
        classes=(5.0,),
        name_servers=f"127.0.0.1:{names.port}",
    )
    downloader = Downloader(config)
    yield downloader
    await downloader.close()


def authority(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


async def test_no_redirect_of_any_hop_leads_there(downloader, origin, canaries):
    hosts = [authority(a, origin.port) for a in FORBIDDEN_ADDRESSES]
    hosts += [f"{h}:{origin.port}" for h in LOOPBACK_HOSTS if h.isascii()]
    for hops in (1, 3):
        for host in hosts:
            for n in range(1, hops):
                origin.answers[f"/{n}"] = [Answer(302, headers={"Location": f"/{n + 1}"})]
            origin.answers[f"/{hops}"] = [Answer(307, headers={"Location": f"http://{host}/x"})]
            found = await downloader.download(origin.url("/1"))
            assert found.outcome == "refused:forbidden_address", (host, found.text)
            assert {step.address for step in found.steps} == {"127.0.0.2"}
            assert found.requests == hops
    assert canaries == []


async def test_no_name_leads_there_alone_or_beside_a_good_answer(
    downloader, origin, names, canaries
):
    for number, address in enumerate(FORBIDDEN_ADDRESSES):
        for kind, answers in (("alone", [address]), ("beside", ["127.0.0.2", address])):
            name = f"{kind}{number}.example"
            names.records[name] = answers
            url = f"http://{name}:{origin.port}/x"
            origin.answers["/to-name"] = [Answer(302, headers={"Location": url})]
            for begin in (url, origin.url("/to-name")):
                found = await downloader.download(begin)
                assert found.outcome == "refused:forbidden_address", (answers, found.text)
    assert canaries == []
    assert {path for path, _ in origin.log} == {"/to-name"}


async def test_a_name_that_turns_between_two_hops_is_judged_again(
    downloader, origin, names, canaries
):
    """Its first answer is the open host, every later one the canary's address."""
    names.turns["turns.example"] = [["127.0.0.2"], ["127.0.0.1"]]
    begin = f"http://turns.example:{origin.port}/1"
    origin.answers["/1"] = [Answer(302, headers={"Location": "/2"})]
    origin.answers["/2"] = [Answer(404)]
    assert (await downloader.download(begin)).outcome == "failed:http_404"
    downloader._dns._cache.clear()
    assert (await downloader.download(begin)).outcome == "refused:forbidden_address"
    assert len(origin.log) == 2
    assert canaries == []


async def test_a_kept_connection_is_judged_before_each_request(downloader, origin):
    """The second hook: a connection that is no longer allowed sends nothing."""
    assert (await downloader.download(origin.url("/photo/1"))).outcome == "received"
    target = judge_url(origin.url("/photo/2"), downloader.policy)
    downloader.policy = Policy(ports=frozenset({origin.port}))
    with pytest.raises(Exception, match="use a public host") as ended:
        await downloader._request(target, _Attempt(Validators(), BOUNDS, RateTokens()))
    assert ended.value.outcome == "refused:forbidden_address"
    assert [path for path, _ in origin.log] == ["/photo/1"]


@pytest.mark.parametrize("address", FORBIDDEN_ADDRESSES)
def test_both_hooks_refuse_every_form(address):
    hop = Exchange(Policy(), BOUNDS, RateTokens())
    assert hop.before_request(address, "", 80, 0) == pycurl.PREREQFUNC_ABORT
    assert not hop.is_sent
    hop = Exchange(Policy(), BOUNDS, RateTokens())
    family = ipaddress.ip_address(address).version
    assert hop.open_socket(0, (family, 1, 6, (address.encode(), 80))) == pycurl.SOCKET_BAD
    assert hop.stopped[0] == "refused:forbidden_address"


def test_a_peer_that_is_no_address_is_refused():
    hop = Exchange(Policy(), BOUNDS, RateTokens())
    assert hop.before_request("", "", 80, 0) == pycurl.PREREQFUNC_ABORT
