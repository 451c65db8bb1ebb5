"""Photos come in while everything dies.

Each in one outcome, counts that add up, limits kept in the sellers' logs.

The real commands, a durable PostgreSQL and a Valkey of their own, hosts in a process of their own.
SIGKILL for slots, agents, whole hosts, the scheduler and both engines. The seed is printed.
"""

from __future__ import annotations

import random
import time

import pytest
from bench.origins.started import origins
from fetch_storm import (
    FAULTS,
    HOST,
    PHOTOS_OF_ITEM,
    STARTS_MAX,
    FetchStorm,
    expected_outcomes,
    over_in_logs,
    pause_until,
    untold,
    without_bytes,
    wrong_counts,
    wrong_outcomes,
)
from own_engines import fleet_on_own_engines
from tests.kit.waiting import wait_true

URL = "http://a.test:1/0/0.jpg"
LINKS = {URL: ("a.test", "/0/0.jpg")}


@pytest.mark.slow
async def test_a_short_storm_leaves_every_photo_in_one_outcome(tmp_path):
    await _weather(tmp_path, customers=3, items=5, rounds=1, pause_s=(0.1, 0.5))


@pytest.mark.soak
async def test_a_long_storm_leaves_every_photo_in_one_outcome(tmp_path):
    await _weather(tmp_path, customers=8, items=120, rounds=8, pause_s=(0.3, 1.5))


async def _weather(folder, *, customers, items, rounds, pause_s, seed=None):
    """Every fault once a round, in an order and at moments of chance.

    Then the sky clears and all is judged.
    """
    seed = random.SystemRandom().getrandbits(32) if seed is None else seed
    print(f"seed {seed}")
    plans = {f"c{n}.test": HOST for n in range(customers)}
    own = fleet_on_own_engines(folder, durable=True, timeout_s=5.0, kind=FetchStorm)
    async with origins(folder / "hosts", plans) as hosts, own as (storm, engines):
        chance = random.Random(seed)
        await storm.begin(engines, hosts, chance, agents=2)
        for number in range(customers):
            await storm.offer(f"c{number}", items)
        await wait_true(hosts.requests, what="photos come in")
        for _ in range(rounds):
            for fault in chance.sample(FAULTS, len(FAULTS)):
                ends_s = time.monotonic() + chance.uniform(*pause_s)
                await wait_true(pause_until(storm, ends_s))
                await storm.suffer(fault)
        await wait_true(storm.is_done, what="every run done", deadline_s=60 + 30 * rounds)
        findings = await storm.all_findings()
        await storm.app.close()
    print(f"faults {storm.faults}, requests {len(hosts.requests())}")
    assert len(storm.links) == customers * items * PHOTOS_OF_ITEM
    assert findings == []


# Planted bugs: each checker speaks of what it is there for, and of nothing else.


def _need(outcome):
    return {"customer": "a", "run_id": 1, "item": "i", "url": URL, "outcome": outcome}


def _count(outcome, counted, *, photos=1, state="done"):
    return {"id": 1, "state": state, "photos": photos, "outcome": outcome, "counted": counted}


def test_a_photo_without_its_outcome_or_with_another_is_named():
    [right, *_] = expected_outcomes(*LINKS[URL])
    assert wrong_outcomes([_need(right)], LINKS) == []
    for wrong in (None, "failed:timeout", "known"):
        assert [f.subject for f in wrong_outcomes([_need(wrong)], LINKS)] == [URL]


@pytest.mark.parametrize(
    ("counts", "faults"),
    [
        ([_count("stored", 1)], []),
        ([_count("stored", 2)], ["wrong counts"]),
        ([_count("stored", 1, photos=2)], ["wrong counts"]),
        ([_count("stored", 1), _count("failed:dns", 1)], ["wrong counts"]),
        ([_count(None, None)], ["wrong counts"]),
        ([_count("stored", 1, state="applied")], ["unfinished"]),
    ],
)
def test_counts_that_do_not_add_up_are_named(counts, faults):
    assert [f.fault for f in wrong_counts([_need("stored")], counts)] == faults


def test_a_row_without_its_bytes_is_named(tmp_path):
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    rows = [{"key": "a.jpg", "sha256": empty}]
    assert [f.text for f in without_bytes(rows, tmp_path)] == ["its row stands and no object does"]
    (tmp_path / "a.jpg").write_bytes(b"other")
    assert [f.text for f in without_bytes(rows, tmp_path)] == ["the object holds other bytes"]
    (tmp_path / "a.jpg").write_bytes(b"")
    assert without_bytes(rows, tmp_path) == []


def test_an_item_without_one_result_or_that_nobody_was_told_is_named():
    result = {"customer": "a", "item": "i", "version": 1}
    needs = [_need("stored")]
    assert untold(needs, [result], {("a", "i")}) == []
    assert [f.fault for f in untold(needs, [], {("a", "i")})] == ["results"]
    assert [f.fault for f in untold(needs, [result, result], {("a", "i")})] == ["results"]
    assert [f.fault for f in untold(needs, [result], set())] == ["untold"]


def test_a_request_too_many_in_a_sellers_log_is_named():
    kept = [n * 0.1 for n in range(STARTS_MAX)]
    assert over_in_logs({"a.test": [*kept, 1.0]}) == []
    assert [f.subject for f in over_in_logs({"a.test": [*kept, 0.999]})] == ["a.test"]
