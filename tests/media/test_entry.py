"""What an entry prints for nodes that live, drain and die; and the loop that keeps a file."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest
import uvloop
from click.testing import CliRunner
from tests.kit.processes import free_ports
from tests.kit.waiting import wait_true

from headrace.engines.blobs import Blobs
from headrace.kernel.config import InvalidConfig, load_config
from headrace.media import Media, MediaConfig
from headrace.media.cli import COMMANDS
from headrace.media.cluster.membership import MEMBERSHIP, Member, Membership, MembershipStore
from headrace.media.errors import NoNodes
from headrace.media.service.entry import EntryNode, EntryOptions, InvalidEntry, render
from headrace.media.signing import UnsignableUrl

SECRET = "the secret of the entry's own cluster"
LISTEN = EntryOptions(listen="203.0.113.10:80")
ZONE = EntryOptions(zone="media.example.com", name_server="ns1.example.com.")


def node(name: str, number: int, *, dc: str = "east", weight: int = 100, **given) -> EntryNode:
    values = {"address": f"10.0.0.{number}:8081", "state": "up", "is_alive": weight > 0, **given}
    return EntryNode(name=name, dc=dc, weight=weight, **values)


NODES = [node("n1", 1), node("n2", 2, weight=0), node("n3", 3, dc="west", weight=50)]


@pytest.mark.parametrize(
    ("form", "options", "expected"),
    [
        ("haproxy", LISTEN, ["server n1 10.0.0.1:8081 weight 100", "bind 203.0.113.10:80",
                             "server n2 10.0.0.2:8081 weight 0", "if { hdr_beg(host) -i n1. }"]),
        ("haproxy", EntryOptions(dc="east"), ["server n3 10.0.0.3:8081 weight 50 backup"]),
        ("keepalived", LISTEN, ["virtual_server 203.0.113.10 80 {",
                                "real_server 10.0.0.2 8081 {\n        weight 0\n"]),
        ("dns", ZONE, ["$ORIGIN media.example.com.", "@ IN NS ns1.example.com.",
                       "\n@ IN A 10.0.0.1\n@ IN A 10.0.0.3\n", "\nn2 IN A 10.0.0.1\n",
                       "\neast IN A 10.0.0.1\nwest IN A 10.0.0.3\n"]),
        ("json", LISTEN, ['"name": "n2"']),
    ],
)  # fmt: skip
def test_a_node_without_weight_gets_no_clients(form, options, expected):
    text = render(form, NODES, options)
    for part in expected:
        assert part in text
    if form == "json":
        assert [one["weight"] for one in json.loads(text)["nodes"]] == [100, 0, 50]
    if form in ("dns", "haproxy"):
        assert "use-server n2" not in text
        assert "@ IN A 10.0.0.2" not in text


@pytest.mark.parametrize(
    ("form", "nodes", "options", "expected"),
    [
        ("nginx", NODES, LISTEN, "one of haproxy"),
        ("keepalived", NODES, EntryOptions(), "203.0.113.10:80"),
        ("keepalived", NODES, EntryOptions(listen="0.0.0.0"), "203.0.113.10:80"),
        ("haproxy", NODES, EntryOptions(listen="a\nb:80"), "203.0.113.10:80"),
        ("haproxy", NODES, EntryOptions(listen="10.0.0.9:80", method="nah"), "nat, dr or tun"),
        ("dns", NODES, EntryOptions(), "--zone"),
        ("dns", NODES, EntryOptions(zone="a b", name_server="ns1"), "--zone"),
        ("dns", [node("n1", 1, address="cache.local:80")], ZONE, "media.advertise"),
        ("dns", [node("east", 1)], ZONE, "a node and a data center"),
        ("dns", [node("n1", 1, dc="new york")], ZONE, "no name of the DNS"),
    ],
)
def test_what_no_server_could_load_is_refused(form, nodes, options, expected):
    with pytest.raises(InvalidEntry, match=expected):
        render(form, nodes, options)


async def test_a_cluster_without_nodes_has_no_entry(blobs):
    with pytest.raises(NoNodes):
        await Media(blobs, MediaConfig()).entry.render("json")


@asynccontextmanager
async def answering(port: int):
    """A server that answers health checks."""

    async def answer(reader, writer):
        with suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", port) as server:
        yield server


async def test_an_unknown_data_center_is_refused_with_the_known_ones(tmp_path, blobs):
    members = tuple(Member(name=dc, address="127.0.0.1:1", dc=dc) for dc in ("east", "west"))
    await blobs.put(MEMBERSHIP.key, msgspec.json.encode(Membership(version=1, members=members)))
    entry, options = Media(blobs, MediaConfig()).entry, EntryOptions(dc="moon")
    for call in (
        lambda: entry.render("haproxy", options),
        lambda: entry.watch("haproxy", options, tmp_path / "file"),
    ):
        with pytest.raises(InvalidEntry, match=r"'moon': no node is there; known are east, west"):
            await call()
    assert "server west" in await entry.render("haproxy", EntryOptions(dc="west"))


def test_a_command_without_a_file_to_watch_is_refused():
    ran = CliRunner().invoke(COMMANDS[0], ["entry", "json", "--run", "true"], obj=None)
    assert (ran.exit_code, "--watch" in ran.output) == (2, True)


async def test_a_node_that_dies_or_drains_loses_its_weight_in_the_file(tmp_path, blobs):
    ports = dict(zip(("n1", "n2", "n3"), free_ports(3), strict=True))
    members = tuple(Member(name=n, address=f"127.0.0.1:{p}") for n, p in ports.items())
    await blobs.put(MEMBERSHIP.key, msgspec.json.encode(Membership(version=1, members=members)))
    file, ran = tmp_path / "entry.json", tmp_path / "ran"
    entry = Media(blobs, MediaConfig()).entry
    command = ["sh", "-c", f"echo >> {ran}; test -e {tmp_path}/loads"]

    def weights() -> dict[str, int]:
        return {one["name"]: one["weight"] for one in json.loads(file.read_text())["nodes"]}

    async with answering(ports["n1"]), answering(ports["n2"]) as second, answering(ports["n3"]):
        watching = asyncio.create_task(
            entry.watch("json", EntryOptions(), file, command=command, every_s=0.05)
        )
        await wait_true(lambda: ran.exists() and len(ran.read_text()) > 1, what="it is repeated")
        (tmp_path / "loads").touch()
        assert weights() == {"n1": 100, "n2": 100, "n3": 100}
        second.close()
        await wait_true(lambda: weights()["n2"] == 0, what="n2 is out")
        await MembershipStore(blobs).drain("n3")
        await wait_true(lambda: weights() == {"n1": 100, "n2": 0, "n3": 0}, what="n3 is out")
        await blobs.put(MEMBERSHIP.key, b"damaged")
    await wait_true(lambda: weights()["n2"] == 100, what="all are dead: the fault is elsewhere")
    assert not watching.done(), "the last member list is used"
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_a_url_names_the_node_that_keeps_its_object(blobs):
    members = [
        Member(name=f"{dc}-{n}", address="10.0.0.1:1", dc=dc) for dc in "ab" for n in range(4)
    ]
    stored = Membership(version=1, members=tuple(members))
    await blobs.put(MEMBERSHIP.key, msgspec.json.encode(stored))
    text = "https://{name}.media.example.com"
    config = load_config({"media": MediaConfig}, env={}, flags={"media.preferred_url": text})
    media = Media(blobs, config.section(MediaConfig), secret=lambda: SECRET)
    for key in ("tracks/a.mp3", "tracks/b.mp3", "tracks/c.mp3"):
        shown = await media.partitions.show(key)
        assert await media.entry.node_of(key) == shown.owners[0].name
        near = await media.entry.node_of(key, dc="b")
        assert near in {owner.name for owner in shown.owners if owner.dc == "b"}
        assert await media.entry.node_of(key, dc="moon") == shown.owners[0].name
        assert media.objects.url(key, prefer=near) == f"https://{near}.media.example.com/m/{key}"
        signed = media.objects.url(key, prefer=near, ttl_s=60)
        assert signed.startswith(f"https://{near}.media.example.com/m/{key}?e=")
    for name in ("", "a b", "a/../b", "x" * 65):
        with pytest.raises(UnsignableUrl, match="this URL cannot be made: prefer"):
            media.objects.url("tracks/a.mp3", prefer=name)
    with pytest.raises(UnsignableUrl, match=r"media\.preferred_url"):
        Media(blobs, MediaConfig()).objects.url("tracks/a.mp3", prefer="n1")
    with pytest.raises(InvalidConfig, match=r"\{name\} in its host"):
        load_config({"media": MediaConfig}, env={}, flags={"media.preferred_url": "https://a.b"})


def test_nodes_are_probed_on_the_loop_of_commands_too(tmp_path):
    """Commands and the API run on uvloop, whose transports are no `asyncio.Transport`."""

    async def listed() -> list[bool]:
        ports = free_ports(2)
        members = [Member(name=f"n{p}", address=f"127.0.0.1:{p}") for p in ports]
        blobs = Blobs(f"file://{tmp_path}")
        stored = Membership(version=1, members=tuple(members))
        await blobs.put(MEMBERSHIP.key, msgspec.json.encode(stored))
        async with answering(ports[0]):
            return [one.is_alive for one in await Media(blobs, MediaConfig()).entry.list()]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(listed()) == [True, False]
