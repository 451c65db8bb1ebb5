"""Hosts on this machine: network namespaces with their own addresses, on one bridge.

    with hosts() as net:
        db = net.add("db1")
        subprocess.Popen([*db.inside, "postgres", ...])
        db.cut()      # packets are lost in both directions, and nobody is notified
        db.restore()

This process has an address on the bridge, too, so it reaches every host. A network namespace does
not hide files: hosts share folders and Unix sockets. It needs root and iproute2; elsewhere the
test skips with the reason. The run's cleanup removes what a killed run left.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.kit.run_cleanup import RUN_VARIABLE

_NETS = range(20, 250)
_FIRST = 11
"""The address of the first host; this process has the first of the net."""


@dataclass(frozen=True, slots=True)
class Host:
    """A network namespace with one address, and a host name for its processes."""

    name: str
    space: str
    link: str
    address: str

    @property
    def inside(self) -> list[str]:
        """The first words of a command that runs in this host, under its name."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name]
        return ["ip", "netns", "exec", self.space, *named]

    def python(self, folder: Path) -> Path:
        """An interpreter that runs in this host, as a file in `folder`."""
        file = folder / f"python-{self.space}"
        # A shell that still reads it would end silently if it were written again.
        if not file.exists():
            file.write_text(f'#!/bin/sh\nexec {shlex.join(self.inside)} {sys.executable} "$@"\n')
            file.chmod(0o755)
        return file

    def cut(self) -> None:
        """Lose every packet to and from this host; its connections stay open."""
        _require(f"link set {self.link} down")

    def restore(self) -> None:
        """Let packets pass again."""
        _require(f"link set {self.link} up")

    def pids(self) -> list[int]:
        """The processes of this host."""
        return [int(pid) for pid in _ip(f"netns pids {self.space}").stdout.split()]

    def kill(self) -> None:
        """Kill every process of this host, as a power cut does."""
        while pids := self.pids():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


class Hosts:
    """The bridge and its hosts."""

    def __init__(self, bridge: str, net: str, stack: ExitStack) -> None:
        self.address, self.prefix = f"{net}.1", f"{net}."
        self._bridge, self._net, self._stack = bridge, net, stack
        self._count = 0

    def add(self, name: str, number: int | None = None) -> Host:
        """One more host; its address ends with `number`, without one with the next from 11 on."""
        space = f"{self._bridge}-{name}"
        link = f"{self._bridge}v{self._count}"
        host = Host(name, space, link, f"{self._net}.{number or _FIRST + self._count}")
        self._count += 1
        self._stack.callback(_ip, f"netns del {space}")
        _require(f"netns add {space}")
        self._stack.callback(host.kill)
        # A namespace's own links are removed some time after it.
        self._stack.callback(_ip, f"link del {link}")
        _require(f"link add {link} type veth peer name eth0 netns {space}")
        _require(f"link set {link} master {self._bridge} up")
        _require(f"-n {space} addr add {host.address}/24 dev eth0")
        _require(f"-n {space} link set eth0 up")
        _require(f"-n {space} link set lo up")
        return host


@contextmanager
def hosts() -> Iterator[Hosts]:
    """A bridge without hosts yet; all of them are removed after the block."""
    with ExitStack() as stack:
        number = _free_net(stack)
        bridge, net = f"hrt{number}", f"10.213.{number}"
        stack.callback(_ip, f"link del {bridge}")
        made = _ip(f"link add {bridge} type bridge")
        if made.returncode != 0:
            pytest.skip(f"network namespaces need root and iproute2: {made.stderr.strip()}")
        # What a killed run left is found by this name.
        _ip(f"link set {bridge} alias {os.environ[RUN_VARIABLE]}")
        _require(f"addr add {net}.1/24 dev {bridge}")
        _require(f"link set {bridge} up")
        yield Hosts(bridge, net, stack)


def _free_net(stack: ExitStack) -> int:
    """A number that no other test of this machine uses, until the stack ends."""
    for number in _NETS:
        held = socket.socket(socket.AF_UNIX)
        try:
            held.bind(f"\0headrace-test-net-{number}")
        except OSError:
            held.close()
            continue
        stack.callback(held.close)
        return number
    pytest.fail("every test network is in use")


def _ip(text: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(["ip", *text.split()], check=False, capture_output=True, text=True)
    except FileNotFoundError as error:
        return subprocess.CompletedProcess(text, 127, "", str(error))


def _require(text: str) -> None:
    made = _ip(text)
    assert made.returncode == 0, f"ip {text}: {made.stderr}"
