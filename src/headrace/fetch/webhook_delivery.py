"""Webhooks: signed results to a customer's URL, in order, retried until the receiver accepts them.

    publish --same transaction--> job of the webhook's turn --> results after `taken_seq`, up to
    100 and 1 MiB --POST--> 2xx: advance `taken_seq` | 410: disable | else: retry with backoff

The results table is the backlog; a webhook stores one number into it. A receiver that is down for
a week loses nothing and costs one request every quarter of an hour. One job per customer sends at
a time, so results arrive in the order of their commits. A message without a response is sent
again, so a receiver keeps the newest `version` of each item.

A job belongs to a turn of its webhook. The publisher locks the webhook and enqueues the job of its
turn under a unique key. A job without unsent results takes the same lock, checks again and ends
the turn. So a result either finds a job that sends it or enqueues the next one. Setting the
webhook or a replay starts another turn, and a job of the old turn ends when it wakes up.

The URL of a webhook is as hostile as that of a photo: the URL, every address of its name and the
peer of the socket are checked, and no redirect is followed. Only status and Retry-After of the
response count.

The format is that of Standard Webhooks (`webhook-id`, `webhook-timestamp`, `webhook-signature`),
which libraries of most languages verify: https://github.com/standard-webhooks/standard-webhooks.
"""

from __future__ import annotations

import base64
import hmac
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from headrace.engines.postgres import Postgres, Runner
from headrace.fetch import store
from headrace.fetch.download import Downloader, PostFailed, PostResponse
from headrace.fetch.model import WEBHOOK_POSTS, WEBHOOK_QUEUE, Result
from headrace.fetch.sql import SQL
from headrace.fetch.store.results import Hook, WebhookTurn
from headrace.jobs import JobContext, Jobs, NewJob, Snooze
from headrace.kernel.errors import Unavailable
from headrace.kernel.logs import logger
from headrace.kernel.resilience import Backoff, crash_point
from headrace.kernel.routes import PAGE_ROWS_MAX

RESULTS_OF_MESSAGE: Final = 100
MESSAGE_BYTES_MAX: Final = 2**20
SECRET_BYTES: Final = 32
SECRET_PREFIX: Final = "whsec_"  # noqa: S105 - the form, no secret
OVERLAP_S: Final = 86_400.0
"""Time after a rotation in which both secrets sign."""
AGAIN: Final = Backoff(first_s=5.0, max_s=900.0)
RETRY_AFTER_S_MAX: Final = 3600.0
STEP_S: Final = 60.0
"""A job sends for this time, then requeues itself behind others."""
WEBHOOKS_AT_ONCE: Final = 50
GONE: Final = 410
_LOG: Final = logger(__name__)
_JSON: Final = msgspec.json.Encoder()


class WebhookJob(msgspec.Struct, frozen=True, kw_only=True):
    """Payload: a turn of a customer's webhook."""

    customer: str
    turn: int


@dataclass(frozen=True, slots=True)
class Message:
    """Content of one POST."""

    id: str
    body: bytes
    last_seq: int


def new_secret() -> str:
    """A new secret in the Standard Webhooks form: `whsec_` and base64."""
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def signature(secret: str, message_id: str, at_s: int, body: bytes) -> str:
    """`v1,` and HMAC-SHA256 of `id.timestamp.body` in base64."""
    key = base64.b64decode(secret.removeprefix(SECRET_PREFIX))
    signed = f"{message_id}.{at_s}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(key, signed, "sha256")).decode()


def headers_of(message_id: str, body: bytes, secrets_of: Sequence[str], at_s: int) -> list[str]:
    """The headers of a POST, signed with each secret."""
    signatures = " ".join(signature(secret, message_id, at_s, body) for secret in secrets_of)
    return [
        "Content-Type: application/json",
        f"webhook-id: {message_id}",
        f"webhook-timestamp: {at_s}",
        f"webhook-signature: {signatures}",
    ]


def message_of(customer: str, results: Sequence[Result]) -> Message:
    """A message with as many of `results` as fit, at least one."""
    parts: list[bytes] = []
    size_bytes = 0
    for result in results[:RESULTS_OF_MESSAGE]:
        part = _JSON.encode(result)
        size_bytes += len(part) + 1
        if parts and size_bytes > MESSAGE_BYTES_MAX:
            break
        parts.append(part)
    sent = results[: len(parts)]
    head = _JSON.encode({"type": "fetch.results", "customer": customer})[:-1]
    body = head + b',"results":[' + b",".join(parts) + b"]}"
    return Message(f"results_{sent[0].seq}_{sent[-1].seq}", body, sent[-1].seq)


def webhook_job(turn: WebhookTurn) -> NewJob:
    """The unique job of a webhook's turn."""
    return NewJob(
        queue=WEBHOOK_QUEUE,
        payload=WebhookJob(customer=turn.customer, turn=turn.turn),
        unique=f"{turn.id}:{turn.turn}",
    )


