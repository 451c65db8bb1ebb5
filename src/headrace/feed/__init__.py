"""Feed: to each viewer the newest posts of those whom he follows, merged when he asks.

    post, follow --transaction--> truth, version, outbox (PostgreSQL) --at once--> index (Valkey) <-- sweep
    page <-- one function call a shard, merged; what is older than the index, or without one: from PostgreSQL

**Promise.** What was posted, deleted, followed, unfollowed, muted, blocked is so on the next read. Pages lose and double
nothing where times are equal, and are full until the true end. The index is the truth, whatever is killed in between,
and `verify` proves it; lost, it is built anew while pages go on from PostgreSQL.

**PostgreSQL** is the truth: posts, follows, mutes, blocks, markers, names. **Valkey** has, for each author, his posts of
`feed.index_for`, the set of authors that each viewer is to see, and in which span of time which authors posted; nothing
that is not built anew from PostgreSQL.

**Limits.** A viewer follows up to `feed.follows_max` authors. Ids of viewers and authors are whole numbers from 1, or
names; those of posts have up to 64 characters. Two posts that are committed within milliseconds of each other may become
visible in the other order than their moments; a page begun in between may then lack one that the next first page has.
A Valkey that comes back is not read before it has what it missed. Where it answers others and not the process that wrote,
these may read what was before until it is reached, or the sweep brings it, a second or two later.

**Files**: hearts `lua/feed_page_v2.lua` (a page of one shard), `merge.py` (a page of all), `apply.py` (changes in order),
`returning.py` (brought back with its server) and `rebuild.py` (made anew, and proved); then `reasons` (why a post is shown or
not), `model`, `settings`, `errors`, `hot` (Valkey), `names`, `store/` + `sql/`, `service/`, `worker` (the sweep, in the role
`flusher`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.feed.model import (
    Differs,
    FeedId,
    FeedVerified,
    Marker,
    NewPost,
    Page,
    PagePost,
    People,
    Person,
    Post,
    PostDeleted,
    ShardState,
    Unread,
)
from headrace.feed.reasons import PostWhy, Reason
from headrace.feed.settings import FeedConfig

if TYPE_CHECKING:
    from headrace.feed.service import Feed as Feed

__all__ = [
    "Differs",
    "Feed",
    "FeedConfig",
    "FeedId",
    "FeedVerified",
    "Marker",
    "NewPost",
    "Page",
    "PagePost",
    "People",
    "Person",
    "Post",
    "PostDeleted",
    "PostWhy",
    "Reason",
    "ShardState",
    "Unread",
]


def __getattr__(name: str) -> Any:
    """Import the room on first use: whoever reads the configuration needs its settings alone."""
    if name == "Feed":
        from headrace.feed.service import Feed

        return Feed
    raise AttributeError(f"module 'headrace.feed' has no attribute {name!r}")
