"""Download a sample of the photos of a dry run, to predict outcomes and duration.

Each download consumes a token of the rate limit of the customer, so a dry run is as polite as a
real run. The expected duration follows from the rate limit, or from the connections and the
measured speed of the sample, if that is slower.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeAlias

from headrace.engines.postgres import Postgres
from headrace.fetch import store
from headrace.fetch.applying import APPLY_S_MAX
from headrace.fetch.limits import LaneClient, RateTokens, TokenExpired
from headrace.fetch.model import Customer, PhotoReport, Sample, SampledPhoto
from headrace.fetch.sql import SQL
from headrace.jobs.errors import LaneExhausted

Try: TypeAlias = Coroutine[Any, Any, PhotoReport]
LINKS_MAX: Final = 20
AT_ONCE_MAX: Final = 5
SAMPLE_S_MAX: Final = 60.0
"""Time limit of the whole sample; photos not downloaded by then are left out."""


class Sampling:
    """Downloads some of the photos that a run needs."""

    def __init__(
        self, postgres: Postgres, lanes: LaneClient, try_photo: Callable[[str, RateTokens], Try]
    ) -> None:
        self._postgres = postgres
        self._lanes = lanes
        self._try_photo = try_photo

    async def sample(self, run_id: int, customer: str) -> Sample:
        """Download up to 20 randomly chosen photos of a run; return their outcomes."""
        found = (await store.runs.find_customers(self._postgres, customer))[0]
        async with self._postgres.transaction() as tx:
            await tx.allow_long_statements(APPLY_S_MAX)
            rows = await tx.all(SQL.sampled_links, run_id=run_id, links_max=LINKS_MAX)
            needs = int(await tx.value(SQL.needs_count, run_id=run_id))
        permits = asyncio.Semaphore(min(AT_ONCE_MAX, found.connections))
        photos: list[SampledPhoto] = []
        urls = dict.fromkeys(row["url"] for row in rows)
        tries = [self._try(url, customer, permits, photos) for url in urls]
        try:
            async with asyncio.timeout(SAMPLE_S_MAX):
                await asyncio.gather(*tries)
        except TimeoutError:
            pass  # the photos downloaded so far are the sample
        return Sample(photos=photos, expected_s=expected_s(needs, found, photos))

    async def _try(
        self,
        url: str,
        customer: str,
        permits: asyncio.Semaphore,
        photos: list[SampledPhoto],
    ) -> None:
        async with permits:
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
    """The expected seconds to download `needs` photos, from the limits and the sample."""
    per_s = customer.starts_max / customer.window_s
    took_s = sum(photo.took_s for photo in photos)
    if took_s:
        per_s = min(per_s, customer.connections * len(photos) / took_s)
    return round(needs / per_s, 1)
