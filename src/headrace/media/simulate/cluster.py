"""The load of each node before and after changes of a cluster.

Clients are sent to a data center (geo DNS, anycast) by the weight of its nodes, and there evenly to
its live nodes; data centers without live nodes get none. A replica of the key serves it. Any other
node requests it from the first live replica of its own data center, otherwise from the first live
one in the partition's order, or from the object store if no replica lives. So each node has two
shares: what it serves from its cache or the object store, and what it sends to its clients and to
peers, which is the load of its network card.

`simulate` computes an invented cluster through losses and a roll-out. The defaults are an example
of 3 data centers with 4 nodes that carry 120 Gbit/s together. The SVG shows bars of each node at
each step, or hit ratios by cache size.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from math import log10
from typing import Final

from headrace.media.errors import InvalidSimulation
from headrace.media.model import REPLICAS_MAX
from headrace.media.partitions import CANDIDATES_MAX, PARTITIONS, Candidate, PartitionTable

CENTERS_MAX: Final = 50
ROLL_OUT: Final = "roll-out"


@dataclass(frozen=True, slots=True)
class Load:
    """One node's shares of all requests. `fair_share` follows from its weight after the change."""

    name: str
    dc: str
    is_up: bool
    share_before: float
    share_after: float
    fair_share: float
    sent_share: float

    @property
    def over_fair(self) -> float:
        """The served share relative to the fair share; 0 for a node without a fair share."""
        return self.share_after / self.fair_share if self.fair_share else 0.0


def loads_of(
    candidates: Sequence[Candidate],
    before: PartitionTable,
    after: PartitionTable,
    lost: Collection[str] = (),
) -> tuple[tuple[Load, ...], float, float]:
    """The loads, the share of cached blocks that new owners read, and the share without an owner.

    The table changes from `before` to `after`, and the `lost` nodes are down. A drained node is up
    and receives clients, but keeps no keys.
    """
    was = _Flow(candidates, before, ())
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
    moved = after is not before and after.replicas
    gained = sum(before.gains(after).values()) / after.replicas if moved else 0.0
    return loads, gained, will.unowned


