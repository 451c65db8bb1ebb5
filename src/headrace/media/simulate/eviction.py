"""The hit ratio of SIEVE in sets of 16, compared with LRU, one global SIEVE and the best static
choice.

The requests follow the popularity that the cache was designed for: of ten million tracks the 140
most popular get 10 % and 500,000 get 90 %, which a Zipf-Mandelbrot law with s = 1.22 and q = 260
fits. `scale` divides tracks, frames and q alike, which keeps the ratios and makes it fast. The
policy within a set is the cache's own (`cache.frame_table`), and so is the hash that selects the
set (`cache.layout`): a cheaper hash is less even, which costs a point.

Limits: the requests have no order in time and no drift, which favors policies that count. Replay
your own log before you rely on a decimal.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from headrace.media.cache.frame_table import MARKS_MAX, choose
from headrace.media.cache.layout import WAYS, Digests

TRACKS: Final = 10_000_000
EXPONENT: Final = 1.22
SHIFT: Final = 260.0


@dataclass(frozen=True, slots=True)
class Row:
    """Hit ratios from 0 to 1 for this many frames of a real node (not scaled)."""

    frames: int
    lru: float
    sieve_sets: float
    sieve_global: float
    best_static: float


class Popularity:
    """Draws tracks, 0 the most popular; `tracks` and `shift` are scaled already."""

    def __init__(self, tracks: int, *, shift: float, seed: int) -> None:
        weights = ((rank + 1 + shift) ** -EXPONENT for rank in range(tracks))
        self._below: list[float] = list(accumulate(weights))
        self._random = random.Random(seed)

    def share_of_top(self, tracks: int) -> float:
        """The share of requests for the most popular tracks: the best without foresight."""
        below = self._below
        return below[min(tracks, len(below)) - 1] / below[-1]

    def draw(self, requests: int) -> Iterator[int]:
        """Draw this many requests."""
        total, below, uniform = self._below[-1], self._below, self._random.random
        return (bisect_left(below, uniform() * total) for _ in range(requests))


class Lru:
    """Evicts the least recently used track."""

    def __init__(self, frames: int) -> None:
        self._frames = frames
        self._held: OrderedDict[int, None] = OrderedDict()

    def hit(self, track: int) -> bool:
        """Request a track and cache it. Return whether it was cached."""
        if track in self._held:
            self._held.move_to_end(track)
            return True
        if len(self._held) >= self._frames:
            self._held.popitem(last=False)
        self._held[track] = None
        return False


class SieveGlobal:
    """One SIEVE over all frames: a queue in insertion order, and a hand from its old end."""

    def __init__(self, frames: int) -> None:
        self._frames = frames
        self._visited: dict[int, bool] = {}
        self._before: dict[int, int] = {}
        self._after: dict[int, int] = {}
        self._ends = [-1, -1]
        self._hand = -1

    def hit(self, track: int) -> bool:
        """Request a track and cache it. Return whether it was cached."""
        if track in self._visited:
            self._visited[track] = True
            return True
        if len(self._visited) >= self._frames:
            self._evict()
        oldest, newest = self._ends
        self._before[track], self._after[track] = newest, -1
        if newest >= 0:
            self._after[newest] = track
        self._ends = [track if oldest < 0 else oldest, track]
        self._visited[track] = False
        return False

    def _evict(self) -> None:
        at = self._hand if self._hand >= 0 else self._ends[0]
        while self._visited[at]:
            self._visited[at] = False
            at = self._after[at] if self._after[at] >= 0 else self._ends[0]
        before, after = self._before.pop(at), self._after.pop(at)
        if before >= 0:
            self._after[before] = after
        if after >= 0:
            self._before[after] = before
        oldest, newest = self._ends
        self._ends = [after if at == oldest else oldest, before if at == newest else newest]
        self._hand = after
        del self._visited[at]


class SieveSets:
    """The policy of the cache: sets of 16 frames with SIEVE by the order of generations."""

    def __init__(self, frames: int, *, seed: int) -> None:
        sets = max(1, frames // WAYS)
        self._sets = [_Set() for _ in range(sets)]
        self._digests = Digests(seed.to_bytes(8, "little"))
        self._set_of: dict[int, _Set] = {}

    def hit(self, track: int) -> bool:
        """Request a track and cache it. Return whether it was cached."""
        own = self._set_of.get(track)
        if own is None:
            hash_bits = self._digests.key(str(track), "", 0).hash_bits
            own = self._set_of[track] = self._sets[(hash_bits >> 16) % len(self._sets)]
        return own.hit(track)


class _Set:
    __slots__ = ("_generations", "_hand", "_newest", "_visited", "_ways")

    def __init__(self) -> None:
        self._ways: dict[int, int] = {}
        self._generations = [0] * WAYS
        self._visited = [0] * WAYS
        self._hand = self._newest = 0

    def hit(self, track: int) -> bool:
        way = self._ways.get(track)
        if way is not None:
            if self._visited[way] < MARKS_MAX:
                self._visited[way] += 1
            return True
        way = len(self._ways) if len(self._ways) < WAYS else self._evict()
        self._newest += 1
        self._ways[track] = way
        self._generations[way], self._visited[way] = self._newest, 0
        return False

    def _evict(self) -> int:
        choice = choose(self._generations, self._visited, hand=self._hand)
        assert choice is not None, "no frame of a simulation is ever busy"
        for way in choice.unmarked:
            self._visited[way] -= 1
        self._hand = choice.hand
        gone = next(track for track, way in self._ways.items() if way == choice.way)
        del self._ways[gone]
        return choice.way


Policy = Lru | SieveGlobal | SieveSets
"""A cache of a fixed size."""


def hit_ratio(policy: Policy, tracks: Iterable[int], *, warm: int) -> float:
    """The share of hits after the first `warm` requests."""
    hits = counted = 0
    for number, track in enumerate(tracks):
        is_hit = policy.hit(track)
        if number >= warm:
            hits += is_hit
            counted += 1
    return hits / max(1, counted)


def simulate(
    frames: Sequence[int], *, requests: int = 600_000, scale: int = 100, seed: int = 1
) -> list[Row]:
    """Hit ratios for these numbers of frames (one track each);

    the second half of the requests counts.

    The same seed gives the same rows.
    """
    tracks, shift = max(WAYS, TRACKS // scale), SHIFT / scale
    rows = []
    for count in frames:
        held = max(WAYS, count // scale // WAYS * WAYS)

        def ratio(policy: Policy) -> float:
            drawn = Popularity(tracks, shift=shift, seed=seed).draw(requests)
            return hit_ratio(policy, drawn, warm=requests // 2)

        rows.append(
            Row(
                frames=count,
                lru=ratio(Lru(held)),
                sieve_sets=ratio(SieveSets(held, seed=seed)),
                sieve_global=ratio(SieveGlobal(held)),
                best_static=Popularity(tracks, shift=shift, seed=seed).share_of_top(held),
            )
        )
    return rows
