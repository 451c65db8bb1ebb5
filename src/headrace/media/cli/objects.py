"""Commands about objects: store, sign, tag, purge, warm, trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

from headrace.kernel.config import parse_byte_rate, parse_duration_s, parse_size_bytes
from headrace.kernel.terminal import (
    CommandGroup,
    Parsed,
    Terminal,
    listing,
    paged,
    pluralize,
    size_cell,
    table,
)
from headrace.media.model import LIST_OBJECTS_MAX, SIDE_MAX, MediaObject
from headrace.media.service import Media
from headrace.media.service.objects import Purged, StoredTag
from headrace.media.tracing import Watch
from headrace.media.variants import AUTO, FITS, FORMATS

OBJECT_HEAD: Final = ("size", "stored (UTC)", "key")


@click.group("media", cls=CommandGroup)
def media() -> None:
    """Objects served by range."""


@media.command("ls", short_help="List objects.")
@click.argument("prefix", default="")
@click.option(
    "--max",
    "objects_max",
    default=100,
    type=click.IntRange(1, LIST_OBJECTS_MAX),
    show_default=True,
    help="Maximum number to list.",
)
def list_objects(terminal: Terminal, prefix: str, objects_max: int) -> None:
    """List the objects in the folder PREFIX, in no order."""
    found = terminal.run(Media, lambda media: media.objects.ls(prefix, objects_max=objects_max))
    text = table(OBJECT_HEAD, map(_object_row, found)) if found else "no objects"
    terminal.show(listing(found), text)


@media.command("folder", short_help="List one folder.")
@click.argument("prefix", default="")
@click.option("--after", default="", help="Only names after this one: the next page.")
@click.option(
    "--max",
    "entries_max",
    default=100,
    type=click.IntRange(1, LIST_OBJECTS_MAX),
    show_default=True,
    help="Maximum number to list.",
)
def list_folder(terminal: Terminal, prefix: str, after: str, entries_max: int) -> None:
    """List the subfolders and objects directly in the folder PREFIX, by name."""
    found = terminal.run(
        Media, lambda media: media.objects.folder(prefix, after=after, entries_max=entries_max)
    )
    rows = [("folder", "-", f"{one}/") for one in found.folders]
    rows += map(_object_row, found.objects)
    text = table(OBJECT_HEAD, rows) if rows else "no objects"
    terminal.show(found, paged(text, found.next_after, "more: --after"))


def _object_row(item: MediaObject) -> tuple[str, str, str]:
    return size_cell(item.size_bytes), f"{item.modified_at:%Y-%m-%d %H:%M:%S}", item.key


@media.command("info", short_help="Show one object.")
@click.argument("key")
def show_info(terminal: Terminal, key: str) -> None:
    """Show size, type, ETag and URL of KEY."""
    found = terminal.run(Media, lambda media: media.objects.info(key))
    terminal.show(found, describe(found))


def variant_options(command: Any) -> Any:
    """Add the options of a variant of an image to a command."""
    for name, help_text, kind in (
        ("--fm", "Format of the variant; default: negotiated.", click.Choice([AUTO, *FORMATS])),
        ("--fit", "How the variant fits into --w and --h; default: inside.", click.Choice(FITS)),
        ("--h", "Height of a variant of an image, in pixels.", click.IntRange(1, SIDE_MAX)),
        ("--w", "Width of a variant of an image, in pixels.", click.IntRange(1, SIDE_MAX)),
    ):
        command = click.option(name, type=kind, help=help_text)(command)
    return command


@media.command("url", short_help="Print the URL of an object.")
@click.argument("key")
@click.option(
    "--prefer", help="Node or data center that the URL leads to first, by media.preferred_url."
)
@variant_options
def show_url(terminal: Terminal, /, key: str, **options: Any) -> None:
    """Print the URL of KEY, or of a variant of it. KEY need not be stored."""

    async def find(media: Media) -> str:
        return media.objects.url(key, **{k: v for k, v in options.items() if v is not None})

    url = terminal.run(Media, find)
    terminal.show({"key": key, "url": url}, url)


@media.command("put", short_help="Store a file.")
@click.argument("key")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def put_object(terminal: Terminal, key: str, file: Path) -> None:
    """Store FILE durably under KEY. An existing object of that key is replaced.

    Nodes serve the new object within a minute, or at once after `headrace media purge KEY`.
    """
    found = terminal.run(Media, lambda media: media.objects.put(key, file.read_bytes()))
    terminal.show(found, describe(found))


@media.command("rm", short_help="Remove an object.")
@click.argument("key")
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
def remove_object(terminal: Terminal, key: str, *, dry_run: bool) -> None:
    """Remove KEY. Nodes drop it within a minute, or at once after `headrace media purge KEY`.

    Clients that cached a copy may use it until it expires.
    """

    async def remove(media: Media) -> MediaObject:
        found = await media.objects.info(key)
        if not dry_run:
            await media.objects.rm(key)
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


@media.command("purge", short_help="Purge keys or a prefix from all caches.")
@click.argument("keys", nargs=-1)
@click.option("--prefix", help="All keys that begin with this; empty: all keys.")
@click.option("--dry-run", is_flag=True, help="Only show what would be purged.")
def purge(terminal: Terminal, keys: tuple[str, ...], *, prefix: str | None, dry_run: bool) -> None:
    """Purge KEYS, or all keys with a prefix, from the caches of all nodes within 2 seconds.

    Objects in the object store stay; nodes read them again on request.
    """

    async def change(media: Media) -> Purged:
        return await media.purges.purge(keys, prefix=prefix, is_dry_run=dry_run)

    done = terminal.run(Media, change)
    what = f"all keys of {prefix!r}" if prefix is not None else ", ".join(keys)
    text = f"would purge {what}" if dry_run else f"purged {what}: generation {done.generation}"
    terminal.show(done, text)


@media.command("warm", short_help="Load objects into the caches of nodes.")
@click.argument("keys", nargs=-1, required=True)
@variant_options
def warm(terminal: Terminal, /, keys: tuple[str, ...], **options: Any) -> None:
    """Load KEYS completely into the caches of the nodes that own them.

    With --w or --h, have a variant of each made instead, in every format that is negotiated unless
    --fm names one. Exits with 7 if a node failed.
    """
    terminal.progress(f"warming {pluralize(len(keys), 'object')}")
    done = terminal.run(Media, lambda media: media.warming.warm(keys, **options))
    rows = [(row.node, row.blocks, row.failed, row.fault or "") for row in done.nodes]
    terminal.show(done, table(("node", "blocks", "failed", ""), rows))
    if any(row.failed for row in done.nodes):
        raise click.exceptions.Exit(7)


DURATION = Parsed(parse_duration_s, name="duration")
SIZE = Parsed(parse_size_bytes, name="size")
BYTE_RATE = Parsed(parse_byte_rate, name="rate")


@media.command("sign", short_help="Print a signed URL of an object.")
@click.argument("key")
@click.option("--ttl", "ttl_s", type=DURATION, help="How long it is valid; default: media.url_ttl.")
@click.option(
    "--grid",
    "grid_s",
    type=DURATION,
    default="1s",
    show_default=True,
    help="Round its expiry up to a multiple of this, so that a page gets the same URL again"
    " and browsers can cache it.",
)
@click.option("--address", help="Valid from this address or network only, such as 203.0.113.0/24.")
@click.option("--rate", type=BYTE_RATE, help="Maximum bytes per second: 65536 or 64KiB.")
@click.option("--tag", help="Id of the ID3 tag to put in front of the track.")
@click.option(
    "--trace",
    help="User and request to write into the URL, for `headrace media trace`: user=42,request=r7.",
)
@click.option(
    "--prefer", help="Node or data center that the URL leads to first, by media.preferred_url."
)
@variant_options
def sign(terminal: Terminal, /, key: str, **options: Any) -> None:
    """Print a URL that allows reading KEY, or a variant of it, for a while.

    KEY need not be stored.
    """
    signed = terminal.run(Media, lambda media: media.objects.sign(key, **options))
    terminal.show(signed, signed.url)


@media.group("tag", cls=CommandGroup)
def tag() -> None:
    """ID3 tags that signed URLs put in front of tracks."""


@tag.command("put", short_help="Store a tag.")
@click.option("--title")
@click.option("--artist")
@click.option("--album")
@click.option("--buyer", help="Id of the buyer, written into the track.")
@click.option(
    "--cover",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A JPEG or PNG file.",
)
def put_tag(terminal: Terminal, /, cover: Path | None, **texts: str | None) -> None:
    """Store a tag and print its id for `headrace media sign --tag`. Equal tags have equal ids."""
    data = cover.read_bytes() if cover is not None else None

    async def put(media: Media) -> StoredTag:
        return await media.tags.put(cover=data, **texts)

    stored = terminal.run(Media, put)
    terminal.show(stored, stored.id)


@tag.command("show", short_help="Show a tag.")
@click.argument("identifier", metavar="ID")
def show_tag(terminal: Terminal, identifier: str) -> None:
    """Show the contents of tag ID."""
    stored = terminal.run(Media, lambda media: media.tags.get(identifier))
    terminal.show(stored, describe_tag(stored))


@tag.command("rm", short_help="Remove a tag.")
@click.argument("identifier", metavar="ID")
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
def remove_tag(terminal: Terminal, identifier: str, *, dry_run: bool) -> None:
    """Remove tag ID. URLs with this tag get 404, on nodes that have it cached within a minute."""

    async def remove(media: Media) -> None:
        await media.tags.require(identifier)
        if not dry_run:
            await media.tags.rm(identifier)

    terminal.run(Media, remove)
    word = "would remove" if dry_run else "removed"
    terminal.show({"id": identifier, "removed": not dry_run}, f"{word} {identifier}")


def describe_tag(stored: StoredTag) -> str:
    """A tag as lines of text."""
    texts = [
        f"  {name}: {value}"
        for name in ("title", "artist", "album", "buyer")
        if (value := getattr(stored, name)) is not None
    ]
    if stored.cover_bytes:
        texts.append(f"  cover: {stored.cover_bytes} bytes")
    return "\n".join([f"{stored.id}\n  {stored.size_bytes} bytes", *texts])


@media.group("trace", cls=CommandGroup)
def trace() -> None:
    """Follow the requests of one user, request or object through all nodes."""


@trace.command("on", short_help="Log matching requests for a while.")
@click.option(
    "--tag",
    "selector",
    required=True,
    help="Which: user=42, request=r7, object=tracks/a.mp3 or trace=<32 hex digits>.",
)
@click.option("--for", "for_s", type=DURATION, default="10m", show_default=True, help="How long.")
def start_trace(terminal: Terminal, selector: str, for_s: float) -> None:
    """Have all nodes log each request with this tag: one line per answer, with the time of each
    stage.

    The lines are events `request_traced` in the logs of the nodes. One trace id finds the lines of
    all nodes.
    """
    watch = terminal.run(Media, lambda media: media.traces.start(selector, for_s=for_s))
    terminal.show(watch, describe_watches([watch]))


@trace.command("off", short_help="Stop logging matching requests.")
@click.option("--tag", "selector", help="The trace to stop; default: all.")
def stop_trace(terminal: Terminal, selector: str | None) -> None:
    """Stop one trace, or all. Each also ends at its set time."""
    ended = terminal.run(Media, lambda media: media.traces.stop(selector))
    lines = [f"trace of {watch.name}={watch.value} ended" for watch in ended]
    terminal.show(listing(ended), "\n".join(lines) or "no active traces")


@trace.command("show", short_help="Show what is traced.")
def show_traces(terminal: Terminal) -> None:
    """Show which requests all nodes log, and until when."""
    found = terminal.run(Media, lambda media: media.traces.list())
    terminal.show(listing(found), describe_watches(found) if found else "no active traces")


def describe_watches(watches: Sequence[Watch]) -> str:
    """Watches as a table."""
    rows = [(f"{w.name}={w.value}", f"{w.ends_at:%Y-%m-%d %H:%M:%S} UTC") for w in watches]
    return table(("tag", "until"), rows)
