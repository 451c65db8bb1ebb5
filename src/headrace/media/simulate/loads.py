"""Each node's part of all requests before and after a change, by the rules that nodes route by.

Clients are sent to a centre (geo DNS, anycast), by the weight of its nodes, and there evenly to one that
lives; a centre without one is left out. A node that keeps the key serves it; any other asks the first live replica of its own centre, else the first live one in the partition's order;
where no replica lives it goes to the object store itself. So two parts are told of each node: what it
*serves* (out of its store, or of the object store), and what it *sends* (to clients who entered there, and to peers who asked),
which is what its network card carries.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from headrace.media.partitions import PARTITIONS, Candidate, Table


@dataclass(frozen=True, slots=True)
class Load:
    """One node's shares of all requests. `fair_share`: what its weight entitles it to afterwards."""

    name: str
    dc: str
    is_up: bool
    share_before: float
    share_after: float
    fair_share: float
    sent_share: float

    @property
    def over_fair(self) -> float:
        """How many times its fair share it serves; 0 for a node that is entitled to nothing."""
        return self.share_after / self.fair_share if self.fair_share else 0.0


@dataclass(frozen=True, slots=True)
class Situation:
    """A table before and after a change of members, and who is lost or drained after it."""

    candidates: tuple[Candidate, ...]
    before: Table
    after: Table
    lost: frozenset[str] = frozenset()
    drained: frozenset[str] = frozenset()


def loads_of(situation: Situation) -> tuple[tuple[Load, ...], float, float]:
    """The loads, the share of kept blocks that new owners read once, and the share that nobody keeps any more.

    A drained node is up and clients enter there, but it keeps no keys. About 0.2 s.
    """
    candidates, after, lost = situation.candidates, situation.after, situation.lost
    was = _Flow(candidates, situation.before, ())
    will = _Flow(candidates, after, lost)
    weights = {one.name: one.weight for one in after.candidates if one.name not in lost}
    entitled = sum(weights.values())
    loads = tuple(
        Load(
            name=one.name,
            dc=one.dc,
            is_up=one.name not in lost,
            share_before=was.served[one.name],
            share_after=will.served[one.name],
            fair_share=weights.get(one.name, 0.0) / entitled if entitled else 0.0,
            sent_share=will.sent(one.name),
        )
        for one in candidates
    )
    moved = after is not situation.before and after.replicas
    gained = sum(situation.before.gains(after).values()) / after.replicas if moved else 0.0
    return loads, gained, will.unowned


class _Flow:
    """Who serves what, as shares of all requests."""

    def __init__(
        self, candidates: Sequence[Candidate], table: Table, lost: Collection[str]
    ) -> None:
        self._dcs = {one.name: one.dc for one in candidates if one.name not in lost}
        self._entering = _entering(candidates, self._dcs)
        self._in_dc: defaultdict[str, float] = defaultdict(float)
        for name, share in self._entering.items():
            self._in_dc[self._dcs[name]] += share
        self.served: defaultdict[str, float] = defaultdict(float)
        self._own: defaultdict[str, float] = defaultdict(float)
        self.unowned = 0.0
        for owners, count in _owner_counts(table).items():
            alive = [name for name in owners if name not in lost]
            self._route(alive, count / PARTITIONS)
            self.unowned += 0.0 if alive else count / PARTITIONS

    def sent(self, name: str) -> float:
        """What a node sends to clients who entered there and to peers who asked."""
        return self._entering.get(name, 0.0) + self.served[name] - self._own[name]

    def _route(self, alive: Sequence[str], share: float) -> None:
        """Add `share` of all requests, those whose key `alive` keep."""
        entering = self._entering
        for name in alive or entering:
            self.served[name] += share * entering[name]
            self._own[name] += share * entering[name]
        if not alive:
            return
        for dc, whole in self._in_dc.items():
            near = [name for name in alive if self._dcs[name] == dc]
            others = whole - sum(entering[name] for name in near)
            self.served[(near or alive)[0]] += share * others


@lru_cache(maxsize=2)
def _owner_counts(table: Table) -> Counter[tuple[str, ...]]:
    """How many partitions each group of owners has: of twelve nodes there are 132 pairs, not 131,072."""
    return Counter(map(table.owners, range(PARTITIONS)))


def _entering(candidates: Sequence[Candidate], alive: Mapping[str, str]) -> dict[str, float]:
    """The share of clients that enters at each node that lives."""
    nodes = Counter(alive.values())
    weights: defaultdict[str, float] = defaultdict(float)
    for one in candidates:
        weights[one.dc] += one.weight if one.dc in nodes else 0.0
    whole = sum(weights.values())
    return {name: weights[dc] / whole / nodes[dc] for name, dc in alive.items()}
