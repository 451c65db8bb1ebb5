"""A site on engines of a test's choice, and one scenario for each room over its API.

`up` runs as a user runs it, with URLs of servers that exist already. Each scenario ends when what
was acknowledged is visible, and may be run again on the same site.
"""

from __future__ import annotations

import http.server
import io
import json
import secrets
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from PIL import Image
from tests.kit.processes import HeadraceProcess, wait_until

JOBS = 500
PHOTOS = 6
APPLICATION = '''
"""A site for tests: writes down what its handlers received."""

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
    with pathlib.Path("items.jsonl").open("a") as file:
        file.write(json.dumps({"id": item.id, "photos": [p.key for p in item.photos]}) + "\\n")
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
ROOMS = ("jobs", "fetch", "views", "feed", "media")


class Rooms:
    """The folder, the running site, and the scenarios by the name of their room."""

    def __init__(self, folder: Path, origin: str, **env: str) -> None:
        self.folder, self._origin, self._env = folder, origin, env
        self._facts: dict[str, str] = {}
        self._key = ""
        self.process: HeadraceProcess | None = None
        folder.mkdir(parents=True)
        (folder / "matrix_site.py").write_text(APPLICATION)
        (folder / "headrace.toml").write_text(textwrap.dedent(SETTINGS))

    def up(self) -> None:
        """Start it and wait until all roles are ready."""
        arguments = ["up", "matrix_site:app", "--json"]
        self.process = HeadraceProcess(arguments, folder=self.folder, env=self._env)
        out = self.process.wait_out('"api":')
        self._facts = json.loads(next(line for line in out.splitlines() if '"api":' in line))

    def run(self, *arguments: str, exit_code: int = 0) -> Any:
        """Run one command with --json to its end; its document."""
        process = HeadraceProcess([*arguments, "--json"], folder=self.folder, env=self._env)
        assert process.wait_exit() == exit_code, f"{arguments}: {process.out}\n{process.err}"
        lines = process.out.strip().splitlines()
        return json.loads(lines[-1]) if lines else None

    def call(self, method: str, path: str, **options: Any) -> Any:
        """The document that answers one request with the root token."""
        token = Path(self._facts["token_file"]).read_text().strip()
        headers = {"Authorization": f"Bearer {token}"}
        url = self._facts["api"] + path
        answer = httpx.request(
            method, url, headers=headers, timeout=60, verify=False, trust_env=False, **options
        )
        assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer.json() if answer.content else None

    def jobs(self, count: int = JOBS) -> None:
        """Jobs sent in one call and one by one run, each once."""
        mark = secrets.token_hex(4)
        texts = [f"{mark}-{number}" for number in range(count)]
        for text in texts[:10]:
            self.call("POST", "/v1/queues/notes/jobs", json={"payload": {"text": text}})
        rest = [{"payload": {"text": text}} for text in texts[10:]]
        self.call("POST", "/v1/queues/notes/jobs", json=rest)

        def ended() -> list[str] | None:
            lines = (
                (self.folder / "notes.txt").read_text().split() if self._has("notes.txt") else []
            )
            ours = [line for line in lines if line.startswith(mark)]
            return ours if len(ours) >= count else None

        assert sorted(wait_until(ended, what=f"{count} jobs ran")) == sorted(texts)

    def fetch(self) -> None:
        """Each item of a catalogue is published with its photo, and none is downloaded twice."""
        shop = f"shop{secrets.token_hex(3)}"
        items = [f"{shop}-{number}" for number in range(PHOTOS)]
        rows = [f"{item},Item,100,{self._origin}/{item}.jpg" for item in items]
        (self.folder / f"{shop}.csv").write_text("\n".join(["id,name,price,photos", *rows, ""]))
        self.run("fetch", "customer", "set", shop, "--rate", "6000/m")
        run = self.run("fetch", "catalogue", "run", f"{shop}.csv", "--customer", shop)["run"]

        def published() -> list[dict[str, Any]] | None:
            if not self._has("items.jsonl"):
                return None
            lines = (self.folder / "items.jsonl").read_text().splitlines()
            found = [row for row in map(json.loads, lines) if row["id"] in items]
            return found if len(found) >= PHOTOS else None

        found = wait_until(published, what=f"{PHOTOS} items are published")
        assert sorted(row["id"] for row in found) == items
        assert self.call("GET", f"/v1/fetch/runs/{run}")["photos_by_outcome"] == {"stored": PHOTOS}
        self._key = found[0]["photos"][0]

    def views(self) -> None:
        """Hits are counted at once and flushed into PostgreSQL."""
        ad = f"ad:{secrets.token_hex(4)}"
        for number in range(1, 21):
            params = {"class": "human", "viewer": f"v{number}"}
            told = self.call("POST", f"/v1/views/items/{ad}", params=params)
            assert told["total"] == number

        def flushed() -> bool:
            rows = self.call("GET", f"/v1/views/items/{ad}/series", params={"by": "day"})
            text = json.dumps(rows)
            return '"human": 20' in text or '"views": 20' in text or '"total": 20' in text

        wait_until(flushed, what="20 hits are in PostgreSQL")
        assert self.call("GET", "/v1/views/verify")["differences"] == []

    def feed(self) -> None:
        """A page has the followed author's posts, newest first, and the index equals the truth."""
        author, viewer = f"a{secrets.token_hex(4)}", f"v{secrets.token_hex(4)}"
        self.call("POST", f"/v1/feed/viewers/{viewer}/follows", json=[author])
        posts = [f"{author}-{number}" for number in range(5)]
        for post in posts:
            self.call("POST", "/v1/feed/posts", json={"author": author, "id": post})
        page = self.call("GET", f"/v1/feed/viewers/{viewer}")
        assert [post["id"] for post in page["posts"]] == posts[::-1]
        wait_until(self._is_same, what="index and truth are equal")

    def media(self) -> None:
        """A range of a stored photo is served; `fetch` stored it."""
        if not self._key:
            self.fetch()
        url = f"{self._facts['media']}/m/{self._key}"
        options = {"timeout": 60, "verify": False, "trust_env": False}
        whole = httpx.get(url, **options)
        part = httpx.get(url, headers={"Range": "bytes=10-99"}, **options)
        assert (whole.status_code, part.status_code) == (200, 206)
        assert whole.content in (photo(item) for item in self._items())
        assert part.content == whole.content[10:100]

    def end(self) -> None:
        """Stop it."""
        if self.process is not None:
            self.process.end()

    def _is_same(self) -> bool:
        return not self.call("GET", "/v1/feed/verify").get("differences", True)

    def _has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def _items(self) -> list[str]:
        return [json.loads(line)["id"] for line in self._lines("items.jsonl")]

    def _lines(self, name: str) -> list[str]:
        return (self.folder / name).read_text().splitlines()


@contextmanager
def photo_host() -> Iterator[str]:
    """A seller's host on loopback with a photo at every path; yields its URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = photo(self.path.strip("/").removesuffix(".jpg"))
            self.send_response(200)
            self.send_header("Content-Type", "image/jpeg")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def photo(name: str) -> bytes:
    """A JPEG of a color that depends on the name."""
    color = (len(name) * 37 % 256, sum(name.encode()) % 256, 128)
    out = io.BytesIO()
    Image.new("RGB", (64, 48), color).save(out, "JPEG")
    return out.getvalue()
