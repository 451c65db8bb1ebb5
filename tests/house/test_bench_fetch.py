"""The judges of fetch's figures and its simulated hosts.

Each says what it is there for, and nothing else.
"""

from __future__ import annotations

import hashlib

import pytest
from bench.fetch_broken import live, read_rule
from bench.fetch_limits import most_in_window
from bench.fetch_routing import Shares, judge_first_requests
from bench.origins.log import Request, judge, per_second, read_log
from bench.origins.photos import jpeg
from bench.origins.plan import PASSING, HostPlan, seed_mix

from headrace.fetch.images import inspect_image

SHAPE = {"starts_max": 3, "window_s": 1.0, "from_s": 0.0, "until_s": 2.0}


def test_a_request_too_many_in_a_window_is_counted_and_one_at_its_end_is_not():
    kept = [0.1, 0.2, 0.3]
    assert judge({"a": [*kept, 1.1]}, **SHAPE).over == 0
    found = judge({"a": [*kept, 1.09]}, **SHAPE)
    assert (found.over, found.checked) == (1, 1)
    assert found.least_s == pytest.approx(0.99)
    assert most_in_window([*kept, 1.1], 1.0) == 3
    assert most_in_window([*kept, 1.09], 1.0) == 4


def test_the_share_is_of_what_all_hosts_were_allowed_in_whole_windows():
    whole = [0.1, 0.2, 0.3, 1.1, 1.2, 1.3]
    assert judge({"a": whole}, **SHAPE).share == 1
    assert judge({"a": whole, "b": []}, **SHAPE).share == 0.5
    assert judge({"a": whole}, **{**SHAPE, "until_s": 2.9}).share == 1
    assert judge({}, **SHAPE).share == 0


def test_requests_are_counted_by_the_second_they_came_in():
    assert per_second([0.5, 1.0, 1.9, 2.5, 9.0], from_s=0.5, until_s=3.5) == [2, 1, 1]


def test_a_line_that_is_not_whole_yet_is_left(tmp_path):
    log = tmp_path / "access.log"
    assert read_log(log) == []
    log.write_text("20 b.test /2 200 5\n10 a.test /1 -1 7\n30 a.te")
    assert [request.path for request in read_log(log)] == ["/1", "/2"]


def test_a_slow_photo_went_twice_where_its_first_request_was_given_up_too_early():
    plans = {"slow.test": HostPlan(low_s=0.4, high_s=0.5), "fast.test": HostPlan()}
    wait_s = plans["slow.test"].answer("slow.test", "/1", 0)[1]

    def request(status, held_s, host="slow.test", at=1):
        return Request(at, host, "/1", status, round(held_s * 1e6))

    given_up, answered = request(0, 0.1), request(200, wait_s, at=2)
    assert judge_first_requests([given_up, answered], plans) == Shares(1, 1)
    assert judge_first_requests([answered, given_up], plans) == Shares(1, 0)
    assert judge_first_requests([request(200, 0.0, "fast.test")], plans) == Shares(0, 0)


def test_the_mix_is_the_one_seen_in_production():
    plans = seed_mix(100, scale=0.1).values()
    bands = [
        sum(low < plan.high_s <= high for plan in plans) for low, high in ((0, 0.1), (0.1, 0.5))
    ]
    assert bands == [40, 40]
    assert all(0.6 <= plan.failing <= 0.8 and plan.low_s <= plan.high_s < 3.0 for plan in plans)
    plan = HostPlan(failing=0.7)
    statuses = [plan.answer("a.test", f"/{n}", 0)[0] for n in range(1_000)]
    assert 0.65 < sum(status != 200 for status in statuses) / 1_000 < 0.75
    passing = next(n for n, status in enumerate(statuses) if status in PASSING)
    assert plan.answer("a.test", f"/{passing}", 1)[0] == 200
    moved = HostPlan(failing=1.0, redirecting=1.0).answer("a.test", "/moved/1", 0)
    assert moved[0] == 200


@pytest.mark.parametrize("size_bytes", [4_000, 150_000])
def test_photos_are_real_of_the_size_told_and_each_another(size_bytes):
    bodies = [jpeg(f"photo {n}", n % 2, size_bytes) for n in range(4)]
    assert len({hashlib.sha256(body).digest() for body in bodies}) == 4
    assert all(inspect_image(body).format == "jpg" for body in bodies)
    assert all(0.8 < len(body) / size_bytes < 1.25 for body in bodies)


async def test_a_simulated_week_saves_requests_and_sees_repairs(postgres):
    rule = await read_rule(postgres)
    for gap_s, least in ((3_600.0, 40), (86_400.0, 40)):
        week = live(rule, 200, gap_s, 1)
        assert week.cut > least
        assert 0 < week.latest_s <= 86_400