class WebhookSender:
    """Handler of the webhook queue."""

    def __init__(
        self, postgres: Postgres, jobs: Jobs, downloader: Downloader, *, timeout_s: float
    ) -> None:
        self._postgres = postgres
        self._jobs = jobs
        self._downloader = downloader
        self._timeout_s = timeout_s

    async def notify(self, tx: Runner, customers: set[str]) -> None:
        """Enqueue the webhook jobs of customers whose results are published in `tx`."""
        turns = await store.results.lock_turns(tx, sorted(customers))
        if turns:
            await self._jobs.enqueue_many([webhook_job(turn) for turn in turns], tx=tx)

    async def notify_all(self) -> None:
        """Enqueue a job for every webhook with a backlog, unless it has one.

        A job may be missing after a quarantine or a deletion by a person.
        """
        after, turns = "", [WebhookTurn("", 0, 0)]
        while turns:
            turns = await store.results.turns_behind(
                self._postgres, after=after, rows_max=PAGE_ROWS_MAX
            )
            await self._jobs.enqueue_many([webhook_job(turn) for turn in turns])
            after = turns[-1].customer if turns else after

    async def deliver(self, job: JobContext[WebhookJob]) -> None:
        """Send the backlog of the customer's webhook."""
        try:
            await self._deliver(job)
        except Unavailable as error:
            raise Snooze(error.retry_after_s or 5.0) from error

    async def _deliver(self, job: JobContext[WebhookJob]) -> None:
        customer, turn = job.payload.customer, job.payload.turn
        ends_s = time.monotonic() + STEP_S
        while time.monotonic() < ends_s:
            found = await store.results.find_webhooks(
                self._postgres, customer=customer, is_counted=False
            )
            if not found or found[0].turn != turn or found[0].shown.disabled_at is not None:
                return
            results = await store.results.unsent_results(
                self._postgres,
                customer,
                after=found[0].shown.taken_seq,
                rows_max=RESULTS_OF_MESSAGE,
                bytes_max=MESSAGE_BYTES_MAX,
            )
            if not results:
                async with self._postgres.transaction() as tx:
                    if await store.results.end_turn(tx, customer, turn):
                        return
                continue
            delay_s = await self._send(found[0], message_of(customer, results))
            if delay_s is not None:
                job.snooze(delay_s)
                return
        job.snooze(0.0)

    async def _send(self, hook: Hook, message: Message) -> float | None:
        """Send a message and record the result; return the delay of the retry, or None."""
        place = {"customer": hook.shown.customer, "turn": hook.turn}
        try:
            posted = await self.post(hook, message.id, message.body)
        except PostFailed as error:
            return await self._note_refused(hook, error.text, None, None)
        if 200 <= posted.status < 300:
            crash_point("fetch.webhook_taken")
            WEBHOOK_POSTS.labels(outcome="taken").inc()
            await self._postgres.run(
                SQL.note_taken, **place, seq=message.last_seq, status=posted.status
            )
            return None
        text = f"the receiver responded {posted.status}"
        if posted.status == GONE:
            WEBHOOK_POSTS.labels(outcome="gone").inc()
            await self._postgres.run(SQL.disable_webhook, **place, status=posted.status, error=text)
            _LOG.warning(
                "webhook_gone",
                customer=hook.shown.customer,
                url=hook.shown.url,
                text="the receiver responded 410; the webhook is disabled and keeps its backlog:"
                f" run headrace fetch customer set {hook.shown.customer} --webhook URL",
            )
            return None
        return await self._note_refused(hook, text, posted.status, posted.retry_after_s)

    async def post(self, hook: Hook, message_id: str, body: bytes) -> PostResponse:
        """POST a signed body to the webhook. Raises: PostFailed."""
        headers = headers_of(message_id, body, hook.secrets, int(time.time()))
        return await self._downloader.post(hook.shown.url, headers, body, time_s=self._timeout_s)

    async def _note_refused(
        self, hook: Hook, text: str, status: int | None, retry_after_s: float | None
    ) -> float:
        WEBHOOK_POSTS.labels(outcome="refused").inc()
        failures = hook.shown.failures + 1
        asked_s = min(retry_after_s or 0.0, RETRY_AFTER_S_MAX)
        delay_s = max(asked_s, AGAIN.delay_s(failures))
        values: dict[str, Any] = {"customer": hook.shown.customer, "turn": hook.turn}
        await self._postgres.run(
            SQL.note_refused, **values, delay_s=delay_s, status=status, error=text[:500]
        )
        _LOG.warning(
            "webhook_not_taken",
            customer=hook.shown.customer,
            error=text,
            failures=failures,
            again_s=round(delay_s, 1),
        )
        return delay_s
