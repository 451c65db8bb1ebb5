"""The verbs of hosts: how fast they are, and what came of asking them."""

from __future__ import annotations

from typing import Final

from headrace.engines.postgres import Postgres, Row
from headrace.fetch import store
from headrace.fetch.errors import HostUnknown
from headrace.fetch.model import Host
from headrace.fetch.routing import FORGOTTEN, Classes, TimeClass, host_of
from headrace.kernel.routes import PAGE_ROWS_MAX

HOST_CHARACTERS_MAX: Final = 300


class Hosts:
    """Looks at what was measured."""

    def __init__(self, postgres: Postgres, classes: Classes, *, half_life_s: float) -> None:
        self._postgres = postgres
        self._classes = classes
        self._half_life_s = half_life_s

    async def page(
        self,
        *,
        customer: str | None = None,
        host: str | None = None,
        after: tuple[str, str] = ("", ""),
        rows_max: int = PAGE_ROWS_MAX,
    ) -> list[Host]:
        """Hosts behind `after`, a (host, customer), by host and customer."""
        rows = await store.speeds.hosts(
            self._postgres,
            customer=customer,
            host=host,
            after=after,
            rows_max=min(max(1, rows_max), PAGE_ROWS_MAX),
            half_life_s=self._half_life_s,
        )
        return [self._host(row, by_outcome) for row, by_outcome in rows]

    async def get(self, host: str) -> list[Host]:
        """A host, or the host of a URL, as each customer's links know it. Raises: HostUnknown."""
        name = host_of(host) or host.lower()
        is_name = name.isprintable() and len(name) <= HOST_CHARACTERS_MAX
        found = await self.page(host=name) if is_name else []
        if not found:
            raise HostUnknown(name)
        return found

    def _host(self, row: Row, by_outcome: dict[str, int]) -> Host:
        weights = dict(zip(row["classes_s"], row["weights"], strict=True))
        total = sum(weights.values())
        is_measured = total >= FORGOTTEN and row["photos"] > 0
        return Host(
            host=row["host"],
            customer=row["customer"],
            starts_in=self._classes.starting(weights).name,
            needs={
                TimeClass(class_s).name: round(weight / total, 3)
                for class_s, weight in weights.items()
                if is_measured
            },
            mean_s=round(row["seconds"] / row["photos"], 4) if is_measured else None,
            requests=row["requests"],
            photos_by_outcome=by_outcome,
            first_seen_at=row["first_seen_at"],
            last_seen_at=row["last_seen_at"],
            paused_until=row["paused_until"],
            crawl_delay_s=row["crawl_delay_s"],
        )
