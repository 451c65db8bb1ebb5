"""The plan: how many slots each queue gets, on which hosts, and why. No I/O.

Slots are shared by weighted water-filling between a lower and an upper bound. In a shortage every
queue gives up slots, unimportant queues more, and none with a lower bound starves. Everything is in
whole slots; ties are broken by position, so the result is deterministic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from math import ceil, floor, sqrt
from typing import Final, NamedTuple

import msgspec

from headrace.jobs.fleet.placement import Change, ClusterMap, HostRoom, net_changes
from headrace.kernel.terminal import pluralize

BISECTIONS = 50


def fill(lo: Sequence[int], hi: Sequence[int], weights: Sequence[float], room: int) -> list[int]:
    """Share `room` as `level * weight * hi` between `lo` and `hi`, with one level for all.

    Requires `lo[i] <= hi[i]` and `sum(lo) <= room`. The result sums up to `room` or, if less, to
    `sum(hi)`.
    """
    if sum(hi) <= room:
        return list(hi)
    full = [weight * high for weight, high in zip(weights, hi, strict=True)]
    least, most = 0.0, 1.0 / min(weights)
    for _ in range(BISECTIONS):
        level = (least + most) / 2
        poured = sum(_clip(level * f, lo[i], hi[i]) for i, f in enumerate(full))
        least, most = (level, most) if poured <= room else (least, level)
    exact = [_clip(least * f, lo[i], hi[i]) for i, f in enumerate(full)]
    return _whole(exact, hi, room)


def divide(amount: int, among: Sequence[int]) -> list[int]:
    """Divide `amount <= sum(among)` into whole parts in proportion to `among`."""
    total = sum(among)
    if amount >= total:
        return list(among)
    return _whole([amount * part / total for part in among], among, amount)


def first_served(wanted: Sequence[int], room: int, *, classes: Sequence[int]) -> list[int]:
    """`wanted` while `room` lasts, class by class; in proportion within the last class."""
    given = [0] * len(wanted)
    for rank in sorted(set(classes)):
        members = [i for i, c in enumerate(classes) if c == rank]
        wants = [wanted[i] for i in members]
        for i, part in zip(members, divide(min(room, sum(wants)), wants), strict=True):
            given[i] = part
            room -= part
    return given


def _clip(value: float, low: float, high: float) -> float:
    return low if value < low else min(value, high)


def _whole(exact: Sequence[float], hi: Sequence[int], total: int) -> list[int]:
    """Round to whole numbers with the sum `total`: the largest remainders get one more."""
    parts = [floor(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (parts[i] - exact[i], i))
    missing = total - sum(parts)
    for i in by_remainder:
        if missing <= 0:
            break
        if parts[i] < hi[i]:
            parts[i] += 1
            missing -= 1
    return parts


__all__ = ["HostRoom", "Move", "Plan", "QueueNeed", "QueueShare", "Tuning", "plan", "tuning"]

IMPORTANCE_LAST: Final = 9
SHORT_TOLERANCE: Final = 1.5
"""In a shortage each move costs work, so larger deviations are tolerated."""
ARRIVALS_IN_HAND_S: Final = 1.0
DRAIN_PER_WORK_MAX: Final = 3
DRAIN_SLOTS_MAX: Final = 10
TAGS_COMBINED_MAX: Final = 4
"""Above this number of tags only each tag and all tags together have a room."""


class QueueNeed(msgspec.Struct, frozen=True, kw_only=True):
    """The needs of a queue when a plan is made."""

    queue: str
    importance: int = 5
    """0 most important, to 9."""
    slots_min: int = 0
    slots_max: int = 1_000_000
    batch: int = 1
    """Jobs that a slot runs at once: its batch, or the concurrency of an async task."""
    tag: str | None = None
    """Only hosts with this tag can work the queue."""
    active: int = 0
    """Jobs that are due and wait, and those that run."""
    rate_per_s: float = 0.0
    """Jobs that become due."""
    handler_s: float = 0.1
    """Mean slot time per job."""


class Tuning(NamedTuple):
    """The parameters of one importance."""

    hot: float
    """Share of its slots' time that a queue may be busy before it needs more."""
    target: float
    """Share that it is busy with the slots of its demand."""
    spare: float
    """Reserve for random variation, times the root of the work."""
    drain_s: float
    """Time within which a backlog should be worked off."""
    up: float
    """A deficit below this share of the slots is tolerated."""
    down: float
    """Surplus up to this share over the demand is taken last."""
    weight: float
    """In a shortage."""


