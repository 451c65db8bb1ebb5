"""Formatting and parsing of values: unknown is not zero, commands are quoted."""

from __future__ import annotations

import re
import shutil
import subprocess
from datetime import UTC, date, datetime
from types import SimpleNamespace

import msgspec
import pytest
from markupsafe import Markup

from headrace.console.actions import Field, has_invalid, quoted
from headrace.console.format import (
    format_bytes,
    format_count,
    format_duration,
    format_limit,
    format_percent,
    format_short,
    pretty_json,
)
from headrace.console.model import FieldsInvalid, QueryInvalid
from headrace.console.rendering import LiveFragments
from headrace.console.screens import ROOMS
from headrace.console.screens.fetch_photos import errors_chart
from headrace.console.screens.fleet import FleetFigures, QueueRow, _key
from headrace.console.screens.health import (
    Issue,
    commit_issues,
    failure_issues,
    fleet_issues,
    role_issues,
    unreadable_issues,
)
from headrace.console.screens.job_actions import job_number
from headrace.console.screens.jobs import moments_of, step_bars
from headrace.console.screens.media import ends_of_media, served_from
from headrace.console.screens.overview import health_of
from headrace.console.security import safe_return_url
from headrace.console.views import PanelData, Query, Rates, parse_series, row_id
from headrace.engines.commit_wait import CommitWait
from headrace.jobs.errors import JobUnknown
from headrace.jobs.fleet.alerts import Alert
from headrace.jobs.fleet.state import FleetState, PlanHead, QueueFailures
from headrace.jobs.model import Job, JobState
from headrace.kernel.terminal import is_visible, pluralize
from headrace.media.model import DiskConfig, MediaConfig
from headrace.web.marks import Mark

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("shower", "value", "text"),
    [
        (format_count, None, "unknown"),
        (format_count, 0, "0"),
        (format_count, 1234567, "1,234,567"),
        (format_count, 2.345, "2.35"),
        (lambda value: pluralize(value, "job is", "jobs are"), 1, "1 job is"),
        (lambda value: pluralize(value, "job is", "jobs are"), 2_000, "2,000 jobs are"),
        (format_short, 12_345, "12.3k"),
        (format_short, 9_999, "9,999"),
        (format_short, 2_000_000, "2M"),
        (format_duration, None, "unknown"),
        (format_duration, 36_500 * 86_400, "100 y"),
        (format_limit, "6300ms", "6.3 s"),
        (format_duration, 0, "0 s"),
        (format_duration, 0.0004, "0.4 ms"),
        (format_duration, 0.25, "250 ms"),
        (format_duration, 3.44, "3.4 s"),
        (format_duration, 119, "119 s"),
        (format_duration, 240, "4 min"),
        (format_duration, 5400, "90 min"),
        (format_duration, 9000, "2.5 h"),
        (format_duration, 4 * 86400, "4 d"),
        (format_bytes, None, "unknown"),
        (format_bytes, 512, "512 B"),
        (format_bytes, 1_572_864, "1.5 MiB"),
        (format_percent, None, "unknown"),
        (format_percent, 0.063, "6.3 %"),
        (format_percent, 3.12, "312 %"),
    ],
)
def test_values_are_formatted(shower, value, text):
    assert shower(value) == text


def test_long_documents_are_truncated():
    text = pretty_json(["x" * 30_000])
    assert len(text) < 21_000
    assert "30,0" in text


def test_query_errors_name_the_expected_values():
    given = {"zeros": "0" * 20 + "9" * 30, "more": "0" * 5_000}
    query = Query({"n": "5", "bad": "five", "sort": "name", "long": "x" * 300, **given})
    assert (query.number("n", 1), query.number("m", 1)) == (5, 1)
    assert query.choice("sort", ("name", "load"), "load") == "name"
    assert query.choice("other", ("name",), "") == ""
    assert query.flag("n")
    assert not query.flag("nothing")
    for issue in (
        lambda: query.number("bad", 1),
        lambda: query.number("n", 1, most=4),
        lambda: query.number("long", 1),
        lambda: query.number("zeros", 1),
        lambda: query.number("more", 1),
        lambda: query.choice("sort", ("load",), "load"),
        lambda: query.text("long"),
    ):
        with pytest.raises(QueryInvalid, match="expected"):
            issue()


@pytest.mark.parametrize("text", ["", "x", "-1", "٣", "0" * 20 + "9" * 30, "0" * 5_000, str(2**63)])
def test_other_texts_than_ids_are_no_row(text):
    assert row_id(text) == 0
    with pytest.raises(JobUnknown):
        job_number(text)


