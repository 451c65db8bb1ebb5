"""The minute history: what the recorder of a host stores, and what a read returns."""

from __future__ import annotations

import asyncio
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from recording_host import Host, known
from tests.kit.waiting import wait_true

from headrace.engines.sql import Query
from headrace.kernel import metrics
from headrace.web.history import MINUTES_KEPT_S, SERIES, History, InvalidSpan, percentile_s, span_of
from headrace.web.marks import CAUSES, Mark
from headrace.web.recorder import Snapshot

ROWS_PER_MINUTE_MAX = 1
ROW_BYTES_MAX = 8_192


def query(text: str, *parameters: str) -> Query:
    """A statement of a test."""
    return Query("test", "", text, parameters)


@pytest.fixture
def reader(postgres):
    return History(postgres)


async def minutes_of(reader, series, **given):
    """The lines of one series by label, without gaps at the ends."""
    found = await reader.read([series], **given)
    return {line.label: line.values for line in found.series[0].lines}


async def test_counters_become_growth_per_minute(tmp_path, postgres, reader):
    host = Host(tmp_path, postgres)
    host.write("api-1", 'views_hits_total{outcome="counted"} 1000')
    await host.recorder.step()
    await host.pass_s(30)
    host.write("api-1", 'views_hits_total{outcome="counted"} 1060')
    await host.pass_s(30)
    host.write("api-1", 'views_hits_total{outcome="counted"} 1070')
    await host.pass_s(60)
    lines = await minutes_of(reader, "views_hits")
    # What was counted before the first reading belongs to no minute.
    assert known(lines["counted"]) == [60, 10]


async def test_a_restarted_role_causes_no_spike_and_a_stopped_recorder_a_gap(
    tmp_path, postgres, reader
):
    host = Host(tmp_path, postgres)
    host.write("flusher-1", "views_flushed_total 5000")
    await host.recorder.step()
    await host.pass_s(60)
    # The role restarts: another process counts from 0, and the old file stays behind.
    host.write("flusher-2", "views_flushed_total 7")
    await host.pass_s(60)
    # The same process id again, with a counter that fell.
    host.write("flusher-2", "views_flushed_total 3")
    await host.pass_s(60)
    await host.recorder.close()
    host.clock.advance(120)
    host.write("flusher-2", "views_flushed_total 900")
    host.recorder = host.new_recorder()
    await host.recorder.step()
    await host.pass_s(60)
    lines = await minutes_of(reader, "views_flushed")
    first = next(i for i, v in enumerate(lines["all"]) if v is not None)
    assert lines["all"][first : first + 6] == [0, 7, 3, None, None, 0]


async def test_two_processes_of_a_host_never_count_twice(tmp_path, postgres, reader):
    host = Host(tmp_path, postgres)
    other = host.new_recorder()
    host.write("api-1", "feed_posts_total 0")
    await host.recorder.step()
    await other.step()
    host.write("api-1", "feed_posts_total 30")
    for _ in range(6):
        host.clock.advance(10)
        await host.recorder.step()
        await other.step()
    assert known((await minutes_of(reader, "feed_posts"))["all"]) == [30]
    # The other takes over, also within a minute, and both parts add up.
    await host.recorder.close()
    await other.step()
    host.write("api-1", "feed_posts_total 90")
    for _ in range(6):
        host.clock.advance(10)
        await other.step()
    assert known((await minutes_of(reader, "feed_posts"))["all"]) == [30, 60]


async def test_hosts_add_up_and_percentiles_are_those_of_all(tmp_path, postgres, reader):
    bounds = ("0.01", "0.1", "1.0", "+Inf")
    hosts = [Host(tmp_path, postgres, name, center=f"dc-{name}") for name in ("one", "two")]
    for host in hosts:
        host.write("api-1", *(f'feed_page_seconds_bucket{{le="{one}"}} 0' for one in bounds))
        await host.recorder.step()
    # 90 pages within 10 ms on one host, 10 of up to 1 s on the other.
    for host, counts in zip(hosts, ((90, 90, 90, 90), (0, 0, 10, 10)), strict=True):
        lines = zip(bounds, counts, strict=True)
        host.write("api-1", *(f'feed_page_seconds_bucket{{le="{b}"}} {n}' for b, n in lines))
        await host.pass_s(60)
    lines = await minutes_of(reader, "feed_page_time")
    assert known(lines["p50"])[0] <= 0.01
    assert 0.1 < known(lines["p99"])[0] <= 1.0
    by_host = await minutes_of(reader, "feed_page_time", by="host")
    assert known(by_host["one"])[0] <= 0.01
    assert known(by_host["two"])[0] > 0.1
    assert set(await minutes_of(reader, "feed_page_time", by="center")) == {"dc-one", "dc-two"}
    found = await reader.read(["feed_page_time"])
    [counts] = known(found.series[0].buckets.counts)
    assert found.series[0].buckets.bounds_s == [0.01, 0.1, 1.0]
    assert counts == [90, 0, 10, 0]


