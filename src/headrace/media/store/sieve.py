"""Which frame of a set gives way: SIEVE, with the order of insertion read off the generations.

SIEVE keeps blocks in the order they came and a hand that goes from the oldest to the newest: a block that was visited
since the hand last passed loses a mark and stays, the first one without a mark goes, and new blocks join as the newest. A visit
costs one byte and moves nothing, so workers need no lock. A block has up to MARKS_MAX marks: in a set of 16 one says too
little of what comes often, and more than two keep what is no longer asked for.

In a fixed array it would decay into CLOCK (+1 to +2 points over LRU instead of +4 to +12), since a new block would stand
where the old one was, at the hand. Here a fill's generation is one more than the highest of its set, so sorting
the 16 by generation is the order of insertion. What that loses against one queue for all says `media/simulate/eviction.py`.

Source: Zhang et al., SIEVE is Simpler than LRU, NSDI 2024.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

MARKS_MAX: Final = 2


class Choice(NamedTuple):
    """The way that goes, the ways that lost a mark before it was found, and the hand behind it.

    A way is named once for each mark that it lost.
    """

    way: int
    unmarked: tuple[int, ...]
    hand: int


def choose(
    generations: Sequence[int],
    visited: Sequence[int],
    *,
    hand: int,
    busy: Collection[int] = (),
) -> Choice | None:
    """The way of a full set that gives way; None while all are busy being filled.

    `hand` is that of the last choice (0 at first): the next one begins with the first generation above it.
    """
    order = sorted(
        (generation, way) for way, generation in enumerate(generations) if way not in busy
    )
    if not order:
        return None
    start = next((at for at, (generation, _) in enumerate(order) if generation > hand), 0)
    unmarked: list[int] = []
    left, at = list(visited), start
    while left[order[at][1]]:
        left[order[at][1]] -= 1
        unmarked.append(order[at][1])
        at = (at + 1) % len(order)
    generation, way = order[at]
    # Behind the newest the hand is back at the oldest; what is filled next must not be first in line.
    return Choice(way, tuple(unmarked), 0 if at == len(order) - 1 else generation)
