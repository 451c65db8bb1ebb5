"""Alerts by webhook: a signed POST per event, retried on a schedule of its own.

The body and the time of sending are signed with a key derived from the root secret. The receiver
computes HMAC-SHA256 of `<t>.<body>` and compares it with `v1` of the header `Headrace-Signature:
t=...,key=...,v1=...`. Its key in hex is `derive_key(SECRET, "alerts-webhook").secret.hex()` of
`headrace.kernel.signing`.

A refused event delays no other: the most refused come last, and one step is bounded in time. The
schedules live in the leader; a new leader starts afresh.
"""

from __future__ import annotations

import asyncio
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any, Final

import msgspec

from headrace.engines.postgres import Postgres
from headrace.jobs import store
from headrace.jobs.fleet.alerts import Alert
from headrace.kernel.errors import PeerFailed
from headrace.kernel.logs import logger
from headrace.kernel.resilience import Backoff
from headrace.kernel.signing import Key

TIMEOUT_S: Final = 5.0
USE: Final = "alerts-webhook"


class WebhookFailed(PeerFailed):
    """The alert webhook did not accept an event. It is retried for an hour."""

    code = "jobs.webhook_failed"


async def send_alert(url: str, key: Key, alert: Alert, *, is_raise: bool) -> None:
    """Send one event and wait until it is accepted.

    The receiver may get it twice; `event` identifies it. Raises: WebhookFailed.
    """
    word = "raised" if is_raise else "cleared"
    document = {"event": f"{alert.id}-{word}", "state": word, **msgspec.to_builtins(alert)}
    body = msgspec.json.encode(document)
    try:
        status = await asyncio.to_thread(_post, url, body, signature(key, body, time.time()))
    except (OSError, HTTPException, ValueError) as error:
        raise WebhookFailed(
            f"the webhook for alerts does not answer ({type(error).__name__}): check"
            " jobs.alerts_webhook_url and the server behind it"
        ) from error
    if not 200 <= status < 300:
        raise WebhookFailed(
            f"the webhook for alerts answered {status}: expected 2xx; redirects are not followed"
        )


def signature(key: Key, body: bytes, at_s: float) -> str:
    """The value of the header `Headrace-Signature`."""
    moment = str(int(at_s))
    signed = key.sign(moment.encode() + b"." + body).hex()
    return f"t={moment},key={key.id},v1={signed}"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Returns a redirect as the response, since only the configured address may be called."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_opener: Final = urllib.request.build_opener(_NoRedirects)


def _post(url: str, body: bytes, signed: str) -> int:
    request = urllib.request.Request(  # noqa: S310 - the setting takes http and https alone
        url,
        data=body,
        method="POST",
        headers={"Content-Type": "application/json", "Headrace-Signature": signed},
    )
    try:
        with _opener.open(request, timeout=TIMEOUT_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return int(error.code)


SEND_AGE_S: Final = 3600.0
EVENTS_PER_STEP: Final = 20
UNSENT_MAX: Final = 10_000
RETRY: Final = Backoff(2.0, 300.0)
_log: Final = logger(__name__)


class AlertSender:
    """Sends the events that the webhook has not accepted."""

    def __init__(self, postgres: Postgres, url: str, key: Key, *, retry: Backoff = RETRY) -> None:
        self._postgres = postgres
        self._url = url
        self._key = key
        self._retry = retry
        self._refused: dict[tuple[int, bool], tuple[int, float]] = {}

    async def send_due(self) -> None:
        """Send up to 20 due events. A refused event is retried for an hour."""
        unsent = await store.fleet.unsent_alerts(
            self._postgres, age_s=SEND_AGE_S, alerts_max=UNSENT_MAX
        )
        began_s = time.monotonic()
        refused = self._refused
        self._refused = {
            event: refused[event]
            for alert, is_raise in unsent
            if (event := (alert.id, is_raise)) in refused
        }
        due = []
        for alert, is_raise in unsent:
            failures, next_s = self._refused.get((alert.id, is_raise), (0, began_s))
            if next_s <= began_s:
                due.append((failures, alert, is_raise))
        due.sort(key=lambda one: one[0])
        for failures, alert, is_raise in due[:EVENTS_PER_STEP]:
            try:
                await send_alert(self._url, self._key, alert, is_raise=is_raise)
                await store.fleet.mark_sent(self._postgres, alert.id, is_raise=is_raise)
            except WebhookFailed as error:
                self._note_refused((alert.id, is_raise), failures + 1, error)
            if time.monotonic() - began_s >= TIMEOUT_S:
                return

    def _note_refused(self, event: tuple[int, bool], failures: int, error: WebhookFailed) -> None:
        self._refused[event] = (failures, time.monotonic() + self._retry.delay_s(failures))
        _log.warning("alert_not_sent", alert=event[0], error=error.text, failures=failures)
