"""A site on engines of a test's choice, and one scenario for each room over its API.

Each scenario ends when all acknowledged work is visible, and may be repeated on the same site.
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path

from tests.kit.processes import wait_until
from tests.kit.site import Site, photo

JOBS, PHOTOS = 200, 6


class Rooms(Site):
    """See `Site`; `origin` is the URL of a host with photos."""

    origin = ""

    def require_all(self) -> None:
        """All rooms work, on engines that `up` did not start."""
        self.jobs()
        key = self.fetch()
        self.views()
        self.feed()
        self.object(key)
        assert self.process is not None
        engines = [pid for pid in self.process.family() if _name(pid) in ENGINES]
        assert engines == []

    def jobs(self) -> None:
        """Jobs sent in one call and one by one run, each once."""
        mark = secrets.token_hex(4)
        texts = [f"{mark}-{number}" for number in range(JOBS)]
        for text in texts[:10]:
            self.document("POST", "/v1/queues/notes/jobs", json={"payload": {"text": text}})
        rest = [{"payload": {"text": text}} for text in texts[10:]]
        self.document("POST", "/v1/queues/notes/jobs", json=rest)

        def ended() -> list[str] | None:
            ours = [line for line in self.lines("notes.txt") if line.startswith(mark)]
            return ours if len(ours) >= JOBS else None

        assert sorted(wait_until(ended, what=f"{JOBS} jobs ran")) == sorted(texts)

    def fetch(self) -> str:
        """Each item of a catalogue is published with its photo; return the key of one."""
        shop = f"shop{secrets.token_hex(3)}"
        items = [f"{shop}-{number}" for number in range(PHOTOS)]
        run = self.run_catalogue(shop, self.origin, items)

        def published() -> list[dict] | None:
            found = [row for row in self.items() if row["id"] in items]
            return found if len(found) >= PHOTOS else None

        found = wait_until(published, what=f"{PHOTOS} items are published")
        assert sorted(row["id"] for row in found) == items
        counts = self.document("GET", f"/v1/fetch/runs/{run}")["photos_by_outcome"]
        assert counts == {"stored": PHOTOS}
        return found[0]["photos"][0]

    def views(self) -> None:
        """Hits are counted at once and flushed into PostgreSQL."""
        ad = f"ad:{secrets.token_hex(4)}"
        for number in range(1, 21):
            params = {"class": "human", "viewer": f"v{number}"}
            hit = self.document("POST", f"/v1/views/items/{ad}", params=params)
            assert hit["total"] == number

        def flushed() -> bool:
            path = f"/v1/views/items/{ad}/series"
            return '"human": 20' in json.dumps(self.document("GET", path, params={"by": "day"}))

        wait_until(flushed, what="20 hits are in PostgreSQL")
        assert self.document("GET", "/v1/views/verify")["differences"] == []

    def feed(self) -> None:
        """A page has the followed author's posts, newest first; the index equals PostgreSQL."""
        author, viewer = f"a{secrets.token_hex(4)}", f"v{secrets.token_hex(4)}"
        self.document("POST", f"/v1/feed/viewers/{viewer}/follows", json=[author])
        posts = [f"{author}-{number}" for number in range(5)]
        for post in posts:
            self.document("POST", "/v1/feed/posts", json={"author": author, "id": post})
        page = self.document("GET", f"/v1/feed/viewers/{viewer}")
        assert [post["id"] for post in page["posts"]] == posts[::-1]

        def is_equal() -> bool:
            return not self.document("GET", "/v1/feed/verify").get("differences", True)

        wait_until(is_equal, what="index and PostgreSQL are equal")

    def object(self, key: str) -> None:
        """A stored photo is served, whole and in ranges."""
        whole, part = self.media(key), self.media(key, Range="bytes=10-99")
        assert (whole.status_code, part.status_code) == (200, 206)
        assert whole.content in (photo(row["id"]) for row in self.items())
        assert part.content == whole.content[10:100]


ENGINES = ("postgres", "valkey-server")


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()
