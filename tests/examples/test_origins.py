"""The demo's world is what it says: hosts that answer, hang and lie, catalogues that change."""

from __future__ import annotations

import asyncio
import csv
import hashlib
import io
import json
import os
import socket
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from examples.bazaar.adverts import Advert, Adverts, Photo
from examples.bazaar.catalogues import Shelf
from examples.bazaar.client import Client
from examples.bazaar.pictures import Album
from examples.bazaar.shops import ITEMS_MIN, first_wares, shops
from PIL import Image
from tests.kit.waiting import wait_true

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
async def hosts(tmp_path_factory):
    """Five shops' hosts in their own process: (port, log file)."""
    log = tmp_path_factory.mktemp("origins") / "access.log"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    words = ["--port", str(port), "--log", str(log), "--shops", "5"]
    leash = ["-m", "examples.bazaar.leash", str(os.getpid()), sys.executable]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *leash,
        "-m",
        "examples.bazaar.origins",
        *words,
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    ready = json.loads(await asyncio.wait_for(process.stdout.readline(), 60))
    assert ready == {"ready": True, "shops": 5, "port": port}
    yield port, log
    process.terminate()
    assert await asyncio.wait_for(process.wait(), 60) == 0


@pytest.fixture
async def shop(hosts):
    """A connection to the first shop's host."""
    client = Client(f"http://{shops(1)[0].address}:{hosts[0]}", patience_s=0)
    yield client
    client.close()


async def test_a_photo_is_a_whole_image_and_its_etag_saves_the_second_download(shop, hosts):
    first = await shop.request("GET", "/ok/etag-a.jpg")
    assert first.status == 200
    assert first.headers["content-type"] == "image/jpeg"
    picture = Image.open(io.BytesIO(first.body))
    picture.load()
    assert picture.size == (800, 600)
    again = await shop.request(
        "GET", "/ok/etag-a.jpg", headers={"If-None-Match": first.headers["etag"]}
    )
    assert (again.status, again.body) == (304, b"")
    seen = await wait_logged(hosts[1], "/ok/etag-a.jpg", count=2)
    assert [(row["status"], row["bytes"], row["whole"]) for row in seen] == [
        (200, len(first.body), True),
        (304, 0, True),
    ]


@pytest.mark.parametrize(
    ("path", "status", "content_type"),
    [
        ("/ok/a.png", 200, "image/png"),
        ("/gone/a.jpg", 404, "text/plain"),
        ("/page/a.jpg", 200, "text/html"),
        ("/moved/a.jpg", 302, None),
        ("/trap/a.jpg", 302, None),
        ("/", 404, "text/plain"),
        ("/nonsense", 404, "text/plain"),
        ("nonsense", 400, None),
    ],
)
async def test_each_kind_of_link_behaves_as_its_path_says(shop, path, status, content_type):
    reply = await shop.request("GET", path)
    assert (reply.status, reply.headers.get("content-type")) == (status, content_type)


async def test_a_flaky_photo_comes_the_second_time(shop):
    assert (await shop.request("GET", "/flaky/b.jpg")).status == 503
    assert (await shop.request("GET", "/flaky/b.jpg")).status == 200


async def test_other_methods_are_refused(shop):
    reply = await shop.request("POST", "/ok/a.jpg")
    assert (reply.status, reply.headers["allow"]) == (405, "GET, HEAD")


def test_photos_differ_by_name_and_are_the_same_each_time():
    first, second = Album(), Album()
    names = [f"item-{n}.{end}" for n in range(60) for end in ("jpg", "png")]
    hashes = {hashlib.sha256(first.photo(name)).hexdigest() for name in names}
    assert len(hashes) == len(names)
    assert all(first.photo(name) == second.photo(name) for name in names[:6])
    assert all(20_000 < len(first.photo(name)) < 150_000 for name in names)


@pytest.mark.parametrize("number", [0, 1])
def test_a_next_catalogue_has_one_item_changed_and_one_gone(tmp_path, number):
    shop = shops(2)[number]
    shelf = Shelf(tmp_path, port=8300)
    before = _items(shelf.write_present(shop))
    assert list(before) == [ware.id for ware in first_wares(shop)]
    after = _items(shelf.write_next(shop))
    assert set(before) - set(after) == {list(before)[-1]}
    assert [item for item in after if after[item] != before[item]] == [next(iter(before))]
    assert Shelf(tmp_path, port=8300).wares(shop) == shelf.wares(shop)


def test_a_shop_never_runs_empty(tmp_path):
    shop, shelf = shops(1)[0], Shelf(tmp_path, port=8300)
    for _ in range(20):
        items = _items(shelf.write_next(shop))
        assert len(items) >= ITEMS_MIN
    assert shelf.wares(shop)[0].photos[-1].endswith("-v19.jpg")


def test_the_site_shows_only_the_newest_version_and_notes_each_once(tmp_path):
    adverts = Adverts(tmp_path / "site.sqlite")
    adverts.create()
    photo = Photo("http://x/a.jpg", "photos/a.jpg", "ab", "stored", 3)
    for version, action, price in ((2, "edit", "20"), (1, "publish", "10"), (2, "edit", "20")):
        adverts.show(Advert("s", "i", version, "Sofa", price, (photo,)), action=action)
    assert adverts.shown("s") == [Advert("s", "i", 2, "Sofa", "20", (photo,))]
    assert sorted(h.action for h in adverts.happened()) == ["edit", "publish"]
    adverts.hide("s", "i", version=3)
    assert adverts.shown() == []
    assert [h.action for h in adverts.happened(after=adverts.happened()[-2].id)] == ["unpublish"]


async def wait_logged(log: Path, path: str, *, count: int) -> list[dict[str, object]]:
    """The log's lines of `path`, once there are `count`: a line is written after its answer."""

    def found():
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        asked = [row for row in rows if row["path"] == path]
        return asked if len(asked) >= count else None

    return await wait_true(found, what=f"{count} requests for {path}")


async def test_a_leashed_program_ends_with_its_starter():
    start = (
        "import os, subprocess, sys, time\n"
        "leash = [sys.executable, '-m', 'examples.bazaar.leash', str(os.getpid())]\n"
        "print(subprocess.Popen([*leash, '/bin/sleep', '60']).pid, flush=True)\n"
        "import signal; signal.pause()\n"
    )
    starter = await asyncio.create_subprocess_exec(
        sys.executable, "-c", start, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert starter.stdout is not None
    pid = int(await asyncio.wait_for(starter.stdout.readline(), 60))
    await wait_true(lambda: Path(f"/proc/{pid}/comm").read_text() == "sleep\n", what="it runs")
    starter.kill()
    await starter.wait()
    await wait_true(lambda: not _is_running(pid), what="it ended")


def _is_running(pid: int) -> bool:
    """Whether the process lives; one that waits for its parent to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _items(file: Path) -> dict[str, tuple[str, ...]]:
    """Item -> (title, price, photo links...) as any reader of the format finds them."""
    if file.suffix == ".csv":
        rows = csv.DictReader(io.StringIO(file.read_text()))
        return {row["id"]: (row["name"], row["price"], *row["photos"].split("|")) for row in rows}
    offers = ET.fromstring(file.read_text()).iter("offer")
    return {
        offer.attrib["id"]: (
            offer.findtext("name", ""),
            offer.findtext("price", ""),
            *(picture.text or "" for picture in offer.iter("picture")),
        )
        for offer in offers
    }
