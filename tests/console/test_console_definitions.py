"""Figures that a reader compares agree by definition, and what is unknown is not 0."""

from __future__ import annotations

import inspect
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from headrace.console.chart_marks import OF_JOBS, alert_marks, is_in_charts
from headrace.console.format import format_in_unit
from headrace.console.history import SPECS
from headrace.console.screens import health, search
from headrace.console.screens.cards import RoomRates, feed_card, fetch_card, views_card
from headrace.console.screens.fleet import RULE_NAMES, rows_of
from headrace.console.screens.health import (
    engine_issues,
    fleet_issues,
    lost_issues,
    unreadable_issues,
)
from headrace.console.screens.queue import _charts
from headrace.console.views import PanelData, Rates
from headrace.engines.postgres_errors import PostgresDown
from headrace.feed.lookup import FeedBacklog
from headrace.fetch.model import RunState
from headrace.jobs.fleet.alerts import HOST_RULE, RULES, SHORT_OLDEST_S, Alert
from headrace.jobs.fleet.state import FleetLoad, FleetState, PlanHead, QueueLoad, QueueMinute
from headrace.web.http import check_engines
from headrace.web.marks import Mark

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
COUNTS = {
    **dict.fromkeys(("done", "failed", "retried", "lost", "calls", "claimed"), 0),
    **dict.fromkeys(("run_s", "wait_s", "wait_max_s", "slot_s"), 0.0),
}


def _mark(kind, role=""):
    return Mark(at=NOON, kind=kind, text="", role=role)


def test_marks_are_in_the_charts_of_their_rooms():
    def rooms(mark):
        return {room for room in SPECS if is_in_charts(mark, room)}

    assert rooms(_mark("deaths", "agent")) == set(OF_JOBS), "a dead slot is one of the fleet"
    assert rooms(_mark("deaths", "media")) == {"overview", "media"}
    assert rooms(_mark("restart", "flusher")) == {"overview", "views", "feed"}
    for of_all in (_mark("outage"), _mark("start"), _mark("restart", "api")):
        assert rooms(of_all) == set(SPECS)
    subjects = (("at_max", "fetch.item"), ("at_max", "mail"), (HOST_RULE, "fetch.a"))
    alerts = [
        Alert(id=number, rule=rule, subject=subject, text="", raised_at=NOON)
        for number, (rule, subject) in enumerate(subjects)
    ]
    assert len(alert_marks(alerts, "jobs")) == 3
    assert [one.text for one in alert_marks(alerts, "fetch")] == ["fetch.item: "]


@pytest.mark.parametrize(("lost", "jobs"), [(1, "1 job was"), (4, "4 jobs were")])
def test_requeued_jobs_are_counted_over_a_span_that_does_not_move(lost, jobs):
    def load(span_s):
        queue = QueueLoad(queue="mail", **{**COUNTS, "lost": lost})
        return PanelData(FleetLoad(span_s=span_s, queues=[queue], minutes=[]))

    [issue] = lost_issues(load(301.0))
    assert issue.text.startswith(f"{jobs} requeued within the last 6 minutes, because")
    assert [issue] == list(lost_issues(load(348.0)))


def _fleet(*alerts):
    plan = PlanHead(leader="a", term=1, version=1, planned_at=NOON, is_led=True)
    return FleetState(hosts=[], plan=plan, decisions=[], alerts_open=len(alerts), alerts=[*alerts])


@pytest.mark.parametrize(
    ("oldest_s", "tone", "cause"),
    [
        (None, "warn", "Now none of its jobs waits."),
        (4.0, "warn", "Now its oldest due job has waited 4.0 s."),
        (SHORT_OLDEST_S + 1, "bad", ""),
    ],
)
def test_an_alert_whose_jobs_no_longer_wait_is_a_warning(oldest_s, tone, cause):
    """A burst, as at the start of a site, leaves an alert until the rule has held for a while."""
    alert = Alert(id=1, rule="fleet_short", subject="mail", text="it waited", raised_at=NOON)
    queue = SimpleNamespace(queue="mail", oldest_ready_age_s=oldest_s)
    [issue] = fleet_issues(PanelData(_fleet(alert)), PanelData([queue]))
    assert (issue.tone, issue.text, issue.cause) == (tone, "it waited", cause)
    other = Alert(id=2, rule="many_fail", subject="mail", text="", raised_at=NOON)
    [issue] = fleet_issues(PanelData(_fleet(other)), PanelData([queue]))
    assert issue.tone == "bad", "its cause is no waiting job"