class QueueShare(msgspec.Struct, frozen=True, kw_only=True):
    """The decision of the plan for a queue."""

    floor: int
    demand: int
    before: int
    """Slots in the map that the plan started from."""
    slots: int
    is_at_max: bool
    """It needs more slots than its maximum: a backlog grows, or handlers have become slow."""
    is_short: bool
    """The fleet has too little room for its lower bound."""


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """A change of a queue's slots on a host, with its reason as code and text."""

    queue: str
    host: str
    before: int
    after: int
    code: str
    why: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The new map, its changes, and the decision by queue."""

    slots: dict[str, dict[str, int]]
    """By host and queue; a draining host has none."""
    moves: tuple[Move, ...]
    queues: dict[str, QueueShare]
    room: int
    """Slots of all hosts that the plan could give."""
    slots_moved: int
    """Slots on live hosts that start to work another queue."""


def tuning(importance: int) -> Tuning:
    """The parameters for an importance, found by simulation."""
    p = min(max(importance, 0), IMPORTANCE_LAST)
    return Tuning(
        hot=0.80 + 0.02 * p,
        target=0.60 + 0.03 * p,
        spare=2.0 - 0.15 * p,
        drain_s=min(5 * 1.35**p, 75.0),
        up=0.10 + 0.02 * p,
        down=0.60 - 0.05 * p,
        weight=2.0**-p,
    )


TUNINGS: Final = tuple(tuning(importance) for importance in range(IMPORTANCE_LAST + 1))


class _Queue(NamedTuple):
    """A queue with the values that follow from its needs."""

    need: QueueNeed
    tuning: Tuning
    low: int
    floor: int
    demand: int
    late: int
    """Slots beyond the demand that would drain its backlog in time."""
    is_at_max: bool


def plan(
    needs: Iterable[QueueNeed],
    hosts: Iterable[HostRoom],
    current: Mapping[str, Mapping[str, int]],
) -> Plan:
    """Plan the slots of the queues in `needs` on `hosts`, with few changes to `current`.

    `current` is by host and queue. Its queues that are not in `needs` keep their slots; hosts that
    are not in `hosts` no longer exist. The order of arguments does not matter.
    """
    queues = [_judged(need) for need in needs]
    queues.sort(key=lambda queue: (queue.need.importance, queue.need.queue))
    slot_map = ClusterMap(hosts, current, {queue.need.queue: queue.need.tag for queue in queues})
    before = dict.fromkeys(slot_map.counts, 0)
    for there in current.values():
        for name in there.keys() & before.keys():
            before[name] += max(0, there[name])
    sharing = _SlotShares(queues, slot_map)
    target = sharing.targets()
    slot_map.evict(target)
    slot_map.remove(target)
    slot_map.add(target)
    slot_map.repair()
    net = net_changes(slot_map.changes)
    shares = {
        queue.need.queue: QueueShare(
            floor=queue.floor,
            demand=queue.demand,
            before=before[queue.need.queue],
            slots=slot_map.counts[queue.need.queue],
            is_at_max=queue.is_at_max,
            is_short=slot_map.counts[queue.need.queue] < sharing.tolerated(queue),
        )
        for queue in queues
    }
    reasons = _Reasons(queues, shares, sharing.given_up)
    return Plan(
        slots={name: dict(sorted(there.items())) for name, there in slot_map.slots.items()},
        moves=tuple(reasons.move(change, current) for _, change in sorted(net.items())),
        queues=shares,
        room=slot_map.room(None),
        slots_moved=_slots_moved(net.values(), slot_map),
    )


def _judged(need: QueueNeed) -> _Queue:
    """A queue with its lower bound and its demand."""
    tuned = TUNINGS[min(max(need.importance, 0), IMPORTANCE_LAST)]
    work = need.rate_per_s * need.handler_s
    # By Little's law `work` jobs run at any time. If handlers take over a second, running jobs are
    # no backlog.
    in_hand = need.rate_per_s * max(ARRIVALS_IN_HAND_S, need.handler_s) + need.batch
    extra = max(0.0, need.active - in_hand)
    wanted = min(extra * need.handler_s / tuned.drain_s, ceil(extra / need.batch))
    drain = min(wanted, DRAIN_PER_WORK_MAX * work + DRAIN_SLOTS_MAX)
    needed = max(ceil(work / tuned.hot + drain), int(need.active > 0))
    wished = ceil(max(work / tuned.target, work + tuned.spare * sqrt(work)) + drain)
    low = min(need.slots_min, need.slots_max)
    floor = min(max(needed, low), need.slots_max)
    demand = max(floor, min(wished, need.slots_max))
    return _Queue(
        need,
        tuned,
        low=low,
        floor=floor,
        demand=demand,
        late=min(ceil(wanted - drain), need.slots_max - demand),
        is_at_max=needed > need.slots_max > 0,  # a maximum of 0 stops the queue on purpose
    )


class _SlotShares:
    """The number of slots per queue: room shared out, compared with the current map."""

    def __init__(self, queues: Sequence[_Queue], slot_map: ClusterMap) -> None:
        self.queues = queues
        self.slot_map = slot_map
        tags = sorted({queue.need.tag for queue in queues if queue.need.tag is not None})
        # Hosts with a tag are a subset of the room: queues that need the tag must fit there first,
        # and queues of several tags together on the hosts that have one of them.
        sizes = range(1, len(tags) + 1) if len(tags) <= TAGS_COMBINED_MAX else {1, len(tags)}
        self.rooms: list[tuple[list[int], int]] = [
            ([i for i, queue in enumerate(queues) if queue.need.tag in some], slot_map.room(some))
            for size in sizes
            for some in combinations(tags, size)
        ]
        self.rooms.append((list(range(len(queues))), slot_map.room(None)))
        self.base = self._base()
        self.demand = self._demand()
        self.crowded: set[int] = set()
        """Queues whose room is needed to the last slot."""
        for members, room in self.rooms:
            if sum(self.base[i] for i in members) >= room:
                self.crowded.update(members)
        self._use_spare()
        self.given_up: dict[str, str] = {}
        """By queue that loses slots: the step in which it gave up the last."""

    def tolerated(self, queue: _Queue) -> float:
        """The lower bound below which a queue counts as short."""
        return queue.floor / (1 + queue.tuning.up * SHORT_TOLERANCE)

    def targets(self) -> dict[str, int]:
        """Slots by queue; stable when called again with its own result."""
        counts = [self.slot_map.counts[queue.need.queue] for queue in self.queues]
        gets = [self._is_lacking(i, count) for i, count in enumerate(counts)]
        target = [
            max(count, self.demand[i]) if gets[i] else min(count, self.queues[i].need.slots_max)
            for i, count in enumerate(counts)
        ]
        for i, queue in enumerate(self.queues):
            if target[i] < counts[i]:
                self.given_up[queue.need.queue] = "over_max"
        for members, room in self.rooms:
            self._cut(target, gets, members, room)
        return {queue.need.queue: target[i] for i, queue in enumerate(self.queues)}

    def _base(self) -> list[int]:
        """The lower bounds, while there is room; minimums first."""
        low = [queue.low for queue in self.queues]
        high = [queue.floor for queue in self.queues]
        for members, room in self.rooms:
            mine = [self.queues[i] for i in members]
            ranks = [queue.need.importance for queue in mine]
            lows = first_served([low[i] for i in members], room, classes=ranks)
            highs = [max(least, high[i]) for least, i in zip(lows, members, strict=True)]
            filled = fill(lows, highs, [queue.tuning.weight for queue in mine], room)
            for i, least, most in zip(members, lows, filled, strict=True):
                low[i], high[i] = least, most
        return high

    def _demand(self) -> list[int]:
        """The demands if all of them fit; else the lower bounds."""
        demand = [
            max(base, queue.demand) for base, queue in zip(self.base, self.queues, strict=True)
        ]
        for members, room in self.rooms:
            if sum(demand[i] for i in members) > room:
                for i in members:
                    demand[i] = self.base[i]
        return demand

    def _use_spare(self) -> None:
        """Give spare slots to backlogs that would otherwise take long."""
        late = [queue.late for queue in self.queues]
        for members, room in self.rooms:
            spare = max(0, room - sum(self.demand[i] for i in members))
            weights = [self.queues[i].tuning.weight for i in members]
            wants = [late[i] for i in members]
            given = fill([0] * len(members), wants, weights, spare)
            for i, part in zip(members, given, strict=True):
                late[i] = part
        for i, part in enumerate(late):
            if part > 0:
                self.demand[i] += part
                self.base[i] = self.demand[i]

    def _is_lacking(self, i: int, count: int) -> bool:
        """Whether `count` slots are so far below the lower bound that the queue gets more."""
        queue, base = self.queues[i], self.base[i]
        tolerance = queue.tuning.up * (SHORT_TOLERANCE if i in self.crowded else 1.0)
        return base - count > tolerance * count or count < min(base, queue.low)

    def _cut(self, target: list[int], gets: list[bool], members: list[int], room: int) -> None:
        """Remove what exceeds `room`, from queues above their demand, important ones last."""
        over = sum(target[i] for i in members) - room
        for code in ("idle_surplus", "surplus"):
            for importance in range(IMPORTANCE_LAST, -1, -1):
                if over <= 0:
                    return
                mine = [i for i in members if self.queues[i].need.importance == importance]
                givers = [i for i in mine if not gets[i]]
                surplus = [max(0, target[i] - self._kept(i, code)) for i in givers]
                for i, part in zip(givers, divide(min(over, sum(surplus)), surplus), strict=True):
                    target[i] -= part
                    over -= part
                    if part:
                        self.given_up[self.queues[i].need.queue] = code
                        if target[i] < self.queues[i].demand:
                            self.given_up[self.queues[i].need.queue] = "comfort"

    def _kept(self, i: int, code: str) -> int:
        """Slots that a queue keeps in one step of giving up."""
        if code == "surplus":
            return self.demand[i]
        return ceil(self.demand[i] * (1 + self.queues[i].tuning.down))


class _Reasons:
    """The reason of each change, as code and text."""

    def __init__(
        self,
        queues: Sequence[_Queue],
        shares: Mapping[str, QueueShare],
        given_up: Mapping[str, str],
    ) -> None:
        self.queues = {queue.need.queue: queue for queue in queues}
        self.shares = shares
        self.given_up = given_up
        self._texts: dict[tuple[str, str], tuple[str, str]] = {}

    def move(self, change: Change, current: Mapping[str, Mapping[str, int]]) -> Move:
        """The change of a queue on a host, with its reason."""
        queue, host, delta, step = change
        before = max(0, current.get(host, {}).get(queue, 0))
        if step in _STANDING:
            code, why = step, _STANDING[step].format(queue=queue, host=host)
        else:
            code, why = self._counted(queue, step)
        return Move(queue=queue, host=host, before=before, after=before + delta, code=code, why=why)

    def _counted(self, name: str, step: str) -> tuple[str, str]:
        """Why a queue gets more slots or fewer; the same on every host."""
        if (name, step) not in self._texts:
            text = self._added(name) if step == "added" else self._removed(name)
            self._texts[name, step] = text
        return self._texts[name, step]

    def _added(self, name: str) -> tuple[str, str]:
        queue, share = self.queues[name], self.shares[name]
        if share.slots <= share.before:
            return "replaced", f"{name} keeps its {share.slots} slots: here are some lost elsewhere"
        if share.before < queue.low:
            text = f"{name} lacks slots of its minimum of {queue.low}"
            return "below_min", f"{text}: {share.before} -> {share.slots}"
        need = queue.need
        text = (
            f"{name} needs {pluralize(share.floor, 'slot')}: {_digits(need.rate_per_s)} jobs/s,"
            f" {_digits(need.handler_s)} s each, {need.active:,} waiting or running:"
            f" {share.before} -> {share.slots}"
        )
        return "below_need", text

    def _removed(self, name: str) -> tuple[str, str]:
        queue, share = self.queues[name], self.shares[name]
        code = self.given_up[name]
        given = share.before - share.slots
        others = "a queue that needs it more" if given == 1 else "queues that need them more"
        gave = f"{name} gave {pluralize(given, 'slot')} to {others}"
        text = {
            "over_max": f"{name} had more slots than its maximum of {queue.need.slots_max}",
            "idle_surplus": f"{gave}, since it had far more than its demand of {share.demand}",
            "surplus": f"{gave}, since it had more than its demand of {share.demand}",
            "comfort": gave,
        }[code]
        return code, f"{text}: {share.before} -> {share.slots}"


def _digits(value: float) -> str:
    """The value with two digits, and without decimals from 100 on."""
    return f"{value:.2g}" if value < 100 else f"{value:,.0f}"


_STANDING: Final = {
    "host_gone": "{host} no longer exists, nor do its slots of {queue}",
    "host_draining": "{host} is draining: {queue} leaves it",
    "host_shrunk": "{host} has room for fewer slots than it had: some of {queue} leave it",
    "tag_missing": "{host} lacks the tag that {queue} requires",
    "spread": "{queue} is spread more evenly, so that a lost host costs it less",
    "swapped": "{queue} changes places on {host} with a queue that is spread more evenly",
    "made_way": "{queue} makes way for a queue that only hosts with its tag can work",
}


def _slots_moved(net: Iterable[Change], slot_map: ClusterMap) -> int:
    """Slots moved: on each live host the greater of added and removed."""
    came = dict.fromkeys(slot_map.hosts, 0)
    left = dict.fromkeys(slot_map.hosts, 0)
    for change in net:
        if change.host in slot_map.hosts:
            came[change.host] += max(0, change.delta)
            left[change.host] -= min(0, change.delta)
    return sum(max(came[name], left[name]) for name in slot_map.hosts)
