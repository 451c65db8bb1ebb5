"""Who keeps which keys: 131,072 fixed partitions, each with its replicas, computed alike on every node.

A key's hash names its partition for ever; which nodes are a partition's replicas follows from the list of
nodes alone. Each node has a number for each partition (a stretch of SHAKE-128 over its name), and the nodes
with the highest numbers are the replicas, in that order (rendezvous, "highest random weight", Thaler and
Ravishankar 1998). So a node that leaves moves only what it had, evenly onto all others, since the second
place of its partitions is drawn among all of them. Weights bend the numbers (u ** (1 / weight)).

Chance alone leaves shares of 0.98 to 1.02 with 12 nodes, 0.93 to 1.07 with 100; so nobody is first for more
than 1.01 of its fair share, nor next for more: whoever follows in order steps in. Each further replica
goes to the data centre with the fewest replicas of the partition, where one has room.

A lookup is a hash and a slice (1.5 us); a whole table takes 0.5 s for 12 nodes (0.9 s with 6 replicas), in steps of about 2 ms, so
that an event loop can serve in between. Evenness is of keys, not of plays: hot objects need replicas.
"""

from __future__ import annotations

import hashlib
import math
import sys
from array import array
from collections import Counter
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.media.model import REPLICAS_MAX, REPLICAS_PER_CENTRE

PARTITION_BITS: Final = 17
PARTITIONS: Final = 1 << PARTITION_BITS
CANDIDATES_MAX: Final = 1000
CAP: Final = 1.01
"""The most a node is given, in fair shares."""
CHUNK_PARTITIONS: Final = 64
"""How many numbers of a node one stretch of hash gives: part of the definition, never to be changed."""
STEP_NUMBERS: Final = 6144
"""How many numbers are looked at between two pauses: under 2 ms."""
_INDEX_BITS: Final = 16
_INDEX_MASK: Final = (1 << _INDEX_BITS) - 1
_SCALE: Final = 2.0**48


def partition_of(key: str) -> int:
    """The partition of `key`, 0 to 131,071."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - PARTITION_BITS)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that may keep keys: `weight` is its share against the others'."""

    name: str
    dc: str = ""
    weight: float = 1.0


class PartitionTable:
    """The replicas of every partition, first choice first; at most `replicas`, fewer with fewer nodes."""

    def __init__(self, candidates: Sequence[Candidate], replicas: int, owners: array[int]) -> None:
        self.candidates = tuple(candidates)
        self.replicas = replicas
        self._owners = owners
        self._names = [candidate.name for candidate in candidates]

    @classmethod
    def build(cls, candidates: Collection[Candidate], replicas: int) -> PartitionTable:
        """The table of `candidates`, in any order, at one go; `replicas` as in `replicas_of`."""
        steps = build_in_steps(candidates, replicas)
        while True:
            try:
                next(steps)
            except StopIteration as done:
                table: PartitionTable = done.value
                return table

    def owners(self, partition: int) -> tuple[str, ...]:
        """The names of the replicas of `partition`, first choice first."""
        start = partition * self.replicas
        names = self._names
        return tuple(names[index] for index in self._owners[start : start + self.replicas])

    def shares(self, lost: Collection[str] = ()) -> dict[str, float]:
        """The share of all partitions that each node left serves first while `lost` are away.

        What has no replica left is served by whoever is asked, so it is spread over all of them.
        """
        left = [name for name in self._names if name not in lost]
        counts: Counter[str] = Counter()
        for partition in range(PARTITIONS) if left else ():
            serving = (name for name in self.owners(partition) if name not in lost)
            counts[next(serving, "")] += 1
        orphans = counts.pop("", 0) / len(left) if left else 0.0
        return {name: (counts[name] + orphans) / PARTITIONS for name in left}

    def orphaned(self, lost: Collection[str]) -> float:
        """The share of all partitions whose replicas are all among `lost`."""
        if not self.replicas:
            return 1.0
        missing = (all(n in lost for n in self.owners(p)) for p in range(PARTITIONS))
        return sum(missing) / PARTITIONS

    def gains(self, newer: PartitionTable) -> dict[str, float]:
        """The share of all partitions that each node keeps in `newer` and does not keep here."""
        counts: Counter[str] = Counter()
        for partition in range(PARTITIONS):
            counts.update(set(newer.owners(partition)) - set(self.owners(partition)))
        return {name: counts[name] / PARTITIONS for name in newer._names}


