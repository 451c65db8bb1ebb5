"""What does a hop to the owner of a key cost, and what load follows one lost node of twelve?

The hop: two nodes of this machine, each on one core, one connection, one request at a time, each by
another signed URL. The second node owns the tracks; the client requests them from it, then from the
first. The spread is
computed from the partition table that the nodes use themselves; a test checks that nodes serve it.
"""

from __future__ import annotations

import http.client
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial

from bench.children import BenchFault, wait_for
from bench.figures import Figure, Goal, Runs, figure
from bench.harness import READY_S, Run
from bench.media_objects import Track, make_tracks, write_targets
from bench.media_ranges import LARGE, SMALL
from bench.media_stage import (
    LISTENERS,
    Serving,
    blobs_folder,
    disk_of,
    hot_times,
    listener_targets,
    our_settings,
    press,
    read_all,
    served,
    signed_targets,
)
from bench.report import write_plot
from bench.systems import OURS, Cell
from bench.views_stage import free_port, pin
from headrace.engines.blobs import Blobs
from headrace.media import Media, MediaConfig
from headrace.media.simulate.cluster import Cluster, Simulation, loads_svg, simulate

NODES = ("a", "b")
SIZES = ((LARGE, "256 KiB"), (SMALL, "16 KiB"))
HOP_GOALS = {LARGE: Goal(at_most=300), SMALL: Goal(at_most=200)}


async def measure_hop(run: Run) -> list[Figure]:
    """Direct and by a hop in one cell, one after the other."""
    found = await run.alternate({OURS.name: partial(_hop, run)})
    rows = []
    for range_bytes, size in SIZES:
        for share, goal in (("first", HOP_GOALS[range_bytes]), ("total", None)):
            byte = "first" if share == "first" else "last"
            ours = found.get(f"added {share} {range_bytes}", {}).get(OURS.name)
            name = f"a hop to the owner, added to the {byte} byte, p50"
            rows.append(
                figure(
                    name,
                    "us",
                    f"ranges of {size}, {LISTENERS:,} URLs",
                    ours=ours,
                    goal=goal,
                    why="client and both nodes share the cores: a hop wakes two processes more",
                )
            )
    return rows


async def _hop(run: Run) -> Mapping[str, float]:
    async with run.cell() as cell, relay_and_owner(run, cell) as (relay, owner):
        found: dict[str, float] = {}
        for range_bytes, _ in SIZES:
            for share, value in (await _added(run, cell, owner, relay, range_bytes)).items():
                found[f"added {share} {range_bytes}"] = value
    return found


@asynccontextmanager
async def relay_and_owner(run: Run, cell: Cell) -> AsyncIterator[tuple[Serving, Serving]]:
    """Two nodes, of which the second owns all tracks, and the first gets each range from it."""
    tracks = make_tracks(blobs_folder(cell), run.sized(128, 64))
    ports = {name: free_port() for name in NODES}
    # Both have the same secret, as every machine of a cluster has.
    secret = {"HEADRACE_SECRET": secrets.token_urlsafe(32)}
    cell.env |= secret
    (cell.folder / "data").mkdir(exist_ok=True)
    (cell.folder / "data" / "secret").write_text(secret["HEADRACE_SECRET"])
    children = [
        cell.role("media", "serve", **_node_settings(cell, name, ports[name])) for name in NODES
    ]
    for core, child in enumerate(children):
        pin(child.pid, core)
    far, near = children[0], children[1]
    nothing = write_targets(cell.folder / "targets", tracks[:1], ["/m/none"])
    async with (
        served(near, ports["b"], nothing, tracks) as second,
        served(far, ports["a"], nothing, tracks) as first,
    ):
        owned = await _owned_by(cell, tracks, "b")
        targets = write_targets(cell.folder / "owned", owned, signed_targets(cell, owned))
        owner, relay = second.with_targets(targets), first.with_targets(targets)
        await read_all(owner)
        await wait_for(lambda: _comes_from_peer(relay), "a hop", READY_S, far)
        await read_all(relay)
        # One URL per listener, as applications give them.
        targets = listener_targets(cell, owned)
        yield relay.with_targets(targets), owner.with_targets(targets)


def _node_settings(cell: Cell, name: str, port: int) -> dict[str, str]:
    return our_settings(
        cell,
        port,
        HEADRACE_DATA_FOLDER=str(cell.folder / f"data-{name}"),
        HEADRACE_MEDIA_NODE=name,
        HEADRACE_MEDIA_ADVERTISE=f"127.0.0.1:{port}",
        HEADRACE_MEDIA_REPLICAS="1",
        HEADRACE_MEDIA_DISKS=disk_of(cell, name=f"disk-{name}"),
    )


async def _owned_by(cell: Cell, tracks: Sequence[Track], node: str) -> list[Track]:
    media = Media(Blobs(blobs_folder(cell).as_uri()), MediaConfig())
    owned = []
    for track in tracks:
        [owner] = (await media.partitions.show(track.key)).owners
        owned += [track] if owner.name == node else []
    if not owned:
        raise BenchFault(f"node {node} owns none of {len(tracks)} tracks")
    return owned


def _comes_from_peer(relay: Serving) -> bool:
    _, _, target = relay.targets.read_text().splitlines()[0].split()
    line = http.client.HTTPConnection("127.0.0.1", relay.port, timeout=10)
    try:
        line.request("GET", target, headers={"Range": "bytes=0-0"})
        answer = line.getresponse()
        answer.read()
        return "peer" in (answer.getheader("cache-status") or "")
    finally:
        line.close()


async def _added(
    run: Run, cell: Cell, owner: Serving, relay: Serving, range_bytes: int
) -> dict[str, float]:
    reports = []
    for serving in (owner, relay):
        pressed = await press(
            cell, serving, "hot", connections=1, range_bytes=range_bytes, **hot_times(run)
        )
        reports.append(pressed.report)
    direct, hopped = reports
    direct_us, hop_us = direct["total_us"]["p50"], hopped["total_us"]["p50"]
    print(f"  {range_bytes}: direct {direct_us} us, hop {hop_us} us")
    return {
        share: hopped[f"{share}_us"]["p50"] - direct[f"{share}_us"]["p50"]
        for share in ("first", "total")
    }


async def measure_spread(run: Run) -> list[Figure]:
    """A node of twelve that dies, and the example of three centers of four nodes."""
    clusters = (
        (Cluster(centers=1, nodes=12), "12 nodes of one center"),
        (Cluster(replicas=2), "12 nodes of 3 centers, 2 replicas"),
    )
    rows = [
        figure(
            "a node dies: most that another serves",
            "fair shares",
            size,
            ours=Runs((simulate(cluster, lost=["c1-n1"]).steps[1].over_fair_max,)),
            goal=Goal(at_most=1.05),
        )
        for cluster, size in (clusters[:1] if run.quick else clusters)
    ]
    if run.quick:
        run.leave_out(clusters[1][1], "the example of three centers")
        return rows
    example = simulate(Cluster())
    write_plot(run.results, "media_cluster", loads_svg(example))
    return [*rows, *_steps(example)]


def _steps(example: Simulation) -> list[Figure]:
    return [
        figure(
            f"{step.name}: most that a node serves",
            "Gbit/s",
            f"{example.load_gbit:g} Gbit/s, 3 centers of 4 nodes",
            ours=Runs((max(node.serves_gbit for node in step.nodes),)),
        )
        for step in example.steps
    ]
