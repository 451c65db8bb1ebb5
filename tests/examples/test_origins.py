"""The demo's world: sellers' hosts with every fault, catalogues that change, adverts."""

from __future__ import annotations

import asyncio
import csv
import hashlib
import io
import json
import os
import re
import socket
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from examples.bazaar.adverts import Advert, Adverts, Photo
from examples.bazaar.catalogues import Shelf
from examples.bazaar.client import Client, RefusedError
from examples.bazaar.pictures import Album
from examples.bazaar.shops import ITEMS_MIN, first_wares, shops
from PIL import Image
from tests.kit.processes import is_alive
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


async def test_a_photo_is_whole_unique_and_sent_once(shop, hosts):
    first = await shop.request("GET", "/ok/etag-a.jpg")
    assert first.headers["content-type"] == "image/jpeg"
    picture = Image.open(io.BytesIO(first.body))
    picture.load()
    assert picture.size == (800, 600)
    headers = {"If-None-Match": first.headers["etag"]}
    again = await shop.request("GET", "/ok/etag-a.jpg", headers=headers)
    assert (first.status, again.status, again.body) == (200, 304, b"")
    seen = await wait_logged(hosts[1], "/ok/etag-a.jpg", count=2)
    assert [(row["status"], row["bytes"]) for row in seen] == [(200, len(first.body)), (304, 0)]
    one, other = Album(), Album()
    names = [f"item-{n}.{end}" for n in range(20) for end in ("jpg", "png")]
    assert len({hashlib.sha256(one.photo(name)).digest() for name in names}) == len(names)
    assert all(one.photo(name) == other.photo(name) for name in names[:6])


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
async def test_each_kind_of_link_behaves_as_its_path(shop, path, status, content_type):
    reply = await shop.request("GET", path)
    assert (reply.status, reply.headers.get("content-type")) == (status, content_type)


async def test_a_flaky_photo_comes_the_second_time_and_other_methods_are_refused(shop):
    with pytest.raises(RefusedError):
        await shop.request("GET", "/flaky/b.jpg")
    assert (await shop.request("GET", "/flaky/b.jpg")).status == 200
    reply = await shop.request("POST", "/ok/a.jpg")
    assert (reply.status, reply.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("number", range(4))
def test_in_twenty_versions_one_item_changes_one_goes_and_no_photo_comes_back(tmp_path, number):
    shop, shelf = shops(10)[number], Shelf(tmp_path, port=80)
    items = _items(shelf.write_present(shop))
    assert list(items) == [ware.id for ware in first_wares(shop)]
    seen: set[str] = set()
    categories: dict[str, str] = {}
    for version in range(20):
        before = items
        held = {link for ware in shelf.wares(shop) for link in shelf.links(shop, ware)}
        seen |= held
        file = shelf.write_next(shop)
        items = _items(file)
        assert len(items) >= ITEMS_MIN
        assert [item for item in items if item in before and items[item] != before[item]] == [
            next(iter(before))
        ]
        if version == 0:
            assert set(before) - set(items) == {list(before)[-1]}
        links = {link for ware in shelf.wares(shop) for link in shelf.links(shop, ware)}
        assert not (links - held) & seen
        for key, name in re.findall(r'<category id="(\d+)">([^<]+)<', file.read_text()):
            assert categories.setdefault(name, key) == key
    assert Shelf(tmp_path, port=80).wares(shop) == shelf.wares(shop)


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
    await wait_true(lambda: not is_alive(pid), what="it ended")


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
