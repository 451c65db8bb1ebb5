"""Prometheus series of each queue, exported by the scheduler that leads.

Gauges are the backlog as last counted. Counters grow by what `queue_total` gained since the last
call, so they start at 0 with each leader, as counters of a restarted process do. The first
QUEUES_MAX queues by name have series of their own; the others share `other`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from headrace.jobs.fleet.state import QueueReading
from headrace.kernel.metrics import allow_values, bound, counter, gauge

QUEUES_MAX: Final = 200
STATES: Final = {
    "ready": "ready",
    "scheduled": "scheduled",
    "running": "running",
    "failed": "failed_kept",
    "quarantined": "quarantined",
}
"""The field of a reading by state."""
OUTCOMES: Final = ("done", "failed", "cancelled", "retried", "lost")
_jobs: Final = gauge(
    "jobs_queue_jobs",
    "Jobs of a queue by state, counted by the leader up to jobs.count_max per state.",
    queue=(),
    state=STATES,
)
_oldest: Final = gauge(
    "jobs_queue_oldest_seconds", "Age of the oldest ready job, measured by the leader.", queue=()
)
_settled: Final = counter(
    "jobs_queue_settled_total",
    "Jobs of a queue by outcome; retried and lost ones are ready again.",
    queue=(),
    outcome=OUTCOMES,
)
_run: Final = counter(
    "jobs_queue_run_seconds_total",
    "Time of slots in a queue's handlers; concurrent calls share it.",
    queue=(),
)
_wait: Final = counter(
    "jobs_queue_wait_seconds_total", "From due to claimed, summed over jobs.", queue=()
)
_BY_QUEUE: Final = (
    "jobs_queue_jobs",
    "jobs_queue_oldest_seconds",
    "jobs_queue_settled_total",
    "jobs_queue_run_seconds_total",
    "jobs_queue_wait_seconds_total",
)


class QueueMetrics:
    """Shows readings of all queues as series."""

    def __init__(self) -> None:
        self._totals: dict[str, QueueReading] = {}

    def show(self, readings: Sequence[QueueReading]) -> None:
        """Export the backlog, and what the totals gained since the last call."""
        names = [reading.queue for reading in readings[:QUEUES_MAX]]
        for metric in _BY_QUEUE:
            allow_values(metric, queue=names)
        self._show_backlog(readings)
        for reading in readings:
            before = self._totals.get(reading.queue)
            self._totals[reading.queue] = reading
            if before is not None:
                _count(before, reading)

    def clear(self) -> None:
        """Remove the gauges: another process leads."""
        _jobs.clear()
        _oldest.clear()
        self._totals.clear()

    @staticmethod
    def _show_backlog(readings: Sequence[QueueReading]) -> None:
        _jobs.clear()
        _oldest.clear()
        for reading in readings:
            for state, field in STATES.items():
                child = bound(_jobs, "jobs_queue_jobs", queue=reading.queue, state=state)
                child.inc(getattr(reading, field))
        # Oldest last, so that the queues that share a label show the oldest of all.
        for reading in sorted(readings, key=lambda one: one.oldest_s):
            bound(_oldest, "jobs_queue_oldest_seconds", queue=reading.queue).set(reading.oldest_s)


def _count(before: QueueReading, reading: QueueReading) -> None:
    queue = reading.queue
    for outcome in OUTCOMES:
        gained = getattr(reading, outcome) - getattr(before, outcome)
        bound(_settled, "jobs_queue_settled_total", queue=queue, outcome=outcome).inc(
            max(0, gained)
        )
    bound(_run, "jobs_queue_run_seconds_total", queue=queue).inc(
        max(0.0, reading.run_s - before.run_s)
    )
    bound(_wait, "jobs_queue_wait_seconds_total", queue=queue).inc(
        max(0.0, reading.wait_s - before.wait_s)
    )
