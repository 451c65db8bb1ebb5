"""A site as a user has it: a folder with an application, a configuration and `headrace up`."""

from __future__ import annotations

import asyncio
import http.server
import io
import json
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from PIL import Image
from tests.kit.processes import HeadraceProcess

from headrace.engines.embedded import running_endpoints
from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.sql import compile_query

AGE_DEAD_HOSTS = compile_query(
    "age_dead_hosts",
    "-- Expire all hosts except the newest.\n"
    "UPDATE headrace.host SET expires_at = now() - interval '1 second'"
    " WHERE id < (SELECT max(id) FROM headrace.host)",
)
APPLICATION = '''
"""A site for tests: appends what its handlers receive to files."""

import json
import pathlib

from headrace import Headrace

app = Headrace()


@app.task("notes", retries=2, concurrency=20)
async def note(text: str) -> None:
    with pathlib.Path("notes.txt").open("a") as file:
        file.write(text + "\\n")


@app.on_item
async def publish(item) -> None:
    row = {"id": item.id, "version": item.version, "photos": [photo.key for photo in item.photos]}
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
[postgres]
connections_max = 4
[jobs]
poll = "200ms"
"""
REQUEST = {"timeout": 60, "verify": False, "trust_env": False}
"""Reading the certificate authorities costs 20 ms of CPU a call."""


class Site:
    """The folder, and the running `headrace up` with its addresses."""

    def __init__(self, folder: Path, **env: str) -> None:
        self.folder, self.env = folder, env
        self.process: HeadraceProcess | None = None
        self.facts: dict[str, str] = {}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "site_for_tests.py").write_text(APPLICATION)
        (folder / "headrace.toml").write_text(textwrap.dedent(SETTINGS))

    def up(self, **env: str) -> HeadraceProcess:
        """Start it and wait until all roles are ready."""
        arguments = ["up", "site_for_tests:app", "--json"]
        self.process = HeadraceProcess(arguments, folder=self.folder, env={**self.env, **env})
        out = self.process.wait_out('"api":')
        self.facts = json.loads(next(line for line in out.splitlines() if '"api":' in line))
        return self.process

    def run(self, *arguments: str, exit_code: int | None = 0) -> Any:
        """Run one command with --json to its end; return its document, if it printed one."""
        process = HeadraceProcess([*arguments, "--json"], folder=self.folder, env=self.env)
        ended = process.wait_exit()
        assert exit_code is None or ended == exit_code, f"{arguments}: {ended} {process.err}"
        lines = process.out.strip().splitlines()
        return json.loads(lines[-1]) if lines else None

    def call(
        self, method: str, path: str, headers: dict[str, str] | None = None, **options: Any
    ) -> httpx.Response:
        """One request to the API with the root token."""
        token = Path(self.facts["token_file"]).read_text().strip()
        headers = {"Authorization": f"Bearer {token}", **(headers or {})}
        url = self.facts["api"] + path
        return httpx.request(method, url, headers=headers, **REQUEST, **options)

    def document(self, method: str, path: str, **options: Any) -> Any:
        """The document of a successful request."""
        answer = self.call(method, path, **options)
        assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer.json() if answer.content else None

    def media(self, key: str, **headers: str) -> httpx.Response:
        """One request for an object."""
        return httpx.get(f"{self.facts['media']}/m/{key}", headers=headers, **REQUEST)

    def run_catalogue(self, customer: str, base: str, items: list[str]) -> int:
        """Run a catalogue with one photo an item; return the id of the run."""
        rows = [f"{item},Item,100,{base}/{item}.jpg" for item in items]
        (self.folder / "shop.csv").write_text("\n".join(["id,name,price,photos", *rows, ""]))
        self.run("fetch", "customer", "set", customer, "--rate", "6000/m")
        arguments = ["fetch", "catalogue", "run", "shop.csv", "--customer", customer, "--no-wait"]
        return self.run(*arguments)["run"]

    def age_hosts(self) -> None:
        """Expire the leases of dead hosts now; live hosts renew at once."""

        async def age() -> None:
            endpoints = running_endpoints(self.folder / "headrace-data")
            postgres = Postgres(endpoints.postgres_url, PostgresConfig())
            try:
                await postgres.run(AGE_DEAD_HOSTS)
            finally:
                await postgres.close()

        asyncio.run(age())

    def lines(self, name: str) -> list[str]:
        """What the application wrote so far."""
        file = self.folder / name
        return file.read_text().splitlines() if file.exists() else []

    def items(self) -> list[dict[str, Any]]:
        """The items that the application received so far."""
        return [json.loads(line) for line in self.lines("items.jsonl")]

    def end(self) -> None:
        """Stop it."""
        if self.process is not None:
            self.process.end()


@contextmanager
def http_host(
    answer: Callable[[str, bytes], tuple[int, bytes]], address: str = "127.0.0.1"
) -> Iterator[str]:
    """A server; `answer` maps a path and body to a status and body. Yields its URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length", "0"))
            status, body = answer(self.path, self.rfile.read(length))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815 - the name that http.server calls

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer((address, 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://{address}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def photo(name: str) -> bytes:
    """A JPEG of a color that depends on the name."""
    color = (len(name) * 37 % 256, sum(name.encode()) % 256, 128)
    out = io.BytesIO()
    Image.new("RGB", (64, 48), color).save(out, "JPEG")
    return out.getvalue()


@contextmanager
def photo_host(address: str = "127.0.0.1") -> Iterator[tuple[str, list[str]]]:
    """A host with a photo at every path; yields its URL and the requested paths."""
    paths: list[str] = []

    def answer(path: str, _body: bytes) -> tuple[int, bytes]:
        paths.append(path)
        return 200, photo(path.strip("/").removesuffix(".jpg"))

    with http_host(answer, address) as url:
        yield url, paths
