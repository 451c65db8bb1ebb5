"""One life of a node through Python, HTTP and commands: the steps of `media_scenario.toml`."""

from __future__ import annotations

import asyncio
import base64
import json
import tomllib
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from id3_tracks import JPEG
from media_surfaces import SURFACES, CommandSurface, surface_on
from node_kinds import few_partitions
from raw_clients import SECRET, pattern, photo_key, serving
from tests.kit.waiting import wait_true
from tests.kit.ways_in import Refused

from headrace.engines.blobs import InvalidBlobKey
from headrace.kernel.errors import InvalidInput
from headrace.media import Media, MediaConfig
from headrace.media.cli import COMMANDS
from headrace.media.errors import InvalidObject, InvalidPurge, ObjectUnknown, WrongContentAddress
from headrace.media.hottest import write_hottest
from headrace.media.http import ROUTES
from headrace.media.id3 import TagCorrupt
from headrace.media.model import DiskConfig
from headrace.media.signing import Keys, check
from headrace.media.tracing import read_trace

STEPS = tomllib.loads(Path(__file__).with_name("media_scenario.toml").read_text())["step"]
KEY = "tracks/a.mp3"


@pytest.fixture(autouse=True)
def _few():
    with few_partitions(bits=12):
        yield


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


@pytest.mark.slow
@pytest.mark.parametrize("name", SURFACES)
async def test_each_surface_gives_the_same_answers_and_refusals(name, blobs, tmp_path):
    disks = tuple(DiskConfig(tmp_path / disk, 24 * 2**20) for disk in ("d1", "d2"))
    settings = {"disks": disks, "node": "n1", "dc": "east", "replicas": 1}
    async with serving(blobs, run=tmp_path / "run", **settings) as node:
        media = Media(blobs, MediaConfig(), secret=lambda: SECRET, folder=tmp_path / "run")
        await wait_true(media.nodes.list, what="the node in the membership")
        names = {f"$d{n}": disk.id for n, disk in enumerate(await media.disks.list(), 1)}
        names |= {"$free": str(tmp_path / "free"), "$jpeg": base64.b64encode(JPEG).decode()}
        async with surface_on(name, media, tmp_path) as surface:
            for step in STEPS:
                try:
                    await take_step(surface, step, names)
                except (Exception, pytest.fail.Exception) as error:
                    error.add_note(f"{name}, step {step['name']!r}")
                    raise
        assert node.port


async def take_step(surface, step, names) -> None:
    given = filled(step.get("with", {}), names)
    if "refused" in step:
        with pytest.raises(Refused) as raised:
            await surface.do(step["do"], given)
        assert raised.value.told == step["refused"]
        return
    answer = await surface.do(step["do"], given)
    expected = filled(step["gives"], names)
    assert without_any(answer, expected) == expected
    if "keep" in step:
        names[step["keep"]] = answer["id"]


async def test_lists_of_objects_are_tables(blobs, tmp_path):
    media = Media(blobs, MediaConfig(), secret=lambda: SECRET, folder=tmp_path)
    surface = CommandSurface(media, tmp_path)
    for verb in ("ls", "folder"):
        await surface.do(verb, {"prefix": "tracks"})
        assert surface.text == "no objects"
    for key in (KEY, "tracks/b.mp3", "tracks/old/c.mp3"):
        await surface.do("put", {"key": key, "size": 2000})
    at = f"{(await media.objects.info(KEY)).modified_at:%Y-%m-%d %H:%M:%S}"
    await surface.do("ls", {"prefix": "tracks"})
    head, *rows = surface.text.splitlines()
    assert head == "size  stored (UTC)         key"
    assert f"2000  {at}  {KEY}" in rows
    assert len(rows) == 3
    await surface.run("folder", "tracks", "--max", "1")
    assert surface.text.splitlines() == [head, f"2000  {at}  {KEY}", "more: --after a.mp3"]
    await surface.do("folder", {"prefix": "tracks", "after": "b.mp3"})
    assert surface.text.splitlines() == [
        "size    stored (UTC)  key",
        "folder  -             tracks/old/",
    ]


