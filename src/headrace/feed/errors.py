"""What can go wrong with feeds, each with its code and what to do about it."""

from __future__ import annotations

from headrace.kernel.errors import Conflict, InvalidInput, NotFound, TooLarge, Unavailable


class InvalidFeedId(InvalidInput):
    """An id of a viewer, author or post that means nothing valid; nothing of the call was done."""

    code = "feed.invalid_id"

    def __init__(self, what: str, value: object, expected: str) -> None:
        super().__init__(f"{what} {str(value)[:40]!r}: expected {expected}; nothing was done")


class InvalidPost(InvalidInput):
    """A post that cannot be taken; nothing of the call was done."""

    code = "feed.invalid_post"


class InvalidFollow(InvalidInput):
    """A follow that cannot be taken; nothing of the call was done."""

    code = "feed.invalid_follow"


class InvalidLine(InvalidInput):
    """A line of a file to import that is none; what was imported before it is in, nothing from there on."""

    code = "feed.invalid_line"

    def __init__(self, number: int, text: str, *, done: int = 0) -> None:
        self.number, self.reason = number, text
        super().__init__(
            f"line {number}: {text}; {_said(done)}: correct it and import the file again"
        )


class ImportStopped(Conflict):
    """Lines of a file to import that cannot be taken as things stand; what stands before them is in."""

    code = "feed.import_stopped"

    def __init__(self, text: str, *, lines: tuple[int, int], done: int) -> None:
        first, last = lines
        where = f"line {first}" if first == last else f"lines {first} to {last}"
        super().__init__(f"{where}: {text}; {_said(done)}: then import the file again")


class InvalidLimit(InvalidInput):
    """A number of posts or lines that cannot be answered."""

    code = "feed.invalid_limit"

    def __init__(self, limit: object, limit_max: int, *, what: str = "limit") -> None:
        super().__init__(f"{what} {str(limit)[:20]}: expected 1 to {limit_max}")


class UnclearUnfollow(InvalidInput):
    """Whom to unfollow was not said, and all is not meant by leaving it out: nothing was changed."""

    code = "feed.unclear_unfollow"


class TooManyAtOnce(TooLarge):
    """More in one call than may be; nothing of it was done."""

    code = "feed.too_many_at_once"

    def __init__(self, what: str, count: int, count_max: int) -> None:
        super().__init__(
            f"{count} {what} in one call, at most {count_max} may be: split it; nothing was done"
        )


class TooManyFollows(Conflict):
    """The viewer would follow more authors than may be; none of the call is followed."""

    code = "feed.too_many_follows"

    def __init__(self, viewer: object, follows_max: int) -> None:
        super().__init__(
            f"viewer {viewer} would follow more than {follows_max} authors (feed.follows_max): unfollow some"
            " first; nothing was done"
        )


class TooManyBars(Conflict):
    """The viewer would mute or block more authors than may be; none of the call is."""

    code = "feed.too_many_bars"

    def __init__(self, viewer: object, kind: str, bars_max: int) -> None:
        super().__init__(
            f"viewer {viewer} would {kind} more than {bars_max} authors: end some first; nothing was done"
        )


class PostTaken(Conflict):
    """The id belongs to a post of another author; nothing of the call was done."""

    code = "feed.post_taken"

    def __init__(self, post_id: str) -> None:
        super().__init__(
            f"post {post_id!r} is another author's: use an id of its own; nothing was done"
        )


class PostUnknown(NotFound):
    """There is no such post."""

    code = "feed.post_unknown"

    def __init__(self, post_id: str) -> None:
        super().__init__(f"post {post_id!r}: there is none (never posted, or deleted)")


class FeedShardsFixed(Conflict):
    """The number of shards is not the one that the index was begun with."""

    code = "feed.shards_fixed"

    def __init__(self, configured: int, stored: int) -> None:
        super().__init__(
            f"feed.shards is {configured}, but the index was begun with {stored}: set feed.shards"
            f" (HEADRACE_FEED_SHARDS) to {stored}; the number stays for good"
        )


class SlowPagesBusy(Unavailable):
    """Too many pages are read from PostgreSQL at once; this one was not read."""

    code = "feed.slow_pages_busy"

    def __init__(self, at_once: int) -> None:
        super().__init__(
            f"the page was not read: without its index it comes from PostgreSQL, of which this process reads {at_once}"
            " at once (feed.slow_pages_max), and too many wait already: try again",
            retry_after_s=2,
        )


def _said(done: int) -> str:
    """What an import did before it ended."""
    return f"lines up to {done} are in, nothing after them" if done else "nothing of the file is in"
