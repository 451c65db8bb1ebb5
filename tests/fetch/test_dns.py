"""DnsCache are judged by what a real name server answers: every address, and again on every hop."""

from __future__ import annotations

import asyncio

import pytest
from name_server import NameServer
from origin import Answer, Origin, photo

from headrace.fetch import FetchConfig
from headrace.fetch.download import Downloader


@pytest.fixture
async def names():
    """A name server on a free port."""
    transport, server = await asyncio.get_running_loop().create_datagram_endpoint(
        NameServer, local_addr=("127.0.0.1", 0)
    )
    yield server
    transport.close()


@pytest.fixture
async def canary():
    """Must never be connected to."""
    canary = Origin()
    await canary.start()
    yield canary
    await canary.close()


def downloader(names, *ports: int, networks: tuple[str, ...] = ()) -> Downloader:
    return Downloader(
        FetchConfig(
            allow_networks=networks,
            allow_ports=ports,
            classes=(5.0,),
            name_servers=f"127.0.0.1:{names.port}",
        )
    )


@pytest.mark.parametrize(
    "answers",
    [
        ["127.0.0.1"],
        ["::1"],
        ["::ffff:127.0.0.1"],
        ["64:ff9b::7f00:1"],
        ["2002:7f00:1::"],
        ["169.254.169.254"],
        ["8.8.8.8", "127.0.0.1"],
        ["2606:4700::1111", "10.0.0.1"],
        ["inner.example"],
    ],
)
async def test_a_name_with_any_forbidden_answer_is_refused(names, canary, answers):
    names.records = {"shop.example": answers, "inner.example": ["127.0.0.1"]}
    public = downloader(names, canary.port)
    try:
        found = await public.download(f"http://shop.example:{canary.port}/a.jpg")
        assert found.outcome == "refused:forbidden_address", found.text
        assert "shop.example" in names.asked
        assert canary.connections == 0
    finally:
        await public.close()


async def test_a_redirect_to_a_name_is_judged_by_its_answers(names, origin, canary):
    """The first host is in a network that is open, the second is loopback in one that is not."""
    names.records = {"shop.example": ["127.0.0.1"], "inner.example": ["127.0.0.2"]}
    inner = f"http://inner.example:{canary.port}/secret"
    origin.answers["/a"] = [Answer(302, headers={"Location": inner})]
    origin.answers["/good"] = [Answer(200, photo("good"))]
    opened = downloader(names, origin.port, canary.port, networks=("127.0.0.1/32",))
    try:
        found = await opened.download(f"http://shop.example:{origin.port}/a")
        assert found.outcome == "refused:forbidden_address", found.text
        assert canary.connections == 0
        good = await opened.download(f"http://shop.example:{origin.port}/good")
        assert good.outcome == "received"
        assert origin.headers["/good"]["host"] == f"shop.example:{origin.port}"
    finally:
        await opened.close()


async def test_a_name_that_changes_its_answer_is_connected_where_it_was_judged(
    names, origin, canary
):
    """Rebinding: the name server turns to another address after each question."""
    names.records = {"shop.example": ["127.0.0.1"]}
    opened = downloader(names, origin.port, networks=("127.0.0.1/32",))
    try:
        first = await opened.download(f"http://shop.example:{origin.port}/photo/1")
        names.records = {"shop.example": ["127.0.0.2"]}
        second = await opened.download(f"http://shop.example:{origin.port}/photo/2")
        assert (first.outcome, second.outcome) == ("received", "received")
        assert origin.requests("/photo/2") == [200], "the answer that was judged is kept and used"
        opened._dns._cache.clear()
        third = await opened.download(f"http://shop.example:{origin.port}/photo/3")
        assert third.outcome == "refused:forbidden_address"
        assert origin.requests("/photo/3") == []
    finally:
        await opened.close()


async def test_one_question_serves_all_who_wait_and_no_such_name_is_dns(names, origin):
    names.records = {"shop.example": ["127.0.0.1"]}
    opened = downloader(names, origin.port, networks=("127.0.0.0/8",))
    try:
        urls = [f"http://shop.example:{origin.port}/photo/{n}" for n in range(30)]
        found = await asyncio.gather(*(opened.download(url) for url in urls))
        assert {f.outcome for f in found} == {"received"}
        assert names.asked.count("shop.example") <= 2, "one A and one AAAA"
        none = await opened.download(f"http://none.example:{origin.port}/x")
        assert none.outcome == "failed:dns"
    finally:
        await opened.close()


async def test_questions_lost_on_the_way_are_repeated_until_the_name_is_judged(names, canary):
    """The server was quick before, so c-ares waits a quarter of a second alone for each reply."""
    quick = {f"quick{n}.example": ["127.0.0.1"] for n in range(8)}
    names.records = {**quick, "shop.example": ["127.0.0.1"]}
    names.lost = {"shop.example": 6}
    public = downloader(names, canary.port)
    try:
        for name in [*quick, "shop.example"]:
            found = await public.download(f"http://{name}:{canary.port}/a.jpg")
            assert found.outcome == "refused:forbidden_address", found.text
        assert names.lost == {"shop.example": 0}
    finally:
        await public.close()


async def test_a_name_server_that_failed_is_asked_again_by_the_next_attempt(names, canary):
    names.records = {"shop.example": ["127.0.0.1"]}
    names.broken = {"shop.example": 100}
    public = downloader(names, canary.port)
    try:
        found = await public.download(f"http://shop.example:{canary.port}/a.jpg")
        assert found.outcome == "failed:dns", found.text
        names.broken = {}
        found = await public.download(f"http://shop.example:{canary.port}/a.jpg")
        assert found.outcome == "refused:forbidden_address", found.text
    finally:
        await public.close()
