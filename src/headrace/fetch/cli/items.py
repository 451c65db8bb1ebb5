"""Commands `headrace fetch item ...` and `headrace fetch results`."""

from __future__ import annotations

from typing import BinaryIO

import click
import msgspec

from headrace.fetch.cli.text import describe_item, describe_run
from headrace.fetch.errors import InvalidItems
from headrace.fetch.model import Result, SentItem
from headrace.fetch.service import Fetch
from headrace.kernel.routes import PAGE_ROWS_MAX
from headrace.kernel.terminal import Terminal


@click.group("item")
def item_group() -> None:
    """Items as they stand, and items sent without a catalogue."""


@item_group.command("show", short_help="Show an item with its photos.")
@click.argument("customer")
@click.argument("item")
@click.pass_obj
def show_item(terminal: Terminal, customer: str, item: str) -> None:
    """Show ITEM of CUSTOMER with the outcome of each photo; put `--` before an id that begins with `-`."""
    found = terminal.run(Fetch, lambda fetch: fetch.item(customer, item))
    terminal.show(found, describe_item(found))


@item_group.command("send", short_help="Take items in without a catalogue.")
@click.argument("file", type=click.File("rb"))
@click.pass_obj
def send_items(terminal: Terminal, file: BinaryIO) -> None:
    """Take in the items of FILE, a JSON list of {customer, item, photos, fields, gone}; `-` is standard input.

    Up to 1,000, all or none; items not named stay as they are.
    """
    try:
        items = msgspec.json.decode(file.read(), type=list[SentItem])
    except RecursionError as error:
        raise InvalidItems(f"{file.name}: the JSON is nested too deep: flatten it") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidItems(f"{file.name}: {error}: expected a JSON list of items") from error
    found = terminal.run(Fetch, lambda fetch: fetch.send_items(items))
    terminal.show(found, "\n".join(describe_run(run) for run in found))


@click.command("results", short_help="List what was published.")
@click.option("--after", default=0, show_default=True, help="Results after this number.")
@click.option("--limit", default=100, show_default=True, type=click.IntRange(1, PAGE_ROWS_MAX))
@click.option("--customer", help="Only this customer's.")
@click.option(
    "--newest", is_flag=True, help="The newest first, instead of in the order of commits."
)
@click.option("--before", type=click.IntRange(1), help="With --newest: those before this number.")
@click.pass_obj
def list_results(
    terminal: Terminal,
    *,
    after: int,
    limit: int,
    customer: str | None,
    newest: bool,
    before: int | None,
) -> None:
    """List what was published, edited and unpublished; ask on with --after the last number."""

    async def list_them(fetch: Fetch) -> list[Result]:
        if newest:
            return await fetch.newest_results(before=before, results_max=limit, customer=customer)
        return await fetch.results(after=after, results_max=limit, customer=customer)

    found = terminal.run(Fetch, list_them)
    lines = [
        f"{one.seq:>8}  {one.at:%Y-%m-%d %H:%M:%S}  {one.action:<9} {one.customer} {one.id}"
        f"  version {one.version}, {len(one.photos)} photos"
        for one in found
    ]
    terminal.show(found, "\n".join(lines) or "no results")
