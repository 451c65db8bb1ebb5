"""Commands about nodes, partitions and the disks of this machine's node."""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import click

from headrace.kernel.errors import require_extra
from headrace.kernel.terminal import (
    CommandGroup,
    Lines,
    Parsed,
    Terminal,
    listing,
    pluralize,
    table,
    writing,
)
from headrace.media.cli.objects import DURATION, SIZE, media
from headrace.media.model import parse_weight
from headrace.media.service import Media
from headrace.media.service.entry import FORMS, METHODS, EntryOptions
from headrace.media.service.nodes import OBJECTS_MAX, Disk, NodeInfo, Plan
from headrace.media.simulate.cluster import Cluster, Simulation, lines_svg, loads_svg, simulate

SIZES: Final = (10_000, 50_000, 150_000, 500_000)
SCALE: Final = 100
"""Divides tracks and cache size alike, which keeps the hit ratios."""
POLICIES: Final = ("SIEVE in sets of 16", "LRU", "global SIEVE", "best static choice")


def parse_node_weight(text: str) -> tuple[str, float]:
    """Parse NODE=WEIGHT. Raises: ValueError."""
    name, _, weight = text.partition("=")
    return name, parse_weight(weight)


WEIGHT: Final = Parsed(parse_node_weight, name="NODE=WEIGHT")


@media.group("nodes", cls=CommandGroup)
def nodes() -> None:
    """The cache nodes of the cluster."""


@nodes.command("ls", short_help="List the nodes.")
def list_nodes(terminal: Terminal) -> None:
    """List all nodes with address, data center, weight, state and share of the keys.

    `answers`: whether the node answers a request from this machine.
    """
    found = terminal.run(Media, lambda media: media.nodes.list())
    head = (
        "node",
        "address",
        "data center",
        "weight",
        "state",
        "answers",
        "share",
        "ramp-up since",
    )
    text = "no nodes: set media.node to register one"
    terminal.show(listing(found), table(head, map(_node_row, found)) if found else text)


@nodes.command("rm", short_help="Remove a node from the cluster.")
@click.argument("node")
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
def remove_node(terminal: Terminal, node: str, *, dry_run: bool) -> None:
    """Remove NODE from the cluster: drain it and stop it first.

    A node that still runs registers again at its next start.
    """

    async def remove(media: Media) -> NodeInfo:
        found = await media.nodes.get(node)
        if not dry_run:
            await media.nodes.remove(node)
        return found

    found = terminal.run(Media, remove)
    word = "would remove" if dry_run else "removed"
    text = f"{word} {found.name}, {found.share * 100:.1f} % of partitions"
    terminal.show({"node": found.name, "removed": not dry_run}, text)


@media.command("drain", short_help="Serve a node's keys by other nodes.")
@click.argument("node")
def drain(terminal: Terminal, node: str) -> None:
    """Let other nodes serve NODE's keys, before a restart or repair. It still answers requests.

    See the effect on the other nodes with `headrace media partitions plan --drain NODE`.
    """
    _change_node(terminal, lambda media: media.nodes.drain(node))


@media.command("undrain", short_help="Serve keys by a drained node again.")
@click.argument("node")
def undrain(terminal: Terminal, node: str) -> None:
    """Let NODE serve its keys again, after `headrace media drain`. Its share grows step by step."""
    _change_node(terminal, lambda media: media.nodes.undrain(node))


@media.command("weight", short_help="Set a node's share of the keys.")
@click.argument("node")
@click.argument("weight", type=float)
def set_weight(terminal: Terminal, node: str, weight: float) -> None:
    """Set the WEIGHT of NODE: its share of the keys, relative to a node of weight 1."""
    _change_node(terminal, lambda media: media.nodes.set_weight(node, weight))


def _change_node(terminal: Terminal, verb: Callable[[Media], Awaitable[NodeInfo]]) -> None:
    found = terminal.run(Media, verb)
    text = (
        f"{found.name}: {found.state}, weight {found.weight:g},"
        f" {found.share * 100:.1f} % of partitions"
    )
    terminal.show(found, text)


