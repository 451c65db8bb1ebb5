"""Derived figures of screens: days of a time zone, histogram bounds, states of rows."""

from __future__ import annotations

import inspect
import re
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from zoneinfo import ZoneInfo

import msgspec
import pytest
from markupsafe import Markup

from headrace.console.chart_lines import COLORS, LINES_MAX, colors_of, largest_queues
from headrace.console.rendering import FILTERS
from headrace.console.screens import ROOMS, health, health_rooms
from headrace.console.screens.cards import RoomRates, card_error, jobs_card
from headrace.console.screens.fetch import TONES, WORDS
from headrace.console.screens.health import (
    backup_issues,
    death_issues,
    engine_issues,
    unreadable_issues,
)
from headrace.console.screens.health_rooms import (
    feed_issues,
    media_issues,
    run_issues,
    trouble_issues,
    views_issues,
)
from headrace.console.screens.media import bound_s, kind_of, parents_of
from headrace.console.screens.views import chart_of, flush_of
from headrace.console.views import (
    NO_ANSWER,
    NO_DATA,
    Chart,
    Line,
    PanelData,
    Rates,
    parse_series,
)
from headrace.engines.backup.service import BackupRow, BackupsState
from headrace.feed.lookup import FeedBacklog
from headrace.fetch.i18n import Texts
from headrace.fetch.model import RunState
from headrace.fetch.service.lookup import Trouble
from headrace.jobs.fleet.alerts import HOST_RULE, QUEUE_RULES
from headrace.jobs.fleet.state import FleetHost, FleetState, HostSlot, PlanHead
from headrace.media.service.nodes import Disk
from headrace.views import SeriesPoint, ShardLag
from headrace.web.marks import CAUSES, Mark

BERLIN = ZoneInfo("Europe/Berlin")
NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
TTFB = """
media_ttfb_seconds_bucket{le="2.5e-05",role="media"} 10.0
media_ttfb_seconds_bucket{le="0.001",role="media"} 90.0
media_ttfb_seconds_bucket{le="0.025",role="media"} 99.0
media_ttfb_seconds_bucket{le="+Inf",role="media"} 100.0
media_ttfb_seconds_count{role="media"} 100.0
media_ttfb_seconds_bucket{le="2.5e-05",role="api"} 5000.0
media_ttfb_seconds_count{role="api"} 5000.0
"""


def test_days_follow_the_time_zone():
    """In Berlin, the last Sunday of October has 25 hours."""
    from_at, to_at = datetime(2026, 10, 24, 12, tzinfo=UTC), datetime(2026, 10, 27, 12, tzinfo=UTC)
    point = SeriesPoint(start_at=datetime(2026, 10, 24, 22, tzinfo=UTC), human=5)
    chart = chart_of([point], "day", from_at, to_at, zone=BERLIN)
    starts = [datetime.fromtimestamp(x, BERLIN) for x in chart.xs]
    assert [(at.day, at.hour) for at in starts] == [(24, 0), (25, 0), (26, 0), (27, 0)]
    assert chart.xs[2] - chart.xs[1] == 25 * 3600
    assert chart.lines[0].values == [0, 5, 0, 0]


def test_missing_hours_count_as_zero_and_empty_classes_have_no_line():
    from_at = NOON - timedelta(hours=3)
    points = [SeriesPoint(start_at=NOON - timedelta(hours=2), human=2, bot=1)]
    chart = chart_of(points, "hour", from_at, NOON, zone=ZoneInfo("UTC"))
    assert [(line.label, list(line.values)) for line in chart.lines] == [
        ("human", [0, 2, 0, 0]),
        ("bot", [0, 1, 0, 0]),
    ]


@pytest.mark.parametrize(
    ("share", "bound"), [(0.05, 2.5e-05), (0.5, 0.001), (0.99, 0.025), (1.0, None)]
)
def test_a_bound_is_the_smallest_sufficient_bucket(share, bound):
    rates = Rates(None)
    rates.add(0.0, parse_series(TTFB))
    assert bound_s(rates, "media_ttfb_seconds", share) == bound


