"""Reports of children: increments are kept, clients are summed, gauges of the dead are removed."""

from __future__ import annotations

from headrace.kernel.metrics import own_metrics
from headrace.media.worker.ipc_reports import Report, ReportCollector


def shown(name: str) -> float:
    """The value as a scrape would show it; 0 if it does not exist."""
    for line in own_metrics().decode().splitlines():
        if line.startswith(name + " "):
            return float(line.split()[-1])
    return 0.0


def test_clients_are_added_up_and_other_gauges_are_the_highest():
    received, before = ReportCollector(), shown("media_connections")
    for child, clients, peers in (("worker-0", 3.0, 2.0), ("worker-1", 4.0, 5.0)):
        gauges = [("media_connections", {}, clients), ("media_reported_peers", {}, peers)]
        received.take(child, Report(is_ready=True, grown=[], gauges=gauges))
    assert shown("media_connections") == before + 7
    assert shown("media_reported_peers") == 5
    received.forget("worker-1")
    assert shown("media_connections") == before + 3
    assert shown("media_reported_peers") == 2
    received.forget("worker-0")
    received.forget("worker-0")
    assert shown("media_connections") == before


def test_what_a_dead_worker_counted_stays():
    received = ReportCollector()
    grown = [("media_reported", "counter", "media_reported_total", {}, 5.0)]
    received.take("worker-0", Report(is_ready=True, grown=grown, gauges=[]))
    received.forget("worker-0")
    received.take("worker-0", Report(is_ready=True, grown=grown, gauges=[]))
    assert shown("media_reported_total") == 10
