"""The shop's pages with hostile texts, and the demo's buyers and visitors, who detect faults."""

from __future__ import annotations

import asyncio
import hashlib
import socket
from contextlib import asynccontextmanager

import httpx
import pytest
import uvicorn
from examples.bazaar.adverts import Advert, Adverts, Photo
from examples.bazaar.buyers import Buyers
from examples.bazaar.pictures import Album
from examples.bazaar.records import Records
from examples.bazaar.shop import make_web
from examples.bazaar.tracks import TRACKS
from examples.bazaar.visitors import Crowd
from tests.kit.waiting import wait_true

from headrace import Headrace
from headrace.jobs import NewJob
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


@asynccontextmanager
async def walking(people):
    """Let buyers or visitors run; yields whether they ended by themselves."""
    task = asyncio.create_task(people.run())
    yield task.done
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


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
def records(tmp_path):
    """What the demo writes down."""
    found = Records(tmp_path / "bazaar.sqlite")
    found.create()
    return found


@pytest.fixture
async def shop_url(headrace, records, tmp_path):
    """The pages, with a few adverts that are also in their sellers' feeds."""
    adverts = Adverts(tmp_path / "bazaar.sqlite")
    adverts.create()
    for advert in ADVERTS:
        adverts.show(advert, action="publish")
        await headrace.feed.post(advert.shop, f"{advert.shop}:{advert.item}")
    async with serving(make_web(headrace, adverts, records)) as url:
        yield url


@pytest.fixture
async def tab(shop_url):
    """A browser's tab."""
    async with httpx.AsyncClient(base_url=shop_url, headers={"origin": shop_url}) as client:
        yield client


@pytest.mark.slow
async def test_texts_of_sellers_are_escaped_and_scripts_blocked(tab, headrace):
    for path in ("/", "/items/shop-01/lamp", "/sellers/shop-01"):
        page = await tab.get(path)
        assert "&lt;script&gt;" in page.text
        assert page.text.count("<script") == 1
        assert "<img src=x" not in page.text
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; style-src 'self'; img-src http://127.0.0.1:")
    assert headrace.media.objects.url("photos/a.jpg") in (await tab.get("/")).text


@pytest.mark.slow
async def test_missing_and_forbidden_pages_have_a_status(tab):
    for path in ("/items/shop-01/gone", "/sellers/nobody", "/tracks/none", "/nothing"):
        page = await tab.get(path)
        assert page.status_code == 404
        assert "Not found" in page.text
    await tab.get("/")
    foreign = await tab.post("/sellers/shop-01/follow", headers={"origin": "http://elsewhere"})
    assert foreign.status_code == 403
    own = {"origin": str(tab.base_url).rstrip("/")}
    for nobody in ("nobody", tab.cookies["bazaar_buyer"]):
        assert (await tab.post(f"/sellers/{nobody}/follow", headers=own)).status_code == 404
    feed = (await tab.get("/feed")).text
    assert "adverts of the 2 sellers that you follow" in feed  # a new visitor follows some
    assert "Sofa" in feed


@pytest.mark.slow
async def test_a_visitor_moderates_new_photos(tab, headrace):
    jobs, decisions = headrace.jobs, {"fine": None, "report": "bazaar.report"}
    for name, given in (("bazaar.photos", decisions), ("bazaar.report", {})):
        await jobs.queues.set(name, create=True, decisions=given)
    payload = {"photo": "photos/a.jpg", "text": HOSTILE, "seller": "shop-01", "item": "sofa"}
    ids = await jobs.enqueue_many([NewJob(queue="bazaar.photos", payload=payload)] * 2)
    assert "Show me a photo" in (await tab.get("/moderate")).text
    assert (await tab.post("/moderate", headers={"origin": "http://elsewhere"})).status_code == 403
    taken = await tab.post("/moderate")
    page = (await tab.get(taken.headers["location"])).text
    assert headrace.media.objects.url("photos/a.jpg") in page
    assert HOSTILE not in page
    lease = (await jobs.job(ids[0])).lease_id
    given = {"lease": lease, "job": ids[0], "decision": "report"}
    wrong = await tab.post("/moderate", data={**given, "decision": "delete"})
    assert (wrong.status_code, (await jobs.job(ids[0])).lease_id) == (422, lease)
    decided = await tab.post("/moderate", data=given)
    assert decided.headers["location"].endswith(f"&job={ids[1]}")
    assert (await jobs.job(ids[0])).queue == "bazaar.report"
    again = await tab.post("/moderate", data=given)
    assert (again.status_code, "is over" in again.text) == (409, True)
    assert "no longer yours" in (await tab.get(taken.headers["location"])).text