def _node_row(node: NodeInfo) -> tuple[str, ...]:
    share = f"{node.share * 100:.1f} %"
    since = f"{node.started_at:%Y-%m-%d %H:%M:%S}" if node.started_at else ""
    is_alive = "yes" if node.is_alive else "no"
    where = (node.name, node.address, node.dc, f"{node.weight:g}", node.state)
    return (*where, is_alive, share, since)


@media.group("partitions", cls=CommandGroup)
def partitions() -> None:
    """Which nodes own a key, and what losses of nodes would do."""


@partitions.command("show", short_help="Show who owns a key.")
@click.argument("key")
def show_owners(terminal: Terminal, key: str) -> None:
    """Show the nodes that own KEY, in the order in which they are tried. KEY need not be stored."""
    found = terminal.run(Media, lambda media: media.partitions.show(key))
    rows = [(one.name, one.address, one.dc, one.state) for one in found.owners]
    text = f"{found.key}: partition {found.partition}"
    terminal.show(found, Lines(text, table(("node", "address", "data center", "state"), rows)))


@partitions.command("plan", short_help="Show what a change of the cluster would do.")
@click.option("--lose", "lost", multiple=True, help="A node or data center that dies.")
@click.option("--drain", "drained", multiple=True, help="A node or data center that is drained.")
@click.option("--weight", "weights", multiple=True, type=WEIGHT, help="Another weight.")
def plan(
    terminal: Terminal,
    lost: tuple[str, ...],
    drained: tuple[str, ...],
    weights: tuple[tuple[str, float], ...],
) -> None:
    """Show each node's share of all requests now and after a change. No changes are made."""
    found = terminal.run(
        Media,
        lambda media: media.partitions.plan(lost=lost, drained=drained, weights=dict(weights)),
    )
    terminal.show(found, _describe_plan(found))


@partitions.command("simulate", short_help="Show what losses do to a hypothetical cluster.")
@click.option("--centers", default=3, show_default=True, help="Data centers.")
@click.option("--nodes", default=4, show_default=True, help="Nodes in each.")
@click.option("--gbit", default=120.0, show_default=True, help="Gbit/s of all clients together.")
@click.option(
    "--replicas",
    default=0,
    show_default=True,
    help="Replicas of a key; 0: two in each data center.",
)
@click.option("--lose", "lost", multiple=True, help="A node (c1-n1) or data center (c1) that dies.")
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Also write an SVG file."
)
def simulate_losses(
    terminal: Terminal,
    *,
    centers: int,
    nodes: int,
    gbit: float,
    replicas: int,
    lost: tuple[str, ...],
    plot: Path | None,
) -> None:
    """Show the load of each node of a hypothetical cluster: complete, with losses, in a roll-out.

    Without --lose: one data center lost, one node of each data center lost, both, and all nodes
    drained in turn. Contacts no server.
    """
    cluster = Cluster(centers=centers, nodes=nodes, load_gbit=gbit, replicas=replicas)
    found = simulate(cluster, lost=lost)
    if plot is not None:
        with writing(plot):
            plot.write_text(loads_svg(found))
    terminal.show(found, _describe_simulation(found))


def _describe_plan(found: Plan) -> str:
    head = ("node", "data center", "now", "then", "fair", "times fair")
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
    return Lines(
        table(head, rows),
        f"{found.filled_share * 100:.1f} % of cached blocks are read again by"
        f" new owners; {found.unowned_share * 100:.2f} % of requests find no live owner and use the"
        " object store",
    )


def _describe_simulation(found: Simulation) -> str:
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
        ("read again", [f"{step.filled_share * 100:.1f} %" for step in found.steps]),
    ):
        rows.append((name, *cells))
    return Lines(
        f"Gbit/s that each node serves from its cache / sends in total, of {found.load_gbit:g} in"
        f" total; {found.replicas} replicas",
        table(head, rows),
    )


