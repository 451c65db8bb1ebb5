"""A site as a user has it: a folder with an application, a configuration and `headrace up`."""

from __future__ import annotations

import asyncio
import json
import textwrap
from pathlib import Path
from typing import Any

import httpx
import pytest
from recorded_fleet import RecordedFleet
from slots_host import SlotsHost
from tests.kit.processes import HeadraceProcess

from headrace.engines.embedded import running_endpoints
from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.sql import compile_query

AGE_DEAD_HOSTS = compile_query(
    "age_dead_hosts",
    "-- All hosts but the newest are dead: let them expire.\n"
    "UPDATE headrace.host SET expires_at = now() - interval '1 second'"
    " WHERE id < (SELECT max(id) FROM headrace.host)",
)
APPLICATION = '''
"""A site for tests: writes down what it is told."""

import json
import pathlib

from headrace import Headrace

app = Headrace()


@app.task("notes", retries=2)
async def note(text: str) -> None:
    with pathlib.Path("notes.txt").open("a") as file:
        file.write(text + "\\n")


@app.on_item
async def publish(item) -> None:
    row = {"action": item.action, "id": item.id, "version": item.version}
    row["photos"] = [photo.key for photo in item.photos]
    with pathlib.Path("items.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\\n")
'''
SETTINGS = """
[web]
listen = "127.0.0.1:0"
[media]
listen = "127.0.0.1:0"
[fetch]
allow_networks = "127.0.0.0/8"
allow_ports = "1024-65535"
"""


class Site:
    """The folder, and the running `headrace up` with its addresses."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: HeadraceProcess | None = None
        self.told: dict[str, str] = {}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "site_for_tests.py").write_text(APPLICATION)
        (folder / "headrace.toml").write_text(textwrap.dedent(SETTINGS))

    def up(self, **env: str) -> HeadraceProcess:
        """Start it and wait until all roles are ready."""
        self.process = HeadraceProcess(
            ["up", "site_for_tests:app", "--json"], folder=self.folder, env=env
        )
        out = self.process.wait_out('"api":')
        self.told = json.loads(next(line for line in out.splitlines() if '"api":' in line))
        return self.process

    def run(self, *arguments: str, exit_code: int | None = 0) -> Any:
        """Run one command with --json to its end; returns its document, if it printed one."""
        process = HeadraceProcess([*arguments, "--json"], folder=self.folder)
        ended = process.wait_exit()
        assert exit_code is None or ended == exit_code, f"{arguments}: {ended} {process.err}"
        lines = process.out.strip().splitlines()
        return json.loads(lines[-1]) if lines else None

    def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        """One request to the API with the root token."""
        token = Path(self.told["token_file"]).read_text().strip()
        headers = {"Authorization": f"Bearer {token}"}
        return httpx.request(
            method,
            self.told["api"] + path,
            headers=headers,
            timeout=60,
            # Reading the authorities, 20 ms of CPU a call, is for no one on a plain address.
            verify=False,
            **options,
        )

    def age_hosts(self) -> None:
        """Let the leases of dead hosts expire now instead of in 30 s (the living renew at once)."""

        async def age() -> None:
            postgres = Postgres(
                running_endpoints(self.folder / "headrace-data").postgres_url, PostgresConfig()
            )
            try:
                await postgres.run(AGE_DEAD_HOSTS)
            finally:
                await postgres.close()

        asyncio.run(age())

    def lines(self, name: str) -> list[str]:
        """What the application wrote down so far."""
        file = self.folder / name
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def site(tmp_path):
    """A site that is not running yet."""
    site = Site(tmp_path / "site")
    yield site
    if site.process is not None:
        site.process.end()


@pytest.fixture
def fleet(tmp_path, running_engines, postgres, database_url):
    """No process yet; those started end with the test."""
    valkey_url = running_engines.endpoints.valkey_url
    fleet = RecordedFleet(
        tmp_path / "fleet", postgres, postgres_url=database_url, valkey_url=valkey_url
    )
    yield fleet
    fleet.end()


@pytest.fixture
def host(tmp_path, running_engines, postgres, database_url):
    """No agent yet; those started end with the test."""
    valkey_url = running_engines.endpoints.valkey_url
    host = SlotsHost(tmp_path / "host", postgres, postgres_url=database_url, valkey_url=valkey_url)
    yield host
    host.end()
