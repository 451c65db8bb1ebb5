"""Which nodes keep which keys: 131,072 fixed partitions with replicas, the same on every node.

A key's hash selects its partition. The list of nodes alone determines a partition's replicas: each
node has a number for each partition (part of SHAKE-128 over its name), and the nodes with the
highest numbers are the replicas, in that order (rendezvous hashing, Thaler and Ravishankar 1998).
So a node that leaves moves only its own partitions, evenly onto all others. Weights change the
numbers (u ** (1 / weight)).

Chance alone leaves uneven shares. So no node is the first replica of more than 1.01 of its fair
share; the next in order takes the rest. Each further replica goes to the data center with the
fewest replicas of the partition, if one has room.

A table is built in steps of about 2 ms, so that an event loop can serve in between. Keys are spread
evenly, not requests: hot objects need replicas.
"""

from __future__ import annotations

import hashlib
import math
import sys
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.media.model import REPLICAS_MAX, REPLICAS_PER_CENTER

PARTITION_BITS: Final = 17
PARTITIONS: Final = 1 << PARTITION_BITS
CANDIDATES_MAX: Final = 1000
CAP: Final = 1.01
"""The maximum of a node, in fair shares."""
CHUNK_PARTITIONS: Final = 64
"""Numbers of a node from one hash output. Part of the definition: never change it."""
STEP_NUMBERS: Final = 6144
"""Numbers processed between two pauses, under 2 ms."""
_INDEX_BITS: Final = 16
_INDEX_MASK: Final = (1 << _INDEX_BITS) - 1
_SCALE: Final = 2.0**48


def partition_of(key: str) -> int:
    """The partition of `key`, 0 to 131,071."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - PARTITION_BITS)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that may keep keys; `weight` is relative to the others."""

    name: str
    dc: str = ""
    weight: float = 1.0


class PartitionTable:
    """The replicas of every partition, first choice first; at most `replicas`."""

    def __init__(self, candidates: Sequence[Candidate], replicas: int, owners: array[int]) -> None:
        self.candidates = tuple(candidates)
        self.replicas = replicas
        self._owners = owners
        self._names = [candidate.name for candidate in candidates]

    @classmethod
    def build(cls, candidates: Collection[Candidate], replicas: int) -> PartitionTable:
        """Build the table of `candidates`, in any order; `replicas` as in `replicas_of`."""
        return next(filter(None, build_in_steps(candidates, replicas)))

    def owners(self, partition: int) -> tuple[str, ...]:
        """The names of the replicas of `partition`, first choice first."""
        start = partition * self.replicas
        names = self._names
        return tuple(names[index] for index in self._owners[start : start + self.replicas])

    def shares(self) -> dict[str, float]:
        """The share of all partitions that each node serves first."""
        firsts = Counter(self._owners[:: max(1, self.replicas)])
        return {name: firsts[index] / PARTITIONS for index, name in enumerate(self._names)}

    def gains(self, newer: PartitionTable) -> dict[str, float]:
        """The share of all partitions that each node keeps in `newer` and not here."""
        counts: Counter[str] = Counter()
        for partition in range(PARTITIONS):
            counts.update(set(newer.owners(partition)) - set(self.owners(partition)))
        return {name: counts[name] / PARTITIONS for name in newer._names}


def replicas_of(candidates: Collection[Candidate], replicas: int) -> int:
    """The number of replicas: `replicas`, or for 0 two in each data center; at most all nodes."""
    centers = len({candidate.dc for candidate in candidates})
    return min(replicas or REPLICAS_PER_CENTER * centers, REPLICAS_MAX, len(candidates))


def build_in_steps(
    candidates: Collection[Candidate], replicas: int
) -> Iterator[PartitionTable | None]:
    """Build a table: yield None about every 2 ms, and at last the table."""
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
            yield None
    yield PartitionTable(ordered, replicas, owners)


class _Placing:
    """The remaining capacity of each node while a table is built."""

    def __init__(self, candidates: Sequence[Candidate], replicas: int) -> None:
        self._candidates = candidates
        self._replicas = replicas
        centers = list(dict.fromkeys(candidate.dc for candidate in candidates))
        self._centers = len(centers)
        self._dcs = [centers.index(candidate.dc) for candidate in candidates]
        weights = [candidate.weight for candidate in candidates]
        heaviest, total = max(weights, default=1.0), sum(weights)
        self._bends = [heaviest / weight for weight in weights]
        fair = [CAP * PARTITIONS * weight / total for weight in weights]
        self._firsts_left = [math.ceil(share) for share in fair]
        self._others_left = [math.ceil(share * (replicas - 1)) for share in fair]

    def place(self, chunk: int) -> list[int]:
        """The owners of the next chunk's partitions as indexes of candidates, row by row."""
        chosen: list[int] = []
        numbers = (self._numbers(index, chunk) for index in range(len(self._candidates)))
        for row in zip(*numbers, strict=True):
            ranked = [number & _INDEX_MASK for number in sorted(row, reverse=True)]
            chosen += self._choose(ranked)
        return chosen

    def _numbers(self, index: int, chunk: int) -> Sequence[int]:
        """For each partition of a chunk: 48 bits of one candidate's hash above its index.

        The index makes all numbers of a row different, and identifies the candidate after sorting.
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
        """The replicas of one partition: the first in order, then the next in the emptiest data
        center.

        This equals sorting nodes by the number of earlier nodes of their own data center, as far as
        they have capacity.
        """
        first = next((i for i in ranked if self._firsts_left[i] > 0), ranked[0])
        self._firsts_left[first] -= 1
        chosen, wanted = [first], self._replicas
        counts = [0] * self._centers
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