@media.group("disks", cls=CommandGroup)
def disks() -> None:
    """Disks on which the media node of this data folder caches objects."""


@disks.command("ls", short_help="List the disks.")
def list_disks(terminal: Terminal) -> None:
    """List all disks with size, state, and number of 256 KiB blocks: possible, stored and
    corrupt.
    """
    found = terminal.run(Media, lambda media: media.disks.list())
    head = ("disk", "path", "GiB", "frames", "used", "rotten", "state", "")
    terminal.show(listing(found), table(head, map(_disk_row, found)) if found else "no disks")


@disks.command("add", short_help="Add a disk.")
@click.argument("path", type=click.Path(path_type=Path))
@click.argument("size", type=SIZE)
def add_disk(terminal: Terminal, path: Path, size: int) -> None:
    """Add the folder or block device PATH with SIZE, such as 900GiB, while the node runs.

    The node keeps the disk for its next starts.
    """
    _change_disk(terminal, lambda media: media.disks.add(str(path.absolute()), size))


@disks.command("drain", short_help="Cache nothing more on a disk.")
@click.argument("disk")
def drain_disk(terminal: Terminal, disk: str) -> None:
    """Cache nothing more on DISK (its id or path). What it has is still served."""
    _change_disk(terminal, lambda media: media.disks.drain(disk))


@disks.command("undrain", short_help="Cache on a drained disk again.")
@click.argument("disk")
def undrain_disk(terminal: Terminal, disk: str) -> None:
    """Cache on DISK (its id or path) again, after `headrace media disks drain`."""
    _change_disk(terminal, lambda media: media.disks.undrain(disk))


@disks.command("retire", short_help="Take a disk out of use.")
@click.argument("disk")
@click.option("--dry-run", is_flag=True, help="Only show which disk it is and what it holds.")
def retire_disk(terminal: Terminal, disk: str, *, dry_run: bool) -> None:
    """Take DISK (its id or path) out of use, so that it can be removed. Its cached data is lost.

    This also removes a failed or refused disk from the list and ends alerts about it. While the
    settings name it, the next start tries it again.
    """
    if dry_run:
        found = terminal.run(Media, lambda media: media.disks.get(disk))
        lost = pluralize(found.used, "block becomes a miss", "blocks become misses")
        terminal.show(found, f"would retire {_name_of(found)}: {lost}")
        return
    _change_disk(terminal, lambda media: media.disks.retire(disk))


@disks.command("simulate", short_help="Show hit ratios by cache size.")
@click.option(
    "--tracks",
    "sizes",
    multiple=True,
    type=click.IntRange(min=1600),
    help="Number of tracks that fit.",
)
@click.option("--plays", default=1_000_000, show_default=True, type=click.IntRange(min=1000))
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Also write an SVG file."
)
def simulate_hits(
    terminal: Terminal, *, sizes: tuple[int, ...], plays: int, plot: Path | None
) -> None:
    """Simulate the hit ratio of a cache of music files, compared with LRU and the optimum.

    The popularity is that of a large music site: 140 of 10 million tracks get a tenth of all plays,
    500,000 get nine tenths. Contacts no server; takes some seconds for each size.
    """
    require_extra("media", "xxhash")
    from headrace.media.simulate.eviction import simulate

    rows = simulate(sizes or SIZES, requests=plays, scale=SCALE)
    shares = [(row.sieve_sets, row.lru, row.sieve_global, row.best_static) for row in rows]
    if plot is not None:
        lines = {
            name: [(row.frames, text[place]) for row, text in zip(rows, shares, strict=True)]
            for place, name in enumerate(POLICIES)
        }
        with writing(plot):
            plot.write_text(lines_svg(f"hits by the tracks that fit, {plays:,} plays", lines))
    cells = [
        (f"{row.frames:,}", *(f"{share * 100:.1f} %" for share in text))
        for row, text in zip(rows, shares, strict=True)
    ]
    terminal.show(listing(rows), table(("tracks", *POLICIES), cells))


