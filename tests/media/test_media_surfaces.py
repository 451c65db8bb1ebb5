"""One life of a node through Python, HTTP and commands: the steps of `media_scenario.toml`."""

from __future__ import annotations

import asyncio
import json
import socket
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner
from media_surfaces import SURFACES, CommandSurface, Refused, surface_on
from raw_clients import pattern
from tests.kit.processes import HeadraceProcess, is_alive
from tests.kit.waiting import wait_true

from headrace.kernel.errors import Unavailable
from headrace.media import Media, MediaConfig
from headrace.media.cli import COMMANDS
from headrace.media.errors import NodeNotHere
from headrace.media.hottest import write_hottest
from headrace.media.http import ROUTES

STEPS = tomllib.loads(Path(__file__).with_name("media_scenario.toml").read_text())["step"]
DISK = "24MiB"


def filled(value, names):
    """`value` with `names` replaced."""
    if isinstance(value, dict):
        return {key: filled(one, names) for key, one in value.items()}
    if isinstance(value, list):
        return [filled(one, names) for one in value]
    return names.get(value, value) if isinstance(value, str) else value


def without_any(answer, expected):
    """The answer with `<any>` wherever that is expected."""
    if expected == "<any>":
        return "<any>"
    if isinstance(expected, dict) and isinstance(answer, dict):
        return {key: without_any(one, expected.get(key)) for key, one in answer.items()}
    if isinstance(expected, list) and isinstance(answer, list) and len(answer) == len(expected):
        return [without_any(one, part) for one, part in zip(answer, expected, strict=True)]
    return answer


@pytest.fixture
def node(blobs, tmp_path):
    """A real node of a cluster with two disks, and the service over the same data folder."""
    data, disks = tmp_path / "data", [tmp_path / "d1", tmp_path / "d2"]
    process = HeadraceProcess(
        ["media", "serve"],
        folder=tmp_path / "node",
        env={
            "HEADRACE_DATA_FOLDER": str(data),
            "HEADRACE_BLOBS_URL": blobs.folder.as_uri(),
            "HEADRACE_MEDIA_LISTEN": f"127.0.0.1:{free_port()}",
            "HEADRACE_MEDIA_WORKERS": "1",
            "HEADRACE_MEDIA_DISKS": ",".join(f"{disk}:{DISK}" for disk in disks),
            "HEADRACE_MEDIA_NODE": "n1",
            "HEADRACE_MEDIA_DC": "east",
            "HEADRACE_MEDIA_REPLICAS": "1",
        },
    )
    yield process, Media(blobs, MediaConfig(), secret=lambda: "s" * 32, folder=data / "run/media")
    process.end()


