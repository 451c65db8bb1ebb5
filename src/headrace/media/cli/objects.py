"""Commands about stored objects: `headrace media ls|info|url|put|rm`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from headrace.kernel.terminal import Terminal
from headrace.media.model import LIST_OBJECTS_MAX, MediaObject
from headrace.media.service import Media


@click.command("ls", short_help="List objects.")
@click.argument("prefix", default="")
@click.option(
    "--max", "objects_max", default=100, type=click.IntRange(1, LIST_OBJECTS_MAX), show_default=True,
    help="The most to list.",
)  # fmt: skip
@click.pass_obj
def list_objects(terminal: Terminal, prefix: str, objects_max: int) -> None:
    """List the objects in the folder PREFIX, in no order."""
    found = terminal.run(Media, lambda media: media.ls(prefix, objects_max=objects_max))
    lines = [
        f"{item.size_bytes:>12}  {item.modified_at:%Y-%m-%d %H:%M:%S}  {item.key}" for item in found
    ]
    terminal.show(found, "\n".join(lines) or "no objects")


@click.command("info", short_help="Show one object.")
@click.argument("key")
@click.pass_obj
def show_info(terminal: Terminal, key: str) -> None:
    """Show size, type, ETag and address of KEY."""
    found = terminal.run(Media, lambda media: media.info(key))
    terminal.show(found, describe(found))


@click.command("url", short_help="Print where an object is served.")
@click.argument("key")
@click.pass_obj
def show_url(terminal: Terminal, key: str) -> None:
    """Print the address of KEY, stored or not."""

    async def find(media: Media) -> str:
        return media.url(key)

    url = terminal.run(Media, find)
    terminal.show({"key": key, "url": url}, url)


@click.command("put", short_help="Store a file.")
@click.argument("key")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.pass_obj
def put_object(terminal: Terminal, key: str, file: Path) -> None:
    """Store FILE under KEY, durably; an object of that key is replaced.

    Nodes serve the new one within a minute, or at once after `headrace media purge KEY`.
    """
    found = terminal.run(Media, lambda media: media.put(key, file.read_bytes()))
    terminal.show(found, describe(found))


@click.command("rm", short_help="Remove an object.")
@click.argument("key")
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
@click.pass_obj
def remove_object(terminal: Terminal, key: str, *, dry_run: bool) -> None:
    """Remove KEY. Nodes forget it within a minute, or at once after `headrace media purge KEY`.

    Clients that hold a copy may show it until it is stale.
    """

    async def remove(media: Media) -> MediaObject:
        found = await media.info(key)
        if not dry_run:
            await media.rm(key)
        return found

    found = terminal.run(Media, remove)
    word = "would remove" if dry_run else "removed"
    terminal.show({"key": found.key, "removed": not dry_run}, f"{word} {found.key}")


def describe(found: MediaObject) -> str:
    """One object as lines of text."""
    return (
        f"{found.key}\n  {found.size_bytes} bytes, {found.content_type}, ETag {found.etag}\n"
        f"  stored {found.modified_at:%Y-%m-%d %H:%M:%S} UTC\n  {found.url}"
    )


COMMANDS: Final[list[click.Command]] = [
    list_objects,
    show_info,
    show_url,
    put_object,
    remove_object,
]