def test_an_idle_node_has_no_bound():
    rates = Rates(None)
    assert bound_s(rates, "media_ttfb_seconds", 0.5) is None
    rates.add(0.0, parse_series('media_ttfb_seconds_count{role="media"} 0.0\n'))
    assert bound_s(rates, "media_ttfb_seconds", 0.5) is None


def test_the_flush_state_is_that_of_the_worst_shard():
    shards = [
        ShardLag(shard=0, through="0-1", pending=2, oldest_s=3.0, flusher="a"),
        ShardLag(shard=1, through="0-1", pending=1, oldest_s=90.0, flusher="a"),
    ]
    flush = flush_of(PanelData(shards)).value
    assert (flush.pending, flush.oldest_s, flush.alone, flush.tone) == (3, 90.0, 0, "bad")
    assert flush_of(PanelData(error="away")).error == "away"
    alone = [ShardLag(shard=0, through="0-1", pending=10_000, oldest_s=1.0, flusher=None)]
    flushes = [flush_of(PanelData(found)).value for found in (shards, alone, shards[:1], [])]
    assert [one.word for one in flushes] == ["flush is late", "no flusher", "flushing", "flushed"]
    assert [one.tone for one in flushes] == ["bad", "bad", "good", "good"]
    assert flushes[1].pending_text == "10,000 or more", "the calls of a shard are counted to 10,000"
    [issue] = views_issues(PanelData([replace_lag(shards[0], 40.0)]))
    assert issue.subject == "views: flush is late"
    assert flush_of(PanelData([replace_lag(shards[0], 40.0)])).value.word == "flush is late"


def replace_lag(shard, oldest_s):
    """The shard with another age of its oldest call."""
    return msgspec.structs.replace(shard, oldest_s=oldest_s)


def test_cells_of_wide_tables_carry_the_names_of_their_columns():
    labelled = FILTERS["labelled"]

    def table(columns, row):
        head = "".join(f'<th scope="col">{one}</th>' for one in columns)
        return Markup(f"<thead><tr>{head}</tr></thead><tbody>{row}</tbody>")

    names = ["Name", '<a class="sort" href="?a">B</a>', "C &amp; D", "E"]
    row = '<tr><th scope="row">x</th><td class="n">1</td><td>2</td><td>3</td><td>4</td></tr>'
    actions = '<span class="hidden">Actions</span>'
    cells = labelled(table([*names, actions], row * 2)).partition("<tbody>")[2]
    assert re.findall(r'<t[dh]\b( data-label="[^"]*")?', cells) == [
        "", ' data-label="B"', ' data-label="C &amp; D"', ' data-label="E"', "",
    ] * 2  # fmt: skip
    assert 'data-label="B" class="n"' in cells
    spanned = '<tr><th scope="row">x</th><td colspan="3">none</td><td>4</td></tr>'
    assert "data-label" not in labelled(table([*names, actions], spanned))
    narrow = table(names[:2], '<tr><th scope="row">x</th><td>1</td></tr>')
    assert labelled(narrow) == narrow, "a narrow table stays one"


def test_a_chart_without_values_is_quiet():
    lines = [Line("done", [None, 0, 0.0]), Line("failed", [None, 0, 0])]
    assert Chart(xs=[1, 2, 3], lines=lines).is_quiet
    assert not Chart(xs=[1, 2, 3], lines=[*lines, Line("lost", [None, None, 0.1])]).is_quiet
    heat = {"xs": [1, 2], "lines": [], "kind": "heat", "bounds_s": [0.1]}
    assert Chart(**heat, counts=[None, [0, 0]]).is_quiet
    assert not Chart(**heat, counts=[None, [0, 2]]).is_quiet


def test_a_chart_marks_values_at_the_limit_of_its_measurement():
    assert Chart(xs=[1], lines=[Line("p99", [86_400])], top=86_400).document()["top"] == 86_400
    assert "top" not in Chart(xs=[1], lines=[]).document()


def test_a_chart_of_queues_names_those_with_the_largest_sums():
    lines = [Line(f"q{n}", [0.0, n]) for n in range(10)] + [Line("", [1, 2])]
    *named, others = largest_queues(lines)
    assert [one.label for one in named] == [f"q{n}" for n in range(9, 1, -1)]
    assert (others.label, others.values) == ("other queues", [1, 3])
    assert [one.label for one in largest_queues(lines[:2])] == ["q1"]


