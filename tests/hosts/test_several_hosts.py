"""A site on several hosts, as docs/several-hosts.md sets it up: hosts are killed and cut off.

The clients use all rooms meanwhile. Nothing that was acknowledged may be lost or doubled, no unit
of another host may end, and each room completes a round trip within its stated time.
"""

from __future__ import annotations

import asyncio
import shutil
import time

import pytest
from engine_hosts import StoreHost, ValkeyHost
from several_hosts import SeveralHosts, metrics_of
from tests.kit.old_code import extract_old_code, missing_old_code
from tests.kit.processes import ROOT
from tests.kit.site import photo_host
from tests.kit.waiting import wait_true

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("haproxy") is None, reason="no haproxy: apt install haproxy"),
]
WITHOUT_VALKEY = ("jobs", "fetch", "photos", "feed", "media")
WITHOUT_STORE = ("jobs", "fetch", "views", "feed")
POSTGRES_BACK_S = 15.0
"""The stated bound after the promotion."""
SHORT_TIMES = {
    "JOBS_LEASE": "12s",
    "JOBS_HEARTBEAT": "3s",
    "JOBS_HOST_SILENT": "4s",
    "JOBS_PLAN_EVERY": "2s",
}
"""A third of the defaults."""
BACK_S = 35.0
"""The stated bound for jobs of a lost agent; other rooms have shorter ones."""


@pytest.fixture
async def make_several(net, tmp_path):
    """`await make_several(engines)`: a site whose units run and use these engines."""
    made: list[SeveralHosts] = []
    with photo_host(net.address) as (url, _):

        async def make(engines, **options) -> SeveralHosts:
            site = SeveralHosts(tmp_path / "site", net, engines, photos_url=url, **options)
            made.append(site)
            await site.start()
            return site

        yield make
        for site in made:
            await site.end()


@pytest.fixture
def cache(net, servers_folder):
    """A host with Valkey."""
    host = ValkeyHost(net.add("cache1", 15), servers_folder / "cache1")
    host.start()
    return host


@pytest.fixture
def store(net, servers_folder):
    """A host with an S3 server."""
    host = StoreHost(net.add("store1", 16), servers_folder / "store1")
    host.start()
    return host


@pytest.fixture
async def all_hosts(patroni, cache, store, make_several):
    """16 hosts: engines, two front hosts, two work hosts, three data centers of two media nodes."""
    engines = {"HEADRACE_POSTGRES_URL": patroni.url, **cache.settings, **store.settings}
    return await make_several(engines, centres=3)


@pytest.fixture
def shared_engines(running_engines, database_url, tmp_path):
    """Engines that every host reaches by sockets in folders: their network is never lost."""
    (tmp_path / "objects").mkdir()
    return {
        "HEADRACE_POSTGRES_URL": database_url,
        "HEADRACE_VALKEY_URL": running_engines.endpoints.valkey_url,
        "HEADRACE_VALKEY_PREFIX": f"hosts-{tmp_path.name}",
        "HEADRACE_BLOBS_URL": (tmp_path / "objects").as_uri(),
    }


async def test_a_lost_host_of_each_kind_loses_nothing(make_several, shared_engines):
    """One host of each kind is killed, then other ones are cut off.

    A work host is not: its engines, which it reaches by sockets, would still give it jobs.
    """
    site = await make_several(shared_engines, **SHORT_TIMES)
    lost = [site.machines[name] for name in ("front1", "work1", "media1")]
    others = [site.machines[name] for name in ("front2", "media2")]
    async with site.traffic():
        await site.wait_back(0.0)
        for machine in lost:
            machine.kill()
        back_s = await site.wait_back(time.monotonic())
        assert max(back_s.values()) < BACK_S, back_s
        assert await site.nodes_shown() == {"media1": False, "media2": True}

        await wait_true(lambda: site.has_alert("work1"), what="an alert names the lost host")
        for machine in lost:
            machine.boot()

        await wait_true(site.is_whole, what="all hosts take part again")
        for machine in others:
            machine.host.cut()
        back_s = await site.wait_back(time.monotonic())
        assert max(back_s.values()) < BACK_S, back_s
        for machine in others:
            machine.host.restore()
        await wait_true(site.is_whole, what="all hosts take part again")
        await site.wait_back(time.monotonic())
    assert "jobs_" in metrics_of(site.machines["work1"])
    await site.require_all_kept()


