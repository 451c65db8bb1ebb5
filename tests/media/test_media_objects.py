"""The services through Python, HTTP and commands."""

from __future__ import annotations

import asyncio
import json
import socket

import click
import msgspec
import pytest
from click.testing import CliRunner
from litestar import Litestar
from litestar.di import Provide
from litestar.testing import AsyncTestClient
from raw_clients import photo_key, serving

from headrace.engines.blobs import Blobs, InvalidBlobKey
from headrace.kernel.errors import HeadraceError
from headrace.media import Media, MediaConfig
from headrace.media.cli import COMMANDS
from headrace.media.errors import ListenFailed, ObjectUnknown, WrongContentAddress
from headrace.media.http import ROUTES
from headrace.media.worker.deadlines import Deadlines
from headrace.media.worker.socket_io import clients_per_process


@pytest.fixture
def media(blobs):
    return Media(blobs, MediaConfig())


async def test_put_info_ls_rm(media):
    key = photo_key(b"abc", "png")
    stored = await media.objects.put(key, b"abc")
    assert stored == await media.objects.info(key)
    assert (stored.size_bytes, stored.content_type) == (3, "image/png")
    await media.objects.put("tracks/a.mp3", b"12345")
    assert [item.key for item in await media.objects.ls("tracks/")] == ["tracks/a.mp3"]
    assert {item.key for item in await media.objects.ls()} == {key, "tracks/a.mp3"}
    assert len(await media.objects.ls(objects_max=1)) == 1
    await media.objects.rm(key)
    for verb in (media.objects.info, media.objects.rm):
        with pytest.raises(ObjectUnknown):
            await verb(key)


async def test_other_bytes_cannot_take_a_content_address(media):
    with pytest.raises(WrongContentAddress):
        await media.objects.put(photo_key(b"abc"), b"abd")
    with pytest.raises(ObjectUnknown):
        await media.objects.info(photo_key(b"abc"))


@pytest.mark.parametrize("key", ["../x", "/x", "a//b", ""])
async def test_keys_that_are_none(media, key):
    with pytest.raises(InvalidBlobKey):
        await media.objects.put(key, b"x")
    with pytest.raises(InvalidBlobKey):
        media.objects.url(key)
    with pytest.raises(ObjectUnknown):
        await media.objects.info(key)


@pytest.mark.parametrize(
    ("config", "url"),
    [
        (MediaConfig(), "http://127.0.0.1:8081/m/a/b@c.jpg"),
        (MediaConfig(listen=("::1", 80)), "http://[::1]:80/m/a/b@c.jpg"),
        (MediaConfig(public_url="https://cdn.test/x/"), "https://cdn.test/x/m/a/b@c.jpg"),
    ],
)
async def test_urls(blobs, config, url):
    assert Media(blobs, config).objects.url("a/b@c.jpg") == url


async def test_a_port_that_is_taken_is_said(blobs):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()
        with pytest.raises(ListenFailed, match=r"choose another media\.listen"):
            async with serving(blobs, listen=address):
                pass


async def test_the_routes(media):
    await media.objects.put("tracks/a.mp3", b"12345")
    app = Litestar(ROUTES, dependencies={"media": Provide(lambda: media, sync_to_thread=False)})
    async with AsyncTestClient(app) as client:
        listed = (await client.get("/v1/media/objects", params={"prefix": "tracks"})).json()
        assert [item["key"] for item in listed["objects"]] == ["tracks/a.mp3"]
        assert listed["is_cut"] is False
        shown = (await client.get("/v1/media/objects/tracks/a.mp3")).json()
        assert shown == listed["objects"][0]
        assert shown["size_bytes"] == 5
        for limit in ("0", "1001", "x"):
            answer = await client.get("/v1/media/objects", params={"limit": limit})
            assert answer.status_code == 400
    assert all(route.opt["scope"] in ("media:read", "media:write") for route in ROUTES)


class Screen:
    """A terminal over one folder, as the cli gives it to commands."""

    is_json = True

    def __init__(self, folder) -> None:
        self.folder = folder

    def run(self, _kind, verb):
        async def in_loop():
            blobs = Blobs(self.folder.as_uri())
            try:
                return await verb(Media(blobs, MediaConfig()))
            finally:
                await blobs.close()

        return asyncio.run(in_loop())

    def show(self, value, _text) -> None:
        click.echo(msgspec.json.encode(value).decode())


def test_the_commands(tmp_path):
    screen, [group] = Screen(tmp_path / "blobs"), COMMANDS
    (tmp_path / "a.mp3").write_bytes(b"12345")

    def run(*words: str):
        result = CliRunner().invoke(group, words, obj=screen)
        if isinstance(result.exception, HeadraceError):
            return result.exception
        assert result.exit_code == 0, result.output
        return json.loads(result.output)

    assert run("put", "tracks/a.mp3", str(tmp_path / "a.mp3"))["size_bytes"] == 5
    assert run("info", "tracks/a.mp3")["content_type"] == "audio/mpeg"
    assert run("url", "tracks/a.mp3")["url"] == "http://127.0.0.1:8081/m/tracks/a.mp3"
    assert [item["key"] for item in run("ls", "tracks")] == ["tracks/a.mp3"]
    assert run("rm", "tracks/a.mp3", "--dry-run")["removed"] is False
    assert run("rm", "tracks/a.mp3")["removed"] is True
    assert isinstance(run("rm", "tracks/a.mp3"), ObjectUnknown)
    assert run("ls") == []


def test_the_limit_of_files_limits_connections():
    assert clients_per_process(10_128, files_per_client=2) == 5_000
    assert clients_per_process(10, files_per_client=1) == 16


class Item:
    """An item with a deadline."""

    def __init__(self) -> None:
        self.deadline_s, self.bucket = 0.0, 0


def test_deadlines_move_both_ways_and_come_once():
    deadlines, early, late, gone = Deadlines(), Item(), Item(), Item()
    deadlines.watch(early, 60.0)
    deadlines.watch(early, 2.0)
    deadlines.watch(late, 2.0)
    deadlines.watch(late, 60.0)
    deadlines.watch(gone, 3.0)
    deadlines.forget(gone)
    assert deadlines.take_due(1.0) == []
    assert deadlines.take_due(10.0) == [early]
    assert deadlines.take_due(59.0) == []
    assert deadlines.take_due(61.0) == [late]
    assert deadlines.take_due(100.0) == []