@pytest.fixture
async def media_url(headrace):
    """The range server on the platform's object store."""
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    node = asyncio.create_task(serve(headrace.media, stop, lambda *at: ready.set_result(at)))
    address, _ = await asyncio.wait_for(ready, 60)
    yield f"http://{address}"
    stop.set()
    await node


@pytest.mark.slow
async def test_simulated_buyers_notice_a_wrong_track(shop_url, media_url, headrace):
    buyers = Buyers(shop_url, media_url)
    async with walking(buyers) as is_over:
        seen = buyers.bought
        await wait_true(lambda: (seen.ways and seen.tracks) or is_over(), what="they came")
        assert seen.faults == []
        assert seen.ranges >= 4 * seen.tracks
        for track in TRACKS:
            await headrace.media.objects.put(track.key, track.data()[:-2] + b"!!")
        await wait_true(lambda: seen.faults_count or is_over(), what="they notice")
        assert "are not the track" in seen.faults[0]


async def _flip_a_byte(blobs, key):
    data = bytearray(await blobs.get(key))
    data[len(data) // 2] ^= 1
    await blobs.put(key, bytes(data))


@pytest.mark.parametrize(
    ("harm", "texts"),
    [
        (None, ()),
        (_flip_a_byte, ("not the bytes of",)),
        (lambda blobs, key: blobs.delete(key), ("expected 206", "got 404")),
    ],
    ids=["whole", "wrong byte", "missing"],
)
async def test_visitors_notice_a_photo_that_is_wrong_or_missing(blobs, media_url, harm, texts):
    data = Album().photo("sofa.jpg")
    sha256 = hashlib.sha256(data).hexdigest()
    key = f"photos/{sha256[:2]}/{sha256}.jpg"
    await blobs.put(key, data)
    if harm:
        await harm(blobs, key)
    photo = Photo("http://shop/sofa.jpg", key, sha256, "stored", len(data))
    crowd = Crowd(media_url)
    crowd.show([Advert("shop", "item", 1, "Sofa", "10", (photo,))])
    async with walking(crowd) as is_over:
        seen = crowd.seen
        every = {200, 206, 304, 416}
        is_seen = (
            (lambda: seen.faults_count > 0) if harm else (lambda: seen.statuses.keys() == every)
        )
        await wait_true(lambda: is_seen() or is_over(), what="the visitors came")
    assert all(text in seen.faults[0] for text in texts)
    if not harm:
        assert (seen.faults, seen.keys) == ([], {key})
        assert seen.photos_whole > 0


async def test_buyers_accept_an_advert_that_is_sold_meanwhile(headrace, records, tmp_path):
    adverts = Adverts(tmp_path / "sold.sqlite")
    adverts.create()
    adverts.show(ADVERTS[0], action="publish")
    pages = make_web(headrace, adverts, records)
    opened = 0

    async def selling(scope, receive, send):
        nonlocal opened
        await pages(scope, receive, send)
        if scope.get("path") == "/items/shop-01/sofa":
            opened += 1
            adverts.hide("shop-01", "sofa", version=2)

    async with serving(selling) as url:
        buyers = Buyers(url, url)
        async with walking(buyers) as is_over:
            seen = buyers.bought
            await wait_true(
                lambda: (opened >= 2 and seen.pages >= 10) or is_over(), what="they continued"
            )
    assert not [fault for fault in seen.faults if "/items/" in fault]