def test_runs_that_wait_for_a_person_are_not_active():
    """As in the list of runs, whose filter has the same word."""
    rates = Rates(None)
    states = (RunState.READING, RunState.APPLIED, RunState.HELD, RunState.DONE)
    runs = [SimpleNamespace(state=state) for state in states]
    assert ("active runs", "2") in fetch_card(rates, RoomRates(rates, None), PanelData(runs)).facts
    many = fetch_card(rates, RoomRates(rates, None), PanelData(runs[:1] * 50))
    assert ("active, of the newest 50 runs", "50") in many.facts


def test_where_no_call_waits_none_is_the_oldest():
    rates = Rates(None)
    shard = SimpleNamespace(pending=0, oldest_s=0.0)
    card = views_card(rates, RoomRates(rates, None), PanelData([shard]))
    assert card.facts == [("calls not yet stored", "0"), ("oldest of them", "none")]


def test_an_unconfirmed_change_is_unknown_while_postgres_is_down():
    """No flusher can look then, and its metric would be the one before."""
    rates = Rates(None)
    ready, given = PanelData([]), RoomRates(rates, None)
    away = feed_card(rates, given, ready, PanelData(error="PostgreSQL does not respond"))
    assert (away.facts[-1][1], away.error) == ("unknown", "PostgreSQL does not respond")
    for lag_s, text in ((0.0, "none"), (2.5, "2.5 s")):
        backlog = FeedBacklog(overdue=0, overdue_since_at=None, unswept_s=lag_s)
        card = feed_card(rates, given, ready, PanelData(backlog))
        assert card.facts[-1] == ("oldest unconfirmed change", text)


def test_jobs_that_people_decide_use_no_slot():
    queue = SimpleNamespace(queue="photos", ready=0, slots=0)
    counts = COUNTS | {"done": 3, "claimed": 3, "wait_s": 9.0, "wait_max_s": 4.0}
    load = FleetLoad(span_s=300.0, queues=[QueueLoad(queue="photos", **counts)], minutes=[])
    [row] = rows_of([queue], load)
    assert (row.run_s, row.wait_s, row.wait_max_s) == (None, 3.0, 4.0)


def test_minutes_of_an_outage_are_a_gap_in_the_charts_of_a_queue():
    """An idle minute has no row either, and is 0."""
    now = NOON + timedelta(minutes=4)
    counts = COUNTS | {"done": 7}
    row = QueueMinute(minute=NOON, ready=2, running=1, failed_kept=0, **counts)
    down = Mark(
        at=NOON + timedelta(seconds=50),
        until_at=NOON + timedelta(minutes=2, seconds=10),
        kind="outage",
        text="",
        engines=["postgres"],
    )
    runs, backlog, times, _ = _charts(
        {int(NOON.timestamp()): row}, "q", now, step_s=60, span_s=240, down=[down]
    )
    assert runs.lines[0].values == [7, None, 0, 0]
    assert backlog.lines[0].values == [2, None, 0, 0]
    longest = next(line for line in times.lines if line.label == "longest wait")
    assert longest.values == [None] * 4, "no job was leased, so none has waited"


async def test_a_room_that_does_not_answer_is_named_by_the_search():
    async def broken(*_):
        raise PostgresDown("no answer")
        yield

    [line] = await search._within(None, "jobs:read", broken, "x")
    assert (line.kind, line.label) == ("no answer", "Jobs")


def test_data_that_cannot_be_read_is_named_by_its_screens():
    away = PanelData(error="PostgreSQL does not respond")
    names = ("Jobs: Fleet", "Jobs: Hosts", "Views: Flush", "the check of backups")
    [issue] = unreadable_issues(dict.fromkeys(names, ("/x", away)), {})
    assert issue.subject == "no data for Jobs: Fleet, Hosts; Views: Flush; the check of backups"


def test_every_engine_and_rule_has_a_name_for_people():
    checked = inspect.getsource(check_engines)
    assert all(f'checks["{name}"]' in checked for name in health.ENGINES)
    assert checked.count("checks[") == len(health.ENGINES)
    down = {name: PanelData(error="refused") for name in health.ENGINES}
    assert [one.subject for one in engine_issues(down)] == [
        "PostgreSQL is down",
        "Valkey is down",
        "object store is down",
    ]
    assert RULE_NAMES.keys() == set(RULES)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.4, "s", "400 ms"),
        (2048.0, "bytes/s", "2 KiB/s"),
        (2840.0, "runs/min", "2,840"),
        (None, "bytes/s", "unknown"),
    ],
)
def test_a_value_of_a_chart_without_scripts_has_its_unit(value, unit, text):
    assert format_in_unit(value, unit) == text
