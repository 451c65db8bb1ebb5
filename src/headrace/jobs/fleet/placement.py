"""On which hosts slots stand: a board of the fleet, changed slot by slot, each change noted.

A queue's slots are spread, so that a lost host costs every queue little: they leave where the queue
has most and come where it has fewest. Since free slots are seldom where they would be best, up to
`REPAIRS_MAX` slots a plan change places afterwards (in simulated days 99.6 % of the queues stood
within one slot of even, and 8 hosts that came back were evened out within 30 plans).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

REPAIRS_MAX: Final = 20
PRESSURE_LAST: Final = 0.4
"""A host with a higher CPU pressure gets new slots last."""


class HostRoom(msgspec.Struct, frozen=True, kw_only=True):
    """A host that lives, and how many slots it can hold."""

    name: str
    capacity: int
    cpu_pressure: float = 0.0
    tags: frozenset[str] = frozenset()
    is_draining: bool = False


class Change(NamedTuple):
    """Slots of a queue that came to a host or left it; `code` says in which step of the plan."""

    queue: str
    host: str
    delta: int
    code: str


class Board:
    """The slot map while a plan changes it.

    It starts without the slots that cannot stay: those of hosts that are gone or draining, and those
    of a queue on a host that lacks its tag. `tags` has the planned queues, the most important first.
    Others are not ours to plan: their slots stay and take room away.
    """

    def __init__(
        self,
        hosts: Iterable[HostRoom],
        current: Mapping[str, Mapping[str, int]],
        tags: dict[str, str | None],
    ) -> None:
        everyone = {host.name: host for host in sorted(hosts, key=lambda host: host.name)}
        self.hosts = {name: host for name, host in everyone.items() if not host.is_draining}
        self.capacity = {name: max(0, host.capacity) for name, host in self.hosts.items()}
        self._overloaded = {
            name for name, host in self.hosts.items() if host.cpu_pressure > PRESSURE_LAST
        }
        self.tags = tags
        self._places = {queue: place for place, queue in enumerate(tags)}
        self.slots: dict[str, dict[str, int]] = {name: {} for name in everyone}
        self.used = dict.fromkeys(everyone, 0)
        self.counts = dict.fromkeys(tags, 0)
        self.changes: list[Change] = []
        self._names_by_tag: dict[str | None, list[str]] = {}
        for host, there in sorted(current.items()):
            for queue, count in sorted(there.items()):
                self._take_over(queue, host, count, is_draining=host in everyone)
        self._shrink_unplanned()

    def names_for(self, queue: str) -> list[str]:
        """The hosts that may hold the queue's slots, by name."""
        return self.names_with(self.tags[queue])

    def names_with(self, tag: str | None) -> list[str]:
        """The hosts with the tag, by name; with None all of them."""
        if tag not in self._names_by_tag:
            self._names_by_tag[tag] = [
                name for name, host in self.hosts.items() if tag is None or tag in host.tags
            ]
        return self._names_by_tag[tag]

    def room(self, tag: str | None) -> int:
        """Slots that hosts with the tag can give to the queues that are planned."""
        names = self.names_with(tag)
        return sum(self.capacity[name] - self._unplanned(name) for name in names)

    def evict(self, target: Mapping[str, int]) -> None:
        """Relieve hosts that hold more than they can: the largest surplus leaves first."""
        for name, capacity in self.capacity.items():
            there = self.slots[name]
            while self.used[name] > capacity:
                planned = [queue for queue in reversed(self.tags) if there.get(queue)]
                queue = max(planned, key=lambda q: (self.counts[q] - target[q], there[q]))
                self._put(queue, name, -1, "host_shrunk")

    def remove(self, target: Mapping[str, int]) -> None:
        """Take queues down to their targets, from where they have most, then the fullest host."""
        for queue in reversed(self.tags):
            surplus = self.counts[queue] - target[queue]
            if surplus <= 0:
                continue
            heap = [(-self._count(queue, n), -self._share(n), n) for n in self.names_for(queue)]
            heapq.heapify(heap)
            for _ in range(surplus):
                name = heap[0][2]
                self._put(queue, name, -1, "removed")
                heapq.heapreplace(heap, (-self._count(queue, name), -self._share(name), name))

    def add(self, target: Mapping[str, int]) -> None:
        """Bring queues up to their targets as far as there is room: those with a tag first."""
        for queue in sorted(self.tags, key=lambda q: self.tags[q] is None):
            missing = target[queue] - self.counts[queue]
            if missing <= 0:
                continue
            heap = [self._rank(queue, name) for name in self.names_for(queue) if self._free(name)]
            heapq.heapify(heap)
            while missing > 0 and (heap or self._make_way(queue, heap)):
                name = heap[0][3]
                self._put(queue, name, 1, "added")
                missing -= 1
                if self._free(name):
                    heapq.heapreplace(heap, self._rank(queue, name))
                else:
                    heapq.heappop(heap)

    def repair(self) -> None:
        """Even out queues that stand unevenly, the important first; at most REPAIRS_MAX slots."""
        left = REPAIRS_MAX
        for queue in self.tags:
            names = [n for n in self.names_for(queue) if self.capacity[n]]
            while left >= 2 and (moved := self._even_out(queue, names)):
                left -= moved

    def _even_out(self, queue: str, names: Sequence[str]) -> int:
        """Move a slot from where the queue has most to where it has fewest; return slots moved."""
        counts = [self.slots[name].get(queue, 0) for name in names]
        if not counts or max(counts) - min(counts) < 2:
            return 0
        ranked = sorted(names, key=lambda n: (self._count(queue, n), self._share(n), n))
        high = ranked[-1]
        for low in ranked:
            if self._count(queue, high) - self._count(queue, low) < 2:
                return 0
            if self._free(low):
                self._move(queue, high, low, "spread")
                return 1
            other = self._partner(queue, low, high)
            if other is not None:
                self._move(queue, high, low, "spread")
                self._move(other, low, high, "swapped")
                return 2
        return 0

    def _partner(self, queue: str, low: str, high: str) -> str | None:
        """Who has most more on `low` than on `high` and may stand there; rather the unimportant."""
        more = [
            (count - self._count(other, high), self._places[other], other)
            for other, count in self.slots[low].items()
            if other in self._places and other != queue and self._may_stand(other, high)
        ]
        best = max(more, default=(0, 0, queue))
        return best[2] if best[0] > 0 else None

    def _make_way(self, queue: str, heap: list[tuple[int, bool, float, str]]) -> bool:
        """Free a slot on a host with the queue's tag: another queue's moves to a free host."""
        if self.tags[queue] is None:
            return False
        others = [q for q in reversed(self.tags) if self.tags[q] != self.tags[queue]]
        for name in sorted(self.names_for(queue), key=lambda n: (self._count(queue, n), n)):
            for other in sorted(others, key=lambda q: -self._count(q, name)):
                places = [n for n in self.names_for(other) if n != name and self._free(n)]
                if places and self._count(other, name):
                    self._move(
                        other, name, min(self._rank(other, n) for n in places)[3], "made_way"
                    )
                    heapq.heappush(heap, self._rank(queue, name))
                    return True
        return False

    def _take_over(self, queue: str, host: str, count: int, *, is_draining: bool) -> None:
        """Count slots of the current map in, or out if they cannot stay."""
        if count <= 0:
            return
        if host not in self.hosts:
            code = "host_draining" if is_draining else "host_gone"
            self.changes.append(Change(queue, host, -count, code))
        elif not self._may_stand(queue, host):
            self.changes.append(Change(queue, host, -count, "tag_missing"))
        else:
            self.slots[host][queue] = count
            self.used[host] += count
            if queue in self.counts:
                self.counts[queue] += count

    def _shrink_unplanned(self) -> None:
        """Slots that are not ours to plan leave only a host too small for them alone."""
        for name, capacity in self.capacity.items():
            surplus = self._unplanned(name) - capacity
            for queue in [q for q in self.slots[name] if q not in self.tags]:
                leaving = max(0, min(surplus, self.slots[name][queue]))
                surplus -= leaving
                if leaving:
                    self._put(queue, name, -leaving, "host_shrunk")

    def _unplanned(self, name: str) -> int:
        return sum(count for queue, count in self.slots[name].items() if queue not in self.tags)

    def _may_stand(self, queue: str, host: str) -> bool:
        tag = self.tags.get(queue)
        return tag is None or tag in self.hosts[host].tags

    def _move(self, queue: str, source: str, to: str, code: str) -> None:
        self._put(queue, source, -1, code)
        self._put(queue, to, 1, code)

    def _put(self, queue: str, host: str, delta: int, code: str) -> None:
        there = self.slots[host]
        there[queue] = there.get(queue, 0) + delta
        if not there[queue]:
            del there[queue]
        self.used[host] += delta
        if queue in self.counts:
            self.counts[queue] += delta
        self.changes.append(Change(queue, host, delta, code))

    def _rank(self, queue: str, name: str) -> tuple[int, bool, float, str]:
        """The smallest is the best place for one more slot."""
        share = self.used[name] / (self.capacity[name] or 1)
        return self.slots[name].get(queue, 0), name in self._overloaded, share, name

    def _count(self, queue: str, name: str) -> int:
        return self.slots[name].get(queue, 0)

    def _free(self, name: str) -> bool:
        return self.used[name] < self.capacity[name]

    def _share(self, name: str) -> float:
        return self.used[name] / (self.capacity[name] or 1)


def net_changes(changes: Iterable[Change]) -> dict[tuple[str, str], Change]:
    """By queue and host what is left of the changes, with the last code in that direction."""
    net: dict[tuple[str, str], int] = defaultdict(int)
    codes: dict[tuple[str, str, bool], str] = {}
    for queue, host, delta, code in changes:
        net[queue, host] += delta
        codes[queue, host, delta > 0] = code
    return {
        (queue, host): Change(queue, host, delta, codes[queue, host, delta > 0])
        for (queue, host), delta in net.items()
        if delta
    }
