"""Errors in Sentry: an event for each call of a handler that raised, with its queue and trace."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any

import sentry_sdk

from headrace import Headrace
from headrace.jobs import Call, Cancel, Fail, Retry, Snooze

app = Headrace()


@app.on_slot_start
def connect_sentry() -> None:
    """Connect in each slot: the client's thread does not survive the fork."""
    sentry_sdk.init(dsn=os.environ.get("SENTRY_DSN"), default_integrations=False)


@app.on_slot_stop
def send_last_events() -> None:
    """Wait for the last events, but not longer than two seconds."""
    sentry_sdk.flush(timeout=2.0)


@app.middleware
async def report_errors(call: Call, handle: Callable[[], Awaitable[Any]]) -> Any:
    """Send an exception to Sentry and raise it again, so that Headrace retries the job."""
    with sentry_sdk.isolation_scope() as scope:
        scope.set_tag("queue", call.queue)
        scope.set_tag("attempt", call.attempt)
        scope.set_tag("job_id", call.jobs[0].id)
        scope.set_tag("trace_id", (call.jobs[0].traceparent or "")[3:35])
        try:
            return await handle()
        except (Retry, Snooze, Fail, Cancel):
            raise  # outcomes that the handler chose
        except Exception as error:
            sentry_sdk.capture_exception(error)
            raise


@app.task("charge", retries=3)
def charge(order: int) -> None:
    """Fail, for this recipe."""
    raise ValueError(f"order {order} has no price")
