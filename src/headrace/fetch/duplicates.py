"""Near-duplicates: photos that look alike, listed for moderators and never merged.

Each decoded photo has a perceptual hash of 64 bits (`decoding/photo_child.py`). A row per customer
and content is inserted with the photo's outcome. A cron compares new rows with all others and
records the pairs that differ in at most BITS_MAX bits; downloads never wait for it.

**The search** (multi-index hashing; Norouzi, Punjani and Fleet, 2012): the hash is divided into
four bands of 16 bits, each with a B-tree index. Of two hashes that differ in at most 7 bits, one
band differs in at most one bit. So 17 values of each of four bands find every such hash.

Many photos may look like one placeholder: a photo has at most the PAIRS_MAX nearest pairs, found
among CANDIDATES_MAX rows of each band. Photos of one item are not paired.
"""

from __future__ import annotations

import time
from datetime import datetime
from typing import Final

import msgspec

from headrace.engines.postgres import Postgres
from headrace.fetch import store
from headrace.fetch.errors import DuplicateUnknown
from headrace.fetch.model import BIGINT_MAX, DUPLICATES_QUEUE
from headrace.fetch.sql import SQL
from headrace.jobs import Registry
from headrace.kernel.routes import PAGE_ROWS_MAX

BITS_MAX: Final = 7
"""Largest distance that the four bands find without exception."""
PAIRS_MAX: Final = 20
CANDIDATES_MAX: Final = 2_000
ROWS_OF_STEP: Final = 500
COMPARE_S: Final = 50.0
"""A run of the cron ends before the next one starts."""


class HashedPhoto(msgspec.Struct, frozen=True, kw_only=True):
    """A photo of a customer: its first item and link, and its stored bytes."""

    customer: str
    item: str
    url: str
    sha256: str
    key: str
    width: int
    height: int
    size_bytes: int


class NearPhoto(HashedPhoto, frozen=True, kw_only=True):
    """A photo that looks like another; `distance` is the number of different bits."""

    distance: int


class NearDuplicate(msgspec.Struct, frozen=True, kw_only=True):
    """Two photos that look alike; `distance` 0: the same content or no visible difference."""

    id: int
    distance: int
    found_at: datetime
    reviewed_at: datetime | None
    photos: list[HashedPhoto]
    """The older one first."""


_PHOTOS: Final = list[HashedPhoto]


class Duplicates:
    """Photos that look alike: `fetch.duplicates`."""

    def __init__(self, postgres: Postgres) -> None:
        self._postgres = postgres

    def register(self, registry: Registry) -> None:
        """Register the cron."""
        registry.cron("* * * * *", name=DUPLICATES_QUEUE, timeout="5m")(self.compare)

    async def review(self, pair: int) -> None:
        """Mark a pair as reviewed; both photos stay as they are. Raises: DuplicateUnknown."""
        is_id = 0 < pair <= BIGINT_MAX
        if not is_id or not await self._postgres.run(SQL.review_duplicate, id=pair):
            raise DuplicateUnknown(pair)

    async def near(self, sha256: str) -> list[NearPhoto]:
        """Photos of all customers that look like the content `sha256`, nearest first.

        Searched now, so a `before_publish` handler may call it. Empty if the photo has no hash.
        """
        rows = await self._postgres.all(
            SQL.near_photos, sha256=sha256, bits=BITS_MAX, candidates_max=CANDIDATES_MAX
        )
        return [msgspec.convert(dict(row), NearPhoto) for row in rows]

    async def compare(self) -> None:
        """Compare new photos with all others, for up to COMPARE_S; return when none is left."""
        ends_s, count = time.monotonic() + COMPARE_S, ROWS_OF_STEP
        while count == ROWS_OF_STEP and time.monotonic() < ends_s:
            async with self._postgres.transaction() as tx:
                await tx.allow_long_statements(COMPARE_S)
                count = await tx.run(
                    SQL.compare_photos,
                    bits=BITS_MAX,
                    pairs_max=PAIRS_MAX,
                    candidates_max=CANDIDATES_MAX,
                    rows_max=ROWS_OF_STEP,
                )

    async def list(
        self,
        customer: str | None = None,
        *,
        across: bool | None = None,
        reviewed: bool = False,
        cursor: int | None = None,
        rows_max: int = PAGE_ROWS_MAX,
    ) -> list[NearDuplicate]:
        """Pairs of one customer or of all, newest first, with ids below `cursor`.

        `across`: only pairs of two customers (True) or of one (False). `reviewed`: those that a
        moderator has marked, instead of the open ones. Raises: CustomerUnknown.
        """
        if customer is not None:
            await store.runs.get_customer(self._postgres, customer)
        rows = await self._postgres.reads.all(
            SQL.near_duplicates,
            customer=customer,
            across=across,
            reviewed=reviewed,
            before=min(cursor or BIGINT_MAX, BIGINT_MAX),
            rows_max=min(max(1, rows_max), PAGE_ROWS_MAX),
        )
        return [
            NearDuplicate(**{**row, "photos": msgspec.json.decode(row["photos"], type=_PHOTOS)})
            for row in rows
        ]
