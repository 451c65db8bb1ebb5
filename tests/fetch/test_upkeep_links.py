"""Failed links skip catalogues and are requested again within a day; good photos are refreshed."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from origin import Answer, photo

from headrace.engines.sql import compile_query
from headrace.fetch import store
from headrace.fetch.model import PHOTO_RETRIES
from headrace.fetch.store.outcomes import Decision

HEAD = "id,name,price,photos\n"
HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
WAIT_S = 23.5 * HOUR_S
"""The value of `fetch_recheck_wait_v1`."""
SWEEP_S = 900.0


@dataclass
class Link:
    """A link by the rule of the SQL functions; `mended_at_s` is when its host begins to answer."""

    mended_at_s: float = float("inf")
    failures: int = 0
    due: int = 0
    asked_at_s: float | None = None

    def run(self, number: int, now_s: float, *, is_sweep: bool = False) -> bool:
        """Whether round `number`, or a sweep after it, requests the link."""
        if self.asked_at_s is not None:
            is_over = now_s - self.asked_at_s >= WAIT_S
            if not self.failures or not (is_over or (not is_sweep and self.due <= number)):
                return False
        self.asked_at_s = now_s
        self.failures = self.failures + 1 if now_s < self.mended_at_s else 0
        self.due = number + self.failures + 1 if self.failures else 0
        return True


def asked_in(week_s: float, gap_s: float, link: Link, *, jitter: random.Random | None = None):
    """Times at which catalogues every `gap_s`, and sweeps in between, request a link."""
    rounds = [
        (n + (jitter.uniform(0, 0.06) if jitter else 0)) * gap_s for n in range(int(week_s / gap_s))
    ]
    sweeps = [n * SWEEP_S for n in range(int(week_s / SWEEP_S))]
    number, asked = -1, []
    for now_s, is_sweep in sorted([(at, False) for at in rounds] + [(at, True) for at in sweeps]):
        number += not is_sweep
        if (link.asked_at_s is not None or not is_sweep) and link.run(
            number, now_s, is_sweep=is_sweep
        ):
            asked.append(now_s)
            if not link.failures:
                break
    return asked


def test_a_week_of_hourly_runs_asks_dead_links_a_tenth_as_often():
    asked = asked_in(7 * DAY_S, HOUR_S, Link())
    assert [at / HOUR_S for at in asked[:6]] == [0, 2, 5, 9, 14, 20]
    assert len(asked) <= 17


def test_a_week_of_nightly_runs_sends_a_dead_host_less_than_half_the_requests():
    """A temporary fault costs the first night its retries, every later time one request."""
    asked = asked_in(7 * DAY_S, DAY_S, Link(), jitter=random.Random(1))
    assert len(asked) <= 8, "one time a day is the least that finds a repair within a day"
    requests, before = len(asked) + PHOTO_RETRIES, 7 * (1 + PHOTO_RETRIES)
    assert requests <= 0.5 * before


@pytest.mark.parametrize("gap_h", [1 / 6, 1, 3, 8, 12, 24, 100])
def test_a_repair_is_noticed_within_a_day(gap_h):
    rng = random.Random(7)
    for _ in range(100):
        link = Link(mended_at_s=rng.uniform(0, 6 * DAY_S))
        asked = asked_in(8 * DAY_S, gap_h * HOUR_S, link, jitter=rng)
        assert link.failures == 0
        assert asked[-1] - max(link.mended_at_s, asked[0]) <= DAY_S


PUBLISHED = compile_query(
    "published",
    "-- What workers would have done: every change is published.\n"
    "WITH changes AS (UPDATE headrace.fetch_change SET published_at = now()"
    " WHERE published_at IS NULL)"
    " UPDATE headrace.fetch_run SET state = 'done' WHERE state = 'applied'",
)
AGED = compile_query(
    "aged",
    "-- Time passes.\n"
    "WITH runs AS (UPDATE headrace.fetch_run SET"
    " started_at = started_at - make_interval(secs => :age_s::double precision))"
    " UPDATE headrace.fetch_link SET"
    " checked_at = checked_at - make_interval(secs => :age_s::double precision),"
    " recheck_at = recheck_at - make_interval(secs => :age_s::double precision)",
)
NEEDS = compile_query(
    "needs",
    "-- Requests of a run.\nSELECT item, url FROM headrace.fetch_need WHERE run_id = :run_id",
)
STATES = compile_query(
    "states",
    "-- What is kept of links.\nSELECT url, failures, due_round FROM headrace.fetch_link",
)


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
        asked = {row["url"] for row in await shop.postgres.all(NEEDS, run_id=run.run)}
        expected = set()
        decisions = []
        for url, link in links.items():
            link.mended_at_s = 0.0 if rng.random() >= fates[url] else float("inf")
            if link.run(number, now_s):
                expected.add(url)
                decisions.append(url)
        assert asked == expected, f"round {number}, seed {seed}"
        waiting = sum(link.failures > 0 for link in links.values()) - sum(
            links[url].failures > 0 for url in expected
        )
        assert run.photos_by_outcome.get("waiting", 0) == waiting
        assert run.photos == len(asked) + sum(run.photos_by_outcome.values())
        items = {row["url"]: row["item"] for row in await shop.postgres.all(NEEDS, run_id=run.run)}
        outcomes = [
            Decision(
                run.run,
                "shop",
                items[url],
                url,
                "failed:http_404" if links[url].failures else "unchanged",
            )
            for url in decisions
        ]
        if outcomes:
            await store.outcomes.decide(shop.postgres, outcomes)
        await shop.postgres.run(PUBLISHED)
        for row in await shop.postgres.all(STATES):
            link = links[row["url"]]
            assert (row["failures"], row["due_round"]) == (link.failures, link.due)
        gap_s = rng.choice([0.2, 1.0, 1.0, 5.0, 11.0, 26.0]) * HOUR_S
        await shop.postgres.run(AGED, age_s=gap_s)
        now_s += gap_s


RECHECKS = compile_query(
    "rechecks",
    "-- Links that are due by the clock at some time.\n"
    "SELECT url FROM headrace.fetch_link WHERE recheck_at IS NOT NULL ORDER BY url",
)


async def links_run(shop):
    """The newest run, if it is one of links."""
    [run] = await shop.fetch.runs.newest(runs_max=1)
    return run if run.format == "links" else None


@pytest.mark.slow
@pytest.mark.usefixtures("worker")
async def test_a_dead_link_is_asked_again_without_a_catalogue(shop):
    """Four requests the first time, one each later time; a repair edits the items that have the
    link.
    """
    url, good = shop.origin.url("/dead"), shop.origin.url("/photo/1")
    shop.origin.answers["/dead"] = [Answer(404)]
    await shop.run_to_end(f"{HEAD}a,A,5,{url}|{good}\nb,B,5,{url}\nc,C,5,{good}\n")
    assert shop.told() == [("publish", "a", 1), ("publish", "b", 1), ("publish", "c", 1)]
    await shop.postgres.run(AGED, age_s=23 * HOUR_S)
    await shop.fetch.upkeep.recheck_links()
    assert await links_run(shop) is None, "it is not due yet"
    await shop.postgres.run(AGED, age_s=HOUR_S)
    await shop.fetch.upkeep.recheck_links()
    run = await shop.wait_done(await links_run(shop))
    assert (run.photos, run.photos_by_outcome["failed:http_404"]) == (2, 2)
    assert shop.origin.requests("/dead") == [404, 404], "two items share one request"
    assert shop.told() == []
    shop.origin.answers["/dead"] = [photo_answer()]
    await shop.fetch.upkeep.recheck_links()
    assert (await links_run(shop)).run == run.run, "it was requested just now"
    await shop.postgres.run(AGED, age_s=DAY_S)
    await shop.fetch.upkeep.recheck_links()
    run = await shop.wait_done(await links_run(shop))
    assert run.changed == 2
    assert shop.told() == [("edit", "a", 2), ("edit", "b", 2)]
    assert shop.origin.requests("/photo/1") == [200], "good photos are left alone"
    assert await shop.postgres.all(RECHECKS) == []


def photo_answer(name: str = "new") -> Answer:
    return Answer(body=photo(name), headers={"Content-Type": "image/jpeg"})


@pytest.mark.slow
@pytest.mark.usefixtures("worker")
async def test_a_link_that_failed_the_last_time_has_one_try(shop):
    shop.origin.answers["/busy"] = [Answer(503)]
    text = f"{HEAD}a,A,5,{shop.origin.url('/busy')}\n"
    run = await shop.run(text)
    await store.outcomes.decide(
        shop.postgres, [Decision(run.run, "shop", "a", shop.origin.url("/busy"), "failed:http_503")]
    )
    await shop.wait_done(run)
    await shop.postgres.run(AGED, age_s=DAY_S)
    before = len(shop.origin.requests("/busy"))
    await shop.fetch.upkeep.recheck_links()
    run = await shop.wait_done(await links_run(shop))
    assert run.photos_by_outcome == {"failed:http_503": 1}
    assert len(shop.origin.requests("/busy")) == before + 1


async def test_links_that_no_item_has_are_looked_at_once(shop):
    url = shop.origin.url("/dead")
    first = await shop.run(f"{HEAD}a,A,5,{url}\nb,B,5,\n")
    await store.outcomes.decide(
        shop.postgres, [Decision(first.run, "shop", "a", url, "failed:http_404")]
    )
    await shop.postgres.run(PUBLISHED)
    await shop.run(f"{HEAD}a,A,5,\nb,B,5,\n")
    assert [row["url"] for row in await shop.postgres.all(RECHECKS)] == [url]
    await shop.postgres.run(AGED, age_s=DAY_S)
    await shop.fetch.upkeep.recheck_links()
    assert await shop.postgres.all(RECHECKS) == []
    assert await links_run(shop) is None


async def test_items_that_a_run_is_about_wait_for_it(shop):
    url = shop.origin.url("/dead")
    first = await shop.run(f"{HEAD}a,A,5,{url}\n")
    await store.outcomes.decide(
        shop.postgres, [Decision(first.run, "shop", "a", url, "failed:http_404")]
    )
    await shop.postgres.run(AGED, age_s=DAY_S)
    await shop.fetch.upkeep.recheck_links()
    assert await links_run(shop) is None
    await shop.postgres.run(PUBLISHED)
    await shop.fetch.upkeep.recheck_links()
    assert (await links_run(shop)).photos_pending == 1
    await shop.fetch.upkeep.recheck_links()
    assert len(await shop.fetch.runs.newest()) == 2, "requested once"


@pytest.mark.slow
@pytest.mark.usefixtures("worker")
async def test_a_photo_that_changed_behind_its_link_is_noticed_where_that_is_set(shop, client):
    url = shop.origin.url("/photo/1")
    await shop.run_to_end(f"{HEAD}a,A,5,{url}\n")
    shop.told()
    await shop.postgres.run(AGED, age_s=8 * DAY_S)
    await shop.fetch.upkeep.recheck_links()
    assert await links_run(shop) is None, "off by default"
    limits = {"starts_max": 100_000, "connections": 50}
    answer = await client.put("/v1/fetch/customers/shop", json={**limits, "refresh_s": 7 * DAY_S})
    assert answer.json()["refresh_s"] == 7 * DAY_S
    await shop.fetch.upkeep.recheck_links()
    run = await shop.wait_done(await links_run(shop))
    assert (run.photos_by_outcome, shop.told()) == ({"unchanged": 1}, [])
    assert shop.origin.requests("/photo/1") == [200, 304], "requested with its ETag"
    await shop.fetch.upkeep.recheck_links()
    assert (await links_run(shop)).run == run.run, "not sooner than that"
    shop.origin.versions["/photo/1"] = "2"
    await shop.postgres.run(AGED, age_s=8 * DAY_S)
    await shop.fetch.upkeep.recheck_links()
    await shop.wait_done(await links_run(shop))
    assert shop.told() == [("edit", "a", 2)]
    await shop.fetch.customers.set("shop", **limits, window_s=60, refresh_s=0)
    await shop.postgres.run(AGED, age_s=8 * DAY_S)
    object.__setattr__(shop.fetch.config, "refresh_s", DAY_S)
    runs = len(await shop.fetch.runs.newest())
    await shop.fetch.upkeep.recheck_links()
    assert len(await shop.fetch.runs.newest()) == runs, "the customer's own setting counts"


async def test_a_sweep_asks_for_no_more_than_half_of_the_customers_rate(shop):
    urls = [shop.origin.url(f"/photo/{n}") for n in range(60)]
    text = HEAD + "".join(f"i{n:02},Item,5,{url}\n" for n, url in enumerate(urls))
    first = await shop.run(text)
    decided = [
        Decision(first.run, "shop", f"i{n:02}", url, "failed:http_404" if n > 40 else "unchanged")
        for n, url in enumerate(urls)
    ]
    await store.outcomes.decide(shop.postgres, decided)
    await shop.postgres.run(PUBLISHED)
    await shop.postgres.run(AGED, age_s=8 * DAY_S)
    await shop.fetch.customers.set(
        "shop", starts_max=60, window_s=900.0, connections=1, refresh_s=DAY_S
    )
    await shop.fetch.upkeep.recheck_links()
    run = await links_run(shop)
    asked = {row["url"] for row in await shop.postgres.all(NEEDS, run_id=run.run)}
    assert len(asked) == 30
    assert asked >= set(urls[41:]), "failed links first"
