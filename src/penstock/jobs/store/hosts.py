"""Host rows, which the leases hang on."""

from __future__ import annotations

from penstock.engines.postgres import Runner
from penstock.jobs.store.sql import SQL


async def add_host(runner: Runner, name: str, queue_ids: list[int], lease_s: float) -> int:
    """Register a host; return its id."""
    host_id = await runner.value(SQL.add_host, name=name, queues=queue_ids, lease_s=lease_s)
    return int(host_id)


async def renew_host(runner: Runner, host_id: int, lease_s: float) -> bool:
    """Whether the host still was there to be renewed."""
    return await runner.value(SQL.renew_host, host=host_id, lease_s=lease_s) is not None


async def remove_host(runner: Runner, host_id: int) -> None:
    """Take the host away."""
    await runner.run(SQL.remove_host, host=host_id)


async def drop_hosts(runner: Runner) -> int:
    """Remove expired hosts without leases."""
    return await runner.run(SQL.drop_hosts)
