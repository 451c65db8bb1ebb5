"""Two crons: publish items at their deadline, and retry failed links.

**Deadlines**, every 5 minutes: a new or changed item whose photos take longer than
`fetch.item_deadline` is published with the photos it has. Downloads continue; photos that arrive
later create a further version.

**Links**, every 15 minutes: failed links are retried at the latest after `fetch_recheck_wait` (less
than a day), even if no catalogue arrives. If `fetch.refresh` is set, stored photos are requested
again with their ETag or date. The items of these links form a run of the format `links`. Items that
another run is changing wait for it.

Catalogue runs skip a failed link for one run, then for two, then for three. This rule is
implemented only in the PostgreSQL functions `fetch_due_round`, `fetch_is_due` and
`fetch_recheck_wait`.
"""

from __future__ import annotations

from typing import Final

from headrace.engines.postgres import Postgres, PostgresBusy
from headrace.fetch import store
from headrace.fetch.applying import APPLY_S_MAX, Applying
from headrace.fetch.model import DEADLINES_QUEUE, LINKS_QUEUE, Customer
from headrace.fetch.publishing import Publishing
from headrace.fetch.settings import FetchConfig
from headrace.fetch.sql import SQL
from headrace.jobs import Registry
from headrace.kernel.logs import logger
from headrace.kernel.resilience import crash_point

LINKS_FORMAT: Final = "links"
LINKS_EVERY_S: Final = 900.0
RATE_SHARE: Final = 0.5
"""The share of the rate limit of a customer that one sweep may use until the next sweep."""
LINKS_MIN: Final = 10
_LOG: Final = logger(__name__)


class Upkeep:
    """Publishes items at their deadline; requests failed and old photos again."""

    def __init__(
        self, postgres: Postgres, config: FetchConfig, publishing: Publishing, applying: Applying
    ) -> None:
        self._postgres = postgres
        self._config = config
        self._publishing = publishing
        self._applying = applying

    def register(self, registry: Registry) -> None:
        """Register the crons."""
        registry.cron("*/5 * * * *", name=DEADLINES_QUEUE, timeout="1h")(self.publish_late)
        registry.cron("*/15 * * * *", name=LINKS_QUEUE, timeout="1h")(self.recheck_links)

    async def publish_late(self) -> None:
        """Publish each item past its deadline once, with the photos it has."""
        runs = await self._postgres.all(SQL.late_runs, deadline_s=self._config.item_deadline_s)
        for row in runs:
            items = await self._publishing.publish_late(row["id"])
            if items:
                _LOG.info("items_published_late", run=row["id"], items=items)

    async def recheck_links(self) -> None:
        """Request due failed links again, and stored photos that are old enough."""
        refresh_s = self._config.refresh_s
        due = await self._postgres.all(SQL.customers_to_recheck, refresh_s=refresh_s)
        for row in due:
            [customer] = await store.catalogues.find_customers(self._postgres, row["customer"])
            try:
                await self._recheck(customer)
            except PostgresBusy:
                _LOG.info("links_not_rechecked", customer=customer.customer, reason="busy")

    async def _recheck(self, customer: Customer) -> None:
        own_s = customer.refresh_s
        refresh_s = self._config.refresh_s if own_s is None else own_s
        allowed = customer.starts_max / customer.window_s * LINKS_EVERY_S * RATE_SHARE
        async with self._postgres.transaction() as tx:
            await tx.allow_long_statements(APPLY_S_MAX)
            await tx.one(SQL.lock_items, customer=customer.customer)
            run_id: int = await tx.value(
                SQL.insert_run,
                customer=customer.customer,
                file_name=LINKS_FORMAT,
                format=LINKS_FORMAT,
                is_whole=False,
            )
            await tx.run(SQL.avoid_nested_loops)
            items: int = await tx.value(
                SQL.stage_due,
                run_id=run_id,
                customer=customer.customer,
                refresh_s=refresh_s,
                links_max=max(LINKS_MIN, int(allowed)),
            )
            await tx.run(SQL.allow_nested_loops)
            if items:
                await self._applying.request_links(
                    tx, run_id, customer.customer, refresh_s=refresh_s
                )
            else:
                await tx.run(SQL.drop_run, run_id=run_id)
        crash_point("fetch.links_rechecked")