@pytest.mark.parametrize("name", SURFACES)
async def test_without_a_node_on_this_data_folder(name, blobs, tmp_path):
    """Its disks are unknown, but what it wrote last is shown; a signed URL needs no node."""
    media = Media(blobs, MediaConfig(), secret=lambda: SECRET, folder=tmp_path)
    async with surface_on(name, media, tmp_path) as surface:
        for verb in ("disks", "hottest"):
            with pytest.raises(Refused) as raised:
                await surface.do(verb, {})
            assert raised.value.told == "409 media.node_not_here"
        write_hottest(tmp_path, [(KEY, 7.031), ("tracks/b.mp3", 2.5), ("c.jpg", 0.1)])
        rows = [
            {"key": KEY, "requests_per_s": 7.03},
            {"key": "tracks/b.mp3", "requests_per_s": 2.5},
        ]
        assert await surface.do("hottest", {"limit": 2}) == rows
        assert len(await surface.do("hottest", {})) == 3
        given = {
            "key": KEY,
            "address": "203.0.113.0/24",
            "ttl_s": 600,
            "grid_s": 300,
            "rate": 65_536,
        }
        signed = await surface.do("sign", {**given, "trace": "user=42"})
        base, _, query = signed["url"].partition("?")
        assert base == f"http://127.0.0.1:8081/m/{KEY}"
        grant = check(Keys.derive(SECRET), f"/m/{KEY}", query, now_s=0, address="203.0.113.9")
        assert (grant.rate, grant.trace, grant.expires_at % 300) == (65_536, "user=42", 0)


async def test_the_service_checks_keys_and_content(blobs):
    media = Media(blobs, MediaConfig())
    key = photo_key(b"abc", "png")
    stored = await media.objects.put(key, b"abc")
    assert stored == await media.objects.info(key)
    assert (stored.size_bytes, stored.content_type) == (3, "image/png")
    await media.objects.put(KEY, b"12345")
    assert [item.key for item in await media.objects.ls("tracks/")] == [KEY]
    assert len(await media.objects.ls(objects_max=1)) == 1
    with pytest.raises(WrongContentAddress):
        await media.objects.put(photo_key(b"other"), b"abd")
    with pytest.raises(InvalidObject, match="expected bytes, got a str"):
        await media.objects.put("a", "text")
    with pytest.raises(InvalidBlobKey, match="blob key '5' is not valid"):
        await media.objects.put(5, b"abc")
    with pytest.raises(InvalidPurge, match="neither was given"):
        await media.purges.purge()
    for bad in ("../x", "/x", "a//b", ""):
        with pytest.raises(InvalidBlobKey):
            await media.objects.put(bad, b"x")
        with pytest.raises(InvalidBlobKey):
            media.objects.url(bad)
        with pytest.raises(ObjectUnknown):
            await media.objects.info(bad)


@pytest.mark.parametrize(
    ("config", "url"),
    [
        (MediaConfig(), "http://127.0.0.1:8081/m/a/b@c.jpg"),
        (MediaConfig(listen=("::1", 80)), "http://[::1]:80/m/a/b@c.jpg"),
        (MediaConfig(public_url="https://cdn.test/x/"), "https://cdn.test/x/m/a/b@c.jpg"),
    ],
)
async def test_the_url_of_an_object(blobs, config, url):
    assert Media(blobs, config).objects.url("a/b@c.jpg") == url


async def test_a_url_is_plain_unless_it_must_be_signed(blobs):
    options = {"secret": lambda: SECRET}
    media = Media(blobs, MediaConfig(), **options)
    assert "&s=" not in media.objects.url(KEY)
    query = media.objects.url(KEY, ttl_s=60, trace="user=42,request=r7").partition("?")[2]
    grant = check(media.objects.url_keys, f"/m/{KEY}", query, now_s=0, address="::1")
    tag = read_trace({"baggage": "user=43"}, KEY, grant.trace)
    assert list(tag) == [None, "42", "r7", KEY]
    shut = Media(blobs, MediaConfig(signed="required", url_ttl_s=60), **options)
    assert "&s=" in shut.objects.url(KEY)


async def test_a_stored_tag_is_kept_once_and_checked_when_it_is_read(blobs):
    media = Media(blobs, MediaConfig(), secret=lambda: SECRET)
    stored = await media.tags.put(title="Lied")
    [before] = [info async for info in blobs.list("_headrace")]
    assert await media.tags.put(title="Lied") == stored
    assert [info async for info in blobs.list("_headrace")] == [before]
    data = await blobs.get(before.key)
    await blobs.put(before.key, data.replace(b"Lied", b"Leid"))
    with pytest.raises(TagCorrupt):
        await media.tags.get(stored.id)


async def test_a_node_that_does_not_answer_is_reported_by_warm(blobs, tmp_path):
    media = Media(blobs, MediaConfig(listen=("127.0.0.1", 9)))
    await media.objects.put(KEY, pattern(300_000))
    shown = await CommandSurface(media, tmp_path).run("warm", KEY, exit_code=7)
    [node] = shown["nodes"]
    assert (node["node"], node["blocks"], node["failed"]) == ("127.0.0.1:9", 0, 2)
    assert "9" in node["fault"]


