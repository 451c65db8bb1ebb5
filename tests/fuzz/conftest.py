"""Interfaces to fuzz: the environment of real engines, and a process of the API on them."""

from __future__ import annotations

import secrets
from types import SimpleNamespace

import httpx
import pytest
from tests.kit.processes import HeadraceProcess, free_ports, is_alive, wait_until

from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.web.tokens import Tokens


@pytest.fixture(scope="module")
async def engines_env(running_engines, tmp_path_factory):
    """Variables that lead a process to a database, keys and a folder of this module's own."""
    folder = tmp_path_factory.mktemp("engines")
    async with running_engines.database() as url:
        yield {
            "HEADRACE_POSTGRES_URL": url,
            "HEADRACE_VALKEY_URL": running_engines.endpoints.valkey_url,
            "HEADRACE_VALKEY_PREFIX": f"test-{secrets.token_hex(4)}",
            "HEADRACE_BLOBS_URL": (folder / "blobs").as_uri(),
            "HEADRACE_DATA_FOLDER": str(folder / "data"),
        }


@pytest.fixture(scope="module")
async def root_token(engines_env):
    """A token for everything."""
    postgres = Postgres(engines_env["HEADRACE_POSTGRES_URL"], PostgresConfig())
    try:
        yield (await Tokens(postgres).create("fuzz", ("*",))).text
    finally:
        await postgres.close()


@pytest.fixture(scope="module")
def api(engines_env, root_token, tmp_path_factory):
    """`headrace api` as a process: its URL, its token and the process."""
    folder = tmp_path_factory.mktemp("api")
    (folder / "shop_for_fuzz.py").write_text(APPLICATION)
    port = free_ports(1)[0]
    url = f"http://127.0.0.1:{port}"
    env = engines_env | {"HEADRACE_WEB_LISTEN": f"127.0.0.1:{port}"}
    process = HeadraceProcess(["api", "shop_for_fuzz:app"], folder=folder, env=env)

    def answers() -> bool:
        assert is_alive(process.pid), process.err
        try:
            return httpx.get(f"{url}/healthz", timeout=60, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_until(answers, what="the API answers")
        yield SimpleNamespace(url=url, port=port, token=root_token, process=process)
    finally:
        process.end()


APPLICATION = '''
"""A site whose queues accept any payload."""

from headrace import Headrace

app = Headrace()


@app.task("mail", retries=2)
async def mail(to: str) -> None:
    """Send nothing."""


app.queue("anything")
app.limiter("smtp", rate="600/m")
'''