class _Flow:
    """The nodes that serve requests, as shares of all requests."""

    def __init__(
        self, candidates: Sequence[Candidate], table: PartitionTable, lost: Collection[str]
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
        """The share that a node sends to its clients and to peers."""
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
def _owner_counts(table: PartitionTable) -> Counter[tuple[str, ...]]:
    """The number of partitions of each group of owners, of which there are few."""
    return Counter(map(table.owners, range(PARTITIONS)))


def _entering(candidates: Sequence[Candidate], alive: Mapping[str, str]) -> dict[str, float]:
    """The share of clients at each live node."""
    nodes = Counter(alive.values())
    weights: defaultdict[str, float] = defaultdict(float)
    for one in candidates:
        weights[one.dc] += one.weight if one.dc in nodes else 0.0
    whole = sum(weights.values())
    return {name: weights[dc] / whole / nodes[dc] for name, dc in alive.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes `c1-n1` to `cC-nN` of equal weight; `replicas` of 0: two in each data center."""

    centers: int = 3
    nodes: int = 4
    load_gbit: float = 120.0
    replicas: int = 0

    def candidates(self) -> tuple[Candidate, ...]:
        """The nodes. Raises: InvalidSimulation."""
        count = self.centers * self.nodes
        right = 1 <= self.centers <= CENTERS_MAX and 1 <= count <= CANDIDATES_MAX and self.nodes > 0
        if not right or not 0 <= self.replicas <= REPLICAS_MAX or self.load_gbit <= 0:
            raise InvalidSimulation(
                f"{self.centers} data centers of {self.nodes} nodes, {self.replicas} replicas,"
                f" {self.load_gbit:g} Gbit/s: expected 1 to {CENTERS_MAX} data centers, 1 to"
                f" {CANDIDATES_MAX} nodes in total, 0 to {REPLICAS_MAX} replicas, over 0 Gbit/s"
            )
        return tuple(
            Candidate(f"c{center}-n{node}", f"c{center}")
            for center in range(1, self.centers + 1)
            for node in range(1, self.nodes + 1)
        )


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """One node at one step: Gbit/s served from its cache and sent by its network card."""

    name: str
    dc: str
    is_up: bool
    serves_gbit: float
    sends_gbit: float
    fair_gbit: float


@dataclass(frozen=True, slots=True)
class Step:
    """The cluster after one change, compared with the complete cluster.

    `over_fair_max` is the highest load in fair shares. `origin_gbit` is read from the object store
    for each request, because all replicas are lost. `filled_share` is the part of all cached blocks
    that new owners read once.
    """

    name: str
    nodes: tuple[NodeLoad, ...]
    over_fair_max: float
    origin_gbit: float
    filled_share: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """All steps of a cluster."""

    load_gbit: float
    replicas: int
    steps: tuple[Step, ...]


def simulate(cluster: Cluster, *, lost: Sequence[str] = ()) -> Simulation:
    """Simulate the complete cluster, then without `lost` (nodes or data centers).

    Without `lost`: one data center lost, one node of each data center lost, both, and the nodes
    drained in turn. Raises: InvalidSimulation.
    """
    candidates = cluster.candidates()
    losses = list(_losses(candidates, lost))
    table = PartitionTable.build(candidates, cluster.replicas)
    steps = [_step(cluster, "whole", loads_of(candidates, table, table))]
    for name, gone in losses:
        steps.append(_step(cluster, name, loads_of(candidates, table, table, gone)))
    if not lost and len(candidates) > 1:
        steps.append(_roll_out(cluster, candidates, table))
    return Simulation(cluster.load_gbit, table.replicas, tuple(steps))


def _losses(
    candidates: Sequence[Candidate], lost: Sequence[str]
) -> Iterable[tuple[str, frozenset[str]]]:
    centers = list(dict.fromkeys(one.dc for one in candidates))
    if lost:
        gone = frozenset(one.name for one in candidates if {one.name, one.dc} & set(lost))
        unknown = [name for name in lost if name not in {*centers, *(c.name for c in candidates)}]
        if unknown or len(gone) == len(candidates):
            raise InvalidSimulation(
                f"{', '.join(unknown) or 'all nodes'} cannot be lost: the nodes are"
                f" {candidates[0].name} to {candidates[-1].name}, the data centers"
                f" {', '.join(centers)}"
            )
        yield f"without {', '.join(lost)}", gone
        return
    first = frozenset(one.name for one in candidates if one.dc == centers[0])
    one_each = frozenset(next(c.name for c in candidates if c.dc == center) for center in centers)
    for name, gone in (
        (f"data center {centers[0]} lost", first),
        ("a node of each data center lost", one_each),
        (f"{centers[0]} and a node of each other lost", first | one_each),
    ):
        if len(gone) < len(candidates):
            yield name, gone


def _step(cluster: Cluster, name: str, found: tuple[tuple[Load, ...], float, float]) -> Step:
    loads, filled, unowned = found
    return Step(
        name=name,
        nodes=tuple(_in_gbit(cluster, load) for load in loads),
        over_fair_max=max(load.over_fair for load in loads),
        origin_gbit=unowned * cluster.load_gbit,
        filled_share=filled,
    )


def _roll_out(cluster: Cluster, candidates: tuple[Candidate, ...], table: PartitionTable) -> Step:
    """Drain each node in turn: the highest load of each other node, and the sum of blocks read."""
    steps = []
    for one in candidates:
        kept = [other for other in candidates if other is not one]
        after = PartitionTable.build(kept, cluster.replicas)
        steps.append(_step(cluster, one.name, loads_of(candidates, table, after)))
    columns = zip(*(step.nodes for step in steps), strict=True)
    return Step(
        name=ROLL_OUT,
        nodes=tuple(max(column, key=lambda load: load.serves_gbit) for column in columns),
        over_fair_max=max(step.over_fair_max for step in steps),
        origin_gbit=max(step.origin_gbit for step in steps),
        filled_share=sum(step.filled_share for step in steps),
    )


def _in_gbit(cluster: Cluster, load: Load) -> NodeLoad:
    all_gbit = cluster.load_gbit
    return NodeLoad(
        load.name,
        load.dc,
        load.is_up,
        serves_gbit=load.share_after * all_gbit,
        sends_gbit=load.sent_share * all_gbit,
        fair_gbit=load.fair_share * all_gbit,
    )


WIDTH: Final = 900
LEFT, RIGHT, TOP = 70, 20, 50
PANEL_HEIGHT, GAP = 120, 54
COLORS: Final = ("#1f6feb", "#2a9d5c", "#d1495b", "#e09f3e", "#7b5ea7", "#3b8ea5")
STYLE: Final = (
    "text{font-family:sans-serif;font-size:11px;fill:#444}.title{font-size:14px;font-weight:bold}"
    ".name{font-size:12px;font-weight:bold}.axis{stroke:#ccc;stroke-width:.5}"
    ".fair{stroke:#222;stroke-dasharray:4 3}.line{fill:none;stroke-width:1.6}"
)


def loads_svg(simulation: Simulation) -> str:
    """A panel for each step: the load of each node, with its fair share dashed."""
    most = max(node.serves_gbit for step in simulation.steps for node in step.nodes) or 1.0
    panels = "".join(
        _panel(step, TOP + place * (PANEL_HEIGHT + GAP) + 14, most)
        for place, step in enumerate(simulation.steps)
    )
    title = (
        f"{simulation.load_gbit:g} Gbit/s over {len(simulation.steps[0].nodes)} nodes,"
        f" {simulation.replicas} replicas: Gbit/s that each serves (dashed: its fair share)"
    )
    return _page(title, TOP + len(simulation.steps) * (PANEL_HEIGHT + GAP), panels)


def lines_svg(title: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Shares from 0 to 1 by size, on a logarithmic axis."""
    sizes = [log10(size) for points in lines.values() for size, _ in points]
    first, last = min(sizes), max(*sizes, min(sizes) + 1e-9)
    height = 3 * PANEL_HEIGHT

    def x(size: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT - 150) * (log10(size) - first) / (last - first)

    def y(share: float) -> float:
        return TOP + height * (1 - share)

    parts = [
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT - 150}" y1="{y(tenth / 10):.1f}"'
        f' y2="{y(tenth / 10):.1f}"/>{_text(LEFT - 30, y(tenth / 10) + 4, f"{tenth * 10} %")}'
        for tenth in range(11)
    ]
    parts += [
        _text(x(size) - 12, TOP + height + 16, f"{size:,.0f}")
        for size in sorted({size for points in lines.values() for size, _ in points})
    ]
    for place, (name, points) in enumerate(lines.items()):
        color = COLORS[place % len(COLORS)]
        drawn = " ".join(f"{x(size):.1f},{y(share):.1f}" for size, share in points)
        parts.append(f'<polyline class="line" stroke="{color}" points="{drawn}"/>')
        legend = f'<tspan fill="{color}">{escape(name)}</tspan>'
        parts.append(f'<text x="{WIDTH - RIGHT - 140}" y="{TOP + 14 + 18 * place}">{legend}</text>')
    return _page(title, TOP + height + 34, "".join(parts))


def _panel(step: Step, top: float, most: float) -> str:
    text = (
        f"{step.name}: at most {step.over_fair_max:.3f} of a fair share, {step.origin_gbit:.2f}"
        f" Gbit/s from the object store, {step.filled_share * 100:.1f} % read again"
    )
    parts = [_text(LEFT, top - 6, text, "name")]
    width = (WIDTH - LEFT - RIGHT) / len(step.nodes)
    centers = list(dict.fromkeys(node.dc for node in step.nodes))
    for place, node in enumerate(step.nodes):
        x = LEFT + place * width
        height = PANEL_HEIGHT * node.serves_gbit / most
        fair_y = top + PANEL_HEIGHT * (1 - node.fair_gbit / most)
        color = COLORS[centers.index(node.dc) % len(COLORS)]
        parts.append(
            f'<rect x="{x + 2:.1f}" y="{top + PANEL_HEIGHT - height:.1f}" width="{width - 4:.1f}"'
            f' height="{height:.1f}" fill="{color}"/>'
        )
        if node.fair_gbit:
            parts.append(
                f'<line class="fair" x1="{x:.1f}" x2="{x + width:.1f}"'
                f' y1="{fair_y:.1f}" y2="{fair_y:.1f}"/>'
            )
        label = node.name if node.is_up else f"{node.name} lost"
        parts.append(_text(x + 2, top + PANEL_HEIGHT + 12, label))
        parts.append(_text(x + 2, top + PANEL_HEIGHT + 24, f"{node.serves_gbit:.2f}"))
    return "".join(parts)


def _page(title: str, height: float, body: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}"'
        f' height="{height:g}"><style>{STYLE}</style>'
        f'<rect width="{WIDTH}" height="{height:g}" fill="#fff"/>'
        f"{_text(LEFT, 22, title, 'title')}{body}</svg>\n"
    )


def _text(x: float, y: float, text: str, kind: str = "label") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
