"""Limits in the seller's own log: redirects, repeated sends, jams, pauses, connections."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pytest
from origin import Answer, PacedOrigin, photo, redirect
from room import LIMITS
from tests.kit.waiting import wait_true

from headrace.engines.postgres import PostgresDown
from headrace.fetch import FetchConfig
from headrace.fetch.download import Downloader
from headrace.fetch.host_stats import TimeClass
from headrace.fetch.limits import LaneClient, RateTokens, TokenExpired
from headrace.fetch.photo_fetch import Fetched, pause_s
from headrace.fetch.robots import crawl_delay_s
from headrace.jobs.errors import LaneExhausted

CONNECTIONS = 8


@pytest.fixture
async def origin():
    """A host whose pace a test sets."""
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
        host_connections=CONNECTIONS,
    )


@pytest.fixture
async def downloader(config):
    downloader = Downloader(config)
    yield downloader
    await downloader.close()


def rows(shop, paths) -> str:
    """A catalogue with one item per path."""
    lines = [f"i{n},Item,{shop.origin.url(path)}" for n, path in enumerate(paths)]
    return "\n".join(["id,name,photos", *lines, ""])


async def limit(shop, starts_max: int, window_s: float, customer: str = "shop") -> None:
    limits = {**LIMITS, "starts_max": starts_max, "window_s": window_s}
    await shop.fetch.customers.set(customer, **limits)


# Requests of one download


async def test_every_request_of_a_download_is_counted(downloader, origin):
    for n in range(3):
        origin.answers[f"/hop{n}"] = [redirect(f"/hop{n + 1}")]
    origin.answers["/hop3"] = [Answer(200, photo("far"))]
    found = await downloader.download(origin.url("/hop0"))
    assert (found.outcome, found.requests, len(origin.came)) == ("received", 4, 4)
    assert [step.status for step in found.steps] == [302, 302, 302, 200]
    origin.dies_after["/photo/2"] = 1
    found = await downloader.download(origin.url("/photo/2"))
    assert (found.outcome, found.requests) == ("received", 2), "libcurl repeats it by itself"
    assert len(origin.times("/photo/2")) == 2


async def test_a_request_without_a_token_is_not_sent_and_a_redirect_resumes(
    shop, downloader, origin
):
    await limit(shop, 3, 60.0)
    lane = LaneClient(shop.jobs)

    async def download(path: str):
        tokens = await lane.tokens("shop", wait_max_s=0)
        return await downloader.download(origin.url(path), tokens=tokens)

    await download("/photo/1")
    origin.dies_after["/photo/2"] = 1
    await download("/photo/2")
    assert len(origin.came) == 3
    await limit(shop, 4, 60.0)
    origin.answers["/a"] = [redirect("/photo/b")]
    with pytest.raises(LaneExhausted):
        await download("/a")
    found = await downloader.download(origin.url("/a"))
    assert found.outcome == "received"
    assert found.hops == [origin.url("/a"), origin.url("/photo/b")]
    assert [path for _, path in origin.came[3:]] == ["/a", "/photo/b"]
    await limit(shop, 5, 60.0)
    origin.dies_after["/photo/3"] = 1
    with pytest.raises(LaneExhausted):
        await download("/photo/3")
    assert len(origin.times("/photo/3")) == 1


async def test_a_redirect_resumes_whose_pause_could_not_be_read(downloader, origin):
    origin.answers["/a"] = [redirect("/photo/b")]

    async def pause_s(_host: str) -> float:
        raise PostgresDown("no connection")

    with pytest.raises(PostgresDown):
        await downloader.download(origin.url("/a"), pause_s=pause_s)
    found = await downloader.download(origin.url("/a"))
    assert (found.outcome, found.requests) == ("received", 1)
    assert [path for _, path in origin.came] == ["/a", "/photo/b"]


async def test_a_download_waits_for_a_connection_no_longer_than_its_token_is_valid(
    shop, downloader, origin
):
    origin.hold()
    lane = (await LaneClient(shop.jobs).tokens("shop", wait_max_s=0))._lane
    urls = [origin.url(f"/photo/{n}") for n in range(CONNECTIONS + 1)]
    waiting = [asyncio.create_task(downloader.download(url)) for url in urls[1:]]
    await wait_true(lambda: len(origin.came) == CONNECTIONS, what="all connections are in use")
    with pytest.raises(TokenExpired):
        await downloader.download(urls[0], tokens=RateTokens(lane, time.monotonic() + 0.1))
    assert not any(one.done() for one in waiting)
    origin.release()
    assert {d.outcome for d in await asyncio.gather(*waiting)} == {"received"}
    assert len(origin.came) == CONNECTIONS


# Pauses and crawl delays


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
def test_which_responses_pause_a_host(outcome, retry_after_s, pause):
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
def test_the_crawl_delay_of_a_robots_txt(text, delay_s):
    assert crawl_delay_s(text, "HeadraceFetch") == delay_s


# Through the whole room


async def drive(shop, origin, *, seed: int, jam_s: float, photos: int) -> None:
    """Two customers at one random host: no window of its log is ever over their limits.

    The oracle is the log alone: redirects, repeated sends, timeouts and a jam are all requests.
    """
    rng = random.Random(seed)
    limits = {f"c{n}": (rng.randrange(6, 12), rng.choice([0.7, 1.0])) for n in range(2)}
    runs = []
    for customer, (starts_max, window_s) in limits.items():
        await limit(shop, starts_max, window_s, customer)
        paths = [f"/photo/{customer}/{n}" for n in range(photos)]
        for n in rng.sample(range(photos), photos // 3):
            paths[n] = f"/to/{customer}/{n}"
            origin.answers[paths[n]] = [redirect(f"/photo/{customer}/r{n}")]
        for path in rng.sample(paths, 3):
            origin.dies_after[path] = 1
        for path in rng.sample(paths, 2):
            origin.delays_s[path] = rng.uniform(0.2, 0.9)
        runs.append(await shop.run(rows(shop, paths), customer=customer))
    await wait_true(lambda: len(origin.came) >= 10, what="it runs")
    origin.hold()
    jammed_s = time.monotonic()
    with suppress(TimeoutError):
        await asyncio.wait_for(asyncio.Event().wait(), jam_s)
    origin.release()
    for run in runs:
        done = await shop.wait_done(run, hurries=True)
        assert done.photos_by_outcome == {"stored": photos}
    for customer, (starts_max, window_s) in limits.items():
        assert len(origin.times(f"/{customer}/")) >= photos * 4 / 3
        assert origin.most_in_window(window_s, among=f"/{customer}/") <= starts_max
    during = [at for at in origin.times() if jammed_s < at < jammed_s + jam_s]
    starts = sum(most for most, _ in limits.values())
    assert len(during) <= starts + CONNECTIONS * (jam_s / 0.5 + 1), "its connections are bounded"


@pytest.mark.slow
@pytest.mark.usefixtures("worker")
async def test_no_window_of_a_hosts_log_is_over_the_limit_and_a_jam_grants_no_burst(shop, origin):
    await drive(shop, origin, seed=1, jam_s=2.0, photos=18)


@pytest.mark.soak
@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("seed", [2, 3])
async def test_a_long_jam_grants_no_burst(shop, origin, seed):
    await drive(shop, origin, seed=seed, jam_s=25.0, photos=60)


async def host_of(shop, photos: int):
    """The statistics of the host when so many photos are recorded."""

    async def is_recorded():
        found = await shop.fetch.hosts.page()
        is_there = found and sum(found[0].photos_by_outcome.values()) >= photos
        return found[0] if is_there else None

    return await wait_true(is_recorded, what="the host is recorded")


@pytest.mark.slow
@pytest.mark.usefixtures("worker")
async def test_a_timeout_moves_a_photo_to_the_next_class_and_the_host_is_remembered(shop, origin):
    origin.hold("/photo/slow")
    run = await shop.run(rows(shop, ["/photo/slow", "/photo/fast"]))
    await wait_true(
        lambda: len(origin.times("/photo/slow")) == 2, what="the next class requests it"
    )
    origin.release()
    assert (await shop.wait_done(run)).photos_by_outcome == {"stored": 2}
    assert len(origin.times("/photo/slow")) == 2
    assert (await host_of(shop, 3)).photos_by_outcome == {"failed:timeout": 1, "stored": 2}
    origin.delays_s["/photo/"] = 0.8
    for seen, paths in ((2, range(2)), (9, range(2, 11))):
        before = len(origin.came)
        run = await shop.run_to_end(rows(shop, [f"/photo/{n}" for n in paths]))
        assert run.photos_by_outcome["stored"] == seen
        await host_of(shop, 3 + seen)
    assert len(origin.came) - before == 9, "each photo starts in the right class"


@pytest.mark.slow
@pytest.mark.usefixtures("worker")
async def test_a_retry_after_pauses_all_photos_of_the_host(shop, origin):
    await shop.fetch.customers.set("shop", starts_max=1000, window_s=1.0, connections=4)
    origin.refusal = Answer(429, headers={"Retry-After": "2"})
    run = await shop.run(rows(shop, [f"/photo/{n}" for n in range(20)]))
    await wait_true(lambda: origin.statuses()[429] > 0, what="it is refused")
    origin.refusal = None
    # The backoff of single photos is skipped; the pause of the host is not.
    done = await shop.wait_done(run, hurries=True)
    assert done.photos_by_outcome == {"stored": 20}
    first_s, *later_s = origin.times()
    early = [at for at in later_s if at < first_s + 2 - origin.late_s]
    assert len(early) < CONNECTIONS, "only requests already running"


@pytest.mark.slow
@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("first", ["direct", "redirected"])
async def test_a_retry_after_holds_for_links_and_redirects_to_the_host(shop, origin, first):
    """The host that sent it is left alone, whichever link leads there."""
    await shop.fetch.customers.set("shop", starts_max=1000, window_s=1.0, connections=4)
    await origin.listen("127.0.0.2")
    other = f"http://127.0.0.2:{origin.port}"
    for n in range(4):
        origin.answers[f"/go/{n}"] = [redirect(f"{other}/photo/{n}")]
    links = [f"{other}/photo/0", f"{other}/photo/1", shop.origin.url("/go/2")]
    if first == "redirected":
        links[0] = shop.origin.url("/go/0")
    refused = Answer(429, headers={"Retry-After": "2"})
    origin.answers["/photo/0"] = [refused, Answer(200, photo("0"))]
    await shop.run(f"id,name,photos\na,A,{links[0]}\n", name="first.csv")
    await wait_true(lambda: origin.times("/photo/0"), what="it is refused")
    text = "".join(f"{n},Item,{link}\n" for n, link in enumerate(links))
    run = await shop.run(f"id,name,photos\n{text}", name="second.csv")
    await shop.wait_done(run, hurries=True)
    refused_s = origin.times("/photo/0")[0]
    others = [*origin.times("/photo/1"), *origin.times("/photo/2")]
    assert len(others) == 2
    assert min(others) > refused_s + 2 - origin.late_s


@pytest.mark.slow
async def test_a_crawl_delay_is_kept_if_it_is_configured(process, config, shop, origin):
    origin.answers["/robots.txt"] = [Answer(200, b"User-agent: *\nCrawl-delay: 1\n")]
    run = await shop.run(rows(shop, ["/photo/1", "/photo/2", "/photo/3"]))
    async with process(ignore, config=replace(config, crawl_delay="honor")):
        await shop.wait_done(run, hurries=True)
    times = origin.times("/photo/")
    assert len(times) == 3
    assert min(b - a for a, b in pairwise(times)) > 0.9 - origin.late_s
    assert len(origin.times("/robots.txt")) == 1


async def ignore(_item) -> None:
    """Receive an item."""


@pytest.mark.slow
async def test_photos_of_a_removed_class_are_still_downloaded(process, config, shop):
    run = await shop.run(rows(shop, [f"/photo/{n}" for n in range(5)]))
    fewer = replace(config, classes=(1.5, 8.0), former_classes=(0.5,))
    async with process(ignore, config=fewer):
        assert (await shop.wait_done(run)).photos_by_outcome == {"stored": 5}


# Isolation

HANGING = {"127.0.2.1": None, "127.0.2.2": 240.0, "mute.example": None}
"""Hosts that never answer, one without an address, and the class that each is known to need."""
PHOTOS_HANGING, PLACES = 60, 40
"""Photos of each such host, and connections of each class in this test."""


@pytest.mark.slow
async def test_customers_whose_hosts_hang_delay_nobody(process, config, shop, names, monkeypatch):
    """30 % of the customers hang, in every class and in DNS; the others are served meanwhile."""
    monkeypatch.setattr(TimeClass, "concurrency", PLACES)
    origin = PacedOrigin()
    addresses = [host for host in HANGING if host[0].isdigit()]
    await origin.start("127.0.0.1", *addresses, *(f"127.0.1.{n}" for n in range(7)))
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

    async def begin(customer: str, host: str, paths: list[str]) -> None:
        await limit(shop, 1000, 1.0, customer)
        lines = [f"i{n},Item,http://{host}:{origin.port}{path}" for n, path in enumerate(paths)]
        file = shop.folder / f"{customer}.csv"
        file.write_text("\n".join(["id,name,photos", *lines, ""]))
        await other.fetch.run_catalogue(file, customer)

    async with process(publish, config=site) as other:
        for number, (host, needed_s) in enumerate(HANGING.items()):
            for _ in range(3 if needed_s else 0):
                other.fetch._host_stats.record(
                    *(f"slow{number}", f"{host}:{origin.port}"),
                    outcome="failed:timeout",
                    requests=1,
                    took_s=needed_s,
                    needed_s=needed_s,
                )
            await other.fetch._host_stats.flush()
            hanging = [f"/hang/{number}-{n}" for n in range(PHOTOS_HANGING)]
            await begin(f"slow{number}", host, hanging)
        await wait_true(
            lambda: (
                {path[:7] for _, path in origin.came} == {"/hang/0", "/hang/1"}
                and "mute.example" in names.queries
            ),
            what="all of them hang",
        )
        for number in range(7):
            paths = [f"/photo/{number}-{n}" for n in range(10)]
            await begin(f"fast{number}", f"127.0.1.{number}", paths)
        fast = Counter({f"fast{number}": 10 for number in range(7)})
        # The shortest class ends after 60 s: a job behind a hanging connection would be later.
        await wait_true(lambda: came >= fast, what="the items of the others", deadline_s=50)
        assert came == fast, "no hanging photo is decided"
        assert origin.held_now >= 2
        origin.release()
        names.speak()
    await origin.close()
