"""Outcomes under their leases: many in one transaction, lost leases refused, one bad entry alone
pays.
"""

from __future__ import annotations

import asyncio

import pytest

from headrace.engines.sql import compile_query
from headrace.fetch.store.outcomes import Decision, NewPhoto, OutcomeStore
from headrace.jobs.errors import LeaseLost

LEASED = compile_query(
    "leased",
    "-- A lease of nobody.\n"
    "INSERT INTO headrace.job_lease (host, queue, jobs, granted_at, ids, run_ats, group_ids,"
    " priorities, attempts, losses, versions, lanes, unique_keys, traceparents, payloads)"
    " VALUES (1, 1, 1, now(), '{1}', ARRAY[now()], '{0}', '{0}', '{0}', '{0}', '{1}', "
    "'{a}', '{a}', '{a}', '{a}')"
    " RETURNING id",
)
NEEDS = compile_query(
    "needs",
    "-- What became of a run's photos.\n"
    "SELECT url, outcome FROM headrace.fetch_need WHERE run_id = :run_id ORDER BY url",
)
pytestmark = pytest.mark.slow


@pytest.fixture
async def run(shop):
    """A run that needs 6 photos of an item."""
    urls = [shop.origin.url(f"/photo/{n}") for n in range(6)]
    return await shop.run(f"id,name,price,photos\na,A,5,{'|'.join(urls)}\n")


def decision(shop, run, number: int, **values) -> Decision:
    url = shop.origin.url(f"/photo/{number}")
    return Decision(run.run, "shop", "a", url, **{"outcome": "failed:http_404", **values})


async def outcomes(shop, run) -> list[str | None]:
    rows = await shop.postgres.all(NEEDS, run_id=run.run)
    return [row["outcome"] for row in rows]


async def test_a_lost_lease_is_refused_and_the_others_are_written(shop, run):
    ledger = OutcomeStore(shop.postgres, shop.jobs)
    lease = await shop.postgres.value(LEASED)
    ended = await asyncio.gather(
        *[ledger.record(lease if n % 2 else -5, decision(shop, run, n)) for n in range(6)],
        return_exceptions=True,
    )
    assert [isinstance(end, LeaseLost) for end in ended] == [True, False] * 3
    assert await outcomes(shop, run) == [None, "failed:http_404"] * 3
    assert (await shop.fetch.runs.get(run.run)).photos_by_outcome == {"failed:http_404": 3}


async def test_an_entry_that_cannot_be_written_costs_itself_alone(shop, run):
    ledger = OutcomeStore(shop.postgres, shop.jobs)
    lease = await shop.postgres.value(LEASED)
    bad = decision(shop, run, 2, etag="half a letter: \ud800")
    entries = [bad if n == 2 else decision(shop, run, n) for n in range(6)]
    ended = await asyncio.gather(
        *[ledger.record(lease, entry) for entry in entries], return_exceptions=True
    )
    assert [end is None for end in ended] == [True, True, False, True, True, True]
    assert (await outcomes(shop, run)).count(None) == 1


async def test_a_repeated_outcome_counts_once_and_a_failure_keeps_the_last_copy(shop, run):
    ledger = OutcomeStore(shop.postgres, shop.jobs)
    lease = await shop.postgres.value(LEASED)
    photo = NewPhoto("ab" * 32, "photos/ab/ab/x.jpg", "jpg", 10, 2, 2)
    stored = decision(shop, run, 0, outcome="stored", photo=photo, etag='"1"')
    for entry in (stored, stored, decision(shop, run, 0)):
        await ledger.record(lease, entry)
    assert (await shop.fetch.runs.get(run.run)).photos_by_outcome == {"stored": 1}
    (link,) = (await shop.fetch.links.why(shop.origin.url("/photo/0"))).links
    assert (link.outcome, link.sha256, link.etag) == ("failed:http_404", "ab" * 32, '"1"')
    assert (link.failures, link.rounds_left) == (1, 1)
    lost = decision(shop, run, 0, outcome="failed:lost")
    await ledger.record(lease, lost)
    (link,) = (await shop.fetch.links.why(shop.origin.url("/photo/0"))).links
    assert (link.failures, link.rounds_left) == (1, 0), "our own fault: requested by the next run"
