"""What can go wrong with views, each with its code and what to do about it."""

from __future__ import annotations

from typing import Final

from headrace.kernel.errors import Conflict, InvalidInput, TooLarge, Unavailable

DIGITS_SHOWN_BITS: Final = 1_000
"""Python refuses to write down numbers of more than 4,300 digits."""


def shown(value: object) -> str:
    """The value as a person may want to see it: whatever it is, and however long."""
    if isinstance(value, int) and value.bit_length() > DIGITS_SHOWN_BITS:
        return "of very many digits"
    return repr(str(value)[:40])


class InvalidHit(InvalidInput):
    """A hit or an id that means nothing valid; nothing of the call was counted."""

    code = "views.invalid_hit"

    def __init__(self, name: str, value: object, expected: str, *, counts: bool = True) -> None:
        outcome = "; nothing was counted" if counts else ""
        super().__init__(f"{name} {shown(value)}: expected {expected}{outcome}")


class TooManyHits(TooLarge):
    """More hits in one call than may be; nothing of it was counted."""

    code = "views.too_many_hits"

    def __init__(self, count: int, count_max: int) -> None:
        super().__init__(
            f"{count} hits in one call, at most {count_max} may be: split it; nothing was counted"
        )


class TooManyIds(TooLarge):
    """More ids in one read than may be."""

    code = "views.too_many_ids"

    def __init__(self, count: int, count_max: int) -> None:
        super().__init__(f"{count} ids in one read, at most {count_max} may be: split it")


class InvalidSpan(InvalidInput):
    """A span of time, a step or a number of rows that cannot be answered."""

    code = "views.invalid_span"


class ShardsFixed(Conflict):
    """The number of shards is not the one that the counts were begun with."""

    code = "views.shards_fixed"

    def __init__(self, configured: int, stored: int) -> None:
        super().__init__(
            f"views.shards is {configured}, but the counts were begun with {stored}: set views.shards"
            f" (HEADRACE_VIEWS_SHARDS) to {stored}; the number stays for good"
        )


class NotCounting(Unavailable):
    """Valkey came back empty and PostgreSQL, which knows where to go on, is away; nothing was counted."""

    code = "views.not_counting"

    def __init__(self) -> None:
        super().__init__(
            "views cannot be counted before PostgreSQL has said where to go on, nothing was counted:"
            " try again",
            retry_after_s=2,
        )


class NotDurable(Unavailable):
    """The hits are counted, but it was not confirmed in time that they survive a failure."""

    code, retryable = "views.not_durable", False

    def __init__(self, confirmed: int, wanted: int) -> None:
        super().__init__(
            f"counted, but confirmed durable by {confirmed} of {wanted} within the time: a power cut or failover"
            " now may lose it; do not repeat it, a repeated hit counts again unless it carries an event id"
        )


class FieldUnknown(InvalidInput):
    """A field of totals that does not exist."""

    code = "views.unknown_field"

    def __init__(self, field: object, fields: tuple[str, ...]) -> None:
        super().__init__(f"field {shown(field)} is unknown: use some of {', '.join(fields)}")
