"""The study of download times: what is counted, which classes it proposes, and how it is shown."""

from __future__ import annotations

import csv
import io
from collections import Counter
from datetime import date

import pytest
from room import HEAD

from headrace.fetch.host_stats import Classes, HostStats, TimeClass
from headrace.fetch.study import (
    BOUNDS_S,
    MISPLACED,
    AttemptCount,
    attempt_of,
    best_plans,
    csv_of_study,
    plan_of,
    quantile_s,
    study_of,
)

ONE_S, LAST = TimeClass(1.0), TimeClass(30.0)
WEEK = date(2026, 11, 23)


def key(outcome: str, took_s: float = 0.5, *, has_body: bool = True, is_moved: bool = False):
    return attempt_of(ONE_S, outcome, took_s, has_body=has_body, is_moved=is_moved)


def test_an_attempt_is_counted_in_its_bucket_and_rare_statuses_in_groups():
    assert BOUNDS_S[:4] == (0.01, 0.0125, 0.016, 0.02)
    assert 600 <= BOUNDS_S[-1] < 700
    for took_s, upper_s in ((0.0, 0.01), (0.5, 0.5), (0.5001, 0.63), (1.0, 1.0), (700, 630)):
        assert BOUNDS_S[key("stored", took_s)[2] - 1] == upper_s
    assert key("failed:http_404", has_body=False) == (1.0, "failed:http_404", 0)
    assert key("failed:http_418", has_body=False)[1] == "failed:http_4xx"
    assert key("failed:timeout", has_body=False, is_moved=True)[1] == "moved"


def test_classes_are_put_where_the_downloads_are():
    """Downloads of 0.4 s and 4 s fit, with headroom, into 0.5 s and 5 s."""
    times = Counter({0.4: 7_000, 4.0: 3_000})
    one, two, *_ = plans = best_plans(times, 0, last_s=30.0)
    assert (one.classes, one.shares, one.reserved_s) == (["8s"], [1.0], 8.0)
    assert two.classes == ["500ms", "8s"]
    assert two.shares == [0.7, 0.3]
    assert two.reserved_s == pytest.approx(0.7 * 0.5 + 0.3 * (8 + MISPLACED * 0.5))
    assert plans[2].classes == ["500ms", "5s", "8s"]
    assert plans[2].shares == [0.7, 0.3, 0.0]
    attempts = [
        AttemptCount(week=WEEK, time_class="1s", outcome="stored", up_to_s=up_to_s, attempts=n)
        for up_to_s, n in times.items()
    ]
    found = study_of(attempts, [1.0, 5.0, 30.0])
    assert found.proposed == plans[2], "a further class saves nothing"
    assert found.current.reserved_s == pytest.approx(0.7 * 1 + 0.3 * (5 + MISPLACED * 1))


def test_no_other_limits_reserve_less_time():
    times = Counter({0.1: 900, 0.63: 400, 2.0: 150, 6.3: 50, 20.0: 10})
    best = best_plans(times, 5, last_s=30.0)[2]
    assert best.classes[-1] == "30s"
    for first in BOUNDS_S:
        for second in BOUNDS_S:
            if 0.05 <= first < second < 30:
                assert best.reserved_s <= plan_of([first, second, 30.0], times, 5).reserved_s + 1e-9


def test_photos_that_never_end_make_a_long_last_class_cost_more_but_do_not_shorten_it():
    times = Counter({0.4: 5_000, 20.0: 100})
    without, hanging = (best_plans(times, unfinished, last_s=30.0) for unfinished in (0, 500))
    assert [plan.classes[-1] for plan in hanging] == [plan.classes[-1] for plan in without]
    assert hanging[1].reserved_s > without[1].reserved_s
    assert best_plans(times, 0, last_s=10.0)[0].classes == ["10s"], "longer ones were not observed"