def free_port():
    """A free port, which must be fixed beforehand because the other nodes get it."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


async def wait_ready(process, media):
    """Return once the node is registered, is served, and its disks are in use."""

    async def is_ready():
        assert is_alive(process.pid), process.err
        try:
            return len(await media.disks.list()) == 2 and await media.nodes.list()
        except (NodeNotHere, Unavailable):
            return False

    await wait_true(is_ready, what="the node in use")


@pytest.mark.slow
@pytest.mark.parametrize("name", SURFACES)
async def test_every_way_in_tells_the_same_life(name, node, tmp_path):
    process, media = node
    await wait_ready(process, media)
    first, second = await media.disks.list()
    names = {"$d1": first.id, "$d2": second.id, "$free": str(tmp_path / "free")}
    async with surface_on(name, media, tmp_path) as surface:
        for step in STEPS:
            given = filled(step.get("with", {}), names)
            try:
                if "refused" in step:
                    with pytest.raises(Refused) as raised:
                        await surface.do(step["do"], given)
                    assert raised.value.told == step["refused"]
                else:
                    answer = await surface.do(step["do"], given)
                    expected = filled(step["gives"], names)
                    assert without_any(answer, expected) == expected
            except (Exception, pytest.fail.Exception) as error:
                error.add_note(f"{name}, step {step['name']!r}")
                raise


async def test_disks_need_a_node_on_this_data_folder(blobs, tmp_path):
    for folder in (None, tmp_path):
        media = Media(blobs, MediaConfig(), folder=folder)
        for name in SURFACES:
            async with surface_on(name, media, tmp_path) as surface:
                for verb in ("disks", "hottest"):
                    with pytest.raises(Refused) as raised:
                        await surface.do(verb, {})
                    assert raised.value.told == "409 media.node_not_here"


async def test_what_is_asked_for_most_is_told_alike(blobs, tmp_path):
    media = Media(blobs, MediaConfig(), folder=tmp_path)
    write_hottest(tmp_path, [("tracks/a.mp3", 7.031), ("tracks/b.mp3", 2.5), ("c.jpg", 0.1)])
    rows = [
        {"key": "tracks/a.mp3", "requests_per_s": 7.03},
        {"key": "tracks/b.mp3", "requests_per_s": 2.5},
    ]
    for name in SURFACES:
        async with surface_on(name, media, tmp_path) as surface:
            assert await surface.do("hottest", {"limit": 2}) == rows
            assert len(await surface.do("hottest", {})) == 3


async def test_a_node_that_does_not_answer_is_told_by_warm(blobs, tmp_path):
    media = Media(blobs, MediaConfig(listen=("127.0.0.1", 9)))
    await media.objects.put("tracks/a.mp3", pattern(300_000))
    surface = CommandSurface(media, tmp_path)
    told = await surface.run("warm", "tracks/a.mp3", exit_code=7)
    [node] = told["nodes"]
    assert (node["node"], node["blocks"], node["failed"]) == ("127.0.0.1:9", 0, 2)
    assert "9" in node["fault"]


async def test_warm_asks_one_byte_of_each_block(blobs):
    """The requests that a counting node gets are the blocks it would read."""
    asked = []

    async def answer(reader, writer):
        with suppress(asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                asked.append(head.decode())
                writer.write(b"HTTP/1.1 206 Partial Content\r\nContent-Length: 1\r\n\r\nx")

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()
    media = Media(blobs, MediaConfig(listen=address))
    await media.objects.put("tracks/a.mp3", pattern(600_000))
    await media.objects.put("tracks/empty.mp3", b"")
    done = await media.warming.warm(["tracks/a.mp3", "tracks/empty.mp3"])
    server.close()
    assert [row.blocks for row in done.nodes] == [3]
    assert all(head.startswith("GET /m/tracks/a.mp3 HTTP/1.1\r\n") for head in asked)
    ranges = [head.partition("Range: ")[2].split("\r\n")[0] for head in asked]
    assert ranges == [f"bytes={start}-{start}" for start in (0, 262_144, 524_288)]


def test_every_route_has_a_scope_that_fits_its_verb():
    reading = {"plan_media", "simulate_media"}
    for route in ROUTES:
        [method] = route.http_methods
        is_read = method == "GET" or route.handler_name in reading
        assert route.opt["scope"] == ("media:read" if is_read else "media:write"), route


@pytest.mark.parametrize(
    ("words", "exit_code"),
    [
        (["partitions", "plan", "--weight", "n1"], 1),
        (["partitions", "plan", "--weight", "n1=-1"], 1),
        (["disks", "add", "/x", "12"], 1),
        (["verify", "--share", "0"], 2),
        (["warm"], 2),
    ],
)
def test_what_is_typed_wrongly_reaches_no_node(words, exit_code):
    [command] = COMMANDS
    ran = CliRunner().invoke(command, words, obj=None)
    assert ran.exit_code == exit_code
    assert "has no attribute" not in repr(ran.exception)


def test_a_simulation_is_drawn(tmp_path):
    [command] = COMMANDS
    shown = []

    class Screen:
        is_json = True

        def show(self, value, text):
            shown.append((value, text))

    plot = tmp_path / "plot.svg"
    words = ["partitions", "simulate", "--centres", "1", "--nodes", "2", "--plot", str(plot)]
    ran = CliRunner().invoke(command, words, obj=Screen())
    assert ran.exit_code == 0, ran.exception
    [(value, text)] = shown
    assert [step.name for step in value.steps] == [
        "whole",
        "a node of each data center lost",
        "roll-out",
    ]
    assert "times fair, most" in text
    assert plot.read_text().startswith("<svg")
    assert json.dumps(text)
