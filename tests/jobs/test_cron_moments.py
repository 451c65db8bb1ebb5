"""When a cron fires: by its fields, in its zone, through changes of the clock."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.jobs.crons import next_moment
from headrace.jobs.errors import InvalidCron

BERLIN = "Europe/Berlin"


def at(text):
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def moments(spec, tz, after, count):
    found = []
    for _ in range(count):
        after = next_moment(spec, tz, after)
        found.append(after)
    return found


@pytest.mark.parametrize(
    ("spec", "tz", "after", "expected"),
    [
        ("0 4 * * *", "UTC", "2026-11-21T04:00", "2026-11-22T04:00"),
        ("0 4 * * *", "UTC", "2026-11-21T03:59:59.999999", "2026-11-21T04:00"),
        ("0 4 * * *", "Europe/Moscow", "2026-11-21T04:00", "2026-11-22T01:00"),
        ("*/10 8-18 * * MON-FRI", "UTC", "2026-11-20T18:51", "2026-11-23T08:00"),
        ("0 0 29 2 *", "UTC", "2026-01-01T00:00", "2028-02-29T00:00"),
        ("30 3 1,15 * *", "UTC", "2026-11-02T00:00", "2026-11-15T03:30"),
        ("0 */24 * * *", "UTC", "2026-11-21T04:00", "2026-11-22T00:00"),
        ("0 0 L * *", "UTC", "2026-02-01T00:00", "2026-02-28T00:00"),
    ],
)
def test_the_next_moment(spec, tz, after, expected):
    assert next_moment(spec, tz, at(after)) == at(expected)


def test_a_job_in_the_hour_that_is_skipped_runs_once_right_after_it():
    """On 2026-03-29 Berlin goes from 02:00 to 03:00, which is 01:00 UTC."""
    assert moments("30 2 * * *", BERLIN, at("2026-03-28T12:00"), 3) == [
        at("2026-03-29T01:00"),
        at("2026-03-30T00:30"),
        at("2026-03-31T00:30"),
    ]


def test_a_job_in_the_repeated_hour_runs_once():
    """On 2026-10-25 Berlin has 02:30 at 00:30 and at 01:30 UTC."""
    assert moments("30 2 * * *", BERLIN, at("2026-10-24T12:00"), 3) == [
        at("2026-10-25T00:30"),
        at("2026-10-26T01:30"),
        at("2026-10-27T01:30"),
    ]
    in_the_second_time = at("2026-10-25T01:10")
    assert next_moment("30 2 * * *", BERLIN, in_the_second_time) == at("2026-10-26T01:30")


@pytest.mark.parametrize("day", ["2026-03-28T22:55", "2026-10-24T22:55"])
def test_a_job_every_half_hour_follows_elapsed_time(day):
    found = moments("*/30 * * * *", BERLIN, at(day), 10)
    assert {later - sooner for sooner, later in pairwise(found)} == {timedelta(minutes=30)}


@given(
    after=st.integers(0, 2 * 365 * 86_400).map(
        lambda second: at("2026-01-01T00:00") + timedelta(seconds=second)
    ),
    spec=st.sampled_from(["30 2 * * *", "0 */2 * * *", "*/7 1-3 * * *", "15 2 * * SUN"]),
    tz=st.sampled_from(
        [BERLIN, "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu", "UTC"]
    ),
)
def test_moments_only_increase(after, spec, tz):
    assert next_moment(spec, tz, after) > after


@pytest.mark.parametrize(
    "spec",
    [
        *("", "* * * *", "* * * * * *", "x * * * *", "60 * * * *", "* 24 * * *", "*/0 * * * *"),
        *("0 0 31 2 *", "\0 * * * *", "* * * * MON#9", "5-1 * * * *", "@daily", "* " * 200),
        *("*/61 * * * *", "0 */25 * * *", "0 0 */32 * *", "0 0 1 */13 *", "5/100 * * * *"),
    ],
)
def test_an_invalid_spec_is_refused(spec):
    with pytest.raises(InvalidCron):
        next_moment(spec, "UTC", at("2026-01-01T00:00"))


@pytest.mark.parametrize(
    "tz",
    [
        *("", "Mars/Olympus", "America", "/etc/passwd", "../x", "U\0", "x" * 400),
        *("localtime", "posixrules", "Factory"),
    ],
)
def test_an_invalid_time_zone_is_refused(tz):
    with pytest.raises(InvalidCron):
        next_moment("0 0 * * *", tz, at("2026-01-01T00:00"))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("61 * * * *", ("minute '61'", "0 to 59")),
        ("0 4 * JUNE *", ("month 'JUNE'", "JAN to DEC")),
        ("0 0 31 2 *", ("day of month '31'", "in these months")),
        ("* * *", ("'* * *'", "five fields")),
    ],
)
def test_the_error_names_the_wrong_field_and_its_values(spec, words):
    with pytest.raises(InvalidCron) as raised:
        next_moment(spec, "UTC", at("2026-01-01T00:00"))
    assert all(word in raised.value.text for word in words), raised.value.text


FIELD = st.text("0123456789*/-,L#WMONSUNJAN ?", max_size=6)


@pytest.mark.slow
@settings(max_examples=40)
@given(st.one_of(st.text(max_size=30), st.tuples(*[FIELD] * 5).map(" ".join)))
def test_any_text_is_a_cron_or_is_refused(spec):
    try:
        assert next_moment(spec, "UTC", at("2026-01-01T00:00"))
    except InvalidCron:
        return
