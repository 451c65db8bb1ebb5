"""The scheduler: any number run, one leads. It plans the fleet, fires crons, sweeps and alerts.

The lead is a row with an end, renewed at each plan by the database's clock. The leader gathers a
snapshot, plans, and writes the map in one statement that names its term; a leader that was
suspended is refused there. Standbys check the lead four times per period and gather snapshots too,
so a new leader plans like the old one within two periods. A leader without a full window leaves the
map as it is.

Crons and sweeps need no leader: rows are locked, and any scheduler processes them. A sweep every 3
s and host expiry after 30 s make a dead host's jobs ready within 35 s.

An alert is also sent by webhook: a signed POST per event, retried on a schedule of its own. The
body and the time of sending are signed with a key derived from the root secret. The receiver
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
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from http.client import HTTPException
from secrets import token_hex
from typing import Any, Final

import msgspec

from headrace.engines.postgres import Postgres
from headrace.engines.postgres_errors import PostgresBusy
from headrace.jobs import store
from headrace.jobs.fleet.alerts import (
    MINUTES_SEEN,
    RULES,
    Alert,
    AlertEvaluator,
    Change,
    FleetObservation,
    QueueObservation,
    open_alerts,
)
from headrace.jobs.fleet.plan import Move, Plan, plan
from headrace.jobs.fleet.queue_metrics import QueueMetrics
from headrace.jobs.fleet.rates import Rates, Reading
from headrace.jobs.fleet.state import FleetSnapshot, PlanInput, plan_input, readings
from headrace.jobs.leases import RECONNECT
from headrace.jobs.service import Jobs
from headrace.jobs.sql import SQL
from headrace.jobs.store.claim_cursor import WHOLE_SHARE
from headrace.kernel.errors import HeadraceError, PeerFailed
from headrace.kernel.logs import SparseLogger, logger
from headrace.kernel.metrics import bound, counter, gauge
from headrace.kernel.resilience import Backoff, require_not_cancelled, wait_event
from headrace.kernel.signing import Key, derive_key

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
                await self._postgres.run(SQL.mark_sent, alert=alert.id, is_raise=is_raise)
            except WebhookFailed as error:
                self._note_refused((alert.id, is_raise), failures + 1, error)
            if time.monotonic() - began_s >= TIMEOUT_S:
                return

    def _note_refused(self, event: tuple[int, bool], failures: int, error: WebhookFailed) -> None:
        self._refused[event] = (failures, time.monotonic() + self._retry.delay_s(failures))
        _log.warning("alert_not_sent", alert=event[0], error=error.text, failures=failures)


LEAD_PERIODS: Final = 1.5
STANDBY_LOOKS: Final = 4
"""Checks of a standby per period."""
DECLARE_EVERY_S: Final = 300.0
UPKEEP_EVERY_S: Final = 60.0
SEND_EVERY_S: Final = 2.0
ROWS_PER_STEP: Final = 10_000
COUNT_COSTLY_S: Final = 0.25
"""A count of waiting jobs that takes longer is repeated seldom."""
is_leading = gauge(
    "jobs_scheduler_leads", "1 if this scheduler is the leader, which shares slots among queues."
)
plans_written = counter("jobs_plans_total", "Plans that this process wrote.")
slots_moved = counter("jobs_slots_moved_total", "Slots that its plans gave to another queue.")
_often: Final = SparseLogger(_log)


class Scheduler:
    """The loops of one scheduler process."""

    def __init__(
        self, postgres: Postgres, jobs: Jobs, *, name: str, secret: str | None = None
    ) -> None:
        # Unique: two processes with one name, such as two containers, must not both lead.
        self.name = f"{name}:{token_hex(4)}"
        self.planner = Planner(postgres, jobs, self.name)
        self._postgres = postgres
        self._jobs = jobs
        self._config = jobs.config
        url = self._config.alerts_webhook_url
        self._alert_sender = (
            AlertSender(postgres, url, derive_key(secret, USE)) if url and secret else None
        )
        self._declared_s: float | None = None
        self._metrics = QueueMetrics()

    async def run(self, stop: asyncio.Event) -> None:
        """Run all loops until `stop`, then give up the lead."""
        async with asyncio.TaskGroup() as group:
            for name, step in (
                ("sweep", self.sweep),
                ("plan", self.planner.run_once),
                ("crons", self.fire_crons),
                ("upkeep", self.forget_old),
                ("backlog", self.record_backlog),
                ("alerts", self.send_alerts),
            ):
                group.create_task(_repeat(name, step, stop))
        with suppress(HeadraceError):
            await self.planner.stop_leading()

    async def sweep(self) -> float:
        """Do one step of maintenance. Return the seconds until the next."""
        swept = await self._jobs.sweep()
        if swept.jobs_returned:
            _log.warning("leases_returned", leases=swept.leases_returned, jobs=swept.jobs_returned)
        return 0.0 if swept.more else self._config.sweep_every_s

    async def fire_crons(self) -> float:
        """Declare this app's crons now and then, fire due ones. Return seconds to wait."""
        now_s = time.monotonic()
        if self._declared_s is None or now_s - self._declared_s > DECLARE_EVERY_S:
            await self._jobs.crons.declare()
            self._declared_s = now_s
        fired = await self._jobs.crons.fire_due()
        if fired:
            _log.info("crons_fired", crons=fired)
        return self._config.cron_every_s

    async def forget_old(self) -> float:
        """Delete expired statistics and decisions. Return the seconds until the next step."""
        if not self.planner.leads:
            return UPKEEP_EVERY_S
        config = self._config
        await self._postgres.run(SQL.sum_hours)
        kept_s = {
            ("queue_minute", "minute"): config.minutes_kept_s,
            ("queue_hour", "hour"): config.hours_kept_s,
            ("fleet_decision", "at"): config.decisions_kept_s,
            ("alert", "cleared_at"): config.decisions_kept_s,
        }
        forgotten = [
            await self._postgres.value(
                SQL.drop_old, table=table, column=column, kept_s=kept, rows_max=ROWS_PER_STEP
            )
            for (table, column), kept in kept_s.items()
        ]
        await self._jobs.crons.forget()
        return 1.0 if ROWS_PER_STEP in forgotten else UPKEEP_EVERY_S

    async def record_backlog(self) -> float:
        """Store the backlog of all queues and export it. Return the seconds until the next step."""
        every_s = self._config.backlog_every_s
        if not self.planner.leads:
            self._metrics.clear()
            return every_s
        try:
            async with asyncio.timeout(every_s):
                readings = await store.fleet.record_backlog(
                    self._postgres, count_max=self._config.count_max
                )
        except (TimeoutError, PostgresBusy):
            _often.warning("backlog_not_counted", limit_s=every_s)
        else:
            self._metrics.show(readings)
        return every_s

    async def send_alerts(self) -> float:
        """Send pending alert events. Return the seconds until the next step."""
        if self._alert_sender is not None and self.planner.leads:
            await self._alert_sender.send_due()
        return SEND_EVERY_S


