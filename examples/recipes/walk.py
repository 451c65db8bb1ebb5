"""A walk over a partner's API, page by page, within the rate that the partner allows.

Each partner is a lane with its own limits. The job of a page enqueues the job of the next page, so
a walk of a week survives restarts. A redirect is one more request, so it takes a token of the lane.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from http.client import HTTPConnection
from urllib.parse import urljoin, urlsplit

from headrace import Headrace
from headrace.jobs import Fail, Retry, current_job

app = Headrace()
PARTNER = os.environ.get("PARTNER_URL", "http://127.0.0.1:8601/items?page=1")
REDIRECTS_MAX = 3
app.limiter("partners", rate="60/m", concurrency=2)


@app.task("walk", limiter="partners", retries=20, timeout="1m")
def walk_page(partner: str, url: str) -> None:
    """Read one page, store its items, enqueue the next."""
    page = get_json(url)
    print(partner, "has", *page["items"], flush=True)
    if page["next"]:
        url = urljoin(url, page["next"])
        key = hashlib.sha256(f"{partner} {url}".encode()).hexdigest()
        walk_page.sync.enqueue(partner=partner, url=url, lane=partner, unique=key)


def get_json(url: str) -> dict[str, object]:
    """The document at `url`; each redirect takes a token. Raises: Retry, Fail."""
    for _ in range(1 + REDIRECTS_MAX):
        status, location, body = get(url)
        if status == 200:
            return json.loads(body)
        if status not in (301, 302, 307, 308):
            raise Retry(None, f"{url} answered {status}")
        url = urljoin(url, location)
        current_job().lane.spend_blocking(1)
    raise Fail(f"more than {REDIRECTS_MAX} redirects, the last to {url}")


def get(url: str) -> tuple[int, str, bytes]:
    """Send one request. Return status, location and body."""
    parts = urlsplit(url)
    connection = HTTPConnection(parts.netloc, timeout=20)
    try:
        connection.request("GET", f"{parts.path}?{parts.query}")
        answer = connection.getresponse()
        return answer.status, answer.getheader("Location", ""), answer.read()
    finally:
        connection.close()


async def main() -> None:
    """Set the limit of partner acme, five requests in two seconds, and enqueue the first page."""
    await app.jobs.lanes.set("partners", "acme", starts_max=5, window_s=2, concurrency=1)
    await walk_page.enqueue(partner="acme", url=PARTNER, lane="acme")
    await app.close()


if __name__ == "__main__":
    asyncio.run(main())
