"""Why a viewer sees a post or not: asked of the truth, and of the page that he would get."""

from __future__ import annotations

from typing import Final

from headrace.engines.postgres import Postgres, Row
from headrace.feed import store
from headrace.feed.merge import Merge
from headrace.feed.model import Place, require_feed_id, require_post_ids
from headrace.feed.names import Names
from headrace.feed.reasons import PostWhy, is_behind, why_shown

NOBODY: Final = 0
"""Stands for a viewer whose name was never written: no one has this number, and it follows nobody."""
JUST_AFTER: Final = "!"
"""Comes before every character of an id, so that `id!` is the place right after that of `id`."""


class Explaining:
    """Answers why; changes nothing."""

    def __init__(self, postgres: Postgres, names: Names, merge: Merge) -> None:
        self._postgres = postgres
        self._names = names
        self._merge = merge

    async def why(self, viewer: object, post_id: object) -> PostWhy:
        """Whether a viewer is shown a post, and why."""
        who, [wanted] = require_feed_id("viewer", viewer), require_post_ids([post_id])
        number = await self._names.find(who) or NOBODY
        facts, page = await self._ask(number, wanted)
        if facts is not None and is_behind(facts, is_shown=page[0]):
            # A change between the two questions looks the same: what is so twice is so.
            facts, page = await self._ask(number, wanted)
        author = None
        if facts is not None:
            author = (await self._names.told([facts["author"]]))[facts["author"]]
        return why_shown(who, wanted, facts, author=author, page=page)

    async def _ask(self, viewer: int, post_id: str) -> tuple[Row | None, tuple[bool, bool]]:
        facts = await store.posts.why(self._postgres, viewer, post_id)
        if facts is None or viewer == NOBODY:
            return facts, (False, False)
        here = Place(facts["score"], post_id + JUST_AFTER)
        merged = await self._merge.page(viewer, limit=1, before=here)
        is_shown = any(found.id == post_id for found in merged.posts)
        return facts, (is_shown, merged.is_slow and is_shown)