class Planner:
    """Plans while it leads; otherwise keeps its rate windows up to date."""

    def __init__(self, postgres: Postgres, jobs: Jobs, name: str) -> None:
        self.leads = False
        self._postgres = postgres
        self._config = jobs.config
        self._name = name
        self._rates = Rates()
        self._read: dict[str, Reading] = {}
        self._waiting: dict[int, tuple[int, float]] = {}
        self._observed_s = float("-inf")
        self._count_from_s = 0.0
        self._watch: AlertEvaluator | None = None

    async def run_once(self) -> float:
        """Check the lead; plan if leading. Return the seconds until the next step."""
        every_s = self._config.plan_every_s
        began_s = time.monotonic()
        term = await store.fleet.lead_fleet(
            self._postgres, self._name, lead_s=every_s * LEAD_PERIODS
        )
        self._note_lead(is_leader=term is not None)
        if term is None:
            if began_s - self._observed_s >= every_s:
                await self._observe()
            return every_s / STANDBY_LOOKS
        facts = await self._observe()
        planned = await self._plan(facts, term)
        if self.leads:
            await self._watch_over(facts, planned)
        return max(0.0, every_s - (time.monotonic() - began_s))

    async def stop_leading(self) -> None:
        """Give up the lead at once."""
        if self.leads:
            self._note_lead(is_leader=False)
            await self._postgres.run(SQL.stop_leading, leader=self._name)

    async def gather(self) -> FleetSnapshot:
        """Gather the snapshot for a plan; the count of waiting jobs is bounded in time."""
        await self._count_waiting()
        return FleetSnapshot(
            queues=await store.fleet.fleet_queues(self._postgres, self._waiting),
            hosts=await store.fleet.fleet_hosts(
                self._postgres, silent_s=self._config.host_silent_s
            ),
            current=await store.fleet.slot_map(self._postgres),
            at_s=time.monotonic(),
        )

    async def _observe(self) -> FleetSnapshot:
        facts = await self.gather()
        self._observed_s = facts.at_s
        self._read = readings(facts, self._read)
        self._rates.observe(self._read)
        return facts

    async def _count_waiting(self) -> None:
        """Count waiting jobs; keep the last count if a long transaction slows the index."""
        began_s = time.monotonic()
        if began_s < self._count_from_s:
            return
        try:
            async with asyncio.timeout(self._config.plan_every_s / 4):
                self._waiting = await store.fleet.fleet_waiting(
                    self._postgres, count_max=self._config.count_max
                )
        except (TimeoutError, PostgresBusy):
            _often.warning("waiting_not_counted", limit_s=self._config.plan_every_s / 4)
        took_s = time.monotonic() - began_s
        if took_s > COUNT_COSTLY_S:
            self._count_from_s = began_s + took_s / WHOLE_SHARE

    async def _plan(self, facts: FleetSnapshot, term: int) -> Plan | None:
        """Plan and write the map. None if there is nothing to plan with or the lead is lost."""
        head = await store.fleet.find_plan(self._postgres)
        inputs = plan_input(facts, self._rates.rates())
        if not inputs.rooms or not (self._rates.is_ready or head.version == 0):
            return None
        planned = plan(inputs.needs, inputs.rooms, inputs.current)
        version = await store.fleet.write_plan(
            self._postgres,
            self._name,
            term,
            slots=planned.slots,
            queue_ids={queue.name: queue.id for queue in facts.queues},
            moves=[*planned.moves, *_without_code(inputs)],
        )
        if version is None:
            self._note_lead(is_leader=False)
            return None
        plans_written.inc()
        slots_moved.inc(planned.slots_moved)
        if version != head.version:
            _log.info("fleet_planned", version=version, moves=len(planned.moves), room=planned.room)
        return planned

    async def _watch_over(self, facts: FleetSnapshot, planned: Plan | None) -> None:
        """Evaluate the alert rules and store their changes."""
        if self._watch is None:
            known = await store.fleet.find_alerts(self._postgres, is_open=True, alerts_max=10_000)
            self._watch = AlertEvaluator(
                self._config, [(alert.rule, alert.subject) for alert in known]
            )
        outcomes = await store.fleet.recent_outcomes(self._postgres, minutes=MINUTES_SEEN)
        for change in self._watch.observe(observation(facts, planned, outcomes)):
            await self._note_change(change)
        for rule, count in self._watch.open_counts.items():
            bound(open_alerts, "jobs_alerts_open", rule=rule).set(count)

    async def _note_change(self, change: Change) -> None:
        if change.is_raised:
            alert = await store.fleet.raise_alert(
                self._postgres, change.rule, change.subject, change.text
            )
            if alert is not None:
                _log.warning(
                    "alert_raised", rule=change.rule, subject=change.subject, text=change.text
                )
        elif await store.fleet.clear_alert(self._postgres, change.rule, change.subject):
            _log.info("alert_cleared", rule=change.rule, subject=change.subject)

    def _note_lead(self, *, is_leader: bool) -> None:
        if is_leader != self.leads:
            _log.info("lead_taken" if is_leader else "lead_lost", scheduler=self._name)
            self._watch = None
            for rule in RULES:
                bound(open_alerts, "jobs_alerts_open", rule=rule).set(0)
        self.leads = is_leader
        is_leading.set(int(is_leader))


