"""An application whose queues may have few slots.

Each call notes when it starts and ends, as `recorded_app` does.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from tests.kit.history import Recorder

from headrace import Headrace
from headrace.jobs import JobContext

app = Headrace()
HISTORY = Path(os.environ["HISTORY"])
recorder = Recorder(HISTORY)


def _take(queue: str, job: JobContext[dict]) -> None:
    with recorder.running(queue, job=job.id, lane=queue, lease=job.lease_id):
        threading.Event().wait(job.payload.get("hold_s", 0))


@app.task("narrow", slots=(0, 2), retries=50)
def narrow(job: JobContext[dict]) -> None:
    """At most two slots of the fleet."""
    _take("narrow", job)


@app.task("stopped", slots=(0, 0), retries=50)
def stopped(job: JobContext[dict]) -> None:
    """No slot."""
    _take("stopped", job)


@app.task("free", retries=50)
def free(job: JobContext[dict]) -> None:
    """Any number of slots."""
    _take("free", job)
