"""Doctor and metrics on a machine that only serves media."""

from __future__ import annotations

import asyncio
import os
import pwd
import socket
from contextlib import asynccontextmanager

import pytest
from tests.media.raw_clients import SECRET, serving

from headrace import Headrace
from headrace.cli.doctor import check_up
from headrace.cli.doctor_media import (
    check_data_plane,
    check_media_disks,
    disk_fix,
    serves_media_alone,
)
from headrace.media.cluster.membership import Member, MembershipStore
from headrace.media.errors import NodeNotHere
from headrace.media.native import build


@asynccontextmanager
async def machine(tmp_path, **media):
    """An application with only media settings."""
    flags = {
        "data.folder": str(tmp_path / "data"),
        "blobs.url": (tmp_path / "store").as_uri(),
        **{f"media.{name}": value for name, value in media.items()},
    }
    async with Headrace(flags=flags) as app:
        yield app


async def found(app) -> dict[str, list[tuple[str, str]]]:
    lines: dict[str, list[tuple[str, str]]] = {}
    for finding in await check_up(app, ()):
        lines.setdefault(finding.subject, []).append((finding.state, finding.text))
    return lines


async def test_without_media_settings_missing_engines_fail(tmp_path):
    async with machine(tmp_path) as app:
        assert (await found(app))["engines"][0][0] == "fail"


async def test_stopped_engines_of_this_machine_fail(tmp_path):
    async with machine(tmp_path, node="n1") as app:
        assert serves_media_alone(app)
        app.data_folder.mkdir()
        (app.data_folder / "layout").touch()
        assert not serves_media_alone(app)


async def test_a_media_only_machine_checks_store_and_cluster(tmp_path):
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    with socket.create_server(("127.0.0.1", 0)) as unused:
        dead = unused.getsockname()[1]
    async with machine(tmp_path, node="n1") as app:
        assert (await found(app))["media cluster"] == [
            ("fail", "n1 is not among the 0 nodes of the cluster")
        ]
        member_store = MembershipStore(app.blobs)
        await member_store.register(Member(name="n1", address=f"{host}:{port}"), replicas=2)
        lines = await found(app)
        assert lines["engines"][0][0] == lines["blobs"][0][0] == "ok"
        assert lines["media cluster"] == [("ok", "1 node, all respond")]
        await member_store.register(Member(name="n2", address=f"127.0.0.1:{dead}"), replicas=2)
        [(state, text)] = (await found(app))["media cluster"]
        assert (state, str(dead) in text) == ("warn", True)
    server.close()


async def test_each_url_of_the_upstream_cluster_is_asked(tmp_path, monkeypatch, blobs):
    monkeypatch.setenv("HEADRACE_SECRET", SECRET)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        dead = f"http://127.0.0.1:{unused.getsockname()[1]}"
    async with serving(blobs) as home:
        url = f"http://127.0.0.1:{home.port}"
        async with machine(tmp_path / "a", node="n1", upstream=url) as app:
            seen = (await found(app))["media upstream"]
            assert seen == [("ok", "1 URL, all accept this site")]
        async with machine(tmp_path / "b", node="n1", upstream=f"{url}, {dead}") as app:
            [(state, text)] = (await found(app))["media upstream"]
            assert (state, text.startswith(f"{dead} does not answer")) == ("warn", True)
        other = {"upstream": url, "upstream_secret": "another-secret-of-32-characters-or-more"}
        async with machine(tmp_path / "c", node="n1", **other) as app:
            [(state, text)] = (await found(app))["media upstream"]
            assert (state, text) == ("fail", f"{url} refuses the signature (403)")


async def test_the_data_plane_is_not_compiled_by_a_check(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    [finding] = await check_data_plane(Headrace(flags={"data.folder": str(tmp_path)}))
    assert finding.state == "ok"
    assert "not compiled for this user yet" in finding.text
    assert not (tmp_path / "cache").exists()


FAULTS = {
    "disk /mnt/a: Permission denied": "`chown -R {user} /mnt/a` as root, then restart the node",
    "Operation not permitted (errno 1)": "`chown -R {user} /mnt/a` as root, then restart the node",
    "Input/output error (errno 5)": "replace it and run `headrace media disks add`, or run"
    " `headrace media disks retire`",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fix_of_a_disk_that_is_out_fits_its_fault(fault):
    user = pwd.getpwuid(os.geteuid()).pw_name
    assert disk_fix("/mnt/a", fault) == FAULTS[fault].format(user=user)


async def test_disks_of_a_stopped_node_fail(tmp_path):
    async with machine(tmp_path, disks=f"{tmp_path}/disk:16MiB") as app:
        assert (await found(app))["media disks"][0][0] == "fail"
        with pytest.raises(NodeNotHere):
            await check_media_disks(app)
