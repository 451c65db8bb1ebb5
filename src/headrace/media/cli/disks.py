"""Commands about the disks of this machine's node: `headrace media disks ...`, `verify`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import click

from headrace.kernel.config import parse_size_bytes
from headrace.kernel.errors import require_extra
from headrace.kernel.terminal import Terminal, table
from headrace.media.errors import InvalidDiskSize
from headrace.media.service import Media
from headrace.media.service.disks import Disk
from headrace.media.simulate.plot import lines_svg

SIZES: Final = (10_000, 50_000, 150_000, 500_000)
SCALE: Final = 100
"""Tracks and cache are divided alike, which leaves the shares as they are."""
POLICIES: Final = ("SIEVE in sets of 16", "LRU", "global SIEVE", "best static choice")


@click.group("disks")
def disks() -> None:
    """The disks of the node whose data folder this is."""


@disks.command("ls", short_help="List the disks.")
@click.pass_obj
def list_disks(terminal: Terminal) -> None:
    """List every disk: its id, size, frames, how many hold blocks, how many blocks rotted, and its state."""
    found = terminal.run(Media, lambda media: media.disks.list())
    head = ("disk", "path", "GiB", "frames", "used", "rotten", "state", "")
    terminal.show(found, table(head, map(_row, found)) if found else "no disks")


@disks.command("add", short_help="Take a disk into use.")
@click.argument("path", type=click.Path(path_type=Path))
@click.argument("size")
@click.pass_obj
def add_disk(terminal: Terminal, path: Path, size: str) -> None:
    """Take the folder or block device PATH into use with SIZE, such as 900GiB, while the node runs.

    The node remembers it for its next starts.
    """
    try:
        size_bytes = parse_size_bytes(size)
    except ValueError as error:
        raise InvalidDiskSize(f"size {size!r}: expected {error}") from error
    _change(terminal, lambda media: media.disks.add(str(path.absolute()), size_bytes))


@disks.command("drain", short_help="Fill nothing more on a disk.")
@click.argument("disk")
@click.pass_obj
def drain_disk(terminal: Terminal, disk: str) -> None:
    """Fill nothing more on DISK (its id or path); what it has is served still."""
    _change(terminal, lambda media: media.disks.drain(disk))


@disks.command("undrain", short_help="Fill a disk again.")
@click.argument("disk")
@click.pass_obj
def undrain_disk(terminal: Terminal, disk: str) -> None:
    """Fill DISK (its id or path) again."""
    _change(terminal, lambda media: media.disks.undrain(disk))


@disks.command("retire", short_help="Take a disk out of use.")
@click.argument("disk")
@click.option("--dry-run", is_flag=True, help="Only show which disk it is and what it holds.")
@click.pass_obj
def retire_disk(terminal: Terminal, disk: str, *, dry_run: bool) -> None:
    """Take DISK (its id or path) out of use, so that it may be pulled: its blocks are misses from then on.

    One that failed or was refused is taken off the list by it, and alerts about it end; as long as the settings
    name it the next start tries it again.
    """
    if dry_run:
        found = terminal.run(Media, lambda media: media.disks.get(disk))
        terminal.show(found, f"would retire {_told(found)}: {found.used} blocks become misses")
        return
    _change(terminal, lambda media: media.disks.retire(disk))


@disks.command("simulate", short_help="Show what disks of some size would hit.")
@click.option(
    "--tracks", "sizes", multiple=True, type=click.IntRange(min=1600), help="Tracks that fit."
)
@click.option("--plays", default=1_000_000, show_default=True, type=click.IntRange(min=1000))
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write an SVG there, too."
)
@click.pass_obj
def simulate_hits(
    terminal: Terminal, *, sizes: tuple[int, ...], plays: int, plot: Path | None
) -> None:
    """Show the share of plays that a cache of a size hits: ours, LRU, and the best there is without foresight.

    The popularity is that of a large music site, where 140 tracks of 10 million are a tenth of all plays and
    500,000 are nine tenths. Asks no server; some seconds a size.
    """
    require_extra("media", "xxhash")
    from headrace.media.simulate.eviction import simulate

    rows = simulate(sizes or SIZES, requests=plays, scale=SCALE)
    shares = [(row.sieve_sets, row.lru, row.sieve_global, row.best_static) for row in rows]
    if plot is not None:
        lines = {
            name: [(row.frames, told[place]) for row, told in zip(rows, shares, strict=True)]
            for place, name in enumerate(POLICIES)
        }
        plot.write_text(lines_svg(f"hits by the number of tracks that fit, {plays:,} plays", lines))
    cells = [
        (f"{row.frames:,}", *(f"{share * 100:.1f} %" for share in told))
        for row, told in zip(rows, shares, strict=True)
    ]
    terminal.show(rows, table(("tracks", *POLICIES), cells))


@click.command("verify", short_help="Read stored blocks and compare their sums.")
@click.option(
    "--share", default=1.0, type=click.FloatRange(0, 1, min_open=True), show_default=True,
    help="Of all blocks, picked evenly.",
)  # fmt: skip
@click.pass_obj
def verify(terminal: Terminal, share: float) -> None:
    """Read the blocks that this node stores and compare their sums; wrong ones are forgotten.

    Exits with 8 where some were wrong or could not be read.
    """
    found = terminal.run(Media, lambda media: media.disks.verify(share))
    told = f"{found.blocks} blocks, {found.right} right, {found.wrong} wrong, {found.unread} not readable"
    terminal.show(found, told)
    if found.wrong or found.unread:
        raise click.exceptions.Exit(8)


def _change(terminal: Terminal, verb: Callable[[Media], Awaitable[Disk]]) -> None:
    found = terminal.run(Media, verb)
    terminal.show(found, f"{_told(found)}: {found.state}")


def _told(disk: Disk) -> str:
    return f"disk {disk.id} at {disk.path}" if disk.id else f"disk {disk.path}"


def _row(disk: Disk) -> tuple[str, ...]:
    size = f"{disk.size_bytes / 2**30:.1f}"
    counts = (str(disk.frames), str(disk.used), str(disk.rotten))
    return (disk.id, disk.path, size, *counts, disk.state, disk.fault)


COMMANDS: Final[list[click.Command]] = [disks, verify]