def replicas_of(candidates: Collection[Candidate], replicas: int) -> int:
    """How many replicas a partition has: `replicas`, or for 0 two in each data centre; never more than nodes."""
    centres = len({candidate.dc for candidate in candidates})
    return min(replicas or REPLICAS_PER_CENTRE * centres, REPLICAS_MAX, len(candidates))


def build_in_steps(
    candidates: Collection[Candidate], replicas: int
) -> Generator[None, None, PartitionTable]:
    """Make a table, pausing every 2 ms or so; it is the generator's return value."""
    ordered = sorted(candidates, key=lambda candidate: candidate.name)
    assert len({candidate.name for candidate in ordered}) == len(ordered) <= CANDIDATES_MAX
    assert all(candidate.weight > 0 for candidate in ordered)
    replicas = replicas_of(ordered, replicas)
    owners = array("H")
    placing = _Placing(ordered, replicas)
    numbers_a_chunk = CHUNK_PARTITIONS * max(1, len(ordered)) * max(1, replicas // 2)
    chunks_a_step = max(1, STEP_NUMBERS // numbers_a_chunk)
    for chunk in range(PARTITIONS // CHUNK_PARTITIONS if replicas else 0):
        owners.extend(placing.place(chunk))
        if chunk % chunks_a_step == 0:
            yield
    return PartitionTable(ordered, replicas, owners)


class _Placing:
    """How much each node has been given so far, and who is next."""

    def __init__(self, candidates: Sequence[Candidate], replicas: int) -> None:
        self._candidates = candidates
        self._replicas = replicas
        centres = list(dict.fromkeys(candidate.dc for candidate in candidates))
        self._centres = len(centres)
        self._dcs = [centres.index(candidate.dc) for candidate in candidates]
        weights = [candidate.weight for candidate in candidates]
        heaviest, total = max(weights, default=1.0), sum(weights)
        self._bends = [heaviest / weight for weight in weights]
        fair = [CAP * PARTITIONS * weight / total for weight in weights]
        self._firsts_left = [math.ceil(share) for share in fair]
        self._others_left = [math.ceil(share * (replicas - 1)) for share in fair]

    def place(self, chunk: int) -> list[int]:
        """The owners of the next chunk's partitions, as indexes of candidates, one row after another."""
        chosen: list[int] = []
        numbers = (self._numbers(index, chunk) for index in range(len(self._candidates)))
        for row in zip(*numbers, strict=True):
            ranked = [number & _INDEX_MASK for number in sorted(row, reverse=True)]
            chosen += self._choose(ranked)
        return chosen

    def _numbers(self, index: int, chunk: int) -> Sequence[int]:
        """Of one candidate, for each partition of a chunk: 48 bits of chance above its own index.

        The index makes every number of a row different, and tells after the sorting whose it was.
        """
        seed = f"headrace partitions 1\n{chunk}\n{self._candidates[index].name}".encode()
        data = bytearray(hashlib.shake_128(seed).digest(8 * CHUNK_PARTITIONS))
        data[0::8] = bytes([index & 255]) * CHUNK_PARTITIONS
        data[1::8] = bytes([index >> 8]) * CHUNK_PARTITIONS
        numbers = array("Q")
        numbers.frombytes(data)
        if sys.byteorder == "big":
            numbers.byteswap()
        bend = self._bends[index]
        if bend == 1.0:
            return numbers
        return [
            int(((number >> _INDEX_BITS) / _SCALE) ** bend * _SCALE) << _INDEX_BITS | index
            for number in numbers
        ]

    def _choose(self, ranked: list[int]) -> list[int]:
        """The replicas of one partition: the first in order, then each time the next in the centre that has the fewest.

        That is the order of nodes by how many of their own centre stand before them, as far as they have room.
        """
        first = next((i for i in ranked if self._firsts_left[i] > 0), ranked[0])
        self._firsts_left[first] -= 1
        chosen, wanted = [first], self._replicas
        counts = [0] * self._centres
        counts[self._dcs[first]] = 1
        later: list[list[int]] = [[] for _ in range(wanted)]
        for index in ranked if wanted > 1 else ():
            if index == first or self._others_left[index] <= 0:
                continue
            count = counts[self._dcs[index]]
            counts[self._dcs[index]] += 1
            if count:
                later[min(count, wanted - 1)].append(index)
                continue
            chosen.append(index)
            if len(chosen) == wanted:
                break
        for level in later:
            chosen += level[: wanted - len(chosen)]
        if len(chosen) < wanted:
            full = [i for i in ranked if i not in chosen]
            chosen += full[: wanted - len(chosen)]
        for index in chosen[1:]:
            self._others_left[index] -= 1
        return chosen
