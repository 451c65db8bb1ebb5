"""Commands `headrace media purge|warm`: what caches must forget, and what they should have already."""

from __future__ import annotations

from typing import Final

import click

from headrace.kernel.terminal import Terminal, table
from headrace.media.service import Media
from headrace.media.service.purging import Purged


@click.command("purge", short_help="Let every node forget keys or a prefix.")
@click.argument("keys", nargs=-1)
@click.option("--prefix", help="Everything whose key begins with this; the empty text is all.")
@click.option("--dry-run", is_flag=True, help="Only show what would be purged.")
@click.pass_obj
def purge(terminal: Terminal, keys: tuple[str, ...], *, prefix: str | None, dry_run: bool) -> None:
    """Let the caches of all nodes forget KEYS, or all keys of a prefix, within 2 seconds.

    Objects in the object store stay. What is asked for again is read anew.
    """

    async def change(media: Media) -> Purged:
        return await media.purges.purge(keys, prefix=prefix, is_dry_run=dry_run)

    done = terminal.run(Media, change)
    what = f"all keys of {prefix!r}" if prefix is not None else ", ".join(keys)
    told = f"would purge {what}" if dry_run else f"purged {what}: generation {done.generation}"
    terminal.show(done, told)


@click.command("warm", short_help="Have the owners of keys fetch them now.")
@click.argument("keys", nargs=-1, required=True)
@click.pass_obj
def warm(terminal: Terminal, keys: tuple[str, ...]) -> None:
    """Have every node that owns one of KEYS read it from the object store, whole.

    Exits with 7 where a node did not.
    """
    done = terminal.run(Media, lambda media: media.warm(keys))
    rows = [(row.node, row.blocks, row.failed, row.fault or "") for row in done.nodes]
    terminal.show(done, table(("node", "blocks", "failed", ""), rows))
    if any(row.failed for row in done.nodes):
        raise click.exceptions.Exit(7)


COMMANDS: Final[list[click.Command]] = [purge, warm]
