"""Simulated losses agree with the partition table: sums, shares, survivors, blocks read again."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from headrace.media import partitions
from headrace.media.errors import InvalidSimulation
from headrace.media.partitions import Candidate, PartitionTable
from headrace.media.simulate import cluster as simulated
from headrace.media.simulate.cluster import (
    ROLL_OUT,
    Cluster,
    lines_svg,
    loads_of,
    loads_svg,
    simulate,
)

FEW = 1 << 14
NODES = tuple(Candidate(f"n{number}", f"c{number % 3}") for number in range(6))


@pytest.fixture(scope="module", autouse=True)
def _few():
    """Fewer partitions: their number decides no share, and tables of all are slow."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (partitions, simulated):
            patch.setattr(module, "PARTITIONS", FEW)
        yield


@pytest.fixture(scope="module")
def table():
    """Six nodes in three data centers, two replicas."""
    return PartitionTable.build(NODES, 2)


@pytest.fixture(scope="module")
def example():
    """The default cluster of twelve nodes without its roll-out."""
    return simulate(Cluster(), lost=["c1"])


@pytest.mark.slow
def test_a_dead_node_s_load_is_shared_by_all_others(table):
    loads, filled, unowned = loads_of(NODES, table, table, {"n0"})
    dead, *others = loads
    assert (dead.is_up, dead.share_after, dead.sent_share) == (False, 0.0, 0.0)
    assert sum(load.share_after for load in others) == pytest.approx(1)
    assert all(load.share_after > load.share_before for load in others if load.dc != "c0")
    assert (filled, unowned) == (0.0, 0.0)


@pytest.mark.slow
def test_every_request_goes_where_a_node_would_send_it(table):
    """The same by walking over every partition and every node at which a client may enter."""
    lost = {"n0", "n1"}
    loads, _, unowned = loads_of(NODES, table, table, lost)
    entering = {"n3": 1 / 3, "n4": 1 / 3, "n2": 1 / 6, "n5": 1 / 6}
    dcs = {one.name: one.dc for one in NODES}
    served = dict.fromkeys(entering, 0.0)
    asked = dict.fromkeys(entering, 0.0)
    orphans = 0
    for partition in range(FEW):
        alive = [name for name in table.owners(partition) if name not in lost]
        orphans += not alive
        for entry, share in entering.items():
            near = [name for name in alive if dcs[name] == dcs[entry]]
            by = entry if entry in alive or not alive else (near or alive)[0]
            served[by] += share
            asked[by] += share * (by != entry)
    assert unowned == orphans / FEW
    for load in loads[2:]:
        assert load.share_after == pytest.approx(served[load.name] / FEW)
        sent = entering[load.name] + asked[load.name] / FEW
        assert load.sent_share == pytest.approx(sent)


@pytest.mark.slow
def test_a_drained_node_moves_its_part_and_little_more(table):
    kept = [one for one in NODES if one.name != "n0"]
    after = PartitionTable.build(kept, 2)
    loads, filled, unowned = loads_of(NODES, table, after)
    assert loads[0].is_up
    assert loads[0].share_after == 0
    assert 1 / 6 <= filled < 1 / 6 * 1.5
    assert unowned == 0
    # Every request is sent to its client; those that entered at no owner, once more.
    assert sum(load.sent_share for load in loads) == pytest.approx(1 + 1 - 2 / 6)


@pytest.mark.slow
def test_a_lost_center_of_the_example_leaves_no_key_without_an_owner(example):
    whole, without = example.steps
    assert sum(node.serves_gbit for node in whole.nodes) == pytest.approx(120)
    assert whole.over_fair_max <= 1.02
    assert [node.is_up for node in without.nodes] == [False] * 4 + [True] * 8
    assert sum(node.serves_gbit for node in without.nodes) == pytest.approx(120)
    assert without.over_fair_max <= 1.05
    assert without.origin_gbit == 0


@pytest.mark.slow
def test_the_default_holds_a_center_and_a_node_of_each_other_without_the_object_store():
    """3 data centers of 4 nodes, 120 Gbit/s: a node sends 30 and serves 20; no origin reads."""
    simulated = simulate(Cluster(), lost=["c1", "c2-n1", "c3-n1"])
    without = simulated.steps[-1]
    up = [node for node in without.nodes if node.is_up]
    assert simulated.replicas == 6
    assert [round(node.sends_gbit) for node in up] == [30] * 6
    assert [round(node.serves_gbit) for node in up] == [20] * 6
    assert without.origin_gbit == 0


@pytest.mark.slow
def test_a_node_of_twelve_that_dies_gives_nobody_more_than_a_twentieth_over_fair():
    for cluster in (Cluster(centers=1, nodes=12), Cluster(replicas=2)):
        [_, step] = simulate(cluster, lost=["c1-n3"]).steps
        assert step.over_fair_max <= 1.05


@pytest.mark.slow
def test_a_roll_out_tells_the_worst_of_each_node():
    simulated = simulate(Cluster(centers=1, nodes=3, load_gbit=30, replicas=1))
    roll_out = simulated.steps[-1]
    assert roll_out.name == ROLL_OUT
    assert all(14 < node.serves_gbit < 16 for node in roll_out.nodes)
    assert roll_out.filled_share == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(
    ("cluster", "lost"),
    [
        (Cluster(centers=0), ()),
        (Cluster(nodes=1001), ()),
        (Cluster(replicas=-1), ()),
        (Cluster(replicas=9), ()),
        (Cluster(load_gbit=0), ()),
        (Cluster(centers=1, nodes=2, replicas=1), ("c2",)),
        (Cluster(centers=1, nodes=2, replicas=1), ("c1",)),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(cluster, lost):
    with pytest.raises(InvalidSimulation):
        simulate(cluster, lost=lost)


@pytest.mark.slow
def test_the_plot_has_a_bar_for_each_node_that_serves(example):
    texts = [element.text for element in ET.fromstring(loads_svg(example)).iter() if element.text]
    assert "c3-n4" in texts
    assert "c1-n1 lost" in texts


def test_lines_are_drawn_for_each_policy():
    points = [(1_000.0, 0.5), (10_000.0, 0.7)]
    root = ET.fromstring(lines_svg("hits <x>", {"ours": points, "LRU": points}))
    lines = [element for element in root.iter() if element.tag.endswith("polyline")]
    assert [len(line.get("points").split()) for line in lines] == [2, 2]
