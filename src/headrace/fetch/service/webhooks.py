"""The verbs of webhooks: set, look, rotate their secrets, replay, try, forget."""

from __future__ import annotations

import time
from secrets import token_hex
from typing import Final

import msgspec

from headrace.engines.postgres import Postgres, Runner
from headrace.fetch import store
from headrace.fetch.errors import WebhookUnknown
from headrace.fetch.guard import judge_url
from headrace.fetch.model import (
    BIGINT_MAX,
    NewSecret,
    Webhook,
    WebhookReplay,
    WebhookTrial,
)
from headrace.fetch.posting import Poster, PostFailed
from headrace.fetch.store.sql import SQL
from headrace.fetch.store.webhooks import Hook
from headrace.fetch.webhooks import OVERLAP_S, WebhookSending, new_secret, webhook_job
from headrace.jobs import Jobs
from headrace.kernel.ids import USER_ID
from headrace.kernel.routes import PAGE_ROWS_MAX

_JSON: Final = msgspec.json.Encoder()


class Webhooks:
    """Where results are sent: `fetch.webhooks`."""

    def __init__(
        self, postgres: Postgres, jobs: Jobs, poster: Poster, sending: WebhookSending
    ) -> None:
        self._postgres = postgres
        self._jobs = jobs
        self._poster = poster
        self._sending = sending

    async def set(self, customer: str, url: str, *, tx: Runner) -> str | None:
        """Send the results of a customer to `url` from now on; its new secret, None where it has one.

        Setting it again moves it to another URL, enables it and sends what waits at once. Inside the
        transaction that makes or changes the customer. Raises: UrlRefused.
        """
        judge_url(url, self._poster.policy)
        secret = new_secret()
        # Publishing takes the same turn: a result is either before the webhook or finds it.
        await tx.run(SQL.take_turn)
        turn, is_new = await store.webhooks.set_webhook(tx, customer, url=url, secret=secret)
        await self._jobs.enqueue_many([webhook_job(turn)], tx=tx)
        return secret if is_new else None

    async def get(self, customer: str) -> Webhook:
        """A customer's webhook and how far it is. Raises: WebhookUnknown."""
        return (await self._hook(customer)).shown

    async def url_of(self, customer: str) -> str | None:
        """Where a customer's results are sent, if anywhere."""
        found = await store.webhooks.find_webhooks(
            self._postgres, customer=customer, is_counted=False
        )
        return found[0].shown.url if found else None

    async def list(self, *, after: str = "", webhooks_max: int = 100) -> list[Webhook]:
        """Webhooks by customer, those behind `after`."""
        rows_max = min(max(1, webhooks_max), PAGE_ROWS_MAX)
        after = after if after.isprintable() else ""
        found = await store.webhooks.find_webhooks(self._postgres, after=after, rows_max=rows_max)
        return [hook.shown for hook in found]

    async def remove(self, customer: str) -> None:
        """Send the customer's results nowhere any more; they stay for whoever polls. Raises: WebhookUnknown."""
        await self._hook(customer)
        await self._postgres.run(SQL.remove_webhook, customer=customer)

    async def rotate(self, customer: str) -> NewSecret:
        """Give a webhook a new secret; the one before signs as well for a day. Raises: WebhookUnknown."""
        await self._hook(customer)
        secret = new_secret()
        old_until = await self._postgres.value(
            SQL.rotate_secret, customer=customer, secret=secret, overlap_s=OVERLAP_S
        )
        return NewSecret(customer=customer, secret=secret, old_until=old_until)

    async def replay(self, customer: str, *, after: int = 0) -> WebhookReplay:
        """Send every result after number `after` once more, at once. Raises: WebhookUnknown."""
        await self._hook(customer)
        after = min(max(0, after), BIGINT_MAX)
        async with self._postgres.transaction() as tx:
            turn = await store.webhooks.rewind(tx, customer, after=after)
            if turn is None:
                raise WebhookUnknown(customer)
            # Counted before it commits: afterwards its job may have sent some of them.
            [hook] = await store.webhooks.find_webhooks(tx, customer=customer)
            await self._jobs.enqueue_many([webhook_job(turn)], tx=tx)
        return WebhookReplay(customer=customer, after=after, waiting=hook.shown.waiting)

    async def test(self, customer: str) -> WebhookTrial:
        """Send one signed message without results now and say what came back. Raises: WebhookUnknown."""
        hook = await self._hook(customer)
        body = _JSON.encode({"type": "fetch.test", "customer": customer, "results": []})
        started_s = time.monotonic()
        try:
            posted = await self._sending.post(hook, f"test_{token_hex(8)}", body)
        except PostFailed as error:
            status, text = None, error.text
        else:
            status = posted.status
            text = "taken" if 200 <= status < 300 else f"the receiver answers {status}"
        return WebhookTrial(
            customer=customer,
            url=hook.shown.url,
            is_taken=text == "taken",
            status=status,
            text=text,
            took_s=round(time.monotonic() - started_s, 4),
        )

    async def _hook(self, customer: str) -> Hook:
        is_name = USER_ID.fullmatch(customer) is not None
        found = (
            await store.webhooks.find_webhooks(self._postgres, customer=customer) if is_name else []
        )
        if not found:
            raise WebhookUnknown(customer)
        return found[0]