async def test_starts_and_versions_are_marked(tmp_path, postgres, reader):
    host = Host(tmp_path, postgres)
    host.write("api-1", started_s=0.0)
    await host.recorder.step()
    host.write("agent-2", version="1.0")
    await host.pass_s(60)
    (host.folder / "agent-2.prom").unlink()
    host.write("agent-3", version="1.1")
    await host.pass_s(60)
    found = [(mark.kind, mark.text) for mark in await reader.marks()]
    assert found == [
        ("start", "agent started on one, version 1.0"),
        ("deploy", "agent started on one, version 1.1"),
    ]


async def test_deaths_are_marked_with_their_causes(tmp_path, postgres, reader):
    host = Host(tmp_path, postgres)
    host.write("agent-1", 'agent_slots_ended_total{how="killed"} 0')
    host.write("media-1", 'media_child_deaths_total{child="worker"} 0')
    await host.recorder.step()
    ends = {"left": 9, "overtime": 1, "killed": 2, "exited": 1}
    host.write("agent-1", *(f'agent_slots_ended_total{{how="{k}"}} {n}' for k, n in ends.items()))
    host.write("media-1", 'media_child_deaths_total{child="worker"} 1')
    await host.pass_s(60)
    slots, media = await reader.marks()
    assert slots.text == f"3 slots died on one: 2 {CAUSES['killed']}, 1 {CAUSES['exited']}"
    assert (slots.kind, slots.host, slots.role, slots.count) == ("deaths", "one", "agent", 3)
    assert media.text == "1 process of the media node died on one: 1 worker"
    assert (slots.within_s, media.within_s) == (60, 60), "known to the minute"


def test_events_of_one_minute_are_in_the_order_of_their_causes():
    def mark(kind, second=0, within_s=0):
        at = datetime(2026, 11, 29, 7, 31, second, tzinfo=UTC)
        return Mark(at=at, kind=kind, text="", within_s=within_s)

    start, death = mark("start", within_s=60), mark("deaths", within_s=60)
    restart, outage = mark("restart", within_s=60), mark("outage", 20)
    found = sorted([restart, death, outage, start], key=lambda one: one.order)
    assert found == [start, outage, death, restart]


async def test_a_restart_differs_from_the_start_of_a_host(tmp_path, postgres, reader):
    host = Host(tmp_path, postgres, ago_s=1800.0)

    def now_s():
        return host.clock.now().timestamp()

    # The host starts, its roles one after the other, with a worker of a role.
    host.write("api-1", started_s=now_s())
    await host.recorder.step()
    await host.pass_s(60)
    host.write("agent-1", started_s=now_s())
    host.write("api.worker-7", started_s=now_s())
    await host.pass_s(60)
    # A role dies and is started again by the supervisor.
    host.write("agent-2", started_s=now_s())
    await host.pass_s(180)
    # One ends in order and is started beside roles that continue.
    (host.folder / "api-1.prom").unlink()
    host.write("agent-2", started_s=now_s() - 180)
    host.write("api-3", started_s=now_s())
    await host.pass_s(60)
    # A role dies twice within a minute, and another one dies, too.
    for name in ("agent-4", "agent-5", "api-6"):
        host.write(name, started_s=now_s())
        await host.pass_s(10)
    await host.pass_s(30)
    # The whole host is started again; nothing of it was left behind.
    for file in host.folder.glob("*.prom"):
        file.unlink()
    await host.pass_s(60)
    host.write("agent-9", started_s=now_s())
    host.write("api-9", started_s=now_s())
    await host.pass_s(60)
    found = [(mark.kind, mark.text.partition(" on ")[0]) for mark in await reader.marks()]
    assert found == [
        ("start", "api started"),
        ("start", "agent started"),
        ("restart", "agent started again"),
        ("restart", "api started again"),
        ("restart", "agent (2 times), api started again"),
        ("start", "agent, api started"),
    ]
    again = [(mark.count, mark.causes) for mark in await reader.marks(kind="restart")]
    assert again == [(1, {"agent": 1}), (1, {"api": 1}), (3, {"agent": 2, "api": 1})]


