"""Host statistics: decay by the rule, shared by workers, shown to people."""

from __future__ import annotations

import asyncio

import pytest

from headrace.fetch import host_stats
from headrace.fetch.errors import HostUnknown
from headrace.fetch.host_stats import RECENT, Classes, HostStats, decayed, forget_hosts

CLASSES = Classes((1.0, 5.0, 30.0))
HALF_LIFE_S = 3600.0


async def age(shop, age_s: float) -> None:
    """Let hosts have been requested so long ago."""
    await shop.sql(
        "UPDATE #fetch_host SET last_seen_at = last_seen_at - make_interval(secs => :s::float8),"
        " paused_until = paused_until - make_interval(secs => :s::float8)",
        s=age_s,
    )


@pytest.fixture
async def make_speeds(postgres):
    """A slot's view: each call is another slot."""
    made = []

    def make() -> HostStats:
        made.append(HostStats(postgres, CLASSES, half_life_s=HALF_LIFE_S))
        return made[-1]

    yield make
    for speeds in made:
        await speeds.close()


def note(
    speeds: HostStats, host: str, needed_s: float | None, *, times: int = 1, **options
) -> None:
    for _ in range(times):
        speeds.record(
            "shop",
            host,
            outcome=options.get("outcome", "stored"),
            requests=1,
            took_s=options.get("took_s", 0.5),
            needed_s=needed_s,
        )
        if "pause_s" in options:
            speeds.pause("shop", host, options["pause_s"])


async def weights(shop) -> dict[tuple[str, float], float]:
    found = await shop.sql("SELECT host, class_s, weight FROM #fetch_speed")
    return {(r["host"], r["class_s"]): r["weight"] for r in found}


async def test_weights_decay_by_the_rule(shop, make_speeds, postgres):
    speeds = make_speeds()
    note(speeds, "a.example", 1.0, times=8)
    note(speeds, "b.example", 30.0)
    await speeds.flush()
    await age(shop, HALF_LIFE_S / 2)
    note(speeds, "a.example", 5.0, times=2)
    await speeds.flush()
    found = await weights(shop)
    kept = decayed(8.0, age_s=HALF_LIFE_S / 2, half_life_s=HALF_LIFE_S, new=2)
    assert found["a.example", 1.0] == pytest.approx(kept, rel=0.01)
    assert found["a.example", 5.0] == 2
    assert found["b.example", 30.0] == 1, "unused weights decay when they are read"
    note(speeds, "a.example", 5.0, times=2 * RECENT)
    await speeds.flush()
    assert (await weights(shop))["a.example", 1.0] == 0


async def test_photos_start_where_their_host_was_measured(shop, make_speeds, postgres):
    speeds = make_speeds()
    note(speeds, "slow.example", 30.0, times=3)
    note(speeds, "fast.example:8080", 1.0, times=3)
    await speeds.flush()
    urls = [
        "http://slow.example/1",
        "https://SLOW.example/2",
        "http://fast.example:8080/1",
        "http://new.example/1",
    ]
    queues = await make_speeds().queues(postgres, "shop", urls)
    assert [queues[url] for url in urls] == ["fetch.30s", "fetch.30s", "fetch.1s", "fetch.1s"]
    others = await make_speeds().queues(postgres, "other", urls)
    assert set(others.values()) == {"fetch.1s"}, "each customer has speeds of its own"
    assert await speeds.queues(postgres, "shop", []) == {}


async def test_a_slot_learns_at_once_and_from_others_soon(make_speeds):
    one, other = make_speeds(), make_speeds()
    known = await one.get("shop", "a.example")
    assert one.first_class(known).name == "1s"
    note(one, "a.example", 5.0, outcome="failed:timeout")
    assert one.first_class(await one.get("shop", "a.example")).name == "5s"
    await one.flush()
    assert other.first_class(await other.get("shop", "a.example")).name == "5s"


async def test_a_pause_is_known_to_all_slots_and_ends(shop, make_speeds, postgres):
    one, other = make_speeds(), make_speeds()
    await one.get("shop", "a.example")
    note(one, "a.example", None, outcome="failed:rate_limited", pause_s=60)
    assert 50 < (await one.get("shop", "a.example")).pause_s <= 60
    await one.flush()
    assert 50 < (await other.get("shop", "a.example")).pause_s <= 60
    note(other, "a.example", None, outcome="failed:rate_limited", pause_s=5)
    await other.flush()
    assert (await make_speeds().get("shop", "a.example")).pause_s > 50, "the longest counts"
    await age(shop, 61.0)
    assert (await make_speeds().get("shop", "a.example")).pause_s == 0


