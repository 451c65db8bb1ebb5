"""Commands `headrace media sign` and `headrace media tag ...`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click

from headrace.kernel.config import parse_duration_s, parse_size_bytes
from headrace.kernel.terminal import Terminal
from headrace.media.service import Media
from headrace.media.service.tags import StoredTag


class Written(click.ParamType[Any]):
    """A value written as in settings: `30m`, `64KiB`."""

    def __init__(self, name: str, parse: Any) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """The number that the text means."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(f"{value!r}: expected {error}", param, ctx)


DURATION = Written("duration", parse_duration_s)
SIZE = Written("size", parse_size_bytes)


@click.command("sign", short_help="Print a signed URL of an object.")
@click.argument("key")
@click.option("--ttl", "ttl_s", type=DURATION, help="How long it is good; else media.url_ttl.")
@click.option(
    "--grid", "grid_s", type=DURATION, default="1s", show_default=True,
    help="Round its end up to a multiple of this: the same URL for so long, which browsers cache.",
)  # fmt: skip
@click.option("--address", help="Good from this address or network only, such as 203.0.113.0/24.")
@click.option("--rate", type=SIZE, help="At most so much a second, such as 64KiB.")
@click.option("--tag", help="Id of the ID3 tag that the track begins with.")
@click.option("--trace", help="Whom it is for, such as user=42,request=r7.")
@click.pass_obj
def sign(terminal: Terminal, /, key: str, **options: Any) -> None:
    """Print a URL that allows to read KEY for a while, stored or not."""
    signed = terminal.run(Media, lambda media: media.sign(key, **options))
    terminal.show(signed, signed.url)


@click.group("tag")
def tag() -> None:
    """ID3 tags that signed URLs write in front of tracks."""


@tag.command("put", short_help="Store a tag.")
@click.option("--title")
@click.option("--artist")
@click.option("--album")
@click.option("--buyer", help="Id of the buyer, written as a mark into the track.")
@click.option(
    "--cover",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A JPEG or PNG file.",
)
@click.pass_obj
def put_tag(terminal: Terminal, /, cover: Path | None, **texts: str | None) -> None:
    """Store a tag and print its id, for `headrace media sign --tag`; the same tag has the same id."""
    data = cover.read_bytes() if cover is not None else None

    async def put(media: Media) -> StoredTag:
        return await media.tags.put(cover=data, **texts)

    stored = terminal.run(Media, put)
    terminal.show(stored, stored.id)


@tag.command("show", short_help="Show a tag.")
@click.argument("identifier", metavar="ID")
@click.pass_obj
def show_tag(terminal: Terminal, identifier: str) -> None:
    """Show what tag ID says."""
    stored = terminal.run(Media, lambda media: media.tags.get(identifier))
    terminal.show(stored, describe_tag(stored))


@tag.command("rm", short_help="Remove a tag.")
@click.argument("identifier", metavar="ID")
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
@click.pass_obj
def remove_tag(terminal: Terminal, identifier: str, *, dry_run: bool) -> None:
    """Remove tag ID: URLs that name it find nothing any more, on a node that has it cached within a minute."""

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


COMMANDS: Final[list[click.Command]] = [sign, tag]