ACTIONS = {action.name: action for room in ROOMS for action in room.actions}


def test_numbers_out_of_range_name_the_range():
    importance = Field(name="x", label="X", kind="number", numbers=(0, 9))
    assert (importance.parse("9"), importance.parse("-0"), importance.parse("0" * 30)) == (9, 0, 0)
    for text in ("9" * 20, "10", "-1"):
        with pytest.raises(ValueError, match=r"a whole number from 0 to 9$"):
            importance.parse(text)
    for text in ("1e3", "", "٣", "1_0", "+1"):
        with pytest.raises(ValueError, match=r"a whole number$|is required"):
            importance.parse(text)


@pytest.mark.parametrize(
    "text", ["a\u202etxt.exe", "it's \\ \u2066x\u2069", "\u00a0", "a\tb\x1b[1m", "\u3164f", "'"]
)
def test_commands_escape_invisible_characters(text):
    word = quoted(text)
    assert all(map(is_visible, word))
    shell = shutil.which("bash")
    assert shell is not None
    typed = subprocess.run(
        [shell, "-c", f"printf %s {word}"], env={"LC_ALL": "C"}, capture_output=True, check=True
    )
    assert typed.stdout.decode() == text


def test_descriptions_and_calls_escape_invisible_characters():
    action = ACTIONS["jobs.add_job"]
    values = action.sketch({"queue": "a\u202eb", "payload": "1", "lane": "x\u00a0y"})
    shown = [action.as_command(values), action.as_http(values), action.described(values)]
    assert shown[0] == "headrace jobs add $'a\\xe2\\x80\\xaeb' 1 --lane $'x\\xc2\\xa0y'"
    assert "/v1/queues/a%E2%80%AEb/jobs\n" in shown[1]
    assert msgspec.json.decode(shown[1].partition("\n\n")[2])["lane"] == "x\u00a0y"
    assert shown[2] == "Enqueues one job into queue a\\u202eb."
    assert all(c == "\n" or is_visible(c) for text in shown for c in text)


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (r'"\u0000"', "/payload: expected text without NUL characters"),
        (r'{"a": ["\u0000"]}', "/payload/a/0: expected text without NUL characters"),
        ('{"a": 1, "a": 2}', "an object has a repeated key"),
        ("9" * 19, "/payload: expected an integer of 64 bits"),
        ("[" * 40 + "]" * 40, "with less nesting"),
        ("[" * 30_000, "expected JSON"),
        ('1, "x": 2', "expected JSON"),
        ("{bad", "expected JSON"),
        ("NaN", "expected JSON"),
    ],
)
def test_invalid_payloads_are_refused_and_not_shown(payload, why):
    action, given = ACTIONS["jobs.add_job"], {"queue": "q", "payload": payload}
    with pytest.raises(FieldsInvalid, match=re.escape(why)):
        action.parse(given)
    values = action.sketch(given)
    assert has_invalid(values)
    assert action.as_http(values) == ""
    assert payload in action.as_command(values).replace("'\"'\"'", "'"), "the audit has it as typed"


def test_kinds_of_fields():
    assert Field(name="x", label="X", kind="json").parse('{"a": [1]}') == {"a": [1]}
    assert Field(name="x", label="X", kind="decimal").parse("0.25") == 0.25
    assert Field(name="x", label="X", kind="check").parse(None) is False
    for kind, text in (("json", "{"), ("decimal", "1e9"), ("decimal", "nan")):
        with pytest.raises(ValueError, match="expected"):
            Field(name="x", label="X", kind=kind).parse(text)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("/console/jobs?state=failed", "/console/jobs?state=failed"),
        ("/console", "/console"),
        ("", "/console"),
        ("https://evil.example/console", "/console"),
        ("//evil.example/console", "/console"),
        ("/\\evil.example", "/console"),
        ("/console/\\..\\evil", "/console"),
        ("/console\r\nset-cookie: a=b", "/console"),
        ("/consoles", "/console"),
        ("javascript:alert(1)", "/console"),
    ],
)
def test_return_urls_stay_in_the_console(given, found):
    assert safe_return_url(given) == found


