"""The demo's platform: ports in use, servers that restart, commands that are slow or fail."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pty
import select
import socket
import subprocess
import sys
from functools import partial

import pytest
from examples.bazaar import demo
from examples.bazaar import stage as staging
from examples.bazaar.adverts import Adverts
from examples.bazaar.client import Client, RefusedError, ServerLeftError
from examples.bazaar.lock import DemoError, folder_of_one
from examples.bazaar.sellers import Desk
from examples.bazaar.shops import shops
from examples.bazaar.stage import ROOT, CommandFailedError, Stage, dead_roles
from examples.bazaar.story import Story
from tests.kit.waiting import wait_true
from tools import set_up


@pytest.fixture
def stage(tmp_path):
    """A stage of three sellers, not started."""
    read_fd, write_fd = os.pipe()
    stage = Stage(tmp_path, shops(3), lock_fd=write_fd)
    stage.token_file.parent.mkdir()
    stage.token_file.write_text("hrt_test")
    stage.origins_log.write_bytes(b"")
    yield stage
    os.close(read_fd)
    os.close(write_fd)


def test_a_role_that_ends_repeatedly_is_named():
    died = '{"source":"headrace.cli.supervisor","name":"agent","exit_code":1,"event":"role_died"}'
    begun = '{"source":"headrace.cli.supervisor","name":"api","pid":7,"event":"role_started"}'
    assert dead_roles(f"{begun}\n{died}\n{died}\n") == "agent ended and was started again"
    assert dead_roles(begun) == "the roles"


def test_the_log_keeps_earlier_runs_and_is_bounded(stage, monkeypatch):
    monkeypatch.setattr(staging, "LOG_BYTES_MAX", 200)
    for number in range(2):
        stage._begin_log()
        with stage.headrace_log.open("ab") as log:
            log.write(b"run %d: %s\n" % (number, b"x" * 100))
        assert stage._log().startswith(f"run {number}: ")
    text = stage.headrace_log.read_text()
    assert [line[:5] for line in text.splitlines()] == ["--- h", "run 0", "--- h", "run 1"]
    stage._begin_log()
    assert stage._log() == ""
    assert stage.headrace_log.with_name("headrace.log.1").read_text() == text
    assert stage.headrace_log.read_text().count("\n") == 1


DEMO_STUB = """#!/bin/sh
trap 'exit "$EXIT_CODE"' INT
echo the demo runs
while :; do sleep 0.1; done
"""


@pytest.mark.parametrize("shell", ["sh", "bash"])
@pytest.mark.parametrize("exit_code", [0, 3])
def test_ctrl_c_ends_make_demo_with_the_exit_code_of_the_demo(tmp_path, shell, exit_code):
    (tmp_path / "python").write_text(DEMO_STUB)
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "set-up").touch()
    given = (f"BIN={tmp_path}", f"DEMO_SET_UP={tmp_path}/set-up", f"SHELL=/bin/{shell}")
    command = ["setsid", "--ctty", "make", "-C", ROOT, "demo", *given]
    env = {**os.environ, "EXIT_CODE": str(exit_code)}
    terminal, of_make = pty.openpty()
    make = subprocess.Popen(command, stdin=of_make, stdout=of_make, stderr=of_make, env=env)
    os.close(of_make)
    output = b""
    with contextlib.suppress(OSError):  # the terminal of an ended process
        while select.select([terminal], [], [], 60)[0]:
            output += os.read(terminal, 1000)
            if b"runs\r\n" in output and b"^C" not in output:
                os.write(terminal, b"\x03")
    os.close(terminal)  # ends a process that did not end
    assert make.wait(60) == (2 if exit_code else 0), output.decode()
    assert (b"***" in output) == bool(exit_code)


def test_chosen_ports_are_used_or_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(DemoError, match=rf"port ({port - 1}|{port}) is in use: choose another"):
            Stage(tmp_path, shops(3), lock_fd=0, port=port - 1)
    with pytest.raises(DemoError, match="port 65536"):
        Stage(tmp_path, shops(3), lock_fd=0, port=65534)


def test_a_port_in_use_is_named_and_used_again_when_it_is_free(tmp_path, monkeypatch):
    usual = []
    for _ in range(4):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            usual.append(probe.getsockname()[1])
    monkeypatch.setattr(staging, "_PREFERRED", staging.Ports(*usual))
    with socket.create_server(("127.0.0.1", usual[0])):
        first = Stage(tmp_path, shops(3), lock_fd=0)
        second = Stage(tmp_path, shops(3), lock_fd=0)
    assert first.ports.api == second.ports.api != usual[0]
    [note] = second.notes.values()
    assert f"port {usual[0]} is in use by another process: the console uses" in note
    assert str(tmp_path / "ports.json") in note
    third = Stage(tmp_path, shops(3), lock_fd=0)
    assert (third.ports.api, third.notes) == (usual[0], {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "advice"),
    [("make", "`make demo FOLDER=other-data`"), ("", "--folder other-data")],
)
def test_a_second_demo_names_the_option_of_its_command_line(tmp_path, options, advice):
    ours = {"DEMO_OPTIONS": options, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    second = [sys.executable, "-m", "examples.bazaar.demo", "--folder", tmp_path]
    with folder_of_one(tmp_path):
        ended = subprocess.run(
            second, check=False, env={**os.environ, **ours}, capture_output=True, text=True
        )
    assert ended.returncode == 1
    assert f"pid {os.getpid()}) runs in {tmp_path}: end it, or choose" in ended.stderr
    assert advice in ended.stderr


def test_make_passes_the_folder_and_its_own_name(tmp_path):
    (tmp_path / "python").write_text('#!/bin/sh\necho "$DEMO_OPTIONS: $*"\n')
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "set-up").touch()
    given = (f"BIN={tmp_path}", f"DEMO_SET_UP={tmp_path}/set-up", "FOLDER=other data")
    made = subprocess.run(
        ["make", "-C", ROOT, "demo", *given], check=True, capture_output=True, text=True, timeout=60
    )
    assert "make: -m examples.bazaar.demo --folder other data\n" in made.stdout


def test_make_refuses_a_variable_that_no_target_reads():
    make = partial(subprocess.run, check=False, capture_output=True, text=True, timeout=60)
    misspelled = make(["make", "-n", "-C", ROOT, "demo", "SECOND=5"])
    assert misspelled.returncode == 2
    assert "unknown variable SECOND=5: `make` shows the variables" in misspelled.stderr
    several = make(["make", "-n", "-C", ROOT, "bench", "ROOM=media", "ONLY=ranges tls"])
    assert "bench media  --only ranges --only tls" in several.stdout


def test_make_outside_is_short_only_on_request():
    for given, is_short in (((), False), (("SHORT=1",), True)):
        made = subprocess.run(
            ["make", "-n", "-C", ROOT, "outside", *given],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert ("--short" in made.stdout) is is_short


async def test_a_long_start_names_what_it_waits_for(stage, monkeypatch, capsys):
    monkeypatch.setattr(demo, "LOGGED_EVERY_S", 0.01)
    showing = asyncio.create_task(demo.show_start(stage))
    printed = []

    def has_lines():
        printed.append(capsys.readouterr().out)
        return "".join(printed).count("waiting for the sellers' hosts ...\n") > 1

    await wait_true(has_lines)
    showing.cancel()


SLOW_PIP = """#!/bin/sh
echo "Collecting one"
while [ ! -e "$GO" ]; do sleep 0.05; done
"""


async def test_a_slow_set_up_prints_its_progress(tmp_path, monkeypatch, capsys):
    python, lock, go = tmp_path / "python", tmp_path / "some.lock", tmp_path / "go"
    python.write_text(SLOW_PIP)
    python.chmod(0o755)
    lock.write_text("one==1\ntwo==2\n")
    monkeypatch.setenv("GO", str(go))
    monkeypatch.setattr(set_up, "LINE_EVERY_S", 0.01)
    installing = asyncio.create_task(
        asyncio.to_thread(set_up.install, python, lock, set_up.Progress("Creating ..."))
    )
    printed = []

    def has_lines():
        printed.append(capsys.readouterr().out)
        return "".join(printed).count("Downloading: 1 of 2 packages of some.lock") > 2

    await wait_true(has_lines)
    go.touch()
    await installing
    assert capsys.readouterr().out.splitlines()[-1].startswith("Set-up ended after")


PIP = """#!/bin/sh
case "$*" in
*--editable*) echo "Obtaining file:///here"; echo "Installing collected packages: headrace";;
*)
  printf '%s\\n' "Collecting one" "Collecting two" "  Downloading two.whl"
  echo "Installing collected packages: one, two"
  echo "Successfully installed one two";;
