"""Why a photo is there or not.

The judgement, the last outcome, what stands between it and the next try.
"""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from headrace.fetch.model import Host, Link
from headrace.fetch.service.items import ahead_of

HEAD = "id,name,price,photos\n"
AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def link(**values) -> Link:
    fields = dict.fromkeys(("sha256", "etag", "last_modified")) | {
        "customer": "shop",
        "url": "http://h/",
        "outcome": "failed:http_404",
        "checked_at": AT,
        "failures": 1,
        "rounds_left": 0,
        "recheck_at": None,
        "run": 1,
        "text": "",
    }
    return Link(**{**fields, **values})


def paused() -> Host:
    return Host(
        host="h",
        customer="shop",
        starts_in="1s",
        needs={},
        mean_s=None,
        requests=1,
        photos_by_outcome={},
        first_seen_at=AT,
        last_seen_at=AT,
        paused_until=AT,
        crawl_delay_s=None,
    )


@pytest.mark.parametrize(
    ("found", "host", "runs", "is_allowed", "told"),
    [
        (link(), None, [], True, "requested again by the next catalogue that lists it"),
        (link(rounds_left=3), None, [], True, "skipped by 3 more whole catalogues"),
        (link(sha256="x"), None, [], True, "the last good copy is kept"),
        (link(), paused(), [], True, "paused until 2026-01-02 03:04:05"),
        (link(), None, [], False, "not requested while the URL is refused"),
        (link(outcome="stored"), None, [], True, "a good copy is stored"),
        (None, None, [4, 7], True, "run 7 will request it"),
    ],
)
def test_when_it_is_asked_next(found, host, runs, *, is_allowed, told):
    assert told in ahead_of(found, host, runs=runs, job=None, is_allowed=is_allowed)


async def test_a_photo_that_waits_for_its_job(shop, command, client):
    """No worker runs: the job says so, the lane shows what waits."""
    url = shop.origin.url("/photo/1")
    await shop.fetch.customers.set("shop", starts_max=10, window_s=60, connections=3)
    run = await shop.run(HEAD + f"a,A,5,{url}\n")
    found = await shop.fetch.links.why(url)
    (one,) = found.customers
    assert (found.links, one.customer, one.waiting_runs) == ([], "shop", [run.run])
    assert one.job is not None
    assert one.job.text in one.ahead
    assert (one.lane.waiting, one.lane.starts_max) == (1, 10)
    told = (await command("why", url))[1]
    assert "shop: not requested yet" in told
    assert one.job.text in told
    answer = await client.get("/v1/fetch/why", params={"url": url})
    assert answer.json()["customers"][0]["waiting_runs"] == [run.run]


@pytest.mark.slow
@pytest.mark.usefixtures("worker")
async def test_a_photo_that_failed_and_one_that_came(shop, command):
    good, gone = shop.origin.url("/photo/1"), shop.origin.url("/none")
    await shop.run_to_end(HEAD + f"a,A,5,{good}|{gone}\n")
    (one,) = (await shop.fetch.links.why(good)).customers
    assert "a good copy is stored" in one.ahead
    assert (one.waiting_runs, one.job) == ([], None)
    (other,) = (await shop.fetch.links.why(gone)).customers
    assert "1 more whole catalogues" in other.ahead
    told = (await command("why", gone))[1]
    assert "there is no photo at this link (404): correct the link" in told
    assert "lane: " in told
    for odd in ("", "nonsense", "http://h/\x00", "http://h/" + "x" * 5000):
        found = await shop.fetch.links.why(odd)
        assert (found.allowed, found.customers) == (False, [])
