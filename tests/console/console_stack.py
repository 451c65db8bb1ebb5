"""One running system for all console tests: `headrace up` with data in every room.

Data is written through the API only, except objects of the store. `seed` fills the rooms with
ordinary data and with the texts of `hostile`. Tests change only data that they create themselves,
so their order does not matter.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
import socket
import struct
import textwrap
import wave
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
from hostile import CORPUS, LAMP, TEXT
from seller_host import SellerHost
from tests.kit.processes import HeadraceProcess, wait_until

from headrace.engines.blobs import Blobs

SETTINGS = """
[web]
listen = "127.0.0.1:0"
[media]
listen = "127.0.0.1:{media_port}"
[fetch]
allow_networks = "127.0.0.0/8"
allow_ports = "1024-65535"
classes = "1s, 5s"
decode_share = "1"
[jobs]
poll = "200ms"
"""
HEAD = "id,name,price,category,colour,photos\n"
TRACK = "tracks/tone.wav"
FINAL = ("done", "held", "refused", "dry", "superseded", "abandoned")


class ConsoleStack:
    """A running system with its folder, addresses and sellers' host."""

    def __init__(self, folder: Path, *, site: str = "console_site:app") -> None:
        self.folder, self.site = folder, site
        self.seller = SellerHost()
        self.process: HeadraceProcess | None = None
        self.api = self.media = self.token = ""
        self.cookies: list[Any] = []
        """Session cookies from the one-time link of `up`, for a browser context."""
        self._client: httpx.Client | None = None
        self.browse: Any = None
        """A logged-in client of pages, without scripts."""

    def start(self) -> None:
        """Start all roles and wait until they are ready."""
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = textwrap.dedent(SETTINGS).format(media_port=free_port())
        (self.folder / "headrace.toml").write_text(settings)
        here = f"{self.folder}:{Path(__file__).parent}"
        self.process = HeadraceProcess(
            ["up", *filter(None, [self.site]), "--json"],
            folder=self.folder,
            env={"PYTHONPATH": here},
        )
        out = self.process.wait_out('"api":')
        reported = json.loads(next(line for line in out.splitlines() if '"api":' in line))
        self.api, self.media = reported["api"], reported["media"]
        self.token = Path(reported["token_file"]).read_text().strip()
        headers = {"authorization": f"Bearer {self.token}"}
        entered = httpx.get(reported["console_link"], verify=False)
        assert entered.status_code == 303, entered.text
        self.cookies = [
            {"name": name, "value": value, "url": f"{self.api}/console"}
            for name, value in entered.cookies.items()
        ]
        self._client = httpx.Client(base_url=self.api, headers=headers, timeout=60, verify=False)
        self.browse = httpx.Client(
            base_url=self.api,
            headers={"accept": "text/html"},
            cookies=dict(entered.cookies),
            timeout=60,
            verify=False,
        )

    def close(self) -> None:
        """Stop everything."""
        if self._client is not None:
            self._client.close()
            self.browse.close()
        if self.process is not None:
            self.process.end()
        self.seller.close()

    def call(self, method: str, path: str, **options: Any) -> Any:
        """Call the API with the root token; return the JSON of its success response."""
        assert self._client is not None
        answer = self._client.request(method, path, **options)
        assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer.json() if answer.content else None

    def process_run(self, *words: str, exit_code: int = 0) -> str:
        """Run a command on this system; return its output, or its errors if it fails."""
        ran = HeadraceProcess([*words], folder=self.folder)
        assert ran.wait_exit() == exit_code, ran.err
        return ran.err if exit_code else ran.out.strip()

    def wait(self, path: str, is_so: Any) -> Any:
        """Poll the API until `is_so` accepts the response; return it."""

        def ask() -> Any:
            found = self.call("GET", path)
            return (found,) if is_so(found) else None

        return wait_until(ask, what=f"{path} as expected")[0]

    def customer(self, name: str, **limits: Any) -> None:
        """Create a customer."""
        given = {"starts_max": 6000, "window_s": 60, "connections": 8, **limits}
        self.call("PUT", f"/v1/fetch/customers/{name}", json=given)

    def catalogue(self, customer: str, rows: list[str], *, name: str = "shop.csv") -> int:
        """Upload a catalogue of these rows; return its run number."""
        path = f"/v1/fetch/customers/{customer}/catalogues"
        body = (HEAD + "".join(f"{row}\n" for row in rows)).encode()
        return self.call("POST", path, params={"file_name": name}, content=body)["run"]

    def wait_run(self, run: int) -> Any:
        """Wait for the final state of a run; return the run."""
        return self.wait(f"/v1/fetch/runs/{run}", lambda found: found["state"] in FINAL)

    def queue(self, name: str) -> str:
        """Create a queue; return its name."""
        self.call("PUT", f"/v1/queues/{name}?create=true", json={})
        return name

    def enqueue(self, queue: str, *payloads: Any, **more: Any) -> list[int]:
        """Enqueue a job for each payload; return their ids."""
        jobs = [{"payload": payload, **more} for payload in payloads]
        return self.call("POST", f"/v1/queues/{queue}/jobs", json=jobs)["ids"]

    async def put(self, key: str, data: bytes) -> None:
        """Store an object."""
        blobs = Blobs((self.folder / "headrace-data" / "blobs").as_uri())
        try:
            await blobs.put(key, data)
        finally:
            await blobs.close()

    async def seed(self) -> None:
        """Fill every room with data and wait until it is processed."""
        self._seed_jobs()
        runs = self._seed_fetch()
        self._seed_views()
        self._seed_feed()
        await self.put(TRACK, tone())
        for run in runs:
            self.wait_run(run)
        # The copies of photos that are stored now.
        self.wait_run(self._seed_copies())
        self.call("POST", "/v1/crons/fetch.duplicates/run")
        self.wait("/v1/fetch/duplicates", lambda found: len(found["duplicates"]) > 1)
        self.wait("/v1/views/lag", lambda shards: not any(one["pending"] for one in shards))

    def _seed_jobs(self) -> None:
        self.enqueue("mail", *({"to": f"reader-{n}@example.org"} for n in range(30)))
        self.enqueue("thumbs", *({"photo": n} for n in range(60)))
        self.enqueue("broken", *({"text": text} for text in CORPUS))
        self.enqueue("partner", *({"text": f"{n} {TEXT}"} for n in range(6)), lane="acme")
        self.enqueue("approve", {"photo": "p1", "note": TEXT}, {"photo": "p2"})
        later = (datetime.now(UTC) + timedelta(days=1)).isoformat()
        self.enqueue("mail", {"to": "tomorrow@example.org"}, at=later)

    def _seed_fetch(self) -> list[int]:
        photo, gone, page = (self.seller.url(f"/{kind}/") for kind in ("photo", "gone", "page"))
        other = self.seller.url("/photo/", address="127.0.0.2")
        self.customer("bike-shop")
        self.customer("lamp-house", starts_max=600, connections=2)
        self.customer("held-books")
        bikes = [
            f"bike-{n},City bike {n},{120 + n},Bicycles,red,{photo}bike{n}.jpg|{photo}bike{n}b.jpg"
            for n in range(12)
        ]
        bikes += [
            f"bike-gone,Without its photo,10,Bicycles,,{gone}1.jpg|{photo}left.jpg",
            f"bike-page,A page for a photo,10,Bicycles,,{page}1.jpg",
            "bike-bad,No price,cheap,Bicycles,,",
        ]
        lamps = [
            f'lamp-{n},"{quoted(text)}",{n + 5},"{quoted(text)}",'
            f'"{quoted(text)}",{other}lamp{n}.jpg'
            for n, text in enumerate(CORPUS)
        ]
        lamps.append(f'{LAMP},"{quoted(TEXT)}",5,"{quoted(TEXT)}","{quoted(TEXT)}",')
        lamps.append(f'"{quoted(TEXT)}",No id,1,,,')
        books = [f"book-{n},Book {n},5,Books,," for n in range(30)]
        self.wait_run(self.catalogue("held-books", books))
        return [
            self.catalogue("bike-shop", bikes),
            self.catalogue("lamp-house", lamps, name=f"{CORPUS[0]}.csv"),
            self.catalogue("held-books", books[:1], name=f"{CORPUS[1]}.csv"),
        ]

    def _seed_copies(self) -> int:
        """Two held items with photos of another customer."""
        photo = self.seller.url("/photo/", address="127.0.0.2")
        self.customer("copy-house")
        copies = [f"look-{n},Copy {n},5,Bicycles,,{photo}bike{n}.jpg" for n in range(2)]
        return self.catalogue("copy-house", copies)

    def _seed_views(self) -> None:
        # The user agent of this client counts as a bot, so the class is given.
        people = {"class": "human"}
        hits = [{"id": f"ad:{n}", "n": 3 * n + 1, "viewer": f"v{n}", **people} for n in range(40)]
        hits += [{"id": "ad:39", "n": 7, "class": "bot"}, {"id": "ad:39", "n": 2, "class": "staff"}]
        self.call("POST", "/v1/views", json=hits)

    def _seed_feed(self) -> None:
        now = datetime.now(UTC)
        posts = [
            {"author": author, "id": f"{author}-{n}", "at": (now - timedelta(hours=n)).isoformat()}
            for author in ("bike-shop", "lamp-house", "loud", "enemy")
            for n in range(15)
        ]
        posts += [{"author": "bike-shop", "id": "noted", "ref": TEXT}]
        later = (now + timedelta(hours=5)).isoformat()
        posts += [{"author": "bike-shop", "id": "bike-soon", "at": later}]
        posts += [{"author": "outsider", "id": "outsider-1"}]
        self.call("POST", "/v1/feed/posts", json=posts)
        viewer = "/v1/feed/viewers/anna"
        followed = ["bike-shop", "lamp-house", "loud", "enemy"]
        self.call("POST", f"{viewer}/follows", json=followed)
        self.call("PUT", f"{viewer}/mutes/loud")
        self.call("PUT", f"{viewer}/blocks/enemy")


def quoted(text: str) -> str:
    """Text escaped for a quoted CSV cell."""
    return text.replace('"', '""')


def tone(seconds: float = 1.0) -> bytes:
    """A WAV file with a tone."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        samples = (math.sin(n / 8000 * 440 * math.tau) for n in range(int(8000 * seconds)))
        file.writeframes(b"".join(struct.pack("<h", int(9000 * sample)) for sample in samples))
    return out.getvalue()


def free_port() -> int:
    """A free port outside the ephemeral range, as the media port must be known in advance."""
    for port in random.sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("none of 100 ports is free")