def observation(
    facts: FleetSnapshot, planned: Plan | None, outcomes: Mapping[int, tuple[int, int]]
) -> FleetObservation:
    """The input of the alert rules; `outcomes`: recent done and failed jobs by queue id.

    Queues without code now or ever are left out: people work at their own pace.
    """
    shares = {} if planned is None else planned.queues
    loaded = facts.loaded_queue_ids
    with_code = {queue_id for host in facts.hosts for queue_id in host.queue_ids}
    idle = Counter(
        slot.queue
        for host in facts.hosts_alive
        for slot in host.shown.slots
        if slot.queue is not None and slot.busy_s <= 0
    )
    queues = {}
    for queue in facts.queues:
        if queue.calls == 0 and queue.id not in with_code:
            continue
        done, failed = outcomes.get(queue.id, (0, 0))
        share = shares.get(queue.name)
        queues[queue.name] = QueueObservation(
            active=queue.active,
            leased=queue.leased,
            oldest_age_s=queue.oldest_age_s,
            done=done,
            failed=failed,
            is_at_max=share is not None and share.is_at_max,
            is_short=share is not None and share.is_short,
            is_loaded=queue.id in loaded,
            idle_elsewhere=idle.total() - idle[queue.name],
            slots=0 if share is None else share.slots,
            slots_min=0
            if share is None or queue.is_paused
            else min(queue.slots_min, queue.slots_max),
        )
    hosts = {
        host.shown.name: host.shown.is_silent
        for host in facts.hosts
        if host.shown.reported_at is not None and not host.shown.is_draining
    }
    return FleetObservation(at_s=facts.at_s, queues=queues, hosts=hosts)


def _without_code(inputs: PlanInput) -> list[Move]:
    return [
        Move(
            queue=queue,
            host=host,
            before=slots,
            after=0,
            code="no_code",
            why=f"no living host has code for {queue} any more: its slots are free",
        )
        for host, queue, slots in inputs.without_code
    ]


async def _repeat(name: str, step: Callable[[], Awaitable[float]], stop: asyncio.Event) -> None:
    """Repeat a step until `stop`, after the seconds it returns; wait for an absent database."""
    failures = 0
    while not stop.is_set():
        require_not_cancelled()
        try:
            wait_s = await step()
            failures = 0
        except HeadraceError as error:
            if not error.retryable:
                raise
            failures += 1
            wait_s = RECONNECT.delay_s(failures)
            _often.warning("scheduler_waits", kind=name, step=name, error=error.text)
        await wait_event(stop, wait_s)