def test_a_queue_has_one_color_on_a_page_and_no_other_queue_of_its_charts_has_it():
    names = [f"bazaar.q{n}" for n in range(40)]
    for first in range(0, 30, 3):
        charts = [names[first : first + LINES_MAX], names[first + 2 : first + 2 + LINES_MAX]]
        colors = colors_of([[*chart, "other queues"] for chart in charts])
        assert all(len({colors[name] for name in chart}) == LINES_MAX for chart in charts)
        assert set(colors.values()) <= set(range(1, COLORS + 1))
        # The sizes of queues, which order the lines, do not matter.
        assert colors_of([list(reversed(chart)) for chart in reversed(charts)]) == colors
    alone = {name: colors_of([[name]])[name] for name in names}
    assert len(set(alone.values())) == COLORS
    pair = next([a, b] for a in names for b in names if alone[a] != alone[b])
    assert colors_of([pair]) == {name: alone[name] for name in pair}, "the same beside others"


def test_growth_is_that_of_ten_minutes():
    rates = Rates(None)
    cut = 'media_cuts_total{reason="source",role="media"}'
    for at_s, cuts in ((0, 5), (300, 6), (590, 6), (900, 2), (905, 9)):
        rates.add(float(at_s), parse_series(f"{cut} {cuts}.0\n"))
    # From 590 on: it was reset to 0 and counted 2, then 7 more.
    assert rates.grown("media_cuts_total", 'reason="source"') == 9
    first = Rates(None)
    for at_s, text in (
        (0.0, 'up{role="media"} 1\n'),
        (2.0, f"{cut} 1.0\n"),
        (4.0, f"{cut} 3.0\n"),
    ):
        first.add(at_s, parse_series(text))
    assert first.grown("media_cuts_total") == 3, "the series begins with the first cut"


def test_restarts_and_deaths_of_the_history_are_issues_by_host_and_role():
    def mark(minute, kind, role, text, **causes):
        given = {"count": sum(causes.values()), "causes": causes, "host": "alpha", "role": role}
        return Mark(at=NOON + timedelta(minutes=minute), kind=kind, text=text, **given)

    again = "agent started again on alpha, version 1.0"
    marks = [
        mark(0, "start", "agent", "agent started on alpha, version 1.0"),
        mark(1, "deaths", "agent", "2 slots died on alpha: 2 exited", exited=2),
        mark(9, "deaths", "agent", "1 slot died on alpha: 1 killed", killed=1),
        *(mark(minute, "restart", "agent", again) for minute in (20, 22, 25)),
        mark(30, "restart", "", "api, media started again on alpha, version 1.0"),
    ]
    roles, agent, slots = death_issues(PanelData(marks))
    assert (roles.subject, roles.tone) == ("roles on alpha", "warn")
    assert agent.tone == "bad"
    assert agent.text == (
        "keeps dying: started again at 12:20, 12:22, 12:25 UTC, 3 times in the last hour"
    )
    assert slots.text == "3 slots died in the last hour, most recently in the minute 12:09 UTC"
    assert slots.cause == "2 exited, 1 killed", "the causes of all that are counted"
    assert "`journalctl -u headrace-agent`" in slots.fix, "where the log is"
    assert list(death_issues(PanelData(error="no data"))) == []


def test_a_slow_read_is_stated_in_the_health_and_not_on_each_card():
    assert card_error(NO_ANSWER) == "no data, see Health"
    assert card_error("a key is missing: check it with `headrace doctor`, then try again") == (
        "a key is missing"
    )
    assert card_error(None) == ""