async def test_a_role_that_dies_in_its_hosts_first_minute_restarts_alone(
    tmp_path, postgres, reader
):
    host = Host(tmp_path, postgres, ago_s=1800.0)
    for role in ("agent", "api", "media"):
        host.write(f"{role}-1", started_s=host.clock.now().timestamp())
    await host.recorder.step()
    await host.pass_s(30)
    host.write("agent-2", started_s=host.clock.now().timestamp())
    await host.pass_s(60)
    found = [(mark.kind, mark.text, mark.role, mark.causes) for mark in await reader.marks()]
    assert found == [
        ("start", "agent, api, media started on one, version 1.0", "", {}),
        ("restart", "agent started again on one, version 1.0", "agent", {"agent": 1}),
    ]


async def test_an_ordered_stop_and_start_of_a_host_is_no_restart(tmp_path, postgres, reader):
    host = Host(tmp_path, postgres, ago_s=1800.0)
    for role in ("agent", "media"):
        host.write(f"{role}-1", started_s=host.clock.now().timestamp())
    await host.recorder.step()
    await host.pass_s(60)
    # A role dies and is replaced; later all end in order, and the host starts again.
    host.write("media-2", started_s=host.clock.now().timestamp())
    await host.pass_s(120)
    for name in ("agent-1", "media-2"):
        (host.folder / f"{name}.prom").unlink()
    for role in ("agent", "media"):
        metrics.remove_snapshot(host.folder, role)
    await host.recorder.close()
    host.recorder = host.new_recorder()
    for role in ("agent", "media"):
        host.write(f"{role}-3", started_s=host.clock.now().timestamp())
    await host.recorder.step()
    await host.pass_s(60)
    found = [(mark.kind, mark.text.partition(" on ")[0]) for mark in await reader.marks()]
    assert found == [
        ("start", "agent, media started"),
        ("restart", "media started again"),
        ("start", "agent, media started"),
    ]


def test_the_end_of_a_process_keeps_the_files_of_processes_that_run(tmp_path):
    for name in ("api-1", "api-2", "api.worker-3", "agent-4"):
        (tmp_path / f"{name}.prom").write_text("")
    for name in ("api-1", "api.worker-3", "agent-4"):
        os.utime(tmp_path / f"{name}.prom", (1, 1))
    metrics.write_snapshot(tmp_path, "api")
    metrics.remove_snapshot(tmp_path, "api")
    left = sorted(path.stem for path in tmp_path.iterdir())
    assert left == ["agent-4", "api-2", "api.worker-3"]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [((10,), 1), ((10,) * 6, 1), ((10,) * 5 + (10.3,), 1)],
    ids=["a sixth of a minute", "a whole minute", "a minute and a bit"],
)
async def test_a_minute_shows_what_was_counted_in_it(tmp_path, postgres, reader, steps, expected):
    host = Host(tmp_path, postgres)
    host.write("api-1", "feed_posts_total 0")
    await host.recorder.step()
    host.write("api-1", "feed_posts_total 1")
    for seconds in steps:
        host.clock.advance(seconds)
        await host.recorder.step()
    await host.recorder.close()
    assert known((await minutes_of(reader, "feed_posts"))["all"]) == [expected]
    # A longer step is the mean per recorded minute, and less than a minute is not extrapolated.
    now_at = datetime.now(UTC)
    longer = await minutes_of(
        reader, "feed_posts", from_at=now_at - timedelta(hours=6), to_at=now_at
    )
    assert known(longer["all"]) == [pytest.approx(expected, rel=0.01)]


async def test_a_host_stores_one_bounded_row_a_minute_and_old_ones_go(tmp_path, postgres):
    host = Host(tmp_path, postgres)
    for round_ in (0, 7):
        host.write("api-1", *every_sample(round_))
        await host.pass_s(60)
    sizes = await postgres.all(
        query("SELECT at, pg_column_size(m) AS bytes FROM headrace.history_minute m")
    )
    assert len(sizes) <= 2 * ROWS_PER_MINUTE_MAX
    assert max(row["bytes"] for row in sizes) < ROW_BYTES_MAX
    age = query("UPDATE headrace.history_minute SET at = at - :s * interval '1 s'", "s")
    await postgres.run(
        Query("age", "", age.text.replace(":s", "$1::float8"), ("s",)), s=MINUTES_KEPT_S
    )
    await host.pass_s(60)
    left = query("SELECT count(*) FROM headrace.history_minute")
    assert await postgres.value(left) == 1
    hours = query("SELECT count(*) FROM headrace.history_hour")
    assert await postgres.value(hours) in (1, 2)


def every_sample(value):
    """A sample of each series, with 24 label values or bounds each."""
    for series in SERIES.values():
        if series.kind == "time":
            for n in range(16):
                yield f'{series.metric}_bucket{{le="{n / 16}"}} {value * n}'
        else:
            labels = (
                [f'{{{series.label}="value-{n}"}}' for n in range(24)] if series.label else [""]
            )
            for labelled in labels:
                yield f"{series.metric}{labelled} {value}"


