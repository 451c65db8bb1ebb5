"""Placement of slots on hosts.

A queue's slots are spread over hosts, so that a lost host costs every queue little. Slots are
removed where the queue has most and added where it has fewest. Afterwards up to `REPAIRS_MAX` slots
per plan move to even out queues.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

REPAIRS_MAX: Final = 20
PRESSURE_LAST: Final = 0.4
"""A host with a higher CPU pressure gets new slots last."""


class HostRoom(msgspec.Struct, frozen=True, kw_only=True):
    """A live host and how many slots it can hold."""

    name: str
    capacity: int
    cpu_pressure: float = 0.0
    tags: frozenset[str] = frozenset()
    is_draining: bool = False


class Change(NamedTuple):
    """Slots of a queue added to a host or removed; `code` names the step of the plan."""

    queue: str
    host: str
    delta: int
    code: str


class ClusterMap:
    """The slot map while a plan changes it.

    It starts without slots that cannot stay: those of missing or draining hosts, and those on a
    host without the queue's tag. `tags` has the planned queues, most important first. Slots of
    other queues stay and take room.
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
        """Names of the hosts that may hold the queue's slots."""
        return self.names_with(self.tags[queue])

    def names_with(self, tag: str | None) -> list[str]:
        """Names of the hosts with the tag; None: all hosts."""
        if tag not in self._names_by_tag:
            self._names_by_tag[tag] = [
                name for name, host in self.hosts.items() if tag is None or tag in host.tags
            ]
        return self._names_by_tag[tag]

    def room(self, tags: Collection[str] | None) -> int:
        """Slots that hosts with one of the tags can give to planned queues; None: all hosts."""
        names = {name for tag in tags or (None,) for name in self.names_with(tag)}
        return sum(self.capacity[name] - self._unplanned(name) for name in names)

    def evict(self, target: Mapping[str, int]) -> None:
        """Relieve hosts above their capacity, the largest surplus first."""
        for name, capacity in self.capacity.items():
            there = self.slots[name]
            while self.used[name] > capacity:
                planned = [queue for queue in reversed(self.tags) if there.get(queue)]
                queue = max(planned, key=lambda q: (self.counts[q] - target[q], there[q]))
                self._put(queue, name, -1, "host_shrunk")

    def remove(self, target: Mapping[str, int]) -> None:
        """Reduce queues to their targets, where they have most, then on the fullest host."""
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
        """Raise queues to their targets while there is room, those with a tag first."""
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
        """Even out uneven queues, important ones first; at most REPAIRS_MAX slots."""
        left = REPAIRS_MAX
        for queue in self.tags:
            names = [n for n in self.names_for(queue) if self.capacity[n]]
            while left >= 2 and (moved := self._even_out(queue, names)):
                left -= moved

    def _even_out(self, queue: str, names: Sequence[str]) -> int:
        """Move a slot from the host with most to the one with fewest. Return slots moved."""
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
        """The queue to swap with, preferably an unimportant one."""
        more = [
            (count - self._count(other, high), self._places[other], other)
            for other, count in self.slots[low].items()
            if other in self._places and other != queue and self._may_stand(other, high)
        ]
        best = max(more, default=(0, 0, queue))
        return best[2] if best[0] > 0 else None

    def _make_way(self, queue: str, heap: list[tuple[int, bool, float, str]]) -> bool:
        """Free a slot on a host with the queue's tag by moving another queue's slot."""
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
        """Count slots of the current map, or drop them if they cannot stay."""
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
        """Remove slots of unplanned queues only from a host too small for them alone."""
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
        """Sort key: the smallest is the best host for one more slot."""
        share = self.used[name] / (self.capacity[name] or 1)
        return self.slots[name].get(queue, 0), name in self._overloaded, share, name

    def _count(self, queue: str, name: str) -> int:
        return self.slots[name].get(queue, 0)

    def _free(self, name: str) -> bool:
        return self.used[name] < self.capacity[name]

    def _share(self, name: str) -> float:
        return self.used[name] / (self.capacity[name] or 1)


def net_changes(changes: Iterable[Change]) -> dict[tuple[str, str], Change]:
    """The net changes by queue and host, with the last code in that direction."""
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
