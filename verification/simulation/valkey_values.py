"""Values of the modelled Valkey: replies, sorted sets, streams, sketches, and their texts."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import Any, Final, TypeAlias

Words: TypeAlias = list[bytes]
Reply: TypeAlias = Any
"""bytes, int, None, a list of replies, or `Status`."""
LAST: Final = (2**64 - 1, 2**64 - 1)


class Status(bytes):
    """A simple string reply, such as OK."""


class ErrorReply(Exception):
    """An error reply; its text begins with a code such as ERR."""


OK: Final = Status(b"OK")
WRONG_TYPE: Final = "WRONGTYPE Operation against a key holding the wrong kind of value"
NOT_A_NUMBER: Final = "ERR value is not an integer or out of range"


class SortedSet:
    """Members with scores, in order of score and bytes."""

    __slots__ = ("rows", "scores")

    def __init__(self) -> None:
        self.scores: dict[bytes, float] = {}
        self.rows: list[tuple[float, bytes]] = []

    def add(self, score: float, member: bytes) -> int:
        """Insert or move a member. Return 1 if it is new."""
        before = self.scores.get(member)
        if before is not None:
            del self.rows[bisect_left(self.rows, (before, member))]
        self.scores[member] = score
        insort(self.rows, (score, member))
        return int(before is None)

    def remove(self, member: bytes) -> int:
        """Delete a member. Return 1 if it existed."""
        score = self.scores.pop(member, None)
        if score is None:
            return 0
        del self.rows[bisect_left(self.rows, (score, member))]
        return 1

    def between(self, low: bytes, high: bytes) -> tuple[int, int]:
        """The indexes of the rows between two limits of scores."""
        first_score, is_first_open = _limit(low)
        last_score, is_last_open = _limit(high)
        find_first = bisect_right if is_first_open else bisect_left
        find_last = bisect_left if is_last_open else bisect_right
        first = find_first(self.rows, first_score, key=_score_of)
        return first, max(first, find_last(self.rows, last_score, key=_score_of))

    def copy(self) -> SortedSet:
        """An equal sorted set."""
        other = SortedSet()
        other.scores, other.rows = dict(self.scores), list(self.rows)
        return other


class Stream:
    """Entries in order of their ids; the last id stays known after its entry is deleted."""

    __slots__ = ("ids", "last", "lines")

    def __init__(self) -> None:
        self.ids: list[tuple[int, int]] = []
        self.lines: list[list[bytes]] = []
        self.last = (0, 0)

    def copy(self) -> Stream:
        """An equal stream."""
        other = Stream()
        other.ids, other.lines, other.last = list(self.ids), list(self.lines), self.last
        return other


class Sketch(dict[bytes, None]):
    """The members of a HyperLogLog."""


Value: TypeAlias = "bytes | dict[bytes, bytes] | dict[bytes, None] | SortedSet | Stream | Sketch"


class Members(dict[bytes, None]):
    """A set, in order of insertion."""


def _score_of(row: tuple[float, bytes]) -> float:
    return row[0]


def _limit(text: bytes) -> tuple[float, bool]:
    if text.startswith(b"("):
        return float(text[1:]), True
    return float(text), False


def number_text(value: float) -> bytes:
    """A number as Valkey writes it."""
    return b"%d" % value if value == int(value) else f"{value:.17g}".encode()


def id_text(entry: tuple[int, int]) -> bytes:
    """A stream id as text."""
    return b"%d-%d" % entry


def parse_id(text: bytes, *, number: int = 0) -> tuple[int, int]:
    """A stream id from text; `number` completes one without its second part."""
    ms, dash, rest = text.partition(b"-")
    return int(ms), int(rest) if dash else number
