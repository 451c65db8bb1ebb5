"""Links that failed sit out rounds: the rule by itself, over a simulated week, and as SQL runs it."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engines.sql import compile_query
from penstock.fetch import store
from penstock.fetch.patience import SENT_WAIT_S, WAIT_MAX_S, due_round, is_due, longest_wait_s
from penstock.fetch.store.photos import Decision

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


@dataclass
class Link:
    """A link as the rule sees it; `mended_at_s` is when its host begins to answer."""

    mended_at_s: float = float("inf")
    failures: int = 0
    due: int = 0
    asked_at_s: float | None = None

    def run(self, number: int, now_s: float, gap_s: float | None) -> bool:
        """Whether the round asks it; what came of it is kept."""
        if self.asked_at_s is not None and not (
            self.failures
            and is_due(
                this_round=number, due=self.due, asked_ago_s=now_s - self.asked_at_s, gap_s=gap_s
            )
        ):
            return False
        self.asked_at_s = now_s
        self.failures = self.failures + 1 if now_s < self.mended_at_s else 0
        self.due = due_round(number, self.failures) if self.failures else 0
        return True


def asked_rounds(rounds: int, gap_s: float = HOUR_S) -> list[int]:
    link = Link()
    return [n for n in range(rounds) if link.run(n, n * gap_s, gap_s if n else None)]


def test_a_dead_link_sits_out_one_round_more_each_time():
    assert asked_rounds(21) == [0, 2, 5, 9, 14, 20]


def test_a_week_of_hourly_runs_asks_dead_links_a_tenth_as_often():
    asked = asked_rounds(7 * 24)
    assert len(asked) <= 0.6 * 7 * 24, "the least that is promised"
    assert len(asked) == 17


@pytest.mark.parametrize("gap_h", [1 / 6, 0.5, 1, 3, 6, 8, 12])
def test_no_link_is_found_later_than_a_day_after_it_was_mended(gap_h):
    rng = random.Random(7)
    gap_s = gap_h * HOUR_S
    waits, asked, broken, links = [], 0, 0, 200
    for _ in range(links):
        link = Link(mended_at_s=rng.uniform(0, 6 * DAY_S))
        for number in range(int(7 * DAY_S / gap_s)):
            now_s = (number + rng.uniform(0, 0.05)) * gap_s
            broken += now_s < link.mended_at_s
            asked += link.run(number, now_s, gap_s if number else None)
            if link.asked_at_s == now_s and not link.failures:
                waits.append(now_s - link.mended_at_s)
                break
    assert len(waits) == links, "each is found good"
    assert max(waits) <= DAY_S
    if gap_h <= 1:
        assert asked <= 0.6 * broken


@given(
    st.lists(st.floats(0.05, 30.0), min_size=2, max_size=80),
    st.floats(0.8, 1.25),
)
def test_a_wait_is_over_before_the_day_is_where_rounds_keep_their_pace(gaps_h, pace):
    gap_s = gaps_h[0] * HOUR_S
    link, now_s, last_asked_s, longest_s = Link(), 0.0, 0.0, 0.0
    for number in range(80):
        if link.run(number, now_s, gap_s if number else None):
            longest_s = max(longest_s, now_s - last_asked_s)
            last_asked_s = now_s
        gap_s = min(max(gap_s * pace, 60.0), DAY_S)
        now_s += gap_s
    assert longest_s <= max(WAIT_MAX_S, gap_s) + 1


def test_an_unknown_gap_waits_the_day_and_a_long_one_not_at_all():
    assert longest_wait_s(None) == WAIT_MAX_S
    assert longest_wait_s(HOUR_S) == WAIT_MAX_S - 1.25 * HOUR_S
    assert longest_wait_s(2 * DAY_S) == 0
    assert SENT_WAIT_S < WAIT_MAX_S


PUBLISHED = compile_query(
    "published",
    "-- What workers would have done: every change is published.\n"
    "WITH changes AS (UPDATE penstock.fetch_change SET published_at = now() WHERE published_at IS NULL)"
    " UPDATE penstock.fetch_run SET state = 'done' WHERE state = 'applied'",
)
AGED = compile_query(
    "aged",
    "-- Time passes.\n"
    "WITH runs AS (UPDATE penstock.fetch_run SET"
    " started_at = started_at - make_interval(secs => :age_s::double precision))"
    " UPDATE penstock.fetch_link SET"
    " checked_at = checked_at - make_interval(secs => :age_s::double precision)",
)
NEEDS = compile_query(
    "needs",
    "-- What a run asks for.\nSELECT item, url FROM penstock.fetch_need WHERE run_id = :run_id",
)
STATES = compile_query(
    "states",
    "-- What is kept of links.\nSELECT url, failures, due_round FROM penstock.fetch_link",
)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
async def test_sql_and_the_rule_agree(shop, seed):
    """Rounds at uneven times over links of many fates; SQL asks exactly what the rule asks."""
    rng = random.Random(seed)
    fates = {shop.origin.url(f"/{n}.jpg"): rng.choice([0.0, 0.3, 0.9, 1.0]) for n in range(12)}
    text = "id,name,price,photos\n" + "".join(
        f"i{n},Item,5,{'|'.join(urls)}\n"
        for n, urls in enumerate(zip(*[iter(fates)] * 3, strict=True))
    )
    links: dict[str, Link] = {url: Link() for url in fates}
    now_s = 0.0
    gap_s: float | None = None
    for number in range(1, 26):
        run = await shop.run(text)
        asked = {row["url"] for row in await shop.postgres.all(NEEDS, run_id=run.run)}
        expected = set()
        decisions = []
        for url, link in links.items():
            link.mended_at_s = 0.0 if rng.random() >= fates[url] else float("inf")
            if link.run(number, now_s, gap_s):
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
            await store.photos.decide(shop.postgres, outcomes)
        await shop.postgres.run(PUBLISHED)
        for row in await shop.postgres.all(STATES):
            link = links[row["url"]]
            assert (row["failures"], row["due_round"]) == (link.failures, link.due)
        gap_s = rng.choice([0.2, 1.0, 1.0, 5.0, 11.0, 26.0]) * HOUR_S
        await shop.postgres.run(AGED, age_s=gap_s)
        now_s += gap_s
