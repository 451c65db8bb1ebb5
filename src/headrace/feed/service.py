"""The public verbs of the feed: `await app.feed.post(7, "item:1")`, `await app.feed.page(9)`."""

from __future__ import annotations

from collections.abc import Callable

from headrace.engines import Engines
from headrace.feed.follows import Follows
from headrace.feed.id_map import Cursors, IdMap
from headrace.feed.index import Index
from headrace.feed.lookup import Lookup
from headrace.feed.merge import PageMerger, SlowPages
from headrace.feed.pages import Pages
from headrace.feed.posts import Posts
from headrace.feed.settings import FeedConfig
from headrace.feed.valkey_store import ValkeyStore
from headrace.jobs import Jobs, Registry
from headrace.kernel.signing import Key


class Feed:
    """The topics of the feed: `posts`, `follows`, `pages`, `index` and `lookup`.

    The most common calls are also here: `post`, `delete`, `follow`, `unfollow` and `page`.
    """

    def __init__(
        self, engines: Engines, jobs: Jobs, config: FeedConfig, *, make_key: Callable[[], Key]
    ) -> None:
        self.config = config
        self.postgres = postgres = engines.postgres
        self.valkey = ValkeyStore(engines.valkey, engines.multiplexer, config.shards)
        ids, cursors = IdMap(postgres), Cursors(make_key)
        self.index = Index(postgres, self.valkey, jobs, ids, config=config)
        merger = PageMerger(SlowPages(postgres, config.slow_pages_max), self.valkey, self.index)
        self.posts = Posts(postgres, jobs, ids, self.index)
        self.follows = Follows(
            postgres, ids, self.index, cursors=cursors, follows_max=config.follows_max
        )
        self.pages = Pages(postgres, ids, self.index, merger, cursors=cursors)
        self.lookup = Lookup(postgres, ids)
        self.post, self.delete = self.posts.post, self.posts.delete
        self.follow, self.unfollow = self.follows.follow, self.follows.unfollow
        self.page = self.pages.page

    def register(self, registry: Registry) -> None:
        """Add the tasks of the feed; required in every process that enqueues or works."""
        self.posts.register(registry)
        self.index.register(registry)
