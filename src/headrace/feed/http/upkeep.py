"""Routes that rebuild, compare, tell how the index stands and why a page is as it is."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from litestar import get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, QueryParameter

from headrace.feed.http.scopes import READ, WRITE
from headrace.feed.model import FeedVerified, ShardState
from headrace.feed.reasons import PostWhy
from headrace.feed.service import Feed

SAMPLE_MAX: Final = 10_000


class RebuildJob(msgspec.Struct, frozen=True, kw_only=True):
    """The job that builds the index anew."""

    job: int


@post(
    "/v1/feed/rebuild",
    operation_id="rebuildFeed",
    summary="Build the index anew",
    status_code=202,
    opt=WRITE,
)
async def rebuild(feed: NamedDependency[Feed]) -> RebuildJob:
    """Put every viewer and author into Valkey anew, as a job with progress; pages go on meanwhile."""
    return RebuildJob(job=await feed.rebuild())


@get("/v1/feed/verify", operation_id="verifyFeed", summary="Compare index and truth", opt=READ)
async def verify(
    feed: NamedDependency[Feed],
    sample: Annotated[int, QueryParameter(ge=1, le=SAMPLE_MAX)] = 1_000,
) -> FeedVerified:
    """Compare what Valkey has of so many viewers and authors with PostgreSQL; `differences` is empty if all is well."""
    return await feed.verify(sample=sample)


@get("/v1/feed/stats", operation_id="getFeedStats", summary="Show how the index stands", opt=READ)
async def get_stats(feed: NamedDependency[Feed]) -> list[ShardState]:
    """Each shard: whether it is ready, how far back it reaches, its newest post."""
    return await feed.stats()


@get(
    "/v1/feed/viewers/{viewer:str}/why",
    operation_id="getFeedWhy",
    summary="Say why a viewer sees a post or not",
    opt=READ,
)
async def get_why(
    feed: NamedDependency[Feed],
    viewer: FromPath[str],
    post_id: Annotated[str, QueryParameter(name="post", max_length=1_000)],
) -> PostWhy:
    """Whether the viewer's pages show the post, and everything that decides it: follows, mutes, blocks, its moment."""
    return await feed.why(viewer, post_id)


ROUTES: Final[list[Any]] = [rebuild, verify, get_stats, get_why]
