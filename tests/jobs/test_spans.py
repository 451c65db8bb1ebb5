"""Spans of jobs in one process: batches, errors, steps, and the application's own provider."""

from __future__ import annotations

import os
import random
import sys

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased
from tests.kit.waiting import wait_true

from headrace.jobs import Batch, JobContext
from headrace.kernel import spans
from headrace.kernel.config import InvalidConfig
from headrace.kernel.logs import (
    NewTraces,
    current_traceparent,
    is_sampled,
    new_traceparent,
    trace_id,
)
from headrace.kernel.otel import Tracing, make_provider

pytestmark = pytest.mark.slow
SAMPLED = [f"00-{number:032x}-{number:016x}-01" for number in (1, 2)]


@pytest.fixture
def provided(monkeypatch):
    """`provided(sampler)`: set a provider of the application; returns its ended spans."""

    def provide(sampler=ALWAYS_ON):
        exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler=ParentBased(sampler))
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
        monkeypatch.setattr(spans, "active", None)
        monkeypatch.setattr(NewTraces, "sampled_ratio", 0.0)
        spans.start()
        return exporter.get_finished_spans

    return provide


def named(found, name):
    return [span for span in found if span.name == name]


def hex_of(number):
    return f"{number:032x}"


async def test_a_batch_is_one_span_with_links(jobs, registry, working, provided):
    ended, seen = provided(), []

    @registry.task("photos", batch=10)
    async def handle(batch: Batch[dict]):
        seen.extend(job.id for job in batch)
        await after.enqueue({})

    @registry.task("after")
    async def after(job: JobContext[dict]):
        seen.append(trace_id(current_traceparent.get()))

    for parent in (*SAMPLED, new_traceparent()[:-2] + "00"):
        token = current_traceparent.set(parent)
        await handle.enqueue({})
        current_traceparent.reset(token)
    async with working():
        await wait_true(lambda: len(seen) == 4)
        await wait_true(lambda: len(named(ended(), "ack")) == 2)
    [run] = named(ended(), "run photos")
    assert trace_id(SAMPLED[0]) == hex_of(run.context.trace_id) == seen[-1]
    assert [hex_of(link.context.trace_id) for link in run.links] == [
        trace_id(text) for text in SAMPLED
    ]
    assert run.attributes["messaging.batch.message_count"] == 3
    enqueues = named(ended(), "enqueue photos")
    assert [hex_of(span.context.trace_id) for span in enqueues] == [trace_id(s) for s in SAMPLED]
    [inner] = named(ended(), "enqueue after")
    assert inner.parent.span_id == run.context.span_id


async def test_unsampled_jobs_and_their_code_have_no_spans(registry, working, provided):
    ended, seen = provided(ALWAYS_OFF), []

    @registry.task("quiet")
    async def quiet(job: JobContext[dict]):
        with trace.get_tracer("own").start_as_current_span("own"):
            seen.append(is_sampled(current_traceparent.get()))

    with trace.get_tracer("own").start_as_current_span("request"):
        await quiet.enqueue({})
    token = current_traceparent.set(new_traceparent()[:-2] + "00")
    await quiet.enqueue({})
    current_traceparent.reset(token)
    async with working():
        await wait_true(lambda: seen == [False, False])
    assert ended() == ()


async def test_an_error_and_a_step_of_a_workflow(registry, working, provided):
    ended = provided()

    @registry.task("bad", retries=0)
    def bad(n: int) -> None:
        raise LookupError(f"no {n}")

    @registry.workflow("order")
    async def order(ctx, n: int) -> int:
        return await ctx.step("pay", lambda: n)

    with trace.get_tracer("own").start_as_current_span("request") as request:
        failed = await bad.enqueue(n=1)
        await order.enqueue(n=2)
    async with working():
        await wait_true(lambda: named(ended(), "step pay") and named(ended(), "run bad"))
        await wait_true(lambda: len(named(ended(), "ack")) == 2)
    [run] = named(ended(), "run bad")
    assert (run.status.is_ok, run.status.description) == (False, "LookupError: no 1")
    assert run.attributes["error.type"] == "LookupError"
    assert run.attributes["messaging.message.id"] == str(int(failed))
    [step], [around] = named(ended(), "step pay"), named(ended(), "run workflow.order")
    assert step.parent.span_id == around.context.span_id
    assert around.context.trace_id == request.get_span_context().trace_id


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("OTEL_TRACES_SAMPLER", "sometimes", "parentbased_traceidratio"),
        ("OTEL_TRACES_SAMPLER_ARG", "12", "fraction"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "http/protobuf"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318", "http://"),
        ("OTEL_BSP_SCHEDULE_DELAY", "5s", "whole number"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "100", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE: expected at most"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "10s", "seconds such as 10"),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/nowhere", "a file"),
        ("OTEL_SPAN_EVENT_COUNT_LIMIT", "-1", "whole number"),
        ("OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER", "nobody", "'nobody'"),
    ],
)
def test_a_bad_variable_is_refused(monkeypatch, name, value, expected):
    monkeypatch.setattr(spans, "active", None)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidConfig) as refused:
        spans.start("api")
    assert name in refused.value.text or "PROVIDER" in name
    assert expected in refused.value.text
    assert spans.active is None


def test_new_traces_are_sampled_by_ratio(monkeypatch):
    monkeypatch.setattr(NewTraces, "sampled_ratio", 0.25)
    random.seed(1)
    count = sum(is_sampled(new_traceparent()) for _ in range(10_000))
    assert 2_300 < count < 2_700


def test_roots_of_other_code_are_sampled_by_ratio(monkeypatch):
    """Those of Headrace are decided before."""
    monkeypatch.setattr(spans, "active", None)
    monkeypatch.setattr(NewTraces, "sampled_ratio", 0.0)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    provider, ratio = make_provider(None, os.environ)
    assert ratio == 0
    assert not provider.get_tracer("own").start_span("other").is_recording()
    parentless = Tracing(provider).begin("ours", "INTERNAL", None, {})
    assert is_sampled(parentless.traceparent)
    parentless.leave()
    provider.shutdown()


def test_without_configuration_nothing_is_imported(monkeypatch):
    monkeypatch.setattr(spans, "active", None)
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    spans.start("api")
    assert spans.active is None
    assert "opentelemetry.trace" not in sys.modules
