"""Fixtures of sites on several hosts."""

from __future__ import annotations

import secrets
import shutil

import pytest
from failover_site import FailoverSite
from tests.kit.own_patroni import PatroniCluster, missing_parts


@pytest.fixture
async def patroni(net, servers_folder, tmp_path):
    """Three running servers of PostgreSQL with a synchronous standby."""
    reason = missing_parts()
    if reason:
        pytest.skip(reason)
    cluster = PatroniCluster(servers_folder, net)
    try:
        await cluster.start()
        yield cluster
    finally:
        for log in servers_folder.glob("db*/*.log"):
            shutil.copy(log, tmp_path / f"{log.parent.name}-{log.name}")


@pytest.fixture
async def make_site(net, running_engines, tmp_path):
    """`await make_site(url)`: a site whose roles run and use this PostgreSQL.

    Other settings, such as `VALKEY_URL`, replace those of the run.
    """
    made: list[FailoverSite] = []

    async def make(url: str, **settings: str) -> FailoverSite:
        settings = {
            "POSTGRES_URL": url,
            "VALKEY_URL": running_engines.endpoints.valkey_url,
            "VALKEY_PREFIX": f"hosts-{secrets.token_hex(4)}",
            **settings,
        }
        env = {f"HEADRACE_{name}": value for name, value in settings.items()}
        made.append(FailoverSite(tmp_path / f"site{len(made)}", net, env))
        await made[-1].start()
        return made[-1]

    yield make
    for site in made:
        await site.end()
