"""Spans of a whole site arrive at an OTLP receiver; without one nothing else changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from tests.kit.otlp import otlp_receiver
from tests.kit.processes import wait_until
from tests.kit.site import Site, photo_host

pytestmark = pytest.mark.slow
ROUTE = "POST /v1/queues/{queue}/jobs"
HANDLERS = """
from opentelemetry import trace


@app.task("traced", retries=0)
async def traced(text: str) -> None:
    with trace.get_tracer("site").start_as_current_span("my step"):
        await note.enqueue(text=text)
    if text == "bad":
        raise ValueError("bad text")
"""
WITHOUT_LIBRARIES = """
import sys
sys.modules["opentelemetry"] = None
from headrace.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def parent(number, *, sampled):
    return f"{number:032x}", f"00-{number:032x}-{number:016x}-{'01' if sampled else '00'}"


def test_a_trace_follows_a_request_to_its_acks(tmp_path):
    with otlp_receiver() as receiver:
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "OTEL_BSP_SCHEDULE_DELAY": "200"}
        site = Site(tmp_path, **env)
        with (tmp_path / "site_for_tests.py").open("a") as file:
            file.write(HANDLERS)
        site.up()
        try:
            check_jobs(site, receiver)
            check_own_traces(site, receiver)
            check_media(site, receiver)
            assert traces_in_doctor(site) == "ok"
        except BaseException:
            site.end()
            raise
    # The endpoint is down from here.
    assert traces_in_doctor(site) == "warn"
    add(site, "later", parent(13, sampled=True)[1])
    wait_until(lambda: "later" in site.lines("notes.txt"), what="the job")
    site.end()
    assert set(receiver.paths) == {"/v1/traces"}


def traces_in_doctor(site):
    rows = site.run("doctor", exit_code=None)["items"]
    [found] = [row for row in rows if row["subject"] == "traces"]
    return found["state"]


def add(site, text, traceparent):
    headers = {"traceparent": traceparent}
    job = {"payload": {"text": text}}
    site.document("POST", "/v1/queues/traced/jobs", headers=headers, json=job)


def check_jobs(site, receiver):
    """Of a sampled request all spans arrive, of an unsampled one none."""
    quiet, unsampled = parent(7, sampled=False)
    add(site, "quiet", unsampled)
    wait_until(lambda: "quiet" in site.lines("notes.txt"), what="the unsampled job")
    trace, sampled = parent(9, sampled=True)
    add(site, "bad", sampled)
    spans = receiver.wait_for(
        trace, ROUTE, "enqueue traced", "run traced", "my step", "run notes", "ack"
    )
    request, enqueue, run = (spans[name] for name in (ROUTE, "enqueue traced", "run traced"))
    assert (request.parent, request.role, request.kind) == (f"{9:016x}", "api", 2)
    assert request.attributes["http.response.status_code"] == 202
    assert request.attributes["http.route"] in ROUTE
    assert (enqueue.parent, enqueue.role, enqueue.kind) == (request.id, "api", 4)
    assert (run.parent, run.role, run.kind) == (enqueue.id, "slot", 5)
    assert run.is_error
    assert run.attributes["error.type"] == "ValueError"
    assert run.attributes["messaging.destination.name"] == "traced"
    assert run.attributes["headrace.job.outcome"] == "retry"
    assert spans["my step"].parent == run.id
    assert spans["enqueue notes"].parent == spans["my step"].id
    assert spans["run notes"].parent == spans["enqueue notes"].id
    acks = [s for s in receiver.spans if s.trace == trace and s.name == "ack"]
    assert {s.role for s in acks} == {"agent"}
    assert receiver.of(quiet) == {}


def check_own_traces(site, receiver):
    """A command, its jobs and each photo are one trace."""
    with photo_host() as (base, _):
        site.run_catalogue("shop", base, ["a", "b"])
        wait_until(lambda: len(site.items()) == 2, what="the items")
    wait_until(lambda: any(s.name == "fetch.photo" for s in receiver.spans), what="a photo's span")
    photos = [span for span in receiver.spans if span.name == "fetch.photo"]
    assert photos[0].attributes["headrace.photo.outcome"] == "stored"
    assert photos[0].attributes["server.address"].startswith("127.0.0.1")
    assert "cli" in {span.role for span in receiver.spans}
    site.document("GET", "/v1/feed/viewers/7")
    wait_until(lambda: any(s.name == "feed.page" for s in receiver.spans), what="a page's span")


def check_media(site, receiver):
    key = next(photo for item in site.items() for photo in item["photos"])
    trace, sampled = parent(11, sampled=True)
    assert site.media(key, traceparent=sampled).status_code == 200
    span = receiver.wait_for(trace, "GET /m/{key}")["GET /m/{key}"]
    assert (span.role, span.parent) == ("media", f"{11:016x}")
    assert span.attributes["http.response.status_code"] == 200
    assert span.attributes["http.response.size"] > 0


def test_a_role_without_the_libraries_names_the_extra(tmp_path):
    env = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    for role in (["scheduler"], ["jobs", "ls"]):
        ended = subprocess.run(
            [sys.executable, "-c", WITHOUT_LIBRARIES, "--json", *role],
            env=env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ended.returncode == 2, ended.stderr
        assert "[otel]" in json.loads(ended.stderr)["error"]["message"]
