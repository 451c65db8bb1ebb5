"""What is known of each URL of a customer."""

from __future__ import annotations

from headrace.engines.postgres import Runner
from headrace.fetch.i18n import Texts
from headrace.fetch.model import Link
from headrace.fetch.store.sql import SQL


async def links_of_url(runner: Runner, url: str, texts: Texts) -> list[Link]:
    """What each customer's runs found behind `url`, in the words of `texts`."""
    rows = await runner.all(SQL.links_of_url, url=url)
    names = [name for name in Link.__struct_fields__ if name not in ("run", "text")]
    return [
        Link(
            run=row["run_id"],
            text=texts.outcome(row["outcome"]),
            **{name: row[name] for name in names},
        )
        for row in rows
    ]


async def waiting_runs(runner: Runner, url: str) -> dict[str, list[int]]:
    """By customer: the runs that have `url` to ask and have not yet. Reads their whole lists of photos."""
    found: dict[str, list[int]] = {}
    for row in await runner.all(SQL.waiting_needs, url=url):
        found.setdefault(row["customer"], []).append(row["run_id"])
    return found