def test_rates_use_series_of_both_readings():
    rates = Rates(None)
    first = 'hits_total{outcome="counted",role="api"} 10.0\nup 1.0\n# HELP hits_total Hits.\n'
    second = (
        'hits_total{outcome="counted",role="api"} 40.0\n'
        'hits_total{outcome="refused",role="api"} 4000.0\n'
    )
    rates.add(100.0, parse_series(first))
    assert rates.rate_per_s("hits_total") is None
    rates.add(110.0, parse_series(second))
    assert rates.rate_per_s("hits_total") == 3.0
    assert rates.rate_per_s("hits_total", 'outcome="refused"') is None
    assert rates.rate_per_s("misses_total") is None
    assert rates.total("hits_total") == 4040.0
    assert rates.greatest("hits_total") == 4000.0
    rates.add(120.0, parse_series(first))
    assert rates.rate_per_s("hits_total", 'outcome="counted"') == 2.0, "it was reset to 0"
    rates.add(500.0, parse_series(first))
    assert rates.rate_per_s("hits_total") is None, "too long ago to compare with"


def test_close_readings_give_no_rates_and_ended_roles_are_reported():
    rates = Rates(None)
    both = 'up{role="api"} 0\nfeed_sweep_lag_seconds{role="api"} 0\n'
    flusher = 'feed_sweep_lag_seconds{role="flusher"} 70\nup{role="flusher"} 9\n'
    rates.add(0.0, parse_series(both + flusher))
    rates.add(2.0, parse_series(both + flusher))
    assert (rates.is_measuring, rates.rate_per_s("up"), rates.gone()) == (True, None, {})
    rates.add(14.0, parse_series(both))
    assert (rates.is_measuring, rates.gone()) == (False, {"flusher": 12.0})
    [line] = role_issues(rates.gone())
    assert (line.subject, line.text) == ("role flusher on this machine", "no metrics for 12 s")


def _failures(queue, state, *, jobs, error):
    cause = error.partition(":")[0]
    ended = {"first_at": NOW, "last_at": NOW, "last_error": error}
    counts = {"jobs": jobs, "jobs_is_capped": jobs >= 1000}
    return QueueFailures(queue=queue, state=state, cause=cause, **counts, **ended)


def test_failures_and_unreadable_sources_are_issues():
    failures = [
        _failures("a b", "failed", jobs=1, error="ValueError: x"),
        _failures("q", "quarantined", jobs=1000, error="killed"),
        *(_failures("many", "failed", jobs=2, error=f"E{n}x: x") for n in range(9)),
    ]
    one, other, *_, rest = failure_issues(PanelData(failures))
    assert (one.tone, other.tone) == ("bad", "bad")
    assert (one.text, one.cause) == ("1 failed job", "ValueError: x")
    assert one.href == "/console/jobs/jobs?queue=a+b&state=failed&q=ValueError"
    matching = {"queue": "a b", "state": "failed", "q": "ValueError"}
    assert one.remedies[0] == ("jobs.bulk_retry", matching, "Retry all")
    assert (rest.subject, rest.text) == ("3 other causes", "6 failed or quarantined jobs")
    assert other.text == "at least 1,000 quarantined jobs"
    assert (other.since_at, other.last_at) == (None, NOW)
    assert list(failure_issues(PanelData(error="no answer"))) == []
    sources = {
        "Views": ("/views", PanelData(error="no answer within 3 s")),
        "Feed": ("/feed", PanelData(error="your token lacks the scope feed:read", is_hidden=True)),
        "Jobs": ("/jobs", PanelData([])),
        "Fetch": ("/fetch", None),
    }
    [line] = unreadable_issues(sources, {})
    assert (line.tone, line.subject) == ("bad", "no data for Views")
    assert line.text == "no answer within 3 s"


@pytest.mark.parametrize(
    ("tones", "health"),
    [
        ([], ("no problems detected", "good")),
        (["warn"], ("1 warning", "warn")),
        (["warn", "bad", "bad"], ("2 problems, 1 warning", "bad")),
    ],
)
def test_health_is_that_of_the_worst_issue(tones, health):
    problems = [Issue(tone=tone, subject="s", href="/", text="t", fix="") for tone in tones]
    assert health_of(problems) == health
    text, tone = health_of(problems, is_partial=True)
    assert (text, tone) == (f"{health[0]} in what your token may read", health[1])


def test_many_alerts_are_summarized():
    alerts = [
        Alert(id=n, rule="oldest_waits", subject=f"q{n}", text="waits", raised_at=NOW)
        for n in range(100)
    ]
    plan = PlanHead(leader="a", term=1, version=1, planned_at=NOW, is_led=True)
    fleet = PanelData(
        FleetState(hosts=[], plan=plan, decisions=[], alerts_open=4_321, alerts=alerts)
    )
    lines = list(fleet_issues(fleet))
    assert [line.subject for line in lines][-2:] == ["queue q4", "4,316 other alerts"]
    assert lines[-1].href == "/console/jobs/alerts?open=1"


