"""Limits in the seller's own log: redirects, repeated sends, jams, pauses, connections."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pytest
from name_server import NameServer
from origin import Answer, photo
from paced import PacedOrigin
from tests.kit.waiting import wait_true

from headrace.engines.sql import compile_query
from headrace.fetch import FetchConfig
from headrace.fetch.download import Downloader
from headrace.fetch.host_stats import TimeClass
from headrace.fetch.limits import LaneClient, RateTokens, TokenExpired
from headrace.fetch.photo_fetch import Fetched, pause_s
from headrace.fetch.robots import crawl_delay_s
from headrace.jobs.errors import LaneExhausted

DUE = compile_query(
    "due",
    "-- What waits for its time is due.\n"
    "WITH ready AS (UPDATE headrace.job_ready SET run_at = now() WHERE run_at > now() RETURNING 1)"
    " SELECT count(*) FROM ready",
)


@pytest.fixture
async def origin():
    """A host whose pace a test decides."""
    origin = PacedOrigin()
    await origin.start()
    yield origin
    await origin.close()


@pytest.fixture
def config(origin):
    """Three classes, shorter than any real ones."""
    return FetchConfig(
        allow_networks=("127.0.0.0/8",),
        allow_ports=(origin.port,),
        classes=(0.5, 1.5, 8.0),
        host_connections=8,
    )


@pytest.fixture
async def downloader(config):
    downloader = Downloader(config)
    yield downloader
    await downloader.close()


def rows(shop, paths, *, item: str = "i") -> str:
    """A catalogue with an item a path."""
    lines = [f"{item}{n},Item,{shop.origin.url(path)}" for n, path in enumerate(paths)]
    return "\n".join(["id,name,photos", *lines, ""])


async def limit(shop, starts_max: int, window_s: float, connections: int = 50) -> None:
    await shop.fetch.customers.set(
        "shop", starts_max=starts_max, window_s=window_s, connections=connections
    )


# ---- downloads


async def test_every_request_of_a_chain_is_counted(downloader, origin):
    for n in range(3):
        origin.answers[f"/hop{n}"] = [Answer(302, headers={"Location": f"/hop{n + 1}"})]
    origin.answers["/hop3"] = [Answer(200, photo("far"))]
    found = await downloader.download(origin.url("/hop0"))
    assert (found.outcome, found.requests, len(origin.came)) == ("received", 4, 4)
    assert [step.status for step in found.steps] == [302, 302, 302, 200]


async def test_a_second_send_over_a_dead_connection_is_a_request_of_its_own(downloader, origin):
    """libcurl sends again by itself where a kept connection dies: the host sees two requests."""
    await downloader.download(origin.url("/photo/1"))
    origin.dies_after["/photo/2"] = 1
    found = await downloader.download(origin.url("/photo/2"))
    assert (found.outcome, found.requests) == ("received", 2)
    assert len(origin.times("/photo/2")) == 2


async def test_a_second_send_without_a_start_is_not_made(shop, downloader, origin):
    await limit(shop, 2, 60.0)
    reach = LaneClient(shop.jobs)
    first = await reach.tokens("shop", wait_max_s=0)
    await downloader.download(origin.url("/photo/1"), tokens=first)
    origin.dies_after["/photo/2"] = 1
    with pytest.raises(LaneExhausted):
        await downloader.download(
            origin.url("/photo/2"), tokens=await reach.tokens("shop", wait_max_s=0)
        )
    assert len(origin.times("/photo/2")) == 1


async def test_a_chain_that_had_to_stop_goes_on_where_it_was(shop, downloader, origin):
    await limit(shop, 1, 60.0)
    origin.answers["/a"] = [Answer(302, headers={"Location": "/photo/b"})]
    tokens = await LaneClient(shop.jobs).tokens("shop", wait_max_s=0)
    with pytest.raises(LaneExhausted):
        await downloader.download(origin.url("/a"), tokens=tokens)
    found = await downloader.download(origin.url("/a"))
    assert found.outcome == "received"
    assert found.hops == [origin.url("/a"), origin.url("/photo/b")]
    assert [path for _, path in origin.came] == ["/a", "/photo/b"]


async def test_a_full_host_is_not_waited_for_longer_than_the_start_is_good(shop, config, origin):
    origin.jam()
    busy = Downloader(config)
    lane = (await LaneClient(shop.jobs).tokens("shop", wait_max_s=0))._lane
    try:
        waiting = [asyncio.create_task(busy.download(origin.url(f"/photo/{n}"))) for n in range(8)]
        await wait_true(lambda: len(origin.came) == 8, what="all places are taken")
        with pytest.raises(TokenExpired):
            await busy.download(
                origin.url("/photo/8"), tokens=RateTokens(lane, time.monotonic() + 0.1)
            )
        assert not any(one.done() for one in waiting), "it did not wait for a place, for up to 8 s"
        origin.release()
        assert {d.outcome for d in await asyncio.gather(*waiting)} == {"received"}
        assert len(origin.came) == 8
    finally:
        await busy.close()


# ---- pauses and crawl delays


@pytest.mark.parametrize(
    ("outcome", "retry_after_s", "pause"),
    [
        ("failed:rate_limited", 30.0, 30.0),
        ("failed:rate_limited", None, 10.0),
        ("failed:http_503", 5.0, 5.0),
        ("failed:http_503", None, 0.0),
        ("failed:http_500", 5.0, 0.0),
        ("stored", None, 0.0),
    ],
)
def test_what_asks_all_photos_to_wait(outcome, retry_after_s, pause):
    assert pause_s(Fetched(outcome, "", retry_after_s=retry_after_s)) == pause


@pytest.mark.parametrize(
    ("text", "delay_s"),
    [
        ("User-agent: *\nCrawl-delay: 3\n", 3.0),
        ("User-agent: HeadraceFetch\nCrawl-delay: 7\n\nUser-agent: *\nCrawl-delay: 3\n", 7.0),
        ("User-agent: other\nCrawl-delay: 3\n", None),
        ("User-agent: *\nCrawl-delay: 99999\n", 60.0),
        ("User-agent: *\nCrawl-delay: often\n", None),
        ("User-agent: *\nDisallow: /\n", None),
        ("<html>", None),
        ("\0\ufffd", None),
        ("", None),
    ],
)
def test_the_delay_that_a_robots_txt_asks(text, delay_s):
    assert crawl_delay_s(text, "HeadraceFetch") == delay_s


# ---- through the whole room


@pytest.mark.slow
@pytest.mark.usefixtures("worker")
async def test_redirects_and_second_sends_keep_the_window(shop, origin):
    """10 requests a second, 30 photos: half redirect, some connections die."""
    await limit(shop, 10, 1.0)
    paths = [f"/photo/{n}" for n in range(15)]
    for n in range(15):
        origin.answers[f"/to/{n}"] = [Answer(302, headers={"Location": f"/photo/r{n}"})]
    origin.dies_after = {"/photo/7": 1, "/photo/9": 1}
    run = await shop.run_to_end(rows(shop, [*paths, *(f"/to/{n}" for n in range(15))]))
    assert run.photos_by_outcome == {"stored": 30}
    assert origin.most_in_window(1.0) <= 10
    assert len(origin.came) >= 45


async def jammed_run(shop, origin, *, jam_s: float, photos: int) -> None:
    """A host is silent for `jam_s`, then answers all at once: no window is over the limit, then or
    later.
    """
    await limit(shop, 10, 1.0, connections=20)
    run = await shop.run(rows(shop, [f"/photo/{n}" for n in range(photos)]))
    await wait_true(lambda: len(origin.came) >= 10, what="it runs")
    origin.jam()
    jammed_s = time.monotonic()
    with suppress(TimeoutError):
        await asyncio.wait_for(asyncio.Event().wait(), jam_s)
    origin.release()
    done = asyncio.create_task(shop.wait_done(run))
    while not done.done():
        # What ran out of time in the longest class waits for its backoff.
        await asyncio.wait([done], timeout=0.5)
        await shop.postgres.value(DUE)
    assert (await done).photos_by_outcome == {"stored": photos}
    assert origin.most_in_window(1.0) <= 10
    during = [at for at in origin.times() if jammed_s < at < jammed_s + jam_s]
    assert len(during) <= 10 + 8 * (jam_s / 0.5 + 1), "the pool limits requests to a silent host"


@pytest.mark.slow
@pytest.mark.usefixtures("worker")
async def test_a_jam_grants_no_burst(shop, origin):
    await jammed_run(shop, origin, jam_s=3.0, photos=40)


@pytest.mark.soak
@pytest.mark.usefixtures("worker")
async def test_a_long_jam_grants_no_burst(shop, origin):
    await jammed_run(shop, origin, jam_s=25.0, photos=80)


@pytest.mark.slow
@pytest.mark.usefixtures("worker")
async def test_a_timeout_moves_a_photo_on_and_costs_no_try(shop, origin):
    origin.hold("/photo/slow")
    run = await shop.run(rows(shop, ["/photo/slow", "/photo/fast"]))
    await wait_true(
        lambda: len(origin.times("/photo/slow")) == 2, what="the next class requests it"
    )
    origin.release()
    assert (await shop.wait_done(run)).photos_by_outcome == {"stored": 2}
    assert len(origin.times("/photo/slow")) == 2
    host = (await _host(shop))[0]
    assert host.photos_by_outcome == {"failed:timeout": 1, "stored": 2}


async def _host(shop):
    async def ask():
        found = await shop.fetch.hosts.page()
        return found if found and sum(found[0].photos_by_outcome.values()) > 2 else None

    return await wait_true(ask, what="the host was recorded")


@pytest.mark.slow
@pytest.mark.usefixtures("worker")
async def test_a_host_that_is_known_to_be_slow_is_asked_in_the_right_class_at_once(shop, origin):
    origin.delays_s["/photo/"] = 0.8
    await shop.run_to_end(rows(shop, ["/photo/1", "/photo/2"]))
    await _host(shop)
    before = len(origin.came)
    run = await shop.run_to_end(rows(shop, [f"/photo/{n}" for n in range(1, 12)]))
    assert run.photos_by_outcome["stored"] == 9
    assert len(origin.came) - before == 9, "no photo was begun twice"


@pytest.mark.slow
@pytest.mark.usefixtures("worker")
async def test_a_retry_after_stops_all_photos_of_the_host(shop, origin):
    await limit(shop, 1000, 1.0, connections=4)
    origin.refusal = Answer(429, headers={"Retry-After": "2"})
    run = await shop.run(rows(shop, [f"/photo/{n}" for n in range(20)]))
    done = asyncio.create_task(shop.wait_done(run))
    await wait_true(lambda: origin.statuses()[429] > 0, what="it responded so")
    origin.refusal = None
    while not done.done():
        # The backoff of the photos with that response; the others wait for the pause all the same.
        await asyncio.wait([done], timeout=0.5)
        await shop.postgres.value(DUE)
    assert (await done).photos_by_outcome == {"stored": 20}
    first_s, *later_s = origin.times()
    early = [at for at in later_s if at < first_s + 2 - origin.late_s]
    assert len(early) < 8, "only requests already running"


@pytest.mark.slow
async def test_a_crawl_delay_is_kept_when_the_operator_says_so(process, config, shop, origin):
    origin.answers["/robots.txt"] = [Answer(200, b"User-agent: *\nCrawl-delay: 1\n")]
    run = await shop.run(rows(shop, ["/photo/1", "/photo/2", "/photo/3"]))
    honest = replace(config, crawl_delay="honour")
    async with process(_told, config=honest):
        done = asyncio.create_task(shop.wait_done(run))
        while not done.done():
            await asyncio.wait([done], timeout=0.3)
            await shop.postgres.value(DUE)
        await done
    times = origin.times("/photo/")
    assert len(times) == 3
    assert min(b - a for a, b in pairwise(times)) > 0.9 - origin.late_s
    assert len(origin.times("/robots.txt")) == 1


async def _told(_item) -> None:
    """A consumer."""


# ---- isolation


@pytest.fixture
async def names():
    """A slow name server."""
    transport, server = await asyncio.get_running_loop().create_datagram_endpoint(
        NameServer, local_addr=("127.0.0.1", 0)
    )
    yield server
    transport.close()


class Crowd:
    """Customers with hosts of their own on one port."""

    def __init__(self, fetch, folder, port: int) -> None:
        self.fetch = fetch
        self.folder = folder
        self.port = port

    async def begin(self, customer: str, host: str, paths: list[str]) -> None:
        """A customer's catalogue: an item a photo."""
        await self.fetch.customers.set(customer, starts_max=1000, window_s=1.0, connections=50)
        lines = [f"i{n},Item,http://{host}:{self.port}{path}" for n, path in enumerate(paths)]
        path = self.folder / f"{customer}.csv"
        path.write_text("\n".join(["id,name,photos", *lines, ""]))
        await self.fetch.run_catalogue(path, customer)

    async def expect(self, customer: str, host: str, needed_s: float) -> None:
        """Let this host be known to need that class."""
        speeds = self.fetch._host_stats
        for _ in range(3):
            speeds.record(
                customer,
                f"{host}:{self.port}",
                outcome="failed:timeout",
                requests=1,
                took_s=needed_s,
                needed_s=needed_s,
            )
        await speeds.flush()


