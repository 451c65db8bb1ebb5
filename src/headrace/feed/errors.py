"""Errors of the feed, each with a code and advice."""

from __future__ import annotations

from headrace.kernel.errors import (
    Conflict,
    HeadraceError,
    InvalidInput,
    NotFound,
    TooLarge,
    Unavailable,
)


class InvalidFeedId(InvalidInput):
    """The id of a viewer, author or post is invalid; nothing was done."""

    code = "feed.invalid_id"

    def __init__(self, what: str, value: object, expected: str) -> None:
        super().__init__(f"{what} {str(value)[:40]!r}: expected {expected}; nothing was done")


class InvalidPost(InvalidInput):
    """A post is invalid; nothing was done."""

    code = "feed.invalid_post"


class InvalidFollow(InvalidInput):
    """A follow is invalid, or an unfollow names no authors; nothing was done."""

    code = "feed.invalid_follow"


class InvalidKind(InvalidInput):
    """A filter by kinds is invalid."""

    code = "feed.invalid_kind"


class RankingUnknown(InvalidInput):
    """The application does not define the ranking."""

    code = "feed.unknown_ranking"

    def __init__(self, name: object, known: list[str]) -> None:
        listed = ", ".join(known) or "none"
        super().__init__(
            f"ranking {str(name)[:40]!r} is not defined with @app.feed_ranking; defined: {listed}"
        )


class InvalidRanking(InvalidInput):
    """The definition of a ranking is invalid."""

    code = "feed.invalid_ranking"


class RankingFailed(HeadraceError):
    """The handler of a ranking raised, was too slow, or returned other posts than it was given."""

    code = "feed.ranking_failed"

    def __init__(self, name: str, fault: str) -> None:
        super().__init__(
            f"the handler of ranking {name!r} {fault}: it returns the given posts in another order"
        )


class InvalidLine(InvalidInput):
    """A line of an import is invalid; the lines before it are imported."""

    code = "feed.invalid_line"

    def __init__(self, number: int, text: str, *, done: int = 0) -> None:
        self.number, self.reason = number, text
        super().__init__(
            f"line {number}: {text}; {_imported(done)}: correct it and import the file again"
        )


class ImportStopped(Conflict):
    """An import stopped at lines that conflict with stored data; earlier lines are imported."""

    code = "feed.import_stopped"

    def __init__(self, text: str, *, lines: tuple[int, int], done: int) -> None:
        first, last = lines
        where = f"line {first}" if first == last else f"lines {first} to {last}"
        super().__init__(
            f"{where}: {text}; {_imported(done)}: resolve the conflict and import the file again"
        )


class InvalidLimit(InvalidInput):
    """The number of posts or rows is invalid."""

    code = "feed.invalid_limit"

    def __init__(self, limit: object, limit_max: int, *, what: str = "limit") -> None:
        super().__init__(f"{what} {str(limit)[:20]}: expected 1 to {limit_max}")


class TooManyAtOnce(TooLarge):
    """A call has too many items; nothing was done."""

    code = "feed.too_many_at_once"

    def __init__(self, what: str, count: int, count_max: int) -> None:
        super().__init__(
            f"{count} {what} in one call exceed the limit of {count_max}: split the call;"
            " nothing was done"
        )


class TooManyFollows(Conflict):
    """The call would exceed the follows, mutes or blocks of a viewer; nothing was done."""

    code = "feed.too_many_follows"

    def __init__(self, viewer: object, what: str, count_max: int) -> None:
        super().__init__(
            f"viewer {viewer} would exceed the limit of {count_max} {what}: end some first;"
            " nothing was done"
        )


class PostTaken(Conflict):
    """The id belongs to a post of another author; nothing was done."""

    code = "feed.post_taken"

    def __init__(self, post_id: str) -> None:
        super().__init__(
            f"post {post_id!r} belongs to another author: use a unique id; nothing was done"
        )


class PostUnknown(NotFound):
    """The post does not exist."""

    code = "feed.post_unknown"

    def __init__(self, post_id: str) -> None:
        super().__init__(f"post {post_id!r} does not exist: it was never posted, or it was deleted")


class FeedShardsFixed(Conflict):
    """The configured number of shards differs from the stored one."""

    code = "feed.shards_fixed"

    def __init__(self, configured: int, stored: int) -> None:
        super().__init__(
            f"feed.shards is {configured}, but the existing index uses {stored} shards: set"
            f" feed.shards (HEADRACE_FEED_SHARDS) to {stored}; the number cannot be changed"
        )


class SlowPagesBusy(Unavailable):
    """Too many pages are read from PostgreSQL at once; this page was not read."""

    code = "feed.slow_pages_busy"

    def __init__(self, at_once: int) -> None:
        super().__init__(
            "the page was not read: the index is unavailable, and this process reads at most"
            f" {at_once} pages at once from PostgreSQL (feed.slow_pages_max), with too many"
            " waiting: try again",
            retry_after_s=2,
        )


def _imported(done: int) -> str:
    """Progress of an import at its end."""
    if done:
        return f"lines up to {done} are imported, later ones are not"
    return "nothing of the file is imported"
