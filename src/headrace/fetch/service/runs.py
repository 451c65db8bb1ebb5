"""The verbs of runs: how far they are."""

from __future__ import annotations

from headrace.engines.postgres import Postgres, Tx
from headrace.fetch import store
from headrace.fetch.errors import RunUnknown
from headrace.fetch.item_ids import find_item_id
from headrace.fetch.model import BIGINT_MAX, Change, Run
from headrace.kernel.routes import PAGE_ROWS_MAX


class Runs:
    """What became of catalogues."""

    def __init__(self, postgres: Postgres) -> None:
        self._postgres = postgres

    async def get(self, run_id: int, *, tx: Tx | None = None) -> Run:
        """How far a run is, as `tx` sees it if given. Raises: RunUnknown."""
        is_id = 0 < run_id <= BIGINT_MAX
        runner = tx or self._postgres
        found = await store.runs.find_runs(runner, run_id=run_id) if is_id else []
        if not found:
            raise RunUnknown(run_id)
        return found[0]

    async def newest(self, customer: str | None, *, runs_max: int) -> list[Run]:
        """The newest runs, of one customer or of all."""
        rows_max = min(max(1, runs_max), PAGE_ROWS_MAX)
        return await store.runs.find_runs(self._postgres, customer=customer, rows_max=rows_max)

    async def changes(self, run_id: int, *, after: str, rows_max: int) -> list[Change]:
        """What a run changes, or would, by item, those after item `after`. Raises: RunUnknown."""
        await self.get(run_id)
        rows_max = min(max(1, rows_max), PAGE_ROWS_MAX)
        # A text that is no id begins at the first item; PostgreSQL would refuse some of those.
        behind = find_item_id(after) or ""
        return await store.runs.changes(self._postgres, run_id, after=behind, rows_max=rows_max)
