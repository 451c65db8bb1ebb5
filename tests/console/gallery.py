"""Every screen of the console in four states, for people who judge how it looks.

`empty` is a new installation, `normal` a small shop, `busy` the same shop under load, and `broken`
the shop with failing jobs and a Valkey that does not answer. `down` is PostgreSQL stopped too.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlencode

import httpx
from console_stack import TRACK, ConsoleStack, tone
from tests.kit.processes import wait_until

from headrace.console.model import PREFIX
from headrace.console.screens import ROOMS

STATES = ("empty", "normal", "busy", "broken", "down")
SITE = "gallery_site:app"
LOGIN = "login"
"""The screen of a browser without a session."""
FAILURES = 40
SHOPS = ("bike-shop", "lamp-house", "old-books", "garden-and-more", "phones24", "vinyl-cellar")
GOODS = ("City bike", "Desk lamp", "Atlas", "Rake", "Headphones", "Record")
LONG = "convert-videos-of-listings-for-phones"
REASONS = ("card declined by the bank", "no answer from pay.example within 10 s", "currency 'EUX'")


def screens(stack: ConsoleStack, state: str) -> dict[str, str]:
    """Name -> path of each screen that exists in this state, with data where there is some."""
    plain = {
        screen.path.strip("/").replace("/", "-") or "overview": PREFIX + screen.path.rstrip("/")
        for room in ROOMS
        for screen in room.screens
        if "{" not in screen.path
    }
    if state == "down":
        return {name: plain[name] for name in ("overview", "jobs", "fetch", "media")}
    extra = {
        "refused": f"{PREFIX}/nothing-here",
        "form": f"{PREFIX}/do/jobs.add_cron",
        "jobs-limiter": f"{PREFIX}/jobs/lanes/partners",
    }
    login = {LOGIN: f"{PREFIX}/login"}
    if state == "empty":
        return {**plain, **extra, **login}
    shop = SHOPS[0]
    failed = stack.call("GET", "/v1/jobs?queue=payments&state=failed")["jobs"]
    run = stack.call("GET", f"/v1/fetch/runs?customer={shop}")["runs"][-1]["run"]
    given = {
        "jobs-queue": f"{PREFIX}/jobs/queues/payments",
        "jobs-moderate": f"{PREFIX}/jobs/queues/moderation/moderate",
        "jobs-job": f"{PREFIX}/jobs/jobs/{failed[0]['id']}",
        "jobs-form": f"{PREFIX}/do/jobs.bulk_retry?queue=payments&state=failed",
        "fetch-run": f"{PREFIX}/fetch/runs/{run}?list=photos",
        "fetch-customer": f"{PREFIX}/fetch/customers/{shop}",
        "fetch-item": f"{PREFIX}/fetch/customers/{shop}/item?id={shop}-1",
        "fetch-why": f"{PREFIX}/fetch/why?{urlencode({'url': stack.seller.url('/gone/1.jpg')})}",
        "views-entity": f"{PREFIX}/views/entity?id=ad:39",
        "feed": f"{PREFIX}/feed?viewer=anna",
        "feed-authors": f"{PREFIX}/feed/authors?author={shop}",
        "feed-why": f"{PREFIX}/feed/why?viewer=anna&post=lamp-house-1",
        "media-object": f"{PREFIX}/media/object?key={TRACK}",
    }
    return {**plain, **extra, **given, **login}


@asynccontextmanager
async def bring_into(stack: ConsoleStack, state: str) -> AsyncIterator[None]:
    """Bring a new system into `state`, and out of it at the end."""
    with ExitStack() as engines:
        if state != "empty":
            await fill(stack)
            wait_recorded(stack, minutes=1 + (state == "normal"))
        if state in ("busy", "broken", "down"):
            load(stack)
            stack.wait("/v1/queues/invoices", lambda queue: queue["leased"] > 1)
            wait_recorded(stack, minutes=2)
        if state in ("broken", "down"):
            fail(stack)
            stack.wait("/v1/queues/payments", lambda queue: queue["failed"] >= FAILURES)
            engines.enter_context(stopped(stack, "valkey"))
        if state == "down":
            # A session that the console has seen stays valid without PostgreSQL.
            assert stack.browse.get(PREFIX).status_code == 200
            engines.enter_context(stopped(stack, "postgres"))
        yield


def wait_recorded(stack: ConsoleStack, *, minutes: int) -> None:
    """Wait until the charts have so many minutes."""
    path = "/v1/history?series=jobs_ended"
    wait_until(
        lambda: sum(stack.call("GET", path)["is_recorded"]) >= minutes,
        what=f"{minutes} minutes of history",
        deadline_s=300,
    )


async def fill(stack: ConsoleStack) -> None:
    """The data of `normal`."""
    _fill_jobs(stack)
    runs = _fill_fetch(stack)
    hits = [{"id": f"ad:{n}", "n": 7 * n + 1, "class": "human"} for n in range(40)]
    hits += [{"id": "ad:39", "n": 31, "class": "bot"}]
    stack.call("POST", "/v1/views", json=hits)
    _fill_feed(stack)
    for key in (TRACK, "tracks/night/blue-hour.wav", "covers/readme.txt"):
        await stack.put(key, tone())
    for run in runs:
        stack.wait_run(run)
    stack.wait(
        "/v1/jobs?queue=payments&state=failed", lambda page: len(page["jobs"]) >= len(REASONS)
    )


def _fill_jobs(stack: ConsoleStack) -> None:
    stack.enqueue("mail", *({"name": f"receipt {n}"} for n in range(60)))
    stack.enqueue("thumbnails", *({"name": f"photo {n}"} for n in range(80)))
    stack.enqueue("invoices", *({"name": f"invoice {n}", "seconds": 0.05} for n in range(20)))
    stack.enqueue("payments", *({"name": f"order {n}", "error": REASONS[n]} for n in range(3)))
    stack.enqueue("moderation", *({"text": f"Is listing {n} allowed?"} for n in range(5)))
    later = (datetime.now(UTC) + timedelta(hours=9)).isoformat()
    stack.enqueue("weekly-report", {"name": "week 47"}, at=later)


def _fill_fetch(stack: ConsoleStack) -> list[int]:
    photo, gone = stack.seller.url("/photo/"), stack.seller.url("/gone/")
    other = stack.seller.url("/photo/", address="127.0.0.2")
    runs = []
    for index, (shop, goods) in enumerate(zip(SHOPS, GOODS, strict=True)):
        stack.customer(shop, starts_max=6000 if index else 1200)
        base = other if index % 2 else photo
        rows = [
            f"{shop}-{n},{goods} {n},{19 + n},{goods}s,red,{base}{shop}{n}.jpg" for n in range(14)
        ]
        if index == 0:
            rows += [f"{shop}-gone,No photo,10,Bikes,,{gone}1.jpg|{photo}left.jpg"]
            rows += [f"{shop}-bad,No price,cheap,Bikes,,"]
        runs.append(stack.catalogue(shop, rows, name=f"{shop}-autumn-2026.csv"))
    books = [f"book-{n},Atlas {n},5,Books,," for n in range(30)]
    stack.customer("held-books")
    stack.wait_run(stack.catalogue("held-books", books))
    runs.append(stack.catalogue("held-books", books[:1]))
    return runs


def _fill_feed(stack: ConsoleStack) -> None:
    now = datetime.now(UTC)
    posts = [
        {"author": shop, "id": f"{shop}-{n}", "at": (now - timedelta(hours=3 * n)).isoformat()}
        for shop in SHOPS
        for n in range(12)
    ]
    stack.call("POST", "/v1/feed/posts", json=posts)
    stack.call("POST", "/v1/feed/viewers/anna/follows", json=[*SHOPS[:4]])
    stack.call("PUT", "/v1/feed/viewers/anna/mutes/lamp-house")


def load(stack: ConsoleStack) -> None:
    """From `normal` to `busy`: work for minutes, a long import, lanes at their limits."""
    for queue, count, seconds in (
        ("mail", 400, 0.2),
        ("thumbnails", 900, 0.5),
        ("invoices", 300, 1.5),
        ("search-index", 1500, 0.1),
        (LONG, 12, 40),
    ):
        stack.enqueue(queue, *({"name": f"{n}", "seconds": seconds} for n in range(count)))
    for shop in SHOPS:
        jobs = ({"name": f"{shop} {n}", "seconds": 2} for n in range(15))
        stack.enqueue("partner-feed", *jobs, lane=shop)
    stack.call("PUT", "/v1/queues/weekly-report", json={"paused": True})
    photo = stack.seller.url("/photo/")
    stack.customer("phones24", starts_max=60, connections=2)
    rows = [f"new-{n},Phone {n},{n + 90},Phones,,{photo}phone{n}.jpg" for n in range(240)]
    stack.catalogue("phones24", rows, name="phones24-black-friday-2026-11-full-export.csv")
    for _ in range(20):
        hits = [{"id": f"ad:{n}", "viewer": f"v{n}", "class": "human"} for n in range(0, 40, 3)]
        stack.call("POST", "/v1/views", json=hits)
        stack.call("GET", "/v1/feed/viewers/anna")
        httpx.get(f"{stack.media}/m/{TRACK}")


def fail(stack: ConsoleStack) -> None:
    """From `busy` towards `broken`: jobs that fail."""
    errors = [{"name": f"order {n}", "error": REASONS[n % 3]} for n in range(FAILURES)]
    stack.enqueue("payments", *errors)
    stack.enqueue("weekly-report", *errors[:3])


@contextmanager
def stopped(stack: ConsoleStack, program: str) -> Iterator[None]:
    """Stop the processes of an embedded engine; let them continue at the end."""
    assert stack.process is not None
    pids = [pid for pid in stack.process.family() if _program(pid).startswith(program)]
    assert pids, f"{program} does not run"
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
