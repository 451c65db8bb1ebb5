"""Feed: the newest posts of followed authors, merged on read.

    post, follow --transaction--> data, version, outbox (PostgreSQL) --at once--> index (Valkey)
                                                               `--- sweep ----------^
    page <-- one function call of the viewer's shard; older posts, or all without it: PostgreSQL

**Promise.** Every change (post, deletion, follow, unfollow, mute, block) is visible on the next
read. Pages neither lose nor repeat posts with equal times, and are full until the true end. The
index stays equal to PostgreSQL, whichever process dies, and `verify` checks it. A lost index is
rebuilt while pages come from PostgreSQL.

**PostgreSQL** is the truth: posts, follows, mutes, blocks, markers, the map of ids. **Valkey**
holds for each author the posts of `feed.index_for`, for each viewer the set of visible authors,
and for each time bucket the authors that posted in it. All of it can be rebuilt from PostgreSQL.

**Limits.** A viewer follows up to `feed.follows_max` authors. Ids of viewers and authors are whole
numbers from 1, or text; ids of posts have up to 64 characters. Two posts committed within
milliseconds of each other may become visible in reverse order of their times; a page started in
between may lack one that the next first page has. A restarted Valkey is not read before its
missing changes are applied. If the writing process alone cannot reach Valkey, other processes read
the state before the change until the process reconnects or the sweep applies it, within one or two
seconds.

**Files.** Read `lua/feed_v1.lua` (the index and a page of one shard), `merge.py` (a page, also
below the index), `apply.py` (changes in order) and `index_recovery.py` (build, verify, recover)
first. Then: `service` with the topics `posts`, `follows`, `pages`, `index` and `lookup`; `worker`
(the sweep, in the role `flusher`), `id_map` (external ids and cursors), `valkey_store`, `store`
with `sql/` (PostgreSQL), `model`, `settings`, `errors`, `http/`, `cli`, `import_files` (bulk
imports), `ranking` (orders of the application).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.feed.model import (
    FeedDifference,
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
from headrace.feed.pages import PostWhy, Reason
from headrace.feed.settings import FeedConfig

if TYPE_CHECKING:
    from headrace.feed.service import Feed as Feed

__all__ = [
    "Feed",
    "FeedConfig",
    "FeedDifference",
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
    """Import the service on first use, so that reading the configuration needs no driver."""
    if name == "Feed":
        from headrace.feed.service import Feed

        return Feed
    raise AttributeError(f"module 'headrace.feed' has no attribute {name!r}")