@pytest.mark.parametrize(
    ("backlog", "load", "done_per_s", "state"),
    [
        ((0, 0, None), 0.0, 0.0, "idle"),
        ((0, 0, None), 0.88, 5.0, "caught up"),
        ((9, 2, 31.0), 1.31, 5.0, "behind"),
        ((9, 2, 29.0), 4.0, 5.0, "running"),
        ((9, 0, 31.0), None, 0.0, "waiting"),
        ((9, 0, 31.0), 0.5, 5.0, "running"),
        ((0, 2, None), 0.5, 0.0, "running"),
    ],
)
def test_queue_states(backlog, load, done_per_s, state):
    """The backlog: waiting and leased jobs, and the age of the oldest due one."""
    figures = dict(zip(("ready", "leased", "oldest_ready_age_s"), backlog, strict=True))
    status = SimpleNamespace(paused=False, is_known=True, **figures)
    row = QueueRow(
        status=status,
        slots_mean=1,
        load=load,
        run_s=None,
        wait_s=None,
        wait_max_s=None,
        done_per_s=done_per_s,
        has_run=done_per_s > 0,
    )
    assert row.state == state
    assert row.tone == {"behind": "bad", "running": "good"}.get(state, "")


def test_waiting_of_the_fleet_leaves_out_jobs_for_people():
    def row(ready, decisions, *, is_capped=False):
        status = SimpleNamespace(ready=ready, ready_is_capped=is_capped, decisions=decisions)
        return QueueRow(status=status, load=0.0)

    rows = [row(2, {}), row(430, {"approve": None}, is_capped=True)]
    figures = FleetFigures(rows=rows, span_s=60)
    assert (figures.waiting, figures.waiting_is_capped) == (2, False)
    assert (figures.waiting_for_people, figures.waiting_for_people_is_capped) == (430, True)


def test_queues_are_ordered_by_the_shown_load_and_by_wait():
    def row(name, **figures):
        status = SimpleNamespace(
            queue=name, importance=5, ready=0, leased=0, failed=0, slots=1, oldest_ready_age_s=None
        )
        return QueueRow(status=status, **figures)

    rows = [
        row("floating", load=None, is_floating=True, wait_s=3.0),
        row("idle", load=0.0),
        row("busy", load=4.61, wait_s=0.5),
        row("no slots", load=None),
    ]
    order = [one.status.queue for one in sorted(rows, key=lambda one: _key(one, "load"))]
    assert order == ["no slots", "busy", "idle", "floating"]
    order = [one.status.queue for one in sorted(rows, key=lambda one: _key(one, "wait"))]
    assert order[:2] == ["floating", "busy"]


def test_rate_history_has_one_entry_per_reading_and_gaps():
    rates = Rates(None)
    rates.add(100.0, {})
    assert rates.note("jobs", 1.0) == [1.0]
    assert rates.note("jobs", 1.0) == [1.0]
    rates.add(102.0, {})
    assert rates.note("jobs", 2.0) == [1.0, 2.0]
    rates.add(150.0, {})
    assert rates.note("jobs", 3.0) == [1.0, 2.0, None, 3.0]


def test_form_values_and_charts_keep_stored_text():
    live = LiveFragments()
    html = (
        '<a title="\u202e" href="/\u202e">\u202e\u3164é\n\t\U000e0001</a>'
        "<textarea>&lt;\u202e</textarea>{}<pre>\u202e</pre>"
    )
    drawn = live.text("chart:x", '{"a": "\u202e"}')
    page, _ = live.finish(f"{live.edge}{html.format(drawn)}{live.edge}")
    assert page.decode() == (
        '<a title="\u202e" href="/\u202e">\\u202e\\u3164é\n\t\\U000e0001</a>'
        "<textarea>&lt;\u202e</textarea>"
        '<span data-live="chart:x" hidden>{&#34;a&#34;: &#34;\u202e&#34;}</span>'
        "<pre>\\u202e</pre>"
    )
    again = live(name="x", caller=lambda: drawn + Markup("<b>\u202e</b>"))
    assert live.parts["x"] == f"{live._filled(str(drawn))}<b>\\u202e</b>"
    assert "\u202e" not in again


def test_ordinary_invisible_characters_are_kept():
    live = LiveFragments()
    text = "12\u00a0000\u202f€, می\u200cخواهم, 👨\u200d👩\u200d👧, 東京\u3000"  # noqa: RUF001 - as people write
    page, _ = live.finish(f"{live.edge}<p>{text}\u202e</p>{live.edge}")
    assert page.decode() == f"<p>{text}\\u202e</p>"


