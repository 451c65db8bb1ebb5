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

import asyncio
import base64
import hmac
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import pycurl

from headrace.engines.postgres import Postgres, Runner
from headrace.fetch import store
from headrace.fetch.curl import AsyncCurl, TransferFailed, new_socket, peer_reason, pinned_handle
from headrace.fetch.dns import DnsCache, DnsFailed
from headrace.fetch.errors import UrlRefused
from headrace.fetch.guard import Address, Policy, Target, forbidden_reason, judge_url
from headrace.fetch.model import WEBHOOK_POSTS, WEBHOOK_QUEUE, Result
from headrace.fetch.settings import FetchConfig
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
ANSWER_BYTES_MAX: Final = 64 * 1024
HEADER_BYTES_MAX: Final = 32 * 1024
CONNECT_TIMEOUT_S: Final = 10.0
ADDRESSES_TRIED: Final = 2


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

    def __init__(self, postgres: Postgres, jobs: Jobs, client: WebhookClient) -> None:
        self._postgres = postgres
        self._jobs = jobs
        self._client = client

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

    async def post(self, hook: Hook, message_id: str, body: bytes) -> WebhookResponse:
        """POST a signed body to the webhook. Raises: PostFailed."""
        headers = headers_of(message_id, body, hook.secrets, int(time.time()))
        return await self._client.post(hook.shown.url, headers, body)

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


class PostFailed(Exception):
    """The POST got no response; `text` is the reason."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class NotConnected(PostFailed):
    """The connection was refused or timed out."""


@dataclass(frozen=True, slots=True)
class WebhookResponse:
    """Status and Retry-After of a response."""

    status: int
    retry_after_s: float | None = None


@dataclass(slots=True)
class _Exchange:
    """State of one POST, filled by libcurl's callbacks."""

    policy: Policy
    status: int = 0
    retry_after: str = ""
    header_bytes: int = 0
    body_bytes: int = 0
    refused: str | None = None
    is_cut: bool = False
    """The rest of a long response was not read; its status counts."""

    def open_socket(self, _purpose: int, address: tuple[int, int, int, tuple[Any, ...]]) -> Any:
        """Refuse a socket to a forbidden address."""
        family, kind, protocol, peer = address
        reason = peer_reason(peer[0], int(peer[1]), self.policy)
        if reason is not None:
            self.refused = reason
            return pycurl.SOCKET_BAD
        return new_socket(family, kind, protocol)

    def on_header(self, line: bytes) -> int | None:
        """Store the last status and its Retry-After."""
        self.header_bytes += len(line)
        if self.header_bytes > HEADER_BYTES_MAX:
            self.is_cut = self.status > 0
            return -1
        text = line.decode("latin-1").strip()
        if text.startswith("HTTP/"):
            words = text.split(None, 2)
            self.status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
        elif text.lower().startswith("retry-after:"):
            self.retry_after = text.partition(":")[2].strip()
        return None

    def on_body(self, block: bytes) -> int | None:
        """Drop the body; stop reading a long one."""
        self.body_bytes += len(block)
        if self.body_bytes > ANSWER_BYTES_MAX:
            self.is_cut = True
            return -1
        return None


class WebhookClient:
    """Client for POSTs of one process; opens no connection before the first."""

    def __init__(self, config: FetchConfig) -> None:
        self._config = config
        self.policy = Policy.of(config.allow_networks, config.allow_ports)
        self._dns = DnsCache(config.name_servers)
        self._curl: AsyncCurl | None = None

    async def close(self) -> None:
        """Close connections and the resolver."""
        await self._dns.close()
        if self._curl is not None:
            self._curl.close()
            self._curl = None

    async def post(self, url: str, headers: list[str], body: bytes) -> WebhookResponse:
        """POST `body` within `fetch.webhook_timeout`; return the response. Raises: PostFailed."""
        limit_s = self._config.webhook_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                target = judge_url(url, self.policy)
                return await self._post_to_any(target, headers, body)
        except UrlRefused as error:
            raise PostFailed(error.text) from None
        except TimeoutError:
            raise PostFailed(f"no response within {limit_s:g} s") from None

    async def _post_to_any(
        self, target: Target, headers: list[str], body: bytes
    ) -> WebhookResponse:
        """Send to the first address; use the second if the first does not connect."""
        addresses = (await self._addresses_of(target))[:ADDRESSES_TRIED]
        for address in addresses[:-1]:
            try:
                return await self._post(target, address, headers, body)
            except NotConnected:
                continue
        return await self._post(target, addresses[-1], headers, body)

    async def _addresses_of(self, target: Target) -> tuple[Address, ...]:
        if target.literal is not None:
            return (target.literal,)
        try:
            addresses = await self._dns.resolve(target.host)
        except DnsFailed as error:
            raise PostFailed(f"the name {target.host} cannot be resolved: {error}") from None
        for address in addresses:
            reason = forbidden_reason(address, self.policy)
            if reason is not None:
                raise PostFailed(f"{target.host}: {reason}")
        return addresses

    async def _post(
        self, target: Target, address: Address, headers: list[str], body: bytes
    ) -> WebhookResponse:
        exchange = _Exchange(self.policy)
        if self._curl is None:
            self._curl = AsyncCurl()
        handle = pinned_handle(self._config, target, address, exchange)
        handle.setopt(pycurl.POST, 1)
        handle.setopt(pycurl.CONNECTTIMEOUT_MS, int(CONNECT_TIMEOUT_S * 1000))
        handle.setopt(pycurl.TIMEOUT_MS, max(1, int(self._config.webhook_timeout_s * 1000)))
        handle.setopt(pycurl.HTTPHEADER, [*headers, "Accept: */*", "Expect:"])
        handle.setopt(pycurl.POSTFIELDS, body)
        try:
            await self._curl.perform(handle)
        except TransferFailed as error:
            if error.number == pycurl.E_COULDNT_CONNECT:
                raise NotConnected(exchange.refused or error.text) from None
            if not exchange.is_cut:
                raise PostFailed(exchange.refused or error.text) from None
        finally:
            handle.close()
        seconds = exchange.retry_after
        return WebhookResponse(exchange.status, float(seconds[:9]) if seconds.isdigit() else None)