def test_a_late_archive_and_a_damaged_base_are_issues_with_their_fix():
    base = BackupRow(
        id="b",
        generation=1,
        ended_at=NOON,
        until=NOON,
        stored_bytes=1,
        size_bytes=2,
        verified_at=None,
        fault="",
    )
    healthy = BackupsState(
        archive="file:///a",
        folder="/d",
        host="h",
        generation=1,
        behind_bytes=0,
        archived_until=NOON,
        is_late=False,
        verified_at=None,
        backups=[base],
        unreadable={"a": "an older record is damaged"},
    )

    def issues(**changes):
        return list(backup_issues(PanelData(msgspec.structs.replace(healthy, **changes))))

    assert issues() == []
    assert list(backup_issues(NO_DATA)) == []
    [late] = issues(is_late=True, behind_bytes=3 * 2**20)
    assert (late.tone, late.text, late.since_at) == ("bad", "3 MiB of log are not archived", NOON)
    assert "headrace doctor" in late.fix
    [late] = issues(is_late=True, behind_bytes=None)
    assert late.text == "nothing archives the log of PostgreSQL"
    [damaged] = issues(backups=[base, msgspec.structs.replace(base, id="c", fault="piece 0")])
    assert (damaged.cause, "headrace backup verify" in damaged.fix) == ("piece 0", True)
    [damaged] = issues(unreadable={"c": "record"})
    assert damaged.cause == "record"


def test_troubles_of_the_rooms_are_issues_with_remedies():
    def run(number, customer, state="done", **outcomes):
        more = {"reason": "why", "started_at": NOON, "photos": 9, "photos_by_outcome": outcomes}
        return SimpleNamespace(run=number, customer=customer, state=state, **more)

    bad = {"failed:http_404": 2, "refused:not_an_image": 1}
    runs = [run(4, "a", stored=5, **bad), run(3, "b", "held"), run(2, "c", "refused"), run(1, "a")]
    faulty = PanelData([runs[0], runs[2]])
    held, others, refused, photos = run_issues(PanelData(runs), faulty, 3, str.upper)
    assert [one.label for one in held.remedies] == ["Apply", "Discard"]
    assert others.subject == "2 other held catalogues"
    assert (refused.subject, refused.cause) == ("catalogue of c was refused", "why")
    assert (photos.text, photos.cause) == (
        "3 photos of 9 in the newest run not stored",
        "2 photos: FAILED:HTTP_404; 1 photo: REFUSED:NOT_AN_IMAGE",
    )
    one_cause = PanelData([run(5, "a", **{"failed:http_404": 2})])
    assert [one.cause for one in run_issues(None, one_cause, 0, str.upper)] == ["FAILED:HTTP_404"]
    trouble = {"things": 1, "since_at": NOON, "cause": "429", "customer": "a", "run": None}
    found = [Trouble(kind=kind, **trouble) for kind in ("webhook", "held_run")]
    [webhook] = trouble_issues(PanelData(found))
    assert webhook.remedies[0] == ("fetch-webhook-test", {"customer": "a"}, "Test")
    backlog = FeedBacklog(overdue=2, overdue_since_at=NOON, unswept_s=90.0)
    shards = [SimpleNamespace(state="building")]
    texts = [one.subject for one in feed_issues(PanelData(backlog), PanelData(shards))]
    assert texts == [
        "feed: scheduled posts are late",
        "feed: changes are confirmed late",
        "feed: index is not ready",
    ]
    alone = ShardLag(shard=0, through="0-1", pending=1, oldest_s=90.0, flusher=None)
    texts = [one.subject for one in views_issues(PanelData([alone]))]
    assert texts == ["views: no flusher", "views: flush is late"]


def test_the_age_of_the_reported_slots_is_stated_beside_the_counts_of_now():
    def host(name, ago_s, *, is_silent=False):
        return FleetHost(
            name=name,
            kind="agent",
            tags=[],
            cores=2,
            capacity=4,
            load_per_core=0.5,
            is_draining=False,
            is_silent=is_silent,
            jobs_ended=0,
            started_at=NOON,
            reported_at=NOON - timedelta(seconds=ago_s),
            slots=[
                HostSlot(queue=None, pid=1, busy_s=0.0),
                HostSlot(queue=None, pid=2, busy_s=1.0),
            ],
        )

    hosts = [host("a", 1.2), host("b", 4.4), host("lost", 90, is_silent=True)]
    plan = PlanHead(leader="a", term=1, version=1, planned_at=NOON, is_led=True)
    fleet = FleetState(hosts=hosts, plan=plan, decisions=[], alerts_open=0, alerts=[])
    rates = Rates(None)
    card = jobs_card(rates, RoomRates(rates, None), PanelData([]), PanelData(fleet), now_at=NOON)
    assert card.facts[2:] == [("slots busy", "2 of 4"), ("slots reported", "4 s ago")]