def test_bars_of_a_workflow_stand_in_proportion_to_its_time():
    def step(begin_s, end_s):
        moment = {
            name: None if at is None else datetime.fromtimestamp(at, UTC)
            for name, at in (("begun_at", begin_s), ("ended_at", end_s))
        }
        return SimpleNamespace(**moment)

    now = datetime.fromtimestamp(100, UTC)
    assert step_bars([], now) == []
    ended = step_bars([step(0, 10), step(10, 40), step(20, 40)], now)
    assert [(bar.begin, bar.length) for bar in ended] == [(0, 25), (25, 75), (50, 50)]
    waiting = step_bars([step(0, 10), step(10, None)], now)
    assert waiting[1].begin + waiting[1].length == pytest.approx(100)
    # The page stays the same for a while.
    assert step_bars([step(0, 10), step(10, None)], datetime.fromtimestamp(101, UTC)) == waiting
    assert step_bars([step(0, None)], datetime.fromtimestamp(0, UTC))[0].length == 100


def test_the_timeline_of_a_failed_job_is_in_order_and_has_its_last_run_once():
    once = Job(id=1, state=JobState.FAILED, run_at=NOW, ended_at=NOW, attempt=1, error="x")
    assert [one.text for one in moments_of(once)] == ["due", "failed"]
    third = msgspec.structs.replace(once, attempt=3)
    texts = [(one.when, one.text) for one in moments_of(third)]
    assert texts == [("earlier", "2 runs failed"), ("", "due for retry"), ("", "run 3 failed")]
    later = msgspec.structs.replace(third, state=JobState.SCHEDULED, ended_at=None)
    assert [one.text for one in moments_of(later)] == ["3 runs failed", "due for retry"]


def _study(*weeks):
    found = [
        SimpleNamespace(week=week, time_class=name, attempts=4, errors=errors)
        for week, name, errors in weeks
    ]
    return SimpleNamespace(weeks=found)


def test_the_errors_of_a_first_week_are_bars_by_class_and_later_weeks_have_their_date():
    first, third = date(2025, 12, 22), date(2026, 1, 5)
    young = errors_chart(_study((first, "500ms", 1), (first, "5s", 2)))
    assert (young.kind, young.labels, young.lines[0].values) == (
        "bars",
        ["500 ms", "5 s"],
        [25, 50],
    )
    old = errors_chart(_study((first, "5s", 2), (third, "5s", 4)))
    assert old.labels == ["2025-12-22", "2025-12-29", "2026-01-05"]
    assert old.lines[0].values == [50, None, 100]


def test_a_killed_media_node_is_counted_although_its_metrics_begin_again():
    marks = [
        Mark(at=NOW, kind="restart", text="", role="media", causes={"media": 1}),
        Mark(at=NOW, kind="restart", text="", causes={"api": 1, "media": 3}),
        Mark(at=NOW, kind="deaths", text="", role="media", count=2),
        Mark(at=NOW, kind="restart", text="", role="agent", causes={"agent": 1}),
        Mark(at=NOW, kind="start", text="", role="media"),
    ]
    assert ends_of_media(PanelData(marks)) == 6, "each restart, also of one minute"
    assert ends_of_media(PanelData(error="no answer")) is None


def test_commits_that_wait_for_a_standby_are_an_issue_of_their_own():
    waits = CommitWait("commits wait: synchronous_standby_names is 'b'", "start the standby")
    [line] = commit_issues(PanelData(waits))
    assert (line.tone, line.subject) == ("bad", "PostgreSQL accepts no writes")
    assert (line.text, line.fix) == (waits.text, "Start the standby.")
    assert list(commit_issues(PanelData())) == []
    # No scheduler can renew its lead meanwhile, and all of them run.
    plan = PlanHead(leader="a", term=1, version=1, planned_at=NOW, is_led=False)
    fleet = PanelData(FleetState(hosts=[], plan=plan, decisions=[], alerts_open=0, alerts=[]))
    [line] = fleet_issues(fleet)
    assert (line.subject, line.may_follow_outage) == ("no scheduler runs", True)


def test_an_object_is_served_from_a_store_or_from_cache_disks():
    disks = (DiskConfig(path="/disk", size_bytes=2**30),)
    assert "without a cache" in served_from(MediaConfig())
    assert "of this node" in served_from(MediaConfig(disks=disks))
    clustered = MediaConfig(disks=disks, node="n1", upstream=("https://home.example",))
    assert "owner nodes" in served_from(clustered)
    assert "upstream cluster" in served_from(clustered)
