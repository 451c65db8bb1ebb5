"""Routes that steer many jobs at once."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from litestar import post
from litestar.di import NamedDependency
from litestar.params import JSONBody

from headrace.jobs.http.scopes import WRITE
from headrace.jobs.model import JobFilter
from headrace.jobs.service import Jobs
from headrace.kernel.signing import Key, read_cursor, sign_cursor

LISTING: Final = "jobs.bulk"


class BulkToDo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`retry`, `cancel` or `delete` the jobs that fit; `dry_run` counts them only."""

    action: str
    filter: JobFilter
    dry_run: bool = False
    cursor: str | None = None
    """The `next_cursor` of the answer before, to go on."""


class BulkTold(msgspec.Struct, frozen=True, kw_only=True):
    """What was done; with `more`, send the same again with `cursor` = `next_cursor`."""

    action: str
    dry_run: bool
    matched: int
    changed: int
    skipped: int
    more: bool
    next_cursor: str | None


@post(
    "/v1/jobs/bulk",
    operation_id="bulkJobs",
    summary="Retry, cancel or delete many jobs",
    status_code=200,
    opt=WRITE,
)
async def bulk_jobs(
    jobs: NamedDependency[Jobs], cursor_key: NamedDependency[Key], data: JSONBody[BulkToDo]
) -> BulkTold:
    """Do one bounded step, some seconds long, over the jobs that fit, newest first."""
    asked = {
        "action": data.action,
        "dry_run": data.dry_run,
        **msgspec.structs.asdict(data.filter),
    }
    before = None
    if data.cursor is not None:
        before = read_cursor(cursor_key, LISTING, asked, data.cursor)
    done = await jobs.bulk(data.action, data.filter, dry_run=data.dry_run, before=before)
    following = None
    if done.next_before is not None:
        following = sign_cursor(cursor_key, LISTING, asked, done.next_before)
    return BulkTold(
        action=done.action,
        dry_run=done.dry_run,
        matched=done.matched,
        changed=done.changed,
        skipped=done.skipped,
        more=done.more,
        next_cursor=following,
    )


ROUTES: Final[list[Any]] = [bulk_jobs]
