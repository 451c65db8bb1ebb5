"""`headrace up` on what people do to a data folder: a revoked token, a backup and its restore."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from tests.kit.processes import HeadraceProcess

from headrace import Headrace
from headrace.cli import up
from headrace.cli.backup import ArchiveKeeper
from headrace.engines.valkey import Valkey, ValkeyConfig
from headrace.views.durability_wait import durability_of

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
FREE_PORTS = {"HEADRACE_WEB_LISTEN": "127.0.0.1:0", "HEADRACE_MEDIA_LISTEN": "127.0.0.1:0"}
pytestmark = pytest.mark.slow
SITE = """
from headrace import Headrace

app = Headrace()


@app.task("notes")
async def note(payload):
    pass
"""


@pytest.fixture
def start():
    """Start `headrace` processes; stop those that a test left."""
    started = []

    def begin(folder, *words):
        started.append(HeadraceProcess(list(words), folder=folder, env=FREE_PORTS))
        return started[-1]

    yield begin
    for process in started:
        process.end()


def stop(process):
    process.signal(signal.SIGINT)
    assert process.wait_exit() == 0, process.err


def run(start, folder, *words):
    """Run a command; return its output."""
    process = start(folder, *words)
    assert process.wait_exit() == 0, process.err
    return process.out


@pytest.mark.soak
def test_a_revoked_root_token_is_reported_and_replaced(start, tmp_path):
    process = start(tmp_path, "up")
    process.wait_out("(token in")
    [name] = re.findall(r"root-[0-9a-f]{8}", run(start, tmp_path, "tokens", "ls"))
    run(start, tmp_path, "tokens", "revoke", name)
    checked = start(tmp_path, "doctor")
    assert checked.wait_exit() == 7
    assert "FAIL  token: " in checked.out
    stop(process)
    process = start(tmp_path, "up")
    reported = process.wait_out("tokens create")
    assert "holds a token that is revoked" in reported
    stop(process)
    (tmp_path / "headrace-data" / "token").unlink()
    process = start(tmp_path, "up")
    process.wait_out("(token in")
    run(start, tmp_path, "doctor")
    stop(process)


def blocks_of(heading):
    """Shell blocks below a heading of the operations page."""
    section = OPERATIONS.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return [block.strip() for block in re.findall(r"```sh\n(.*?)```", section, re.DOTALL)]


def shell(folder, text):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(
        ["bash", "-euc", text], cwd=folder, env={**os.environ, "PATH": path}, check=True, timeout=90
    )


@pytest.mark.soak
def test_backup_and_restore_work_as_documented(start, tmp_path):
    # Longer than the limit of socket paths.
    folder = tmp_path / ("a long name " * 12)
    folder.mkdir()
    (folder / "shop").mkdir()
    (folder / "shop" / "app.py").write_text(SITE)
    process = start(folder, "up", "shop.app:app")
    process.wait_out("(token in")
    run(start, folder, "queues", "pause", "notes")
    run(start, folder, "jobs", "add", "notes", "{}")
    run(start, folder, "media", "put", "photos/a.txt", "shop/app.py")
    [backup], (copy, load, serve) = blocks_of("Backup"), blocks_of("Restore")
    shell(folder, backup)
    stop(process)

    *lines, foreground = copy.splitlines()
    shell(folder, "\n".join(lines))
    engines = start(folder, *shlex.split(foreground)[1:])
    assert "restored/run/.s.PGSQL.5432" in engines.wait_out("try:")
    assert len(engines.events("role_started")) == 0
    shell(folder, f"{backup.splitlines()[0]}\n{load}")
    stop(engines)

    up, doctor = serve.splitlines()
    process = start(folder, *shlex.split(up.replace("site_app:app", "shop.app:app"))[1:])
    api = re.search(r"API +(\S+)", process.wait_out("(token in"))[1]
    run(start, folder, *shlex.split(doctor)[1:])
    token = (folder / "headrace-data" / "token").read_text().strip()
    answer = httpx.get(f"{api}/v1/queues", headers={"authorization": f"Bearer {token}"})
    [notes] = [queue for queue in answer.json() if queue["queue"] == "notes"]
    assert (notes["ready"], notes["paused"]) == (1, True)
    assert "photos/a.txt" in run(start, folder, "media", "ls", "photos", "--data", "restored")
    stop(process)


@pytest.mark.parametrize(
    ("settings", "extra"),
    [
        ({}, {}),
        ({"views.durability": "durable"}, {"appendfsync": "always"}),
        ({"views.durability": "durable", "views.durable_replicas": "1"}, {}),
    ],
)
async def test_durable_hits_sync_the_embedded_valkey(tmp_path, monkeypatch, settings, extra):
    given = []
    monkeypatch.setattr(
        up, "EmbeddedEngines", lambda *_, valkey_extra, **_rest: given.append(valkey_extra)
    )
    up.embedded_of(Headrace(flags={"data.folder": str(tmp_path / "data"), **settings}))
    assert given == [extra]


async def test_an_extra_setting_reaches_the_embedded_valkey(tmp_path):
    flags = {"data.folder": str(tmp_path / "data"), "views.durability": "durable"}
    engines = up.embedded_of(Headrace(flags=flags))
    valkey = Valkey((await engines.start()).valkey_url, ValkeyConfig())
    try:
        assert await durability_of(valkey) == ("always", 0)
    finally:
        await valkey.close()
        await engines.stop()


async def test_a_damaged_archive_does_not_stop_the_start(tmp_path):
    archive = tmp_path / "archive"
    archive.mkdir()
    (archive / "archive.json").write_text("{")
    flags = {"data.folder": str(tmp_path / "data"), "backup.url": archive.as_uri()}
    await ArchiveKeeper(Headrace(flags=flags)).check_start()


def test_the_banner_shows_https_beside_the_plain_listener():
    facts = {"media": {"listen": "0.0.0.0:8081", "listen_tls": None}, "agent": {}}
    assert up.addresses_of(facts) == {"media": "http://127.0.0.1:8081"}
    facts["media"]["listen_tls"] = "0.0.0.0:8443"
    addresses = up.addresses_of(facts)
    assert addresses["media_https"] == "https://127.0.0.1:8443"
    assert up.media_urls(addresses).split() == [
        "http://127.0.0.1:8081/m/KEY,",
        "https://127.0.0.1:8443/m/KEY",
    ]
