"""Where catalogues are brought from, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.engines.postgres import Row, Runner
from headrace.fetch.store.sql import SQL


@dataclass(frozen=True, slots=True)
class SourceToBring:
    """A file to ask for, with the validators and the hash of the one that was applied, read as `rules`."""

    url: str
    format_name: str | None
    mapping: str | None
    etag: str | None = None
    last_modified: str | None = None
    sha256: str | None = None
    rules: bytes | None = None

    def read_as(self, rules: bytes) -> SourceToBring:
        """The same to be read as `rules`: what was read otherwise has to be brought again."""
        if self.rules == rules:
            return self
        return SourceToBring(self.url, self.format_name, self.mapping, rules=rules)


async def set_source(
    runner: Runner,
    customer: str,
    *,
    url: str,
    cron: str,
    tz: str,
    format_name: str | None,
    mapping: str | None,
) -> None:
    """Keep where a customer's catalogue comes from; what was known of an earlier file is forgotten."""
    await runner.run(
        SQL.set_source,
        customer=customer,
        url=url,
        cron=cron,
        tz=tz,
        format=format_name,
        mapping=mapping,
    )


async def find_sources(runner: Runner, customer: str | None = None) -> list[Row]:
    """Every source by customer, or the one of that customer."""
    return await runner.all(SQL.sources, customer=customer)


async def drop_source(runner: Runner, customer: str) -> bool:
    """Whether there was a source; it is forgotten."""
    return await runner.one(SQL.drop_source, customer=customer) is not None


async def find_to_bring(runner: Runner, customer: str) -> SourceToBring | None:
    """The customer's source, with validators where its last file is what the items are made of."""
    row = await runner.one(SQL.source_to_bring, customer=customer)
    return None if row is None else SourceToBring(*row)
