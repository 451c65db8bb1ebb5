"""A made-up cluster through losses and a roll-out: what each node has to carry at every step.

The example that the defaults stand for: 3 centres of 4 nodes that carry 120 Gbit/s together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.media.errors import InvalidSimulation
from headrace.media.model import REPLICAS_MAX
from headrace.media.partitions import CANDIDATES_MAX, Candidate, Table
from headrace.media.simulate.loads import Load, Situation, loads_of

CENTRES_MAX: Final = 50
ROLL_OUT: Final = "roll-out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes `c1-n1` to `cC-nN`, all of one weight; `replicas` of 0: two in each centre."""

    centres: int = 3
    nodes: int = 4
    load_gbit: float = 120.0
    replicas: int = 0

    def candidates(self) -> tuple[Candidate, ...]:
        """The nodes. Raises: InvalidSimulation."""
        count = self.centres * self.nodes
        right = 1 <= self.centres <= CENTRES_MAX and 1 <= count <= CANDIDATES_MAX and self.nodes > 0
        if not right or not 0 <= self.replicas <= REPLICAS_MAX or self.load_gbit <= 0:
            raise InvalidSimulation(
                f"{self.centres} centres of {self.nodes} nodes, {self.replicas} replicas, {self.load_gbit:g}"
                f" Gbit/s: expected 1 to {CENTRES_MAX} centres, 1 to {CANDIDATES_MAX} nodes in all,"
                f" 0 to {REPLICAS_MAX} replicas, more than 0 Gbit/s"
            )
        return tuple(
            Candidate(f"c{centre}-n{node}", f"c{centre}")
            for centre in range(1, self.centres + 1)
            for node in range(1, self.nodes + 1)
        )


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """One node at one step: what it serves from its store, what its network card sends, in Gbit/s."""

    name: str
    dc: str
    is_up: bool
    serves_gbit: float
    sends_gbit: float
    fair_gbit: float


@dataclass(frozen=True, slots=True)
class Step:
    """The cluster after one change, seen from the whole one.

    `over_fair_max`: the most that any node serves, in fair shares. `origin_gbit`: what has lost all its
    replicas and comes from the object store at each request. `filled_share`: of all blocks kept, those
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


def require_possible(cluster: Cluster, lost: Sequence[str]) -> None:
    """Raises: InvalidSimulation, where `simulate` would, without its tables."""
    list(_losses(cluster.candidates(), lost))


def simulate(cluster: Cluster, *, lost: Sequence[str] = ()) -> Simulation:
    """The cluster whole, then without `lost` (nodes or centres), or without those of the usual questions.

    Those are: a centre lost; a node of each centre lost; both; and the nodes drained one after another.
    About 0.4 s a table of 12 nodes: 6 s for the example. Raises: InvalidSimulation.
    """
    candidates = cluster.candidates()
    losses = list(_losses(candidates, lost))
    table = Table.build(candidates, cluster.replicas)
    steps = [_step(cluster, "whole", Situation(candidates, table, table))]
    for name, gone in losses:
        steps.append(_step(cluster, name, Situation(candidates, table, table, gone)))
    if not lost and len(candidates) > 1:
        steps.append(_roll_out(cluster, candidates, table))
    return Simulation(cluster.load_gbit, table.replicas, tuple(steps))


def _losses(
    candidates: Sequence[Candidate], lost: Sequence[str]
) -> Iterable[tuple[str, frozenset[str]]]:
    centres = list(dict.fromkeys(one.dc for one in candidates))
    if lost:
        gone = frozenset(one.name for one in candidates if {one.name, one.dc} & set(lost))
        unknown = [name for name in lost if name not in {*centres, *(c.name for c in candidates)}]
        if unknown or len(gone) == len(candidates):
            raise InvalidSimulation(
                f"{', '.join(unknown) or 'all nodes'} cannot be lost: the nodes are"
                f" {candidates[0].name} to {candidates[-1].name}, the centres {', '.join(centres)}"
            )
        yield f"without {', '.join(lost)}", gone
        return
    first = frozenset(one.name for one in candidates if one.dc == centres[0])
    one_each = frozenset(next(c.name for c in candidates if c.dc == centre) for centre in centres)
    for name, gone in (
        (f"centre {centres[0]} lost", first),
        ("a node of each centre lost", one_each),
        (f"{centres[0]} and a node of each other lost", first | one_each),
    ):
        if len(gone) < len(candidates):
            yield name, gone


def _step(cluster: Cluster, name: str, situation: Situation) -> Step:
    loads, filled, unowned = loads_of(situation)
    return Step(
        name=name,
        nodes=tuple(_in_gbit(cluster, load) for load in loads),
        over_fair_max=max(load.over_fair for load in loads),
        origin_gbit=unowned * cluster.load_gbit,
        filled_share=filled,
    )


def _roll_out(cluster: Cluster, candidates: tuple[Candidate, ...], table: Table) -> Step:
    """Each node drained in turn: the most that each other carries, and all that is filled on the way."""
    steps = []
    for one in candidates:
        kept = [other for other in candidates if other is not one]
        after = Table.build(kept, cluster.replicas)
        situation = Situation(candidates, table, after, drained=frozenset({one.name}))
        steps.append(_step(cluster, one.name, situation))
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
