"""Commands `headrace media partitions show|plan|simulate`: who owns what, and what a change would do."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from headrace.kernel.terminal import Terminal, table
from headrace.media.errors import InvalidSimulation
from headrace.media.service import Media
from headrace.media.service.partitions import Plan
from headrace.media.simulate.cluster import Cluster, Simulation, simulate
from headrace.media.simulate.plot import loads_svg


@click.group("partitions")
def partitions() -> None:
    """The 131,072 partitions of all keys, and the nodes that own them."""


@partitions.command("show", short_help="Show who owns a key.")
@click.argument("key")
@click.pass_obj
def show(terminal: Terminal, key: str) -> None:
    """Show the partition of KEY, stored or not, and its owners in the order in which they are asked."""
    found = terminal.run(Media, lambda media: media.partitions.show(key))
    rows = [(one.name, one.address, one.dc, one.state) for one in found.owners]
    told = f"{found.key}: partition {found.partition}"
    terminal.show(found, f"{told}\n{table(('node', 'address', 'centre', 'state'), rows)}")


@partitions.command("plan", short_help="Show what a change of the cluster would do.")
@click.option("--lose", "lost", multiple=True, help="A node or centre that dies.")
@click.option("--drain", "drained", multiple=True, help="A node or centre that is drained.")
@click.option("--weight", "weights", multiple=True, metavar="NODE=WEIGHT", help="Another weight.")
@click.pass_obj
def plan(
    terminal: Terminal,
    lost: tuple[str, ...],
    drained: tuple[str, ...],
    weights: tuple[str, ...],
) -> None:
    """Show each node's share of all requests now and after a change. Nothing is changed."""
    heavier = dict(map(_parse_weight, weights))
    found = terminal.run(
        Media,
        lambda media: media.partitions.plan(lost=lost, drained=drained, weights=heavier),
    )
    terminal.show(found, _describe_plan(found))


@partitions.command("simulate", short_help="Show what losses do to a made-up cluster.")
@click.option("--centres", default=3, show_default=True, help="Data centres.")
@click.option("--nodes", default=4, show_default=True, help="Nodes in each.")
@click.option("--gbit", default=120.0, show_default=True, help="Gbit/s of all clients together.")
@click.option(
    "--replicas", default=0, show_default=True, help="Nodes that own a key; 0: two in each centre."
)
@click.option("--lose", "lost", multiple=True, help="A node (c1-n1) or centre (c1) that dies.")
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write an SVG there, too."
)
@click.pass_obj
def simulate_losses(
    terminal: Terminal,
    *,
    centres: int,
    nodes: int,
    gbit: float,
    replicas: int,
    lost: tuple[str, ...],
    plot: Path | None,
) -> None:
    """Show the load of each node of a cluster that is not there: whole, with losses, in a roll-out.

    Without --lose: a centre lost, a node of each centre lost, both, and all nodes drained in turn. Asks no
    server.
    """
    cluster = Cluster(centres=centres, nodes=nodes, load_gbit=gbit, replicas=replicas)
    found = simulate(cluster, lost=lost)
    if plot is not None:
        plot.write_text(loads_svg(found))
    terminal.show(found, _describe(found))


def _parse_weight(text: str) -> tuple[str, float]:
    """Raises: InvalidSimulation."""
    name, _, weight = text.partition("=")
    try:
        heavy = float(weight)
    except ValueError:
        heavy = 0.0
    if not name or not 0 < heavy < float("inf"):
        raise InvalidSimulation(f"--weight {text!r}: expected NODE=WEIGHT such as n1=0.5")
    return name, heavy


def _describe_plan(found: Plan) -> str:
    head = ("node", "centre", "now", "then", "fair", "times fair")
    rows = [
        (
            one.name,
            one.dc,
            *(
                f"{share * 100:.2f} %"
                for share in (one.share_before, one.share_after, one.fair_share)
            ),
            f"{one.over_fair:.3f}" if one.is_up else "lost",
        )
        for one in found.nodes
    ]
    return (
        f"{table(head, rows)}\n{found.filled_share * 100:.1f} % of kept blocks are read anew by new owners;"
        f" {found.unowned_share * 100:.2f} % of requests find no owner alive and go to the object store"
    )


def _describe(found: Simulation) -> str:
    head = ("node", *(step.name for step in found.steps))
    rows = []
    for column in zip(*(step.nodes for step in found.steps), strict=True):
        cells = [
            f"{one.serves_gbit:.2f} / {one.sends_gbit:.2f}" if one.is_up else "lost"
            for one in column
        ]
        rows.append((column[0].name, *cells))
    for name, cells in (
        ("times fair, most", [f"{step.over_fair_max:.3f}" for step in found.steps]),
        ("object store", [f"{step.origin_gbit:.2f}" for step in found.steps]),
        ("filled anew", [f"{step.filled_share * 100:.1f} %" for step in found.steps]),
    ):
        rows.append((name, *cells))
    return (
        f"Gbit/s that each node serves from its store / sends in all, of {found.load_gbit:g} in all;"
        f" {found.replicas} replicas\n"
        f"{table(head, rows)}"
    )


COMMANDS: Final[list[click.Command]] = [partitions]
