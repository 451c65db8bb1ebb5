"""Errors of views, each with a code and advice."""

from __future__ import annotations

from headrace.kernel.errors import Conflict, InvalidInput, TooLarge, Unavailable, describe_value


class InvalidHit(InvalidInput):
    """A hit, an id or a field of totals is invalid; nothing of the call was counted."""

    code = "views.invalid_hit"

    def __init__(self, name: str, value: object, expected: str, *, counts: bool = True) -> None:
        outcome = "; nothing was counted" if counts else ""
        super().__init__(f"{name} {describe_value(value)}: expected {expected}{outcome}")


class TooManyHits(TooLarge):
    """A call has too many hits; none of them was counted."""

    code = "views.too_many_hits"

    def __init__(self, count: int, count_max: int) -> None:
        super().__init__(
            f"{count} hits in one call exceed the limit of {count_max}: split the call;"
            " nothing was counted"
        )


class TooManyIds(TooLarge):
    """A read has too many ids."""

    code = "views.too_many_ids"

    def __init__(self, count: int, count_max: int) -> None:
        super().__init__(f"{count} ids in one read exceed the limit of {count_max}: split the read")


class InvalidSpan(InvalidInput):
    """A time span, step or number of rows is invalid."""

    code = "views.invalid_span"


class ShardsFixed(Conflict):
    """The configured number of shards differs from the stored one."""

    code = "views.shards_fixed"

    def __init__(self, configured: int, stored: int) -> None:
        super().__init__(
            f"views.shards is {configured}, but the existing counts use {stored} shards: set"
            f" views.shards (HEADRACE_VIEWS_SHARDS) to {stored}; the number cannot be changed"
        )


class NotCounting(Unavailable):
    """Valkey restarted while PostgreSQL is down, which stores which hits were flushed; nothing
    was counted.
    """

    code = "views.not_counting"

    def __init__(self) -> None:
        super().__init__(
            "views cannot be counted until PostgreSQL returns the offset of the shard;"
            " nothing was counted: try again",
            retry_after_s=2,
        )


class NotDurable(Unavailable):
    """The hits are counted, but their durability was not confirmed in time."""

    code, retryable = "views.not_durable", False

    def __init__(self, confirmed: int, required: int) -> None:
        super().__init__(
            f"counted, but only {confirmed} of {required} confirmed durability in time: a power cut"
            " or failover now may lose the hit; do not repeat it, because a repeated hit counts"
            " again unless it has an event id"
        )


class ChangesOff(Conflict):
    """The feed of changes is off, or no flusher has started it yet."""

    code = "views.changes_off"

    def __init__(self) -> None:
        super().__init__(
            "changes of views are not recorded: set views.changes_kept"
            " (HEADRACE_VIEWS_CHANGES_KEPT) to a duration such as 7d for the flusher"
        )


class InvalidPosition(InvalidInput):
    """A text is not a position of the feed of changes."""

    code = "views.invalid_position"

    def __init__(self, text: object) -> None:
        super().__init__(
            f"position {describe_value(text)}: expected the `position` of an earlier page, or now"
        )


class PositionLost(Conflict):
    """Changes after this position are missing; a reader that continued would be wrong."""

    code = "views.position_lost"

    def __init__(self) -> None:
        super().__init__(
            "changes after this position are missing: they are older than views.changes_kept, the"
            " feed was off meanwhile, or PostgreSQL lost commits; store the position that"
            " `after=now` returns, then export the series again, and continue at that position"
        )