async def test_a_slot_reads_a_host_again_before_it_uses_old_statistics(make_speeds, monkeypatch):
    one, other = make_speeds(), make_speeds()
    assert (await other.get("shop", "a.example")).pause_s == 0
    note(one, "a.example", None, outcome="failed:rate_limited", pause_s=60)
    await one.flush()
    monkeypatch.setattr(host_stats, "REFRESH_S", 0.0)
    assert (await other.get("shop", "a.example")).pause_s > 50


async def test_a_pause_that_is_not_written_yet_survives_a_read(make_speeds):
    speeds = make_speeds()
    await speeds.get("shop", "a.example")
    note(speeds, "a.example", None, outcome="failed:rate_limited", pause_s=60)
    await speeds._read_one(("shop", "a.example"))
    assert (await speeds.get("shop", "a.example")).pause_s > 50


async def test_slots_that_record_the_same_hosts_at_once_lose_no_count(shop, make_speeds, postgres):
    slots = [make_speeds() for _ in range(4)]
    hosts = [f"h{n}.example" for n in range(30)]
    for turn in range(3):
        for number, slot in enumerate(slots):
            for host in hosts if number % 2 else reversed(hosts):
                note(slot, host, None, outcome=f"failed:http_50{turn}")
        await asyncio.gather(*(slot.flush() for slot in slots))
    rows = await shop.sql("SELECT requests FROM #fetch_host")
    assert [row["requests"] for row in rows] == [12] * 30


async def test_hosts_without_requests_for_long_are_forgotten(shop, make_speeds, postgres):
    speeds = make_speeds()
    note(speeds, "old.example", 1.0)
    await speeds.flush()
    await age(shop, 91 * 86_400.0)
    note(speeds, "new.example", 1.0)
    await speeds.flush()
    assert await forget_hosts(postgres, kept_s=90 * 86_400.0) == 1
    assert set(await weights(shop)) == {("new.example", 1.0)}


async def test_hosts_are_shown_with_their_speed_class_and_outcomes(
    shop, make_speeds, client, command
):
    speeds, quiet_host = make_speeds(), "quiet.example:8080"
    note(speeds, "slow.example", 30.0, times=3, took_s=8.0)
    note(speeds, "slow.example", None, outcome="failed:http_404")
    note(speeds, quiet_host, None, outcome="failed:rate_limited", pause_s=60)
    await speeds.flush()
    quiet, slow = await shop.fetch.hosts.page()
    assert (slow.host, slow.customer, slow.requests) == ("slow.example", "shop", 4)
    assert slow.photos_by_outcome == {"failed:http_404": 1, "stored": 3}
    assert slow.mean_s == pytest.approx(8.0, rel=0.01)
    assert slow.needs == {"30s": 1.0}
    assert slow.starts_in == shop.fetch._classes.last.name, "a class of the room's settings"
    assert (quiet.mean_s, quiet.paused_until is None) == (None, False)
    assert await shop.fetch.hosts.page(after=(quiet.host, quiet.customer)) == [slow]
    assert (await shop.fetch.hosts.get("http://slow.example/a.jpg"))[0] == slow
    for unknown in ("none.example", "", "\0", "x" * 5000):
        with pytest.raises(HostUnknown):
            await shop.fetch.hosts.get(unknown)
    hosts = (await client.get("/v1/fetch/hosts")).json()["hosts"]
    assert [host["host"] for host in hosts] == [quiet_host, "slow.example"]
    rest = await client.get(f"/v1/fetch/hosts?after_host={quiet_host}&after_customer=shop")
    assert rest.json()["hosts"] == hosts[1:]
    assert (await client.get(f"/v1/fetch/hosts/{quiet_host}")).json()["hosts"] == hosts[:1]
    shown = (await command("host", "ls"))[1].splitlines()
    assert shown[0].split()[:5] == ["host", "customer", "timeout", "class", "mean"]
    assert shown[-1].split()[:6] == ["slow.example", "shop", slow.starts_in, "8.00", "s", "4"]
    assert "paused until" in (await command("host", "show", f"http://{quiet_host}/a"))[1]
