"""Routes for other languages and for people: take jobs, say what became of them, keep them for longer."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

import msgspec
from litestar import post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody

from headrace.jobs.errors import InvalidTake, LeaseLost
from headrace.jobs.http.scopes import WRITE, parse_lease_id
from headrace.jobs.intake import is_row_id
from headrace.jobs.model import Taken, TakenOutcome
from headrace.jobs.service import Jobs
from headrace.kernel.config import parse_duration_s


class Acked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What became of the jobs of a lease: by id, and `rest` of those not named; without it those stay."""

    outcomes: dict[int, TakenOutcome] = {}
    rest: TakenOutcome | None = None


class Extended(msgspec.Struct, frozen=True, kw_only=True):
    """When the lease ends now."""

    lease_id: int
    expires_at: datetime


@post(
    "/v1/queues/{queue:str}/take",
    operation_id="takeJobs",
    summary="Take jobs of a queue",
    status_code=200,
    opt=WRITE,
)
async def take_jobs(
    jobs: NamedDependency[Jobs],
    queue: FromPath[str],
    *,
    n: FromQuery[int] = 1,
    lease: FromQuery[str] = "5m",
    wait: FromQuery[str] = "0s",
) -> Taken:
    """Take up to `n` due jobs for `lease`; where there are none, wait for some up to `wait`, 30 s at most."""
    lease_s, wait_s = _duration_s("lease", lease), _duration_s("wait", wait)
    return await jobs.takes.take(queue, n, lease_s=lease_s, wait_s=wait_s)


@post(
    "/v1/leases/{lease_id:str}/ack",
    operation_id="ackLease",
    summary="Say what became of taken jobs",
    status_code=204,
    opt={**WRITE, "large_body": True},
)
async def ack_lease(
    jobs: NamedDependency[Jobs], lease_id: FromPath[str], data: JSONBody[Acked]
) -> None:
    """Say what became of jobs of a lease; sending the same again changes nothing while others are left."""
    number = parse_lease_id(lease_id)
    if not is_row_id(number):
        raise LeaseLost(lease_id)
    if not data.outcomes and data.rest is None:
        raise InvalidTake(
            'nothing is said: send `outcomes` by id, or `rest` such as {"outcome": "done"}'
        )
    await jobs.takes.ack(number, data.outcomes, rest=data.rest)


@post(
    "/v1/leases/{lease_id:str}/extend",
    operation_id="extendLease",
    summary="Keep taken jobs for longer",
    status_code=200,
    opt=WRITE,
)
async def extend_lease(
    jobs: NamedDependency[Jobs], lease_id: FromPath[str], lease: FromQuery[str] = "5m"
) -> Extended:
    """Let a lease end `lease` from now."""
    number = parse_lease_id(lease_id)
    expires_at = await jobs.takes.extend(number, _duration_s("lease", lease))
    return Extended(lease_id=number, expires_at=expires_at)


def _duration_s(name: str, text: str) -> float:
    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise InvalidTake(f"{name}: expected {error}, got {text[:80]!r}") from error


ROUTES: Final[list[Any]] = [take_jobs, ack_lease, extend_lease]
