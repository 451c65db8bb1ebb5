"""The shop's pages: a buyer's way through them, and that sellers' words stay words."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager

import httpx
import pytest
import uvicorn
from examples.bazaar.adverts import Advert, Adverts, Photo
from examples.bazaar.buyers import Buyers
from examples.bazaar.shop import make_web
from examples.bazaar.tracks import TRACKS
from tests.kit.waiting import wait_true

from headrace import Headrace
from headrace.media.worker import serve

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"
PHOTOS = (
    Photo("http://shop/a.jpg", "photos/a.jpg", "ab", "stored", 3),
    Photo("http://shop/b.jpg", "", "", "failed:http_404", 0),
)
ADVERTS = [
    Advert("shop-01", "sofa", 1, "Sofa", "10", PHOTOS),
    Advert("shop-01", "lamp", 1, HOSTILE, HOSTILE, ()),
    Advert("shop-02", "bike", 1, "Bike", "120", ()),
]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@asynccontextmanager
async def serving(web):
    """The pages on a socket, as `uvicorn` serves them."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(web, log_config=None))
    task = asyncio.create_task(server.serve([listening]))
    await wait_true(lambda: server.started or task.done(), what="the shop listens")
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    await task


@pytest.fixture
async def headrace(running_engines, database_url, valkey, tmp_path):
    """A platform of this test's own."""
    flags = {
        "data.folder": str(tmp_path),
        "postgres.url": database_url,
        "valkey.url": running_engines.endpoints.valkey_url,
        "valkey.prefix": valkey.prefix,
        "blobs.url": (tmp_path / "blobs").as_uri(),
        "media.listen": f"127.0.0.1:{free_port()}",
    }
    return Headrace(flags=flags)


@pytest.fixture
async def shop_url(headrace, tmp_path):
    """The pages, with a few adverts that are also in their sellers' feeds."""
    adverts = Adverts(tmp_path / "bazaar.sqlite")
    adverts.create()
    for advert in ADVERTS:
        adverts.show(advert, action="publish")
        await headrace.feed.post(advert.shop, f"{advert.shop}:{advert.item}")
    async with serving(make_web(headrace, adverts)) as url:
        yield url


@pytest.fixture
async def tab(shop_url):
    """A browser's tab."""
    async with httpx.AsyncClient(base_url=shop_url, headers={"origin": shop_url}) as client:
        yield client


@pytest.mark.slow
async def test_a_buyers_way_from_the_listing_to_the_feed(tab):
    listing = await tab.get("/")
    assert 'href="/items/shop-01/sofa"' in listing.text
    item = await tab.get("/items/shop-01/sofa")
    assert 'class="views">1 view<' in item.text
    assert "1 of 2 photos missing" in item.text
    assert 'class="views">2 views<' in (await tab.get("/items/shop-01/sofa")).text
    assert "2 views" in (await tab.get("/?page=abc")).text

    assert "You follow nobody yet" in (await tab.get("/feed")).text
    followed = await tab.post("/sellers/shop-01/follow", follow_redirects=True)
    assert "1 follower<" in followed.text
    assert "/sellers/shop-01/unfollow" in followed.text
    feed = (await tab.get("/feed")).text
    assert "/items/shop-01/sofa" in feed
    assert "/items/shop-02/bike" not in feed
    await tab.post("/sellers/shop-01/unfollow")
    assert "You follow nobody yet" in (await tab.get("/feed")).text


@pytest.mark.slow
async def test_sellers_words_are_text_and_nothing_may_run(tab, headrace):
    for path in ("/", "/items/shop-01/lamp", "/sellers/shop-01"):
        page = await tab.get(path)
        assert "&lt;script&gt;" in page.text
        assert "<script" not in page.text
        assert "<img src=x" not in page.text
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; style-src 'self'; img-src http://127.0.0.1:")
    assert headrace.media.objects.url("photos/a.jpg") in (await tab.get("/")).text


@pytest.mark.slow
async def test_what_is_not_there_and_what_is_not_allowed_is_a_page(tab):
    for path in ("/items/shop-01/gone", "/sellers/nobody", "/tracks/none", "/nothing"):
        page = await tab.get(path)
        assert page.status_code == 404
        assert "Not found" in page.text
    await tab.get("/")
    foreign = await tab.post("/sellers/shop-01/follow", headers={"origin": "http://elsewhere"})
    assert foreign.status_code == 403
    assert "You follow nobody yet" in (await tab.get("/feed")).text


@pytest.mark.slow
async def test_simulated_buyers_walk_play_and_notice_a_wrong_track(shop_url, headrace):
    stop = asyncio.Event()
    ready = asyncio.get_running_loop().create_future()
    node = asyncio.create_task(serve(headrace.media, stop, lambda *at: ready.set_result(at)))
    host, port = await asyncio.wait_for(ready, 60)
    buyers = Buyers(shop_url, f"http://{host}:{port}")
    walking = asyncio.create_task(buyers.run())
    seen = buyers.bought
    await wait_true(lambda: (seen.ways and seen.tracks) or walking.done(), what="they came")
    assert seen.faults == []
    assert seen.ranges >= 4 * seen.tracks
    for track in TRACKS:
        await headrace.media.objects.put(track.key, track.data()[:-2] + b"!!")
    await wait_true(lambda: seen.faults_count or walking.done(), what="they notice")
    assert "are not the track" in seen.faults[0]
    walking.cancel()
    await asyncio.gather(walking, return_exceptions=True)
    stop.set()
    await node


async def test_buyers_do_not_mind_an_advert_that_is_sold_while_they_look_at_it(headrace, tmp_path):
    adverts = Adverts(tmp_path / "sold.sqlite")
    adverts.create()
    adverts.show(ADVERTS[0], action="publish")
    pages = make_web(headrace, adverts)
    opened = 0

    async def selling(scope, receive, send):
        nonlocal opened
        await pages(scope, receive, send)
        if scope.get("path") == "/items/shop-01/sofa":
            opened += 1
            adverts.hide("shop-01", "sofa", version=2)

    async with serving(selling) as url:
        buyers = Buyers(url, url)
        walking = asyncio.create_task(buyers.run())
        seen = buyers.bought
        await wait_true(
            lambda: (opened >= 2 and seen.pages >= 10) or walking.done(), what="they went on"
        )
        walking.cancel()
        await asyncio.gather(walking, return_exceptions=True)
    assert not [fault for fault in seen.faults if "/items/" in fault]