def test_failing_nodes_disks_and_answers_of_media_are_issues():
    rates = Rates(None)
    answers = 'media_requests_total{status="%d",role="media"} %d.0\n'
    for at_s, ok, missing, broken in ((0, 0, 0, 0), (60, 900, 100, 3)):
        text = answers % (200, ok) + answers % (404, missing) + answers % (503, broken)
        rates.add(float(at_s), parse_series(text))
    node = SimpleNamespace(name="m1", is_alive=False)
    disk = {"id": "d", "path": "/d", "size_bytes": 1, "frames": 1, "used": 1}
    disks = [Disk(**disk, state="out", fault="EIO", rotten=2), Disk(**disk, state="in use")]
    found = list(media_issues(rates, PanelData(disks), PanelData([node]), 'role="media"'))
    assert [(one.tone, one.subject) for one in found] == [
        ("bad", "media node m1"),
        ("bad", "disk /d"),
        ("warn", "disk /d"),
        ("bad", "media: objects could not be read"),
        ("warn", "media: objects are missing"),
    ]
    assert found[4].text.startswith("100 requests of 1,003 in the last 10 min")


def test_a_panel_without_an_answer_in_time_is_a_warning():
    slow = PanelData(error="no answer within 3 s", is_slow=True)
    engines = {"valkey": PanelData(error="refused"), "blobs": PanelData(value=True)}
    assert [(one.tone, one.subject) for one in engine_issues(engines)] == [
        ("bad", "Valkey is down")
    ]
    [line] = unreadable_issues({"Jobs": ("/jobs", slow)}, engines)
    assert line.tone == "warn"


def test_no_sentence_on_photos_is_cut():
    for texts in (Texts.load(lang="ru"), Texts.load()):
        names = [one for one in texts.sections["photo"] if one.startswith(("failed:", "refused:"))]
        longest = sorted(names, key=lambda one: -len(texts.outcome(one)))
        photos = {**dict.fromkeys(longest[:3], 10_000), longest[3]: 1}
        run = SimpleNamespace(
            run=1, customer="a", state="done", started_at=NOON, photos=1, photos_by_outcome=photos
        )
        [issue] = run_issues(None, PanelData([run]), 0, texts.outcome)
        assert issue.cause.count("; ") >= 3
        assert len(issue.cause) <= health.CAUSE_CHARACTERS


def test_an_alert_states_what_to_do_once():
    """The text of these rules names it, as their webhook has no more than the text."""
    named = {"leased_grows", "at_max", "fleet_short", "below_min"}
    assert health.FIXES.keys() == {*QUEUE_RULES, HOST_RULE} - named


def test_every_remedy_is_an_action_of_a_room():
    actions = {action.name: action for room in ROOMS for action in room.actions}
    source = inspect.getsource(health) + inspect.getsource(health_rooms)
    named = set(re.findall(r'Remedy\(\s*"([\w.-]+)"', source))
    assert len(named) > 8
    assert named <= actions.keys()


def test_every_run_state_has_text_and_tone():
    assert WORDS.keys() == TONES.keys() == set(RunState)


def test_only_images_audio_and_video_have_previews():
    kinds = [kind_of(one) for one in ("image/jpeg", "image/svg+xml", "audio/mpeg", "text/html", "")]
    assert kinds == ["image", "", "audio", "", ""]
    assert parents_of("a/b") == [("a", "a"), ("b", "a/b")]


def test_memory_is_named_only_after_deaths_by_sigkill():
    """Linux may kill so if memory is short; a crash or an exit has another cause."""
    for how, is_named in (("killed", True), ("crashed", False), ("exited", False)):
        mark = Mark(
            at=NOON,
            kind="deaths",
            text="1 slot died on a",
            host="a",
            role="agent",
            count=1,
            causes={CAUSES[how]: 1},
        )
        [issue] = health.death_issues(PanelData([mark]))
        assert ("memory of the host" in issue.fix) is is_named
