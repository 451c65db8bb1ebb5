"""Telling the webhook of alerts: each event on a schedule of its own, so that one that is refused holds up no other.

What was refused most often comes last, and a step ends once it has waited long for a receiver that hangs. The
schedules live in the leader: one that takes over begins anew.
"""

from __future__ import annotations

import time
from typing import Final

from headrace.engines.postgres import Postgres
from headrace.jobs import store
from headrace.jobs.fleet.webhook import TIMEOUT_S, WebhookFailed, send_alert
from headrace.kernel.logs import logger
from headrace.kernel.resilience import Backoff
from headrace.kernel.signing import Key

TOLD_AGE_S: Final = 3600.0
TOLD_PER_STEP: Final = 20
UNTOLD_SEEN: Final = 10_000
RETRY: Final = Backoff(2.0, 300.0)
_log: Final = logger(__name__)


class Teller:
    """Sends what the webhook has not taken yet."""

    def __init__(self, postgres: Postgres, url: str, key: Key, *, retry: Backoff = RETRY) -> None:
        self._postgres = postgres
        self._url = url
        self._key = key
        self._retry = retry
        self._refused: dict[tuple[int, bool], tuple[int, float]] = {}

    async def tell_due(self) -> None:
        """Send up to 20 events whose time has come; what is not taken is sent again for an hour."""
        untold = await store.alerts.untold_alerts(
            self._postgres, age_s=TOLD_AGE_S, alerts_max=UNTOLD_SEEN
        )
        began_s = time.monotonic()
        refused = self._refused
        self._refused = {
            event: refused[event]
            for alert, is_raise in untold
            if (event := (alert.id, is_raise)) in refused
        }
        due = []
        for alert, is_raise in untold:
            failures, next_s = self._refused.get((alert.id, is_raise), (0, began_s))
            if next_s <= began_s:
                due.append((failures, alert, is_raise))
        due.sort(key=lambda one: one[0])
        for failures, alert, is_raise in due[:TOLD_PER_STEP]:
            try:
                await send_alert(self._url, self._key, alert, is_raise=is_raise)
                await store.alerts.note_told(self._postgres, alert.id, is_raise=is_raise)
            except WebhookFailed as error:
                self._note_refused((alert.id, is_raise), failures + 1, error)
            if time.monotonic() - began_s >= TIMEOUT_S:
                return

    def _note_refused(self, event: tuple[int, bool], failures: int, error: WebhookFailed) -> None:
        self._refused[event] = (failures, time.monotonic() + self._retry.delay_s(failures))
        _log.warning("alert_not_told", alert=event[0], error=error.text, failures=failures)