async def test_warm_requests_one_byte_of_each_block(blobs):
    heads = []

    async def answer(reader, writer):
        with suppress(asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                heads.append(head.decode())
                writer.write(b"HTTP/1.1 206 Partial Content\r\nContent-Length: 1\r\n\r\nx")

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    media = Media(blobs, MediaConfig(listen=server.sockets[0].getsockname()))
    await media.objects.put(KEY, pattern(600_000))
    await media.objects.put("tracks/empty.mp3", b"")
    done = await media.warming.warm([KEY, "tracks/empty.mp3"])
    server.close()
    assert [row.blocks for row in done.nodes] == [3]
    assert all(head.startswith(f"GET /m/{KEY} HTTP/1.1\r\n") for head in heads)
    ranges = [head.partition("Range: ")[2].split("\r\n")[0] for head in heads]
    assert ranges == [f"bytes={start}-{start}" for start in (0, 262_144, 524_288)]


def test_every_route_has_a_scope_that_fits_its_verb():
    reading = {"plan_media"}
    for route in ROUTES:
        [method] = route.http_methods
        is_read = method == "GET" or route.handler_name in reading
        assert route.opt["scope"] == ("media:read" if is_read else "media:write"), route


@pytest.mark.parametrize(
    ("words", "exit_code"),
    [
        (["partitions", "plan", "--weight", "n1"], 2),
        (["partitions", "plan", "--weight", "n1=-1"], 2),
        (["disks", "add", "/x", "12"], 2),
        (["verify", "--share", "0"], 2),
        (["warm"], 2),
    ],
)
def test_mistyped_commands_reach_no_node(words, exit_code):
    [command] = COMMANDS
    ran = CliRunner().invoke(command, words, obj=None)
    assert getattr(ran.exception, "exit_code", ran.exit_code) == exit_code, ran.exception
    assert "has no attribute" not in repr(ran.exception)


def test_commands_print_texts_for_a_shell(tmp_path, blobs):
    """One line: a URL, an id, a table; and the effect of a dry run."""
    media, shown = Media(blobs, MediaConfig(), secret=lambda: SECRET), []
    terminal = SimpleNamespace(
        is_json=False,
        run=lambda _kind, verb: asyncio.run(verb(media)),
        show=lambda _value, text: shown.append(text),
    )
    [command] = COMMANDS

    def run(*words):
        ran = CliRunner().invoke(command, words, obj=terminal, standalone_mode=False)
        assert ran.exception is None, ran.exception
        return shown.pop()

    (tmp_path / "file").write_bytes(b"12345")
    run("put", KEY, str(tmp_path / "file"))
    assert run("url", KEY) == f"http://127.0.0.1:8081/m/{KEY}"
    identifier = run("tag", "put", "--title", "Lied", "--buyer", "u1")
    assert len(identifier) == 64
    assert "title: Lied\n  buyer: u1" in run("tag", "show", identifier)
    assert run("sign", KEY, "--tag", identifier).startswith("http://127.0.0.1:8081/")
    for rate in ("65536", "64KiB", "64KiB/s"):
        assert "&r=65536&" in run("sign", KEY, "--rate", rate), rate
    assert run("tag", "rm", identifier, "--dry-run") == f"would remove {identifier}"
    assert run("tag", "rm", identifier) == f"removed {identifier}"
    started = run("trace", "on", "--tag", "user=42", "--for", "5m")
    assert started.splitlines()[1].startswith("user=42  ")
    assert run("trace", "show") == started
    assert run("trace", "off", "--tag", "user=42") == "trace of user=42 ended"
    assert run("trace", "off") == "no active traces"


def test_a_simulation_is_drawn(tmp_path):
    [command] = COMMANDS
    shown, plot = [], tmp_path / "plot.svg"
    screen = SimpleNamespace(is_json=True, show=lambda value, text: shown.append((value, text)))
    words = ["partitions", "simulate", "--centers", "1", "--nodes", "2", "--plot", str(plot)]
    ran = CliRunner().invoke(command, words, obj=screen)
    assert ran.exit_code == 0, ran.exception
    [(value, text)] = shown
    names = [step.name for step in value.steps]
    assert names == ["whole", "a node of each data center lost", "roll-out"]
    assert "times fair, most" in text
    assert plot.read_text().startswith("<svg")
    assert json.dumps(text)
    words[-1] = str(tmp_path / "missing" / "plot.svg")
    ran = CliRunner().invoke(command, words, obj=screen)
    assert isinstance(ran.exception, InvalidInput), ran.exception
