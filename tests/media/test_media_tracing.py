"""Trace tags are read, passed on, and logged where a watch matches."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.kernel.logs import configure_logs
from headrace.kernel.metrics import REGISTRY
from headrace.media.cluster.cluster_config import Document
from headrace.media.tracing import (
    LINES_PER_S,
    TRACE,
    WATCHES_MAX,
    TooManyWatches,
    TraceInvalid,
    TraceLog,
    Traces,
    TraceTag,
    Watch,
    onward_fields,
    parse_selector,
    read_trace,
)

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
KEY = "tracks/a.mp3"
NOW_S = 1_795_302_000.0


def watch(selector: str, *, ends_s: float = 60) -> Watch:
    name, value = parse_selector(selector)
    return Watch(name=name, value=value, ends_at=datetime.fromtimestamp(NOW_S + ends_s, UTC))


def log_of(*watches: Watch) -> tuple[TraceLog, list[float]]:
    now = [NOW_S]
    return TraceLog(lambda: watches, node="n1", now_s=lambda: now[0]), now


def test_a_tag_is_read_from_the_head():
    fields = {"traceparent": PARENT, "baggage": " other=1, user = 42 ;ttl=3,request=r7 , user=43"}
    tag = read_trace(fields, KEY)
    assert tag == TraceTag(PARENT, "42", "r7", KEY)
    assert (tag.trace, tag.has_context) == (TRACE_ID, True)
    assert read_trace({}, KEY) == TraceTag(None, None, None, KEY)
    assert not read_trace({}, KEY).has_context


def test_the_tag_of_a_signed_url_wins():
    fields = {"baggage": "user=mallory,request=r8"}
    assert read_trace(fields, KEY, "user=42") == TraceTag(None, "42", "r8", KEY)


@pytest.mark.parametrize(
    "fields",
    [
        {"traceparent": "00-" + "0" * 32 + "-00f067aa0ba902b7-01"},
        {"traceparent": PARENT + "\u2028"},
        {"traceparent": "01" + PARENT[2:]},
        {"baggage": "user"},
        {"baggage": "user="},
        {"baggage": 'user="42"'},
        {"baggage": "user=a%0ab"},
        {"baggage": "user=" + "x" * 513},
        {"baggage": "x=1," * 4000 + "user=42"},
    ],
)
def test_what_is_malformed_is_left_out(fields):
    assert read_trace(fields, KEY) == TraceTag(None, None, None, KEY)


@pytest.mark.slow
@given(st.text(max_size=300), st.text(max_size=300))
def test_no_head_is_an_error_or_gets_into_a_line(parent, baggage):
    tag = read_trace({"traceparent": parent, "baggage": baggage}, KEY)
    for value in (tag.user, tag.request):
        assert value is None or re.fullmatch(r"[A-Za-z0-9._:@~/-]{1,512}", value)


def test_a_tag_is_passed_on_under_the_same_trace():
    tag = TraceTag(PARENT, "42", None, KEY)
    onward = dict(onward_fields(tag))
    assert onward["baggage"] == f"user=42,object={KEY}"
    assert onward["traceparent"] == PARENT, "the hop's span would have a parent that none made"
    there = read_trace(onward, KEY)
    assert (there.trace, there.user, there.request) == (tag.trace, tag.user, tag.request)
    assert onward_fields(TraceTag(None, None, None, KEY)) == ()
    started = dict(onward_fields(TraceTag(None, "42", "r7", KEY)))
    assert read_trace(started, KEY).trace


@pytest.mark.parametrize(
    "text", ["user", "user=", "=42", "colour=red", "user=4 2", "user=a\n", "object=" + "x" * 513]
)
def test_nothing_that_can_be_traced(text):
    with pytest.raises(TraceInvalid):
        parse_selector(text)


def test_a_watch_matches_its_own_requests_until_its_end():
    traces, now = log_of(watch("user=42"), watch(f"object={KEY}", ends_s=10))
    assert traces.is_on
    assert traces.is_wanted(TraceTag(None, "42", None, "other.mp3"))
    assert traces.is_wanted(TraceTag(None, None, None, KEY))
    assert not traces.is_wanted(TraceTag(None, "43", "42", "other.mp3"))
    now[0] += 11
    assert not traces.is_wanted(TraceTag(None, None, None, KEY))
    assert traces.is_wanted(TraceTag(None, "42", None, KEY))
    by_trace, _ = log_of(watch(f"trace={TRACE_ID}"))
    assert by_trace.is_wanted(TraceTag(PARENT, None, None, KEY))
    now[0] += 60
    assert not traces.is_on
    nothing, _ = log_of()
    assert not nothing.is_on
    assert not nothing.is_wanted(TraceTag(PARENT, "42", None, KEY))


def test_a_watched_request_without_a_trace_gets_one():
    traces, _ = log_of(watch("user=42"))
    began = traces.follow(TraceTag(None, "42", None, KEY))
    assert began.trace
    assert dict(onward_fields(began))["traceparent"][3:35] == began.trace
    for left in (TraceTag(PARENT, "42", None, KEY), TraceTag(None, "43", None, KEY)):
        assert traces.follow(left) is left


def write(traces: TraceLog) -> None:
    traces.write(
        TraceTag(PARENT, "42", None, KEY),
        status=206,
        sent_bytes=1000,
        cache="headrace; hit",
        outcome="done",
        stages_s={"parse": 0.00001, "send": 0.0123456},
    )


def lines(reported: str) -> list[dict]:
    return [json.loads(line) for line in reported.splitlines() if "request_traced" in line]


def test_a_line_has_the_tag_and_the_time_of_each_stage(capfd):
    configure_logs("media")
    traces, _ = log_of(watch("user=42"))
    write(traces)
    [line] = lines(capfd.readouterr().err)
    del line["timestamp"], line["level"], line["source"], line["role"]
    assert line == {
        "event": "request_traced",
        "trace_id": TRACE_ID,
        "node": "n1",
        "user": "42",
        "request": None,
        "object": KEY,
        "status": 206,
        "sent_bytes": 1000,
        "cache": "headrace; hit",
        "outcome": "done",
        "left_out_lines": 0,
        "parse_ms": 0.01,
        "send_ms": 12.346,
    }


def test_lines_are_bounded_and_omitted_ones_are_counted(capfd):
    configure_logs("media")
    traces, now = log_of(watch("user=42"))
    before = REGISTRY.get_sample_value("media_trace_lines_total", {"outcome": "left_out"}) or 0
    for _ in range(LINES_PER_S + 7):
        write(traces)
    assert len(lines(capfd.readouterr().err)) == LINES_PER_S
    now[0] += 1
    write(traces)
    write(traces)
    assert [line["left_out_lines"] for line in lines(capfd.readouterr().err)] == [7, 0]
    after = REGISTRY.get_sample_value("media_trace_lines_total", {"outcome": "left_out"})
    assert after == before + 7


async def test_watches_are_started_renewed_and_stopped(blobs):
    traces = Traces(blobs)
    assert list(await traces.list()) == []
    first = await traces.start("user=42", for_s=600)
    await traces.start(f"object={KEY}", for_s=60)
    longer = await traces.start("user=42", for_s=1200)
    assert longer.ends_at > first.ends_at
    assert [(w.name, w.value) for w in await traces.list()] == [("object", KEY), ("user", "42")]
    assert list(await traces.stop("user=43")) == []
    [ended] = await traces.stop("user=42")
    assert (ended.name, ended.value) == ("user", "42")
    assert ended.is_over(datetime.now(UTC)), "it does not look like one that runs on"
    assert len(await traces.list()) == 1
    assert len(await traces.stop()) == 1
    assert list(await traces.stop()) == []


async def test_watches_are_bounded(blobs):
    traces = Traces(blobs)
    for number in range(WATCHES_MAX):
        await traces.start(f"user={number}", for_s=60)
    with pytest.raises(TooManyWatches):
        await traces.start("user=one-more", for_s=60)
    await traces.start("user=0", for_s=60)
    for for_s in (0, 86_401, float("nan")):
        with pytest.raises(TraceInvalid):
            await traces.start("user=0", for_s=for_s)


async def test_a_watch_that_is_over_makes_room(blobs):
    def past(old):
        over = Watch(name="user", value="42", ends_at=datetime.now(UTC) - timedelta(seconds=1))
        return type(old)(version=old.version, watches=(over,) * WATCHES_MAX)

    await Document(blobs, TRACE).change(past)
    traces = Traces(blobs)
    assert list(await traces.list()) == []
    await traces.start("user=43", for_s=60)
    assert [w.value for w in await traces.list()] == ["43"]