@media.command("verify", short_help="Compare cached data with its checksums.")
@click.option(
    "--share",
    default=1.0,
    type=click.FloatRange(0, 1, min_open=True),
    show_default=True,
    help="Share of the blocks to compare, picked at random.",
)
def verify(terminal: Terminal, share: float) -> None:
    """Compare what this node has cached with its checksums, and drop what is wrong.

    Exits with 8 if some were wrong or could not be read.
    """
    terminal.progress("reading the stored blocks")
    found = terminal.run(Media, lambda media: media.disks.verify(share))
    text = (
        f"{pluralize(found.blocks, 'block')}, {found.right} right, {found.wrong} wrong,"
        f" {found.unread} unreadable"
    )
    terminal.show(found, text)
    if found.wrong or found.unread:
        raise click.exceptions.Exit(8)


def _change_disk(terminal: Terminal, verb: Callable[[Media], Awaitable[Disk]]) -> None:
    found = terminal.run(Media, verb)
    terminal.show(found, f"{_name_of(found)}: {found.state}")


def _name_of(disk: Disk) -> str:
    return f"disk {disk.id} at {disk.path}" if disk.id else f"disk {disk.path}"


def _disk_row(disk: Disk) -> tuple[str, ...]:
    size = f"{disk.size_bytes / 2**30:.1f}"
    counts = (str(disk.frames), str(disk.used), str(disk.rotten))
    return (disk.id, disk.path, size, *counts, disk.state, disk.fault)


@media.command("hottest", short_help="List the most requested objects.")
@click.option(
    "--max",
    "objects_max",
    default=20,
    show_default=True,
    type=click.IntRange(1, OBJECTS_MAX),
    help="Maximum number to list.",
)
def hottest(terminal: Terminal, objects_max: int) -> None:
    """List the objects requested most from the node of this data folder, in requests per second.

    The rates are sampled; the last minutes count most.
    """
    found = terminal.run(Media, lambda media: media.hottest.list(objects_max=objects_max))
    rows = [(one.key, f"{one.requests_per_s:,.1f}") for one in found]
    terminal.show(listing(found), table(("object", "requests/s"), rows) if rows else "no requests")


@media.command("entry", short_help="Print configuration of load balancers or DNS.")
@click.argument("form", metavar="FORM", type=click.Choice(FORMS))
@click.option("--listen", help="Address and port that clients connect to: 203.0.113.10:80.")
@click.option(
    "--dc", help="The data center of this load balancer; nodes of others are its backups."
)
@click.option("--zone", help="dns: the name of the zone, such as media.example.com.")
@click.option("--name-server", help="dns: the name server of the zone, such as ns1.example.com.")
@click.option("--ttl", "ttl_s", type=DURATION, default="30s", show_default=True, help="dns: TTL.")
@click.option(
    "--method",
    type=click.Choice(METHODS),
    default="nat",
    show_default=True,
    help="keepalived: how packets are forwarded.",
)
@click.option(
    "--watch",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write FILE and replace it after every change, until stopped.",
)
@click.option("--run", "command", help="With --watch: the command that reloads FILE; no shell.")
def entry(
    terminal: Terminal,
    /,
    *,
    form: str,
    ttl_s: float,
    file: Path | None,
    command: str | None,
    **options: Any,
) -> None:
    """Print configuration that directs clients to the nodes: haproxy, keepalived, dns, json.

    A node that is draining or does not answer has weight 0; in DNS, its names lead to others.
    """
    if command is not None and file is None:
        raise click.UsageError("--run is the command after a change of FILE: give --watch FILE too")
    chosen = EntryOptions(ttl_s=max(1, round(ttl_s)), **options)
    if file is None:
        text = terminal.run(Media, lambda media: media.entry.render(form, chosen))
        terminal.show({"form": form, "text": text}, text.rstrip("\n"))
        return
    words = shlex.split(command or "")
    with writing(file):
        terminal.run(Media, lambda media: media.entry.watch(form, chosen, file, command=words))
