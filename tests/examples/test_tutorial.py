"""The tutorial works as it is written: its files are saved and its commands typed, word for word.

Only ports differ (several runs share a machine), and the address of a photo, which the page leaves
open.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kit.processes import wait_until

pytestmark = pytest.mark.slow
PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```(sh|python|toml)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FOREGROUND = ("headrace up", "uvicorn")
"""Commands that keep their terminal."""


class Terminals:
    """A shell for each command that keeps its terminal, and one for the rest, in one folder."""

    def __init__(self, folder):
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        kept = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
        self.folder = folder
        self.ports = {8500: free_port(), 8000: free_port()}
        self.env = {
            **kept,
            "PATH": path,
            "HEADRACE_WEB_LISTEN": "127.0.0.1:0",
            "HEADRACE_MEDIA_LISTEN": f"127.0.0.1:{free_port()}",
        }
        self.running = []
        self.is_changed = False

    def with_ports(self, text):
        for written, taken in self.ports.items():
            text = text.replace(str(written), str(taken))
        return text

    def type(self, text):
        """Type commands; return their output. A command that keeps its terminal continues."""
        text = self.with_ports(text)
        if not text.startswith(FOREGROUND):
            return self._run(text)
        out = self.folder / f"{text.split()[0]}.txt"
        with out.open("wb") as file:
            command = ["bash", "-c", f"exec {text}"]
            self.running.append(
                subprocess.Popen(
                    command, cwd=self.folder, env=self.env, stdout=file, stderr=subprocess.STDOUT
                )
            )
        return self.wait_said(out, "is up" if text.startswith("headrace") else "running on")

    def _run(self, text):
        # What is left in the background is ended with this group.
        typed = self.folder / "typed.txt"
        with typed.open("wb") as file:
            shell = subprocess.Popen(
                ["bash", "-euc", text],
                cwd=self.folder,
                env=self.env,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.running.append(shell)
        assert shell.wait(60) == 0, f"{text}\n{typed.read_text()}"
        return typed.read_text()

    def wait_said(self, out, text, *, deadline_s=90):
        """What a terminal shows, once `text` is among it."""

        def look():
            shown = out.read_text(errors="replace")
            return shown if text in shown else None

        return wait_until(look, what=f"{text!r} in {out.name}", deadline_s=deadline_s)

    def close(self):
        for process in self.running:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(40)
            else:
                end_group(process.pid)


def end_group(pid):
    """End what a shell that ended has left in its own group."""
    try:
        os.killpg(pid, signal.SIGTERM)
    except ProcessLookupError:
        return


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def terminals(tmp_path):
    opened = Terminals(tmp_path)
    yield opened
    opened.close()


def steps():
    """Heading -> its blocks, in order."""
    parts = re.split(r"^## \d+\. (.+)$", PAGE.read_text(), flags=re.MULTILINE)[1:]
    return {name: BLOCK.findall(text) for name, text in zip(parts[::2], parts[1::2], strict=True)}


def save(terminals, language, text):
    """A file of the page: a program names itself, the TOML is the configuration."""
    name = text.split()[1] if language == "python" else "headrace.toml"
    (terminals.folder / name).write_text(terminals.with_ports(text))


def type_when_ready(terminals, text):
    """Type a block once the first terminal shows the text that the page waits for."""
    first = terminals.folder / "headrace.txt"
    if "ADDRESS-OF-A-PHOTO" in text:
        shown = terminals.wait_said(first, "publish lamp-7")
        shown = terminals.wait_said(first, "publish bike-1")
        [address] = re.findall(r"publish bike-1 City bike (\S+)", shown)
        text = text.replace("ADDRESS-OF-A-PHOTO", f"'{address}'")
    elif text.startswith("curl") and terminals.is_changed:
        terminals.wait_said(first, "unpublish lamp-7")
    terminals.is_changed = "sed -i" in text
    return terminals.type(text)


def test_the_tutorial_word_for_word(terminals):
    reported = {}
    for name, blocks in steps().items():
        reported[name] = []
        for language, text in blocks if name != "Install" else ():
            if language == "sh":
                reported[name].append(type_when_ready(terminals, text))
            else:
                save(terminals, language, text)
    range_answer = reported["Import the catalogue"][1]
    assert "206 Partial Content" in range_answer
    assert "bytes 0-99/" in range_answer.lower()
    looked = reported["A page that counts views"][-1]
    assert "<h1>City bike</h1><img src=" in looked
    assert "<p>views: 1</p>" in looked
    assert "<p>views: 2</p>" in looked
    assert re.search(r"item:bike-1 +2 ", looked), looked
    assert reported["A feed"][0].count("<li>") == 2
    assert reported["Change something"][1].count("<li>") == 1
    shown = terminals.wait_said(terminals.folder / "headrace.txt", "mail to ann@example.com hello")
    assert "edit bike-1" in shown
    log = (terminals.folder / "seller.log").read_text()
    assert log.count("GET /bike.jpg") == 1, "the seller's host sees no new request"
