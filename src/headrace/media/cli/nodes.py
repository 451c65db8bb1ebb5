"""Commands about the cluster's nodes: `headrace media nodes ls|rm`, `drain`, `undrain`, `weight`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import click

from headrace.kernel.terminal import Terminal, table
from headrace.media.service import Media
from headrace.media.service.nodes import NodeSeen


@click.group("nodes")
def nodes() -> None:
    """The cluster's cache nodes."""


@nodes.command("ls", short_help="List the nodes.")
@click.pass_obj
def list_nodes(terminal: Terminal) -> None:
    """List every node: address, centre, weight, state, and its share of partitions."""
    found = terminal.run(Media, lambda media: media.nodes.list())
    head = ("node", "address", "centre", "weight", "state", "share", "rises since")
    terminal.show(
        found, table(head, map(_row, found)) if found else "no nodes: one enters by media.node"
    )


@nodes.command("rm", short_help="Forget a node that is gone for good.")
@click.argument("node")
@click.option("--dry-run", is_flag=True, help="Only show what would be forgotten.")
@click.pass_obj
def remove_node(terminal: Terminal, node: str, *, dry_run: bool) -> None:
    """Forget NODE: drain it, stop it, then forget it. One that still runs enters again with its next start."""

    async def remove(media: Media) -> NodeSeen:
        found = await media.nodes.get(node)
        if not dry_run:
            await media.nodes.remove(node)
        return found

    found = terminal.run(Media, remove)
    word = "would forget" if dry_run else "forgot"
    told = f"{word} {found.name}, {found.share * 100:.1f} % of partitions"
    terminal.show({"node": found.name, "removed": not dry_run}, told)


@click.command("drain", short_help="Give a node no partitions any more.")
@click.argument("node")
@click.pass_obj
def drain(terminal: Terminal, node: str) -> None:
    """Give NODE no partitions any more: for a restart, a repair, its end. It serves what comes to it.

    What that does to the others: `headrace media partitions plan --drain NODE`.
    """
    _change(terminal, lambda media: media.nodes.drain(node))


@click.command("undrain", short_help="Give a node its partitions again.")
@click.argument("node")
@click.pass_obj
def undrain(terminal: Terminal, node: str) -> None:
    """Give NODE its partitions again, rising to its weight."""
    _change(terminal, lambda media: media.nodes.undrain(node))


@click.command("weight", short_help="Give a node more or fewer partitions.")
@click.argument("node")
@click.argument("weight", type=float)
@click.pass_obj
def set_weight(terminal: Terminal, node: str, weight: float) -> None:
    """Let NODE have WEIGHT times the partitions of a node of weight 1."""
    _change(terminal, lambda media: media.nodes.set_weight(node, weight))


def _change(terminal: Terminal, verb: Callable[[Media], Awaitable[NodeSeen]]) -> None:
    found = terminal.run(Media, verb)
    told = f"{found.name}: {found.state}, weight {found.weight:g}, {found.share * 100:.1f} % of partitions"
    terminal.show(found, told)


def _row(node: NodeSeen) -> tuple[str, ...]:
    share = f"{node.share * 100:.1f} %"
    since = f"{node.started_at:%Y-%m-%d %H:%M:%S}" if node.started_at else ""
    return (node.name, node.address, node.dc, f"{node.weight:g}", node.state, share, since)


COMMANDS: Final[list[click.Command]] = [nodes, drain, undrain, set_weight]
