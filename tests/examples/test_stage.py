"""The demo's platform.

Ports that others take, servers that are started anew, and the role that keeps it from being up.
"""

from __future__ import annotations

import asyncio
import os
import socket

import pytest
from examples.bazaar import stage as staging
from examples.bazaar.adverts import Adverts
from examples.bazaar.client import Client, ServerLeftError
from examples.bazaar.sellers import Desk
from examples.bazaar.shops import shops
from examples.bazaar.stage import CommandFailedError, Stage, dead_roles
from examples.bazaar.story import Story

DIED = '{"source":"headrace.cli.supervisor","name":"agent","exit_code":1,"event":"role_died"}'
STARTED = '{"source":"headrace.cli.supervisor","name":"api","pid":7,"event":"role_started"}'


def test_a_role_that_ends_again_and_again_is_named():
    assert dead_roles(f"{STARTED}\n{DIED}\n{DIED}\n") == "agent ended and was started again"
    assert dead_roles(STARTED) == "the roles"


@pytest.mark.slow
async def test_a_port_that_is_taken_after_it_was_chosen_is_replaced(tmp_path):
    read_fd, write_fd = os.pipe()
    stage = Stage(tmp_path, shops(3), lock_fd=write_fd)
    taken = stage.ports.origins
    with socket.create_server((stage.sellers[1].address, taken)):
        origins = await stage._start_origins(asyncio.Event())
        os.close(read_fd)
        os.close(write_fd)
        assert stage.ports.origins != taken
        reply = await Client(
            f"http://{stage.sellers[1].address}:{stage.ports.origins}", patience_s=0
        ).request("GET", "/gone/1.jpg")
        assert reply.status == 404
        origins.terminate()
        await origins.wait()


async def test_whoever_comes_waits_for_a_server_that_is_started_anew():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n42")
        writer.close()

    async def die(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.close()
        dying.close()

    client = Client(f"http://127.0.0.1:{port}")
    dying = await asyncio.start_server(die, "127.0.0.1", port)
    with pytest.raises(ServerLeftError):
        await client.request("POST", "/counted-or-not")
    asking = asyncio.create_task(client.get_json("/"))
    await asyncio.sleep(0)
    async with await asyncio.start_server(answer, "127.0.0.1", port):
        assert await asking == 42


@pytest.fixture
def stage(tmp_path):
    """A stage of three sellers; nothing of it runs."""
    read_fd, write_fd = os.pipe()
    stage = Stage(tmp_path, shops(3), lock_fd=write_fd)
    stage.token_file.parent.mkdir()
    stage.token_file.write_text("hrt_test")
    stage.origins_log.write_bytes(b"")
    yield stage
    os.close(read_fd)
    os.close(write_fd)


async def test_a_command_ends_with_its_call(stage, monkeypatch):
    assert b"Usage" in await stage.command("fetch", "--help")
    with pytest.raises(CommandFailedError, match="ended with 2"):
        await stage.command("no-such-command")
    slow = asyncio.create_task(stage.command("fetch", "--help"))
    await asyncio.sleep(0)
    slow.cancel()
    with pytest.raises(asyncio.CancelledError):
        await slow
    monkeypatch.setattr(staging, "COMMAND_S", 0.01)
    with pytest.raises(CommandFailedError, match="took over"):
        await stage.command("fetch", "--help")


async def test_a_slow_command_is_a_fault_and_the_story_continues(stage, monkeypatch):
    monkeypatch.setattr(staging, "COMMAND_S", 0.01)
    adverts = Adverts(stage.database)
    adverts.create()
    desk = Desk(stage)
    story = Story(stage, desk, adverts)
    await story._change(stage.sellers[0], by_command=True)
    desk.close()
    [fault] = story.progress.faults
    assert "took over 0.01 s" in fault
