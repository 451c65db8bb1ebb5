"""Pages of sellers: signed links without an account, and the data that a page shows.

A link contains the customer, the number of revocations of its links, and its expiry, signed with a
key of its own. So nothing is stored per link, and one revocation ends all links of a customer. A
link permits reading the page of its customer and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from time import monotonic
from typing import Final, NamedTuple

import msgspec

from headrace.engines.postgres import Postgres, Row
from headrace.fetch import store
from headrace.fetch.errors import (
    InvalidCustomer,
    SellerLinkEnded,
    SellerLinkUnknown,
    SellerPageBusy,
)
from headrace.fetch.guard import Policy
from headrace.fetch.i18n import DEFAULT, Texts
from headrace.fetch.mappings import Mapping
from headrace.fetch.model import SAME_FORMAT, SUPPLEMENTAL, UNDO_FORMAT, Run, SellerLink
from headrace.fetch.outcomes import count_bad
from headrace.fetch.readers import Value
from headrace.fetch.schemas import DEFAULT as DEFAULT_SCHEMA
from headrace.fetch.schemas import Schema, plain_category
from headrace.fetch.seller_page import SellerView, example_of, seller_page
from headrace.fetch.service.catalogues import Reports, Runs
from headrace.fetch.service.items import FORMAT as ITEMS_FORMAT
from headrace.fetch.settings import FetchConfig
from headrace.fetch.sql import SQL
from headrace.kernel.signing import CursorInvalid, Key, read_cursor, sign_cursor

SELLER_USE: Final = "seller-link"
"""The use of the key: `derive_key(root, SELLER_USE)`."""
PATH: Final = "/v1/fetch/sellers/"
DAYS: Final = 30
DAYS_MAX: Final = 366
DAY_S: Final = 86_400
RUNS_SHOWN: Final = 10
RUNS_READ: Final = 50
HIDDEN: Final = ("links", SAME_FORMAT, UNDO_FORMAT)
"""Formats of runs that no file or call of the seller caused; an undone run is named as such."""
PAGE_S: Final = 1.0
"""One page per second and customer at one API process, after a burst of BURST_S."""
BURST_S: Final = 20.0
CUSTOMERS_MAX: Final = 10_000
_FIELDS: Final = msgspec.json.Decoder(dict[str, Value])


class LinkSigning(NamedTuple):
    """The key of links, and the scheme and host with which they begin by default."""

    make_key: Callable[[], Key]
    origin: str = ""


class Sellers:
    """Links to the pages of sellers, and these pages: `fetch.sellers`."""

    def __init__(
        self,
        postgres: Postgres,
        config: FetchConfig,
        *,
        runs: Runs,
        reports: Reports,
        policy: Policy,
        signing: LinkSigning,
    ) -> None:
        self._postgres = postgres
        self._config = config
        self._runs = runs
        self._reports = reports
        self._policy = policy
        self._signing = signing
        self._full_at_s: dict[str, float] = {}

    async def link(
        self, customer: str, *, days: int = DAYS, origin: str | None = None
    ) -> SellerLink:
        """A link to the page of a customer, valid for `days`; nothing is stored.

        It begins with `fetch.seller_url`, else `origin`, else the address of `web.listen`.
        Raises: CustomerUnknown, InvalidCustomer.
        """
        if not 1 <= days <= DAYS_MAX:
            raise InvalidCustomer(f"{days} days: a link to a seller's page lasts 1 to {DAYS_MAX}")
        await store.runs.get_customer(self._postgres, customer)
        row: Row = await self._postgres.one(
            SQL.seller_link, customer=customer, lasts_s=days * DAY_S
        )
        position = [customer, row["seller_links"], row["expires_s"]]
        start = self._config.seller_url or origin or self._signing.origin
        token = sign_cursor(self._signing.make_key(), SELLER_USE, {}, position)
        return SellerLink(
            customer=customer,
            url=f"{start.rstrip('/')}{PATH}{token}",
            expires_at=datetime.fromtimestamp(row["expires_s"], UTC),
        )

    async def revoke(self, customer: str) -> None:
        """End all links of a customer at once. Raises: CustomerUnknown."""
        await store.runs.get_customer(self._postgres, customer)
        await self._postgres.run(SQL.revoke_seller_links, customer=customer)

    async def page(self, token: str, *, run_id: int | None = None, lang: str = DEFAULT) -> str:
        """The page of the link's customer, with the problems of one of the listed runs.

        Raises: SellerLinkUnknown, SellerLinkEnded, SellerPageBusy, LanguageUnknown.
        """
        customer, expires_s = await self._read(token)
        texts = Texts.load(lang, self._config)
        found = await self._runs.newest(customer, runs_max=RUNS_READ)
        runs = [run for run in found if run.format not in HIDDEN][:RUNS_SHOWN]
        run = _default_run(runs)
        if run_id is not None:
            run = next((one for one in runs if one.run == run_id), None)
            if run is None:
                raise SellerLinkUnknown("this page has no such run: open it without `run`")
        rows = await self._reports.problems(run.run, lang=lang) if run else []
        photos = await self._reports.photo_problems(run.run, lang=lang) if run else []
        schema, mapping, known = await self._rules_of(customer)
        view = SellerView(
            customer=customer,
            expires_at=datetime.fromtimestamp(expires_s, UTC),
            runs=runs,
            run=run,
            rows=[problem for _, problem in rows],
            photos=[photo for _, photo in photos],
            example=example_of(schema, mapping, known, texts=texts, policy=self._policy),
        )
        return seller_page(view, texts)

    async def _read(self, token: str) -> tuple[str, int]:
        """Customer and expiry of a link. Raises: SellerLinkUnknown, SellerLinkEnded."""
        try:
            position = read_cursor(self._signing.make_key(), SELLER_USE, {}, token)
        except CursorInvalid:
            raise SellerLinkUnknown(
                "this link to a seller's page is not valid: check that it is complete, or request"
                " a new one"
            ) from None
        customer, seller_links, expires_s = position
        self._charge(customer)
        is_valid = await self._postgres.value(
            SQL.is_seller_link, customer=customer, seller_links=seller_links, expires_s=expires_s
        )
        if not is_valid:
            raise SellerLinkEnded(
                "this link to a seller's page has expired or was revoked: request a new one"
            )
        return customer, expires_s

    def _charge(self, customer: str) -> None:
        """Count one page of a customer. Raises: SellerPageBusy."""
        now_s = monotonic()
        full_at_s = max(self._full_at_s.pop(customer, 0.0), now_s) + PAGE_S
        is_over = full_at_s - now_s > BURST_S
        self._full_at_s[customer] = full_at_s - PAGE_S if is_over else full_at_s
        if len(self._full_at_s) > CUSTOMERS_MAX:
            del self._full_at_s[next(iter(self._full_at_s))]
        if is_over:
            raise SellerPageBusy("too many requests for this page: wait a moment", retry_after_s=5)

    async def _rules_of(self, customer: str) -> tuple[Schema, Mapping | None, dict[str, Value]]:
        """The schema of a published item, the mapping of the source, and the item's values."""
        fields = await self._postgres.value(SQL.sample_item, customer=customer)
        known = _FIELDS.decode(fields) if fields else {}
        found = await store.runs.find_schemas(self._postgres)
        schemas = {plain_category(one.category): one.schema for one in found}
        schema = default = schemas.get(DEFAULT_SCHEMA, Schema())
        for name in reversed(default.category_fields):
            value = known.get(name)
            if isinstance(value, str):
                schema = schemas.get(plain_category(value), schema)
        source = await self._postgres.one(SQL.sources, customer=customer)
        mapped = source["mapping"] if source is not None else None
        named = await store.runs.find_mappings(self._postgres, mapped) if mapped else []
        return schema, named[0].mapping if named else None, known


def _default_run(runs: Sequence[Run]) -> Run | None:
    """The run of the newest catalogue if it has problems, else the newest of `runs`."""
    newest = next((one for one in runs if one.format not in (SUPPLEMENTAL, ITEMS_FORMAT)), None)
    if newest is not None and (
        newest.problems or newest.reason or count_bad(newest.photos_by_outcome)
    ):
        return newest
    return runs[0] if runs else None
