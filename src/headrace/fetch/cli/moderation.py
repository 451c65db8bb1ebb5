"""Commands for moderators: held items, and photos that look alike."""

from __future__ import annotations

import click

from headrace.fetch.service import Fetch
from headrace.kernel.routes import PAGE_ROWS_MAX
from headrace.kernel.terminal import CommandGroup, Terminal, cursor_after, listing, paged, table

LIMIT = click.option(
    "--limit", default=100, show_default=True, type=click.IntRange(1, PAGE_ROWS_MAX)
)


@click.group("held", cls=CommandGroup)
def held_group() -> None:
    """Items that a before_publish handler holds back until a person releases them."""


@held_group.command("ls", short_help="List held items.")
@click.option("--customer", help="Only this customer.")
@LIMIT
def list_held(terminal: Terminal, customer: str | None, limit: int) -> None:
    """List the items that a before_publish handler holds back, with the reasons."""
    found = terminal.run(Fetch, lambda fetch: fetch.held.list(customer, rows_max=limit))
    rows = [
        (one.customer, one.id, one.version, f"{one.held_at:%Y-%m-%d %H:%M:%S}", one.reason)
        for one in found
    ]
    head = ("customer", "item", "version", "held (UTC)", "reason")
    text = table(head, rows) if found else "no held items"
    terminal.show(listing(found), text)


@held_group.command("release", short_help="Publish a held item.")
@click.argument("customer")
@click.argument("item")
def release_held(terminal: Terminal, customer: str, item: str) -> None:
    """Publish ITEM of CUSTOMER, which is held back, as it is.

    Write `--` before an id that starts with `-`.
    """
    terminal.run(Fetch, lambda fetch: fetch.held.release(customer, item))
    document = {"customer": customer, "item": item, "released": True}
    terminal.show(document, f"item {item} of {customer} is published")


@click.group("duplicates", cls=CommandGroup)
def duplicates_group() -> None:
    """Photos that look alike, found by perceptual hashes."""


@duplicates_group.command("ls", short_help="List pairs of photos.")
@click.option("--customer", help="Only pairs with a photo of this customer.")
@click.option(
    "--across/--within", default=None, help="Only pairs of two customers, or of one customer."
)
@click.option("--reviewed", is_flag=True, help="Reviewed pairs instead of open ones.")
@click.option("--cursor", type=click.IntRange(1), help="The next page: pairs below this number.")
@LIMIT
def list_duplicates(
    terminal: Terminal,
    *,
    customer: str | None,
    across: bool | None,
    reviewed: bool,
    cursor: int | None,
    limit: int,
) -> None:
    """List pairs of photos that look alike, newest first; Headrace never merges or deletes them."""
    found = terminal.run(
        Fetch,
        lambda fetch: fetch.duplicates.list(
            customer, across=across, reviewed=reviewed, cursor=cursor, rows_max=limit
        ),
    )
    rows = [
        (
            pair.id,
            pair.distance,
            one.customer,
            one.item,
            f"{one.width}x{one.height}",
            one.key,
            one.url,
        )
        for pair in found
        for one in pair.photos
    ]
    head = ("pair", "differing bits", "customer", "item", "pixels", "key", "url")
    text = "no pairs: photos are compared within a minute if fetch.decode_share selects them"
    if found:
        text = table(head, rows)
    following = cursor_after(found, limit, "id")
    terminal.show(listing(found, next_cursor=following), paged(text, following))


@duplicates_group.command("review", short_help="Mark a pair as reviewed.")
@click.argument("pair", type=int)
def review_duplicate(terminal: Terminal, pair: int) -> None:
    """Mark PAIR as reviewed; both photos stay as they are."""
    terminal.run(Fetch, lambda fetch: fetch.duplicates.review(pair))
    terminal.show({"pair": pair, "reviewed": True}, f"pair {pair} is reviewed")