esac
"""


def test_the_set_up_names_its_steps_in_order(tmp_path, monkeypatch):
    python, lock = tmp_path / "python", tmp_path / "some.lock"
    python.write_text(PIP)
    python.chmod(0o755)
    lock.write_text("one==1\ntwo==2\n")
    progress, steps = set_up.Progress("Creating ..."), []
    monkeypatch.setattr(progress, "set", steps.append)
    set_up.install(python, lock, progress)
    assert [step for step, _ in itertools.groupby(steps)] == [
        *(f"Downloading: {count} of 2 packages of some.lock ..." for count in range(3)),
        "Unpacking 2 packages ...",
        "Installing Headrace from this folder ...",
    ]


async def test_a_port_that_was_taken_meanwhile_is_replaced(stage):
    taken, address = stage.ports.origins, stage.sellers[1].address
    with socket.create_server((address, taken)):
        origins = await stage._start_origins(asyncio.Event())
        assert stage.ports.origins != taken
        client = Client(f"http://{address}:{stage.ports.origins}", patience_s=0)
        assert (await client.request("GET", "/gone/1.jpg")).status == 404
        origins.terminate()
        await origins.wait()


async def test_clients_wait_for_a_server_that_restarts():
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


async def test_a_failed_or_slow_command_is_an_error_and_the_story_continues(stage, monkeypatch):
    with pytest.raises(CommandFailedError, match="ended with 2"):
        await stage.command("no-such-command")
    monkeypatch.setattr(staging, "COMMAND_S", 0.01)
    adverts = Adverts(stage.database)
    adverts.create()
    desk = Desk(stage)
    story = Story(stage, desk, adverts)
    await story._change(stage.sellers[0], by_command=True)
    desk.close()
    [fault] = story.progress.faults
    assert "took over 0.01 s" in fault


@pytest.mark.parametrize("form", [(), ("--json",)])
async def test_a_command_refused_by_an_engine_that_is_away_has_its_code(stage, form):
    urls = {"postgres": "postgresql://h@127.0.0.1:1/h", "valkey": "valkey://127.0.0.1:1"}
    stage.config.write_text("".join(f'[{name}]\nurl = "{url}"\n' for name, url in urls.items()))
    with pytest.raises(RefusedError) as raised:
        await stage.command("queues", "ls", *form)
    assert raised.value.code == "postgres.unavailable"