HANGING = {"127.0.2.1": None, "127.0.2.2": 240.0, "mute.example": None}
"""Hosts that answer nothing, the last not even its name, and the class that each is known to need.

"""
PHOTOS_HANGING, PLACES = 60, 40
"""Of each host, and of each class in this test: one such host has more than a class has places."""


@pytest.mark.slow
async def test_customers_whose_hosts_hang_delay_nobody(process, config, shop, names, monkeypatch):
    """30 % of the customers hang, in every class and in DNS; the others' items come meanwhile."""
    monkeypatch.setattr(TimeClass, "concurrency", PLACES)
    origin = PacedOrigin()
    addresses = [host for host in HANGING if host[0].isdigit()]
    await origin.start("127.0.0.1", *addresses, *(f"127.0.1.{n}" for n in range(1, 8)))
    origin.hold("/hang/")
    names.silent = {"mute.example"}
    site = replace(
        config,
        classes=(60.0, 120.0, 240.0),
        allow_ports=(origin.port,),
        name_servers=f"127.0.0.1:{names.port}",
    )
    came = Counter()

    async def publish(item) -> None:
        came[item.customer] += 1

    try:
        async with process(publish, config=site) as other:
            crowd = Crowd(other.fetch, shop.folder, origin.port)
            for number, (host, needed_s) in enumerate(HANGING.items()):
                if needed_s is not None:
                    await crowd.expect(f"slow{number}", host, needed_s)
                await crowd.begin(
                    f"slow{number}", host, [f"/hang/{number}-{n}" for n in range(PHOTOS_HANGING)]
                )
            await wait_true(
                lambda: (
                    {path[:7] for _, path in origin.came} == {"/hang/0", "/hang/1"}
                    and "mute.example" in names.asked
                ),
                what="all of them hang",
            )
            for number in range(7):
                paths = [f"/photo/{number}-{n}" for n in range(10)]
                await crowd.begin(f"fast{number}", f"127.0.1.{number + 1}", paths)
            fast = Counter({f"fast{number}": 10 for number in range(7)})
            # The shortest class ends after 60 s: a job behind a hanging connection would be later.
            await wait_true(lambda: came >= fast, what="the others' items", deadline_s=50)
            assert came == fast, "nothing that hangs is decided"
            assert origin.held_now >= 2
            origin.release()
            names.speak()
    finally:
        await origin.close()


@pytest.mark.slow
async def test_photos_of_a_class_that_was_taken_away_are_worked_off(process, config, shop, origin):
    run = await shop.run(rows(shop, [f"/photo/{n}" for n in range(5)]))
    fewer = replace(config, classes=(1.5, 8.0), former_classes=(0.5,))
    async with process(_told, config=fewer):
        assert (await shop.wait_done(run)).photos_by_outcome == {"stored": 5}