async def test_hours_are_the_sums_of_their_minutes(tmp_path, postgres, reader):
    host = Host(tmp_path, postgres, ago_s=900)
    host.write("api-1", "feed_posts_total 0", "media_connections 3")
    await host.recorder.step()
    for minute in range(3):
        host.write("api-1", f"feed_posts_total {60 * (minute + 1)}", f"media_connections {minute}")
        await host.pass_s(60)
    now_at = datetime.now(UTC)
    found = await reader.read(
        ["feed_posts", "media_connections"], from_at=now_at - timedelta(days=7), to_at=now_at
    )
    posts, connections = (known(one.lines[0].values) for one in found.series)
    assert found.step_s == 3600
    assert all(value == pytest.approx(60, rel=0.01) for value in posts)
    assert max(connections) == 3


@pytest.mark.parametrize("by", ["key", "host"])
async def test_a_history_without_rows_has_gaps(reader, by):
    names = list(SERIES)
    for some in (names[:20], names[20:]):
        found = await reader.read(some, by=by)
        assert not any(found.is_recorded)
        for one in found.series:
            assert all(line.values == [None] * len(found.is_recorded) for line in one.lines)
    assert await reader.marks() == []
    assert await reader.begin() is None


def test_every_series_is_documented():
    text = (Path(__file__).parents[2] / "docs" / "console.md").read_text()
    assert [name for name in SERIES if f"`{name}`" not in text] == []


def test_a_snapshot_keeps_only_what_is_charted():
    found = Snapshot.parse(
        'web_requests_total{method="GET",route="/a",status="2xx"} 3\n'
        'web_requests_total{method="POST",route="/b",status="2xx"} 4\n'
        "other_total 9\n# HELP views_flushed_total x\n"
    )
    assert found.sums == {("http_requests", "2xx"): 7}


@pytest.mark.parametrize(
    ("counts", "share", "expected_s"),
    [
        ([], 0.5, None),
        ([0, 0, 0], 0.5, None),
        ([10, 0, 0], 0.5, 0.005),
        ([0, 10, 0], 0.5, pytest.approx(0.0316, rel=0.01)),
        ([1, 1, 98], 0.99, 0.1),
    ],
)
def test_percentiles_of_buckets(counts, share, expected_s):
    assert percentile_s([0.01, 0.1][: len(counts)], counts, share) == expected_s


@pytest.mark.parametrize(
    ("from_s", "to_s", "step_s"),
    [(3_600, 0, 60), (6 * 3_600, 0, 120), (86_400, 0, 600), (7 * 86_400, 0, 3_600)],
)
def test_a_span_has_steps_that_fit_it(from_s, to_s, step_s):
    now_at = datetime(2026, 1, 10, 12, 0, 30, tzinfo=UTC)
    ends = [now_at - timedelta(seconds=one) for one in (from_s, to_s)]
    span = span_of(*ends, now_at=now_at)
    assert span.step_s == step_s
    assert span.steps <= 181


@pytest.mark.parametrize(
    "given",
    [
        {"series": []},
        {"series": ["nope"]},
        {"series": ["views_hits"], "by": "queue"},
        {"series": ["views_hits"], "from_at": datetime.now(UTC) - timedelta(days=31)},
        {"series": ["views_hits"], "from_at": datetime.now(UTC) + timedelta(days=1)},
        {"series": ["views_hits"], "from_at": datetime(2026, 1, 1)},  # noqa: DTZ001
    ],
)
async def test_bad_reads_are_refused(reader, given):
    with pytest.raises(InvalidSpan):
        await reader.read(given.pop("series"), **given)


async def test_a_recorder_runs_and_ends(tmp_path, postgres, reader):
    host = Host(tmp_path, postgres)
    running = asyncio.create_task(host.recorder.run())

    async def is_recorded():
        host.clock.advance(10)
        return True in (await reader.read(["views_hits"])).is_recorded

    await wait_true(is_recorded, what="a minute is recorded")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await host.recorder.close()


async def test_a_clock_that_jitters_makes_no_further_row(tmp_path, postgres):
    host = Host(tmp_path, postgres)
    await host.recorder.step()
    # Readings 0.3 s before and after the minute's end.
    for seconds in (10,) * 5 + (9.7, 10.3, 10, 10, 10, 10, 10.3, 9.7) + (10,) * 5:
        host.clock.advance(seconds)
        await host.recorder.step()
    count = query("SELECT count(*) FROM headrace.history_minute")
    assert await postgres.value(count) == 3
