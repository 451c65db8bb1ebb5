"""Failed links skip catalogues and are requested again within a day; good photos are refreshed."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

import pytest
from origin import Answer, photo
from room import HEAD, LIMITS

from headrace.fetch import FetchConfig, store
from headrace.fetch.model import PHOTO_RETRIES, RunState
from headrace.fetch.store.outcomes import Decision

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
WAIT_S = 23.5 * HOUR_S
"""The value of `fetch_recheck_wait_v1`."""
SWEEP_S = 900.0


async def age(shop, age_s: float) -> None:
    """Let time pass for runs and links."""
    for table, *columns in (
        ("fetch_run", "started_at"),
        ("fetch_link", "checked_at", "recheck_at"),
    ):
        earlier = ", ".join(f"{c} = {c} - make_interval(secs => :age_s::float8)" for c in columns)
        await shop.sql(f"UPDATE #{table} SET {earlier}", age_s=age_s)


async def publish_all(shop) -> None:
    """Publish every change, as workers do."""
    await shop.sql("UPDATE #fetch_change SET published_at = now() WHERE published_at IS NULL")
    await shop.sql("UPDATE #fetch_run SET state = 'done' WHERE state = 'applied'")


async def needs_of(shop, run) -> dict[str, str]:
    """The links that a run requests, with an item of each."""
    text = "SELECT url, item FROM #fetch_need WHERE run_id = :run_id"
    return dict(map(tuple, await shop.sql(text, run_id=run.run)))


async def rechecks(shop) -> list[str]:
    """Links that become due by the clock."""
    text = "SELECT url FROM #fetch_link WHERE recheck_at IS NOT NULL ORDER BY url"
    return [row["url"] for row in await shop.sql(text)]


async def decide(shop, run, outcomes: dict[str, tuple[str, str]]) -> None:
    """Record (item, outcome) of each link."""
    decisions = [Decision(run.run, "shop", i, url, o) for url, (i, o) in outcomes.items()]
    await store.outcomes.decide(shop.postgres, decisions)


def row(shop, item: str, name: str, *paths: str) -> str:
    return f"{item},{name},5,{shop.urls(*paths)}\n"


def digest(name: str) -> str:
    return hashlib.sha256(photo(name)).hexdigest()


@dataclass
class Link:
    """A link by the rule of the SQL functions; its host answers from `repaired_at_s`."""

    repaired_at_s: float = float("inf")
    failures: int = 0
    due: int = 0
    requested_at_s: float | None = None

    def run(self, number: int, now_s: float, *, is_sweep: bool = False) -> bool:
        """Whether round `number`, or a sweep after it, requests the link."""
        if self.requested_at_s is not None:
            is_over = now_s - self.requested_at_s >= WAIT_S
            if not self.failures or not (is_over or (not is_sweep and self.due <= number)):
                return False
        self.requested_at_s = now_s
        self.failures = self.failures + 1 if now_s < self.repaired_at_s else 0
        self.due = number + self.failures + 1 if self.failures else 0
        return True


def requested_in(week_s: float, gap_s: float, link: Link, *, jitter: random.Random | None = None):
    """Times at which catalogues every `gap_s`, and sweeps in between, request a link."""
    rounds = [
        (n + (jitter.uniform(0, 0.06) if jitter else 0)) * gap_s for n in range(int(week_s / gap_s))
    ]
    sweeps = [n * SWEEP_S for n in range(int(week_s / SWEEP_S))]
    number, requested = -1, []
    for now_s, is_sweep in sorted([(at, False) for at in rounds] + [(at, True) for at in sweeps]):
        number += not is_sweep
        if (link.requested_at_s is not None or not is_sweep) and link.run(
            number, now_s, is_sweep=is_sweep
        ):
            requested.append(now_s)
            if not link.failures:
                break
    return requested


def test_a_week_of_hourly_runs_requests_dead_links_a_tenth_as_often():
    requested = requested_in(7 * DAY_S, HOUR_S, Link())
    assert [at / HOUR_S for at in requested[:6]] == [0, 2, 5, 9, 14, 20]
    assert len(requested) <= 17


def test_a_week_of_nightly_runs_sends_a_dead_host_less_than_half_the_requests():
    """A temporary fault costs the first night its retries, every later time one request."""
    requested = requested_in(7 * DAY_S, DAY_S, Link(), jitter=random.Random(1))
    assert len(requested) <= 8, "one time a day is the least that finds a repair within a day"
    requests, before = len(requested) + PHOTO_RETRIES, 7 * (1 + PHOTO_RETRIES)
    assert requests <= 0.5 * before


@pytest.mark.parametrize("gap_h", [1 / 6, 1, 3, 8, 12, 24, 100])
def test_a_repair_is_noticed_within_a_day(gap_h):
    rng = random.Random(7)
    for _ in range(100):
        link = Link(repaired_at_s=rng.uniform(0, 6 * DAY_S))
        requested = requested_in(8 * DAY_S, gap_h * HOUR_S, link, jitter=rng)
        assert link.failures == 0
        assert requested[-1] - max(link.repaired_at_s, requested[0]) <= DAY_S


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
async def test_sql_and_the_rule_agree(shop, seed):
    """Rounds at uneven times over many links: SQL requests exactly what the rule requests."""
    rng = random.Random(seed)
    fates = {shop.origin.url(f"/{n}.jpg"): rng.choice([0.0, 0.3, 0.9, 1.0]) for n in range(12)}
    text = "id,name,price,photos\n" + "".join(
        f"i{n},Item,5,{'|'.join(urls)}\n"
        for n, urls in enumerate(zip(*[iter(fates)] * 3, strict=True))
    )
    links: dict[str, Link] = {url: Link() for url in fates}
    now_s = 0.0
    for number in range(1, 26):
        run = await shop.run(text)
        needs = await needs_of(shop, run)
        expected = set()
        for url, link in links.items():
            link.repaired_at_s = 0.0 if rng.random() >= fates[url] else float("inf")
            if link.run(number, now_s):
                expected.add(url)
        assert needs.keys() == expected, f"round {number}, seed {seed}"
        waiting = sum(link.failures > 0 for url, link in links.items() if url not in expected)
        assert run.photos_by_outcome.get("waiting", 0) == waiting
        assert run.photos == len(needs) + sum(run.photos_by_outcome.values())
        kinds = {False: "unchanged", True: "failed:http_404"}
        found = {url: (item, kinds[links[url].failures > 0]) for url, item in needs.items()}
        if found:
            await decide(shop, run, found)
        await publish_all(shop)
        for url, failures, due in map(
            tuple, await shop.sql("SELECT url, failures, due_round FROM #fetch_link")
        ):
            assert (failures, due) == (links[url].failures, links[url].due)
        gap_s = rng.choice([0.2, 1.0, 1.0, 5.0, 11.0, 26.0]) * HOUR_S
        await age(shop, gap_s)
        now_s += gap_s


async def links_run(shop):
    """The newest run, if it is one of links."""
    [run] = await shop.fetch.runs.newest(runs_max=1)
    return run if run.format == "links" else None


@pytest.mark.slow
@pytest.mark.usefixtures("worker")
async def test_a_dead_link_is_requested_again_without_a_catalogue(shop):
    """Four requests the first time, one each later time; a repair edits the items that have the
    link.
    """
    url, good = shop.origin.url("/dead"), shop.origin.url("/photo/1")
    shop.origin.answers["/dead"] = [Answer(404)]
    await shop.run_to_end(f"{HEAD}a,A,5,{url}|{good}\nb,B,5,{url}\nc,C,5,{good}\n")
    assert shop.published() == [("publish", "a", 1), ("publish", "b", 1), ("publish", "c", 1)]
    await age(shop, 23 * HOUR_S)
    await shop.fetch.upkeep.recheck_links()
    assert await links_run(shop) is None, "it is not due yet"
    await age(shop, HOUR_S)
    await shop.fetch.upkeep.recheck_links()
    run = await shop.wait_done(await links_run(shop))
    assert (run.photos, run.photos_by_outcome["failed:http_404"]) == (2, 2)
    assert shop.origin.requests("/dead") == [404, 404], "two items share one request"
    assert shop.published() == []
    shop.origin.answers["/dead"] = [Answer(body=photo("new"))]
    await shop.fetch.upkeep.recheck_links()
    assert (await links_run(shop)).run == run.run, "it was requested just now"
    await age(shop, DAY_S)
    await shop.fetch.upkeep.recheck_links()
    run = await shop.wait_done(await links_run(shop))
    assert run.changed == 2
    assert shop.published() == [("edit", "a", 2), ("edit", "b", 2)]
    assert shop.origin.requests("/photo/1") == [200], "good photos are left alone"
    assert await rechecks(shop) == []


@pytest.mark.slow
@pytest.mark.usefixtures("worker")
async def test_a_link_that_failed_the_last_time_has_one_try(shop):
    shop.origin.answers["/busy"] = [Answer(503)]
    text = f"{HEAD}a,A,5,{shop.origin.url('/busy')}\n"
    run = await shop.run(text)
    await decide(shop, run, {shop.origin.url("/busy"): ("a", "failed:http_503")})
    await shop.wait_done(run)
    await age(shop, DAY_S)
    before = len(shop.origin.requests("/busy"))
    await shop.fetch.upkeep.recheck_links()
    run = await shop.wait_done(await links_run(shop))
    assert run.photos_by_outcome == {"failed:http_503": 1}
    assert len(shop.origin.requests("/busy")) == before + 1


async def test_a_sweep_waits_for_items_of_a_run_and_skips_links_of_no_item(shop):
    url = shop.origin.url("/dead")
    first = await shop.run(f"{HEAD}a,A,5,{url}\nb,B,5,\n")
    await decide(shop, first, {url: ("a", "failed:http_404")})
    await age(shop, DAY_S)
    await shop.fetch.upkeep.recheck_links()
    assert await links_run(shop) is None, "the run is still about its item"
    await publish_all(shop)
    await shop.fetch.upkeep.recheck_links()
    run = await links_run(shop)
    assert run.photos_pending == 1
    await shop.fetch.upkeep.recheck_links()
    assert len(await shop.fetch.runs.newest()) == 2, "requested once"
    await decide(shop, run, {url: ("a", "failed:http_404")})
    await publish_all(shop)
    await shop.run(f"{HEAD}a,A,5,\nb,B,5,\n")
    await publish_all(shop)
    assert await rechecks(shop) == [url]
    await age(shop, DAY_S)
    await shop.fetch.upkeep.recheck_links()
    assert await rechecks(shop) == []
    assert await links_run(shop) is None


@pytest.mark.slow
@pytest.mark.usefixtures("worker")
async def test_a_photo_that_changed_behind_its_link_is_noticed_where_that_is_set(shop, client):
    url = shop.origin.url("/photo/1")
    await shop.run_to_end(f"{HEAD}a,A,5,{url}\n")
    shop.published()
    await age(shop, 8 * DAY_S)
    await shop.fetch.upkeep.recheck_links()
    assert await links_run(shop) is None, "off by default"
    answer = await client.put("/v1/fetch/customers/shop", json={**LIMITS, "refresh_s": 7 * DAY_S})
    assert answer.json()["refresh_s"] == 7 * DAY_S
    await shop.fetch.upkeep.recheck_links()
    run = await shop.wait_done(await links_run(shop))
    assert (run.photos_by_outcome, shop.published()) == ({"unchanged": 1}, [])
    assert shop.origin.requests("/photo/1") == [200, 304], "requested with its ETag"
    await shop.fetch.upkeep.recheck_links()
    assert (await links_run(shop)).run == run.run, "not sooner than that"
    shop.origin.versions["/photo/1"] = "2"
    await age(shop, 8 * DAY_S)
    await shop.fetch.upkeep.recheck_links()
    await shop.wait_done(await links_run(shop))
    assert shop.published() == [("edit", "a", 2)]
    await shop.fetch.customers.set("shop", **LIMITS, refresh_s=0)
    await age(shop, 8 * DAY_S)
    object.__setattr__(shop.fetch.config, "refresh_s", DAY_S)
    runs = len(await shop.fetch.runs.newest())
    await shop.fetch.upkeep.recheck_links()
    assert len(await shop.fetch.runs.newest()) == runs, "the customer's own setting counts"


async def test_a_sweep_requests_at_most_half_of_the_customers_rate(shop):
    urls = [shop.origin.url(f"/photo/{n}") for n in range(60)]
    text = HEAD + "".join(f"i{n:02},Item,5,{url}\n" for n, url in enumerate(urls))
    first = await shop.run(text)
    outcomes = ["unchanged"] * 41 + ["failed:http_404"] * 19
    await decide(shop, first, {u: (f"i{n:02}", outcomes[n]) for n, u in enumerate(urls)})
    await publish_all(shop)
    await age(shop, 8 * DAY_S)
    await shop.fetch.customers.set(
        "shop", starts_max=60, window_s=900.0, connections=1, refresh_s=DAY_S
    )
    await shop.fetch.upkeep.recheck_links()
    run = await links_run(shop)
    found = (await needs_of(shop, run)).keys()
    assert len(found) == 30
    assert found >= set(urls[41:]), "failed links first"


# In catalogues


@pytest.mark.usefixtures("worker")
async def test_a_changed_list_of_links_is_requested_at_once(shop):
    shop.origin.answers["/dead.jpg"] = [Answer(404)]
    await shop.run_to_end(HEAD + row(shop, "a", "A", "/dead.jpg", "/photo/1"))
    price = await shop.run_to_end(HEAD + row(shop, "a", "Another name", "/dead.jpg", "/photo/1"))
    assert price.photos_by_outcome == {"known": 1, "waiting": 1}
    assert shop.origin.requests("/dead.jpg") == [404]
    turned = await shop.run_to_end(HEAD + row(shop, "a", "Another name", "/photo/1", "/dead.jpg"))
    assert turned.photos_by_outcome == {"failed:http_404": 1, "unchanged": 1}
    assert shop.origin.requests("/dead.jpg") == [404, 404]
    edited = await shop.run_to_end(HEAD + row(shop, "a", "Another name", "/photo/1", "/photo/2"))
    assert edited.photos_by_outcome == {"stored": 1, "unchanged": 1}


@pytest.mark.usefixtures("worker")
async def test_a_refused_link_is_judged_by_the_current_settings(shop, process):
    text = HEAD + row(shop, "a", "A", "/photo/1")
    (shop.folder / "door.csv").write_text(text)
    closed = process(config=FetchConfig(allow_ports=(shop.origin.port,)))
    refused = await closed.fetch.run_catalogue(shop.folder / "door.csv", "shop")
    assert (await shop.wait_done(refused)).photos_by_outcome == {"refused:forbidden_address": 1}
    again = await closed.fetch.run_catalogue(shop.folder / "door.csv", "shop")
    assert (again.state, again.photos) == (RunState.DONE, 0)
    shop.published()
    why = await closed.fetch.links.why(shop.origin.url("/photo/1"))
    assert not why.allowed
    assert "fetch.allow_networks" in why.judgement
    assert (await shop.fetch.links.why(shop.origin.url("/photo/1"))).allowed
    opened = await shop.run_to_end(text)
    assert (opened.changed, opened.photos_by_outcome) == (1, {"stored": 1})
    assert shop.published() == [("edit", "a", 2)]
    await closed.fetch.close()


async def test_a_retry_of_a_link_does_not_disturb_other_runs(shop, process):
    shop.origin.answers["/late.jpg"] = [Answer(404)]
    text = HEAD + row(shop, "a", "A", "/late.jpg")
    async with process():
        await shop.wait_done(await shop.run(text))
    shop.origin.answers["/late.jpg"] = [Answer(200, photo("late"))]
    await age(shop, DAY_S)
    again = await shop.run(text)
    assert (again.state, again.photos, again.items_pending) == (RunState.APPLIED, 1, 1)
    beside = await shop.run(text)
    assert (beside.state, beside.photos) == (RunState.DONE, 0), "another run requests it already"
    changed = await shop.run(text.replace("a,A", "a,A2"))
    async with process():
        again, changed = await shop.wait_done(again), await shop.wait_done(changed)
    assert (again.changed, again.unchanged) == (0, 1)
    results = [(r.action, r.version, r.photos[0].outcome) for r in await shop.fetch.items.results()]
    assert results == [("publish", 1, "failed:http_404"), ("edit", 2, "stored")]
    assert sum(again.photos_by_outcome.values()) == sum(changed.photos_by_outcome.values()) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("worker")
async def test_a_broken_link_keeps_its_copy_and_a_changed_photo_is_an_edit_of_every_item(shop):
    old = row(shop, "b", "B", "/photo/1") + row(shop, "d", "D", "/late.jpg")
    shop.origin.answers["/late.jpg"] = [Answer(404)]
    await shop.run_to_end(HEAD + row(shop, "a", "A", "/photo/1") + old)
    shop.origin.answers["/photo/1"] = [Answer(410)]
    text = HEAD + row(shop, "a", "A", "/photo/1", "/photo/2") + old
    await shop.run_to_end(text)
    shop.published()
    kept = (await shop.fetch.items.get("shop", "a")).photos[0]
    assert (kept.outcome, kept.sha256) == ("failed:http_410", digest("/photo/1"))
    del shop.origin.answers["/photo/1"]
    await age(shop, DAY_S)
    back = await shop.run_to_end(text)
    assert back.photos_by_outcome["unchanged"] >= 1, "after a day it is requested in any round"
    assert shop.published() == [], "the copy is the one that consumers have"
    assert shop.origin.requests("/photo/1") == [200, 410, 304]
    shop.origin.versions["/photo/1"] = "-new"
    shop.origin.answers["/late.jpg"] = [Answer(200, photo("late"))]
    changed = text.replace("a,A", "a,A2") + row(shop, "c", "C", "/photo/1", "/late.jpg")
    changed = changed.replace(shop.urls("/photo/1", "/photo/2"), shop.urls("/photo/2", "/photo/1"))
    assert (await shop.run_to_end(changed)).photos_by_outcome["stored"] >= 2
    assert ("publish", "c", 1) in shop.published()
    following = await shop.run_to_end(changed)
    assert following.photos == 0
    assert {item for _, item, _ in shop.published()} == {"b", "d"}
    for item, name in (("a", "/photo/1-new"), ("b", "/photo/1-new"), ("d", "late")):
        photos = (await shop.fetch.items.get("shop", item)).photos
        assert digest(name) in [one.sha256 for one in photos], item
    quiet = await shop.run_to_end(changed)
    assert (quiet.changed, shop.published()) == (0, [])