def test_few_downloads_give_no_proposal_and_none_give_an_empty_study():
    assert best_plans(Counter({0.4: 999}), 0, last_s=30.0) == []
    study = study_of([], [1.0, 5.0])
    assert (study.downloads, study.quantiles, study.proposed) == (0, {}, None)
    assert (study.current.shares, study.current.reserved_s) == ([0.0, 0.0], 0.0)


def test_quantiles_errors_and_csv():
    def count(outcome: str, attempts: int, up_to_s: float | None = None) -> AttemptCount:
        return AttemptCount(
            week=WEEK, time_class="1s", outcome=outcome, up_to_s=up_to_s, attempts=attempts
        )

    attempts = [
        count("stored", 90, 0.1),
        count("refused:not_an_image", 10, 0.8),
        count("failed:http_404", 5),
        count("moved", 20),
        count("failed:timeout", 3),
    ]
    study = study_of(attempts, [1.0])
    assert study.quantiles == {"p50": 0.1, "p90": 0.1, "p95": 0.8, "p99": 0.8, "p99.9": 0.8}
    assert [(one.up_to_s, one.downloads) for one in study.times] == [(0.1, 90), (0.8, 10)]
    [found] = study.weeks
    assert (found.attempts, found.errors, study.unfinished) == (128, 18, 3)
    assert quantile_s(Counter(), 0.5) is None
    rows = list(csv.DictReader(io.StringIO(csv_of_study(attempts))))
    assert rows[0] == {
        "week": "2026-11-23",
        "time_class": "1s",
        "outcome": "stored",
        "up_to_s": "0.1",
        "attempts": "90",
    }
    assert rows[2]["up_to_s"] == ""


async def test_slots_add_up_their_counts_by_week(shop, postgres):
    slots = [HostStats(postgres, Classes((1.0, 30.0)), half_life_s=3600.0) for _ in range(3)]
    for slot in slots:
        for _ in range(4):
            slot.count_attempt(key("stored"))
        slot.count_attempt(attempt_of(LAST, "failed:timeout", 30.0, has_body=False, is_moved=False))
        await slot.close()
    await shop.sql(
        "INSERT INTO #fetch_attempt SELECT day - 7, class_s, outcome, bucket, 1 FROM #fetch_attempt"
    )
    study = await shop.fetch.study(weeks=1)
    assert (study.downloads, study.unfinished) == (12, 3)
    assert {one.time_class: one.errors for one in study.weeks} == {"1s": 0, "30s": 3}
    assert (await shop.fetch.study(weeks=2)).downloads == 13


@pytest.mark.usefixtures("worker")
async def test_attempts_of_real_downloads_are_shown_everywhere(shop, client, command, tmp_path):
    links = [shop.origin.url(f"/photo/{n}") for n in range(3)] + [shop.origin.url("/none")]
    rows = "".join(f"i{n},Item,5,{link}\n" for n, link in enumerate(links))
    await shop.run_to_end(HEAD + rows)
    await shop.fetch._host_stats.close()
    answer = (await client.get("/v1/fetch/study")).json()
    assert (answer["downloads"], answer["current"]["classes"]) == (3, ["3s"])
    [week] = answer["weeks"]
    assert (week["attempts"], week["errors"]) == (4, 1)
    assert week["by_outcome"] == {"stored": 3, "failed:http_404": 1}
    found = await client.get("/v1/fetch/study?format=csv&weeks=2")
    assert found.headers["content-type"].startswith("text/csv")
    assert len(found.text.splitlines()) == 1 + len(answer["attempts"])
    code, text = await command("study")
    assert (code, "3 downloads: p50" in text, "no proposal" in text) == (0, True, True)
    file = tmp_path / "times.csv"
    assert (await command("study", "--csv", str(file)))[0] == 0
    assert file.read_text() == found.text.replace("\r\n", "\n")
    assert (await command("study", "--csv", "/nonexistent/x.csv"))[0] == "invalid_input"
    for weeks in ("x", "0", "58"):
        code, text = await command("study", "--weeks", weeks)
        assert (code, "weeks" in text) == (2, True), text