async def upgrade(site, machine) -> None:
    """The page's commands for a host: its units run the new code afterwards."""
    new = ROOT / "src"
    if "headrace-media" in machine.units:
        await site.run("media", "drain", machine.name)
        await wait_true(lambda: site.entry.is_out(machine.name), what=f"{machine.name} is out")
        await asyncio.to_thread(machine.restart, "headrace-media", new)
        await wait_true(site.is_whole, what=f"{machine.name} answers")
        await site.run("media", "undrain", machine.name)
        return
    for unit in machine.units:
        if unit == "headrace-api":
            site.entry.set_state(machine.name, "drain")
        await asyncio.to_thread(machine.restart, unit, new)
        if unit == "headrace-api":
            await wait_true(lambda: site.is_healthy(machine), what=f"{machine.name} answers")
            site.entry.set_state(machine.name, "ready")
            await wait_true(lambda: site.entry.is_up(machine.name), what=f"{machine.name} is up")


async def lose(site, host, back) -> None:
    """Wait until every room is back without a host; bring it back; wait until all take part."""
    lost_s = time.monotonic()
    back_s = await site.wait_back(lost_s)
    assert max(back_s.values()) < BACK_S, f"{host.name}: {back_s}"
    back()
    await wait_true(site.is_whole, what=f"{host.name} takes part again")


@pytest.mark.soak
@pytest.mark.parametrize("name", ["front1", "work1", "media1"])
async def test_each_host_with_roles_may_be_killed_and_cut_off(all_hosts, name):
    site, machine = all_hosts, all_hosts.machines[name]
    async with site.traffic():
        await site.wait_back(0.0)
        machine.kill()
        await lose(site, machine.host, machine.boot)
        machine.host.cut()
        await lose(site, machine.host, machine.host.restore)
        await site.wait_back(time.monotonic())
    await site.require_all_kept()


@pytest.mark.soak
async def test_each_host_with_an_engine_may_be_killed_and_cut_off(all_hosts, patroni, cache, store):
    """Rooms that need a lost Valkey or object store are back when its host is."""
    site = all_hosts
    async with site.traffic():
        await site.wait_back(0.0)
        primary = patroni.primary()
        primary.kill()
        _, promoted_s = await patroni.wait_primary(other_than=primary)
        back_s = await site.wait_back(promoted_s)
        # A claim without an answer is returned after two heartbeats: a catalogue may wait for it.
        assert back_s.pop("photos") < BACK_S
        assert max(back_s.values()) < POSTGRES_BACK_S, back_s
        patroni.start_member(primary)
        await wait_true(patroni.is_whole, what="the old primary is a standby")
        cache.kill()
        await site.wait_back(time.monotonic(), rooms=WITHOUT_VALKEY)
        cache.start()
        await site.wait_back(time.monotonic())
        for engine, rooms in ((cache, WITHOUT_VALKEY), (store, WITHOUT_STORE)):
            engine.host.cut()
            await site.wait_back(time.monotonic(), rooms=rooms)
            engine.host.restore()
            await site.wait_back(time.monotonic())
        site.entry.kill()
        await asyncio.to_thread(site.entry.boot)
        await site.wait_back(time.monotonic())
    await site.require_all_kept()


@pytest.mark.soak
async def test_old_and_new_code_run_side_by_side(make_several, shared_engines, tmp_path):
    """Host by host, as the page shows: no request is refused and nothing is lost."""
    if reason := missing_old_code():
        pytest.skip(reason)
    old = extract_old_code(tmp_path / "old")
    site = await make_several(shared_engines, code=old)
    async with site.traffic():
        await site.wait_back(0.0)
        site.refused.clear()
        for machine in site.machines.values():
            await upgrade(site, machine)
            await site.wait_back(time.monotonic())
    assert site.refused == []
    await site.require_all_kept()
