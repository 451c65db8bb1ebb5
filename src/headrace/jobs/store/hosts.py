"""Host rows, which the leases hang on."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from headrace.engines.postgres import Runner
from headrace.jobs.store.sql import SQL


async def add_host(
    runner: Runner,
    name: str,
    queue_ids: Sequence[int],
    lease_s: float,
    *,
    kind: str = "work",
    tags: Sequence[str] = (),
    cores: int = 1,
) -> int:
    """Register a host; return its id. `kind`: `agent`, `work` or `taker`."""
    host_id = await runner.value(
        SQL.add_host,
        name=name,
        queues=list(queue_ids),
        lease_s=lease_s,
        kind=kind,
        tags=list(tags),
        cores=cores,
    )
    return int(host_id)


async def renew_host(runner: Runner, host_id: int, lease_s: float) -> bool:
    """Whether the host still was there to be renewed."""
    return await runner.value(SQL.renew_host, host=host_id, lease_s=lease_s) is not None


async def extend_take(runner: Runner, lease_id: int, lease_s: float) -> datetime | None:
    """Give a taker's lease `lease_s` from now; when it ends then, or None where it is over."""
    expires_at: datetime | None = await runner.value(
        SQL.extend_take, lease=lease_id, lease_s=lease_s
    )
    return expires_at


async def expires_at(runner: Runner, host_id: int) -> datetime:
    """When the host's leases end unless they are renewed."""
    moment: datetime = await runner.value(SQL.host_expires_at, host=host_id)
    return moment


async def remove_host(runner: Runner, host_id: int) -> None:
    """Take the host away."""
    await runner.run(SQL.remove_host, host=host_id)


async def end_take(runner: Runner, host_id: int) -> None:
    """Take a taker away if it holds nothing any more."""
    await runner.run(SQL.end_take, host=host_id)


async def expire_host(runner: Runner, host_id: int) -> None:
    """Let the host expire now."""
    await runner.run(SQL.expire_host, host=host_id)


async def drop_hosts(runner: Runner) -> int:
    """Remove expired hosts without leases."""
    return await runner.run(SQL.drop_hosts)
