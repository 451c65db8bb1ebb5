"""Where catalogues come from and where results go: sources, consumers, webhooks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from headrace.console.seeing import Ask, Found, attempt
from headrace.fetch.model import Consumer, Source, Webhook

WEBHOOKS_SHOWN: Final = 200
WAITING_COUNTED: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLine:
    """A source and how it does."""

    source: Source
    tone: str
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcesView:
    """Every source."""

    sources: Found[list[SourceLine]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookLine:
    """A webhook and how it does."""

    webhook: Webhook
    tone: str
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveriesView:
    """Who is told of results."""

    consumers: Found[list[Consumer]]
    webhooks: Found[list[WebhookLine]]
    more: str | None
    waiting_counted: int


async def see_sources(ask: Ask) -> SourcesView:
    """Where catalogues are brought from."""
    found = await attempt(ask.service("fetch").sources.all())
    lines = None if found.value is None else [source_line(source) for source in found.value]
    return SourcesView(sources=Found(lines, found.error))


async def see_deliveries(ask: Ask) -> DeliveriesView:
    """Consumers and webhooks, with what waits for them."""
    fetch = ask.service("fetch")
    after = ask.query.text("after", most=128)
    consumers, webhooks = await asyncio.gather(
        attempt(fetch.consumers.all()),
        attempt(fetch.webhooks.list(after=after, webhooks_max=WEBHOOKS_SHOWN)),
    )
    lines, more = None, None
    if webhooks.value is not None:
        lines = [webhook_line(webhook, ask.now_at) for webhook in webhooks.value]
        if len(webhooks.value) == WEBHOOKS_SHOWN:
            more = ask.url(after=webhooks.value[-1].customer)
    return DeliveriesView(
        consumers=consumers,
        webhooks=Found(lines, webhooks.error),
        more=more,
        waiting_counted=WAITING_COUNTED,
    )


def source_line(source: Source) -> SourceLine:
    """A source as a line of the list."""
    if source.next_at is None:
        return SourceLine(source=source, tone="warn", state="paused")
    if source.outcome is None:
        return SourceLine(source=source, tone="", state="not brought yet")
    kind = source.outcome.partition(":")[0]
    tone = {"failed": "bad", "refused": "bad", "held": "warn"}.get(kind, "good")
    return SourceLine(source=source, tone=tone, state=source.outcome)


def webhook_line(webhook: Webhook, now_at: datetime) -> WebhookLine:
    """A webhook as a line of the list."""
    if webhook.disabled_at is not None:
        return WebhookLine(webhook=webhook, tone="bad", state="gone")
    if webhook.failures:
        return WebhookLine(webhook=webhook, tone="bad", state="failing")
    if webhook.waiting and webhook.next_at is not None and webhook.next_at > now_at:
        return WebhookLine(webhook=webhook, tone="warn", state="waiting")
    return WebhookLine(webhook=webhook, tone="good", state="sending" if webhook.waiting else "even")
