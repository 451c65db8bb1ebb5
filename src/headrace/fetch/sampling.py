"""A few photos of a dry run, really downloaded: how the real run would go, and how long it would take.

Each takes its start out of the customer's lane like any other request, so a dry run is as polite as a real
one. What is expected: the photos to ask at the customer's rate, or, where that is slower, over its connections
at the speed of those that were sampled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeAlias

from headrace.engines.postgres import Postgres
from headrace.fetch import store
from headrace.fetch.applying import APPLY_S_MAX
from headrace.fetch.model import Customer, PhotoReport, Sample, SampledPhoto
from headrace.fetch.rate_tokens import LaneClient, RateTokens, TokenExpired
from headrace.fetch.store.sql import SQL
from headrace.jobs.errors import LaneExhausted

Try: TypeAlias = Coroutine[Any, Any, PhotoReport]
LINKS_MAX: Final = 20
AT_ONCE_MAX: Final = 5
SAMPLE_S_MAX: Final = 60.0
"""Longest time of all of them; those not asked by then are left out."""


class Sampling:
    """Tries some of the photos that a run would ask."""

    def __init__(
        self, postgres: Postgres, lanes: LaneClient, try_photo: Callable[[str, RateTokens], Try]
    ) -> None:
        self._postgres = postgres
        self._lanes = lanes
        self._try_photo = try_photo

    async def sample(self, run_id: int, customer: str) -> Sample:
        """What became of at most 20 of the run's photos, drawn at random."""
        found = (await store.catalogues.find_customers(self._postgres, customer))[0]
        async with self._postgres.transaction() as tx:
            await tx.allow_long_statements(APPLY_S_MAX)
            rows = await tx.all(SQL.sampled_links, run_id=run_id, links_max=LINKS_MAX)
            needs = int(await tx.value(SQL.needs_count, run_id=run_id))
        places = asyncio.Semaphore(min(AT_ONCE_MAX, found.connections))
        photos: list[SampledPhoto] = []
        urls = dict.fromkeys(row["url"] for row in rows)
        tries = [self._try(url, customer, places, photos) for url in urls]
        try:
            async with asyncio.timeout(SAMPLE_S_MAX):
                await asyncio.gather(*tries)
        except TimeoutError:
            pass  # what came until then is the sample
        return Sample(photos=photos, expected_s=expected_s(needs, found, photos))

    async def _try(
        self,
        url: str,
        customer: str,
        places: asyncio.Semaphore,
        photos: list[SampledPhoto],
    ) -> None:
        async with places:
            try:
                tokens = await self._lanes.tokens(customer, wait_max_s=SAMPLE_S_MAX)
                report = await self._try_photo(url, tokens)
            except (LaneExhausted, TokenExpired):
                return
            photos.append(
                SampledPhoto(
                    url=url, outcome=report.outcome, text=report.text, took_s=report.took_s
                )
            )


def expected_s(needs: int, customer: Customer, photos: list[SampledPhoto]) -> float:
    """How long asking `needs` photos takes, within the customer's limits and as fast as the sampled ones."""
    per_s = customer.starts_max / customer.window_s
    took_s = sum(photo.took_s for photo in photos)
    if took_s:
        per_s = min(per_s, customer.connections * len(photos) / took_s)
    return round(needs / per_s, 1)
