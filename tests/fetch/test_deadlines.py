"""Cost of a slow host: the cap of Retry-After, and the deadline of items."""

from __future__ import annotations

import asyncio
import time

import pytest
from origin import Answer, photo
from room import HEAD, LIMITS
from tests.kit.waiting import wait_true

from headrace.fetch import store
from headrace.fetch.model import RunState, SentItem
from headrace.fetch.store.outcomes import Decision


async def age(shop, age_s: float) -> None:
    """Let runs be applied so long ago."""
    text = "UPDATE #fetch_run SET applied_at = applied_at - make_interval(secs => :age_s::float8)"
    await shop.sql(text, age_s=age_s)


async def results_of(shop, item: str):
    found = await shop.fetch.items.results(results_max=1000)
    return [(r.version, r.action, [p.outcome for p in r.photos]) for r in found if r.id == item]


async def decide(shop, run, item: str, url: str, outcome: str) -> None:
    await store.outcomes.decide(shop.postgres, [Decision(run.run, "shop", item, url, outcome)])


@pytest.mark.slow
@pytest.mark.usefixtures("worker")
async def test_a_host_pauses_for_15_minutes_at_most(shop):
    far = "Fri, 31 Dec 2199 23:59:59 GMT"
    answers = {"a": (429, "999999"), "b": (429, far), "c": (503, "999999"), "d": (503, far)}
    for customer, (status, value) in answers.items():
        await shop.fetch.customers.set(customer, **LIMITS)
        shop.origin.answers[f"/{customer}"] = [Answer(status, headers={"Retry-After": value})]
        text = f"{HEAD}a,A,5,{shop.origin.url(f'/{customer}')}\n"
        await shop.run(text, customer=customer)

    async def pauses():
        hosts = [host for host in await shop.fetch.hosts.page() if host.paused_until]
        return hosts if len(hosts) == len(answers) else None

    for host in await wait_true(pauses, what="each pause is stored"):
        assert 600 < host.paused_until.timestamp() - time.time() <= 15 * 60


@pytest.mark.slow
async def test_an_item_is_published_at_its_deadline_with_the_photos_it_has(shop, client, command):
    one, two, slow = (shop.origin.url(path) for path in ("/photo/1", "/photo/2", "/slow"))
    run = await shop.run(f"{HEAD}a,A,5,{one}|{slow}\nb,B,5,{two}\nc,C,5,\n")
    await decide(shop, run, "a", one, "failed:http_404")
    waiting = (await shop.fetch.items.get("shop", "a")).photos
    assert [photo.outcome for photo in waiting] == ["failed:http_404", "pending"]
    await shop.fetch.upkeep.publish_late()
    assert await results_of(shop, "a") == [], "before its deadline"
    await age(shop, 6 * 3600 + 1)
    await asyncio.gather(*(shop.fetch.upkeep.publish_late() for _ in range(3)))
    assert await results_of(shop, "a") == [(1, "publish", ["failed:http_404", "failed:late"])]
    assert await results_of(shop, "b") == [(1, "publish", ["failed:late"])]
    assert await results_of(shop, "c") == [], "only its publication is missing"
    late = await shop.fetch.runs.get(run.run)
    assert (late.state, late.items_late, late.items_pending) == (RunState.APPLIED, 2, 3)
    problems = [(p.item, p.outcome) for _, p in await shop.fetch.reports.photo_problems(run.run)]
    assert sorted(problems) == [
        ("a", "failed:http_404"),
        ("a", "failed:late"),
        ("b", "failed:late"),
    ]
    sheet = await client.get(f"/v1/fetch/runs/{run.run}/errors?format=csv&lang=ru")
    assert "к сроку" in sheet.text
    assert "2 items were published at their deadline" in (await command("run", "show", "1"))[1]


@pytest.mark.slow
async def test_late_photos_make_a_further_version_and_faults_do_not(shop, process, config):
    good, bad = shop.origin.url("/photo/1"), shop.origin.url("/gone")
    shop.origin.answers["/gone"] = [Answer(404)]
    run = await shop.run(f"{HEAD}a,A,5,{good}\nb,B,5,{bad}\nc,C,5,{good}|{bad}\n")
    await age(shop, 7 * 3600)
    await shop.fetch.upkeep.publish_late()

    async def publish(item) -> None:
        shop.items.append(item)

    async with process(publish):
        done = await shop.wait_done(run)
    assert await results_of(shop, "a") == [(1, "publish", ["failed:late"]), (2, "edit", ["stored"])]
    assert await results_of(shop, "b") == [(1, "publish", ["failed:late"])]
    assert [version for version, _, _ in await results_of(shop, "c")] == [1, 2]
    assert (done.state, done.new, done.changed, done.unchanged) == (RunState.DONE, 3, 0, 0)
    kinds = {change.kind for change in await shop.fetch.runs.changes(run.run)}
    assert kinds == {"new"}
    problems = [(p.item, p.outcome) for _, p in await shop.fetch.reports.photo_problems(run.run)]
    assert sorted(problems) == [("b", "failed:http_404"), ("c", "failed:http_404")]
    await shop.fetch.upkeep.publish_late()
    assert len(await shop.fetch.items.results(results_max=100)) == 5
    again = await shop.run(f"{HEAD}a,A,5,{good}\nb,B,5,{bad}\nc,C,5,{good}|{bad}\n")
    assert (again.unchanged, again.changed) == (3, 0)


async def test_an_older_version_is_never_published_late(shop):
    first = await shop.run(f"{HEAD}a,A,5,{shop.origin.url('/photo/1')}\n")
    await age(shop, 7 * 3600)
    await shop.fetch.send_items([SentItem(customer="shop", item="a", gone=True)])
    await shop.fetch.upkeep.publish_late()
    assert await results_of(shop, "a") == []
    assert (await shop.fetch.runs.get(first.run)).items_late == 0


async def test_a_last_good_copy_is_no_missing_photo(shop):
    url = shop.origin.url("/photo/1")
    run = await shop.run(f"{HEAD}a,A,5,{url}\n")
    stored = store.outcomes.NewPhoto("0" * 64, "photos/x.jpg", "jpg", len(photo("x")), 64, 48)
    decision = Decision(run.run, "shop", "a", url, "stored", stored, '"1"')
    await store.outcomes.decide(shop.postgres, [decision])
    run = await shop.run(f"{HEAD}a,A,5,{url}|{shop.origin.url('/photo/2')}\n")
    await age(shop, 7 * 3600)
    await shop.fetch.upkeep.publish_late()
    [(version, action, outcomes)] = await results_of(shop, "a")
    assert (version, action, outcomes) == (2, "publish", ["stored", "failed:late"])
