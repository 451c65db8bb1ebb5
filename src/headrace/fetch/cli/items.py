"""Commands of items, results, hosts and single links, schemas and mappings."""

from __future__ import annotations

import json
import tomllib
from datetime import datetime
from pathlib import Path
from typing import IO, Any, BinaryIO, Final

import click
import msgspec

from headrace.fetch.cli.text import (
    describe_host,
    describe_item,
    describe_photo,
    describe_run,
    describe_study,
    describe_url,
    hosts_table,
    step_line,
)
from headrace.fetch.errors import (
    InvalidItems,
    InvalidMapping,
    InvalidSchema,
    InvalidTime,
    UrlRefused,
)
from headrace.fetch.mappings import NamedMapping, parse_mapping
from headrace.fetch.model import Result, SentItem
from headrace.fetch.schemas import CategorySchema, parse_schema
from headrace.fetch.service import Fetch
from headrace.fetch.study import WEEKS_MAX, csv_of_study
from headrace.kernel.config import parse_moment
from headrace.kernel.routes import PAGE_ROWS_MAX
from headrace.kernel.terminal import (
    CommandGroup,
    Parsed,
    Terminal,
    cursor_after,
    listing,
    paged,
    table,
    writing,
)


@click.group("item", cls=CommandGroup)
def item_group() -> None:
    """Upload items without a catalogue file; show an item."""


@item_group.command("show", short_help="Show an item with its photos.")
@click.argument("customer")
@click.argument("item")
def show_item(terminal: Terminal, customer: str, item: str) -> None:
    """Show ITEM of CUSTOMER with its photos; write `--` before an id that starts with `-`."""
    found = terminal.run(Fetch, lambda fetch: fetch.items.get(customer, item))
    terminal.show(found, describe_item(found))


@item_group.command("send", short_help="Upload items without a catalogue.")
@click.argument("file", type=click.File("rb"))
def send_items(terminal: Terminal, file: BinaryIO) -> None:
    """Upload FILE, a JSON list of {customer, item, photos, fields, gone}; `-` is standard input.

    Up to 1,000 items, all or none; other items stay as they are.
    """
    try:
        items = msgspec.json.decode(file.read(), type=list[SentItem])
    except RecursionError as error:
        raise InvalidItems(f"{file.name}: the JSON is nested too deep: flatten it") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidItems(f"{file.name}: {error}: expected a JSON list of items") from error
    found = terminal.run(Fetch, lambda fetch: fetch.send_items(items))
    terminal.show(listing(found), "\n".join(describe_run(run) for run in found))


MOMENT: Final = Parsed(parse_moment, InvalidTime, name="moment")


@click.command("results", short_help="List published results.")
@click.option(
    "--after", default=0, show_default=True, help="Only results with a higher number (seq)."
)
@click.option("--limit", default=100, show_default=True, type=click.IntRange(1, PAGE_ROWS_MAX))
@click.option("--customer", help="Only this customer.")
@click.option("--newest", is_flag=True, help="Newest first, not in the order of commits.")
@click.option("--cursor", type=click.IntRange(1), help="With --newest: results below this number.")
@click.option("--from", "from_at", type=MOMENT, help="With --newest: published from then on.")
@click.option("--to", "to_at", type=MOMENT, help="With --newest: published before then.")
@click.pass_obj
def list_results(
    terminal: Terminal,
    /,
    *,
    after: int,
    limit: int,
    customer: str | None,
    newest: bool,
    cursor: int | None,
    **span: datetime | None,
) -> None:
    """List what happened to items: publish, edit, unpublish; oldest first, by number (seq)."""
    is_bounded = cursor is not None or any(span.values())
    if (newest and after) or (is_bounded and not newest):
        raise click.UsageError("--cursor, --from and --to go with --newest, and --after without it")

    async def load(fetch: Fetch) -> list[Result]:
        if newest:
            return await fetch.items.newest_results(
                cursor=cursor, results_max=limit, customer=customer, **span
            )
        return await fetch.items.results(after=after, results_max=limit, customer=customer)

    found = terminal.run(Fetch, load)
    rows = [
        (
            one.seq,
            f"{one.at:%Y-%m-%d %H:%M:%S}",
            one.action,
            *(one.customer, one.id, one.version, len(one.photos)),
        )
        for one in found
    ]
    head = ("seq", "at (UTC)", "action", "customer", "item", "version", "photos")
    text = table(head, rows) if found else "no results"
    following = cursor_after(found, limit, "seq")
    hint = "more: --cursor" if newest else "more: --after"
    terminal.show(listing(found, next_cursor=following), paged(text, following, hint))


@click.group("host", cls=CommandGroup)
def host_group() -> None:
    """Hosts of photos: download times and outcomes."""


@host_group.command("ls", short_help="List hosts.")
@click.option("--customer", help="Only hosts of this customer's links.")
@click.option("--limit", default=100, show_default=True, help="Maximum number of hosts.")
def list_hosts(terminal: Terminal, customer: str | None, limit: int) -> None:
    """List the hosts of photos, each with the timeout class that its photos are tried in first."""
    found = terminal.run(Fetch, lambda fetch: fetch.hosts.page(customer=customer, hosts_max=limit))
    text = hosts_table(found) if found else "no hosts: no photo was requested yet"
    terminal.show(listing(found), text)


@host_group.command("show", short_help="Show a host.")
@click.argument("host")
def show_host(terminal: Terminal, host: str) -> None:
    """Show download times and outcomes of HOST, a name or a link, per customer."""
    found = terminal.run(Fetch, lambda fetch: fetch.hosts.get(host))
    terminal.show(listing(found), "\n".join(describe_host(one) for one in found))


@click.command("study", short_help="Study download times and propose timeout classes.")
@click.option(
    "--weeks",
    default=4,
    show_default=True,
    type=click.IntRange(1, WEEKS_MAX),
    help="Number of calendar weeks, this one included.",
)
@click.option(
    "--csv",
    "csv_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the counts by week, class, outcome and download time to this CSV file.",
)
@click.pass_obj
def show_study(terminal: Terminal, *, weeks: int, csv_file: Path | None) -> None:
    """Show download times, errors per timeout class and week, and suggested classes."""
    found = terminal.run(Fetch, lambda fetch: fetch.study(weeks=weeks))
    if csv_file is None:
        terminal.show(found, describe_study(found))
        return
    with writing(csv_file):
        size = csv_file.write_text(csv_of_study(found.attempts), encoding="utf-8", newline="")
    terminal.show({"file": str(csv_file), "size_bytes": size}, f"{csv_file}: {size:,} bytes")


@click.command("photo", short_help="Download one photo now.")
@click.argument("url")
@click.option("--verbose", is_flag=True, help="Show each request: address, status, times.")
@click.pass_obj
def try_photo(terminal: Terminal, url: str, *, verbose: bool) -> None:
    """Download URL now and show the outcome; nothing is stored.

    Exits with 1 if the host sent no photo, and with 2 if URL is not allowed.
    """
    found = terminal.run(Fetch, lambda fetch: fetch.links.download(url))
    lines = [describe_photo(found), *(step_line(step) for step in found.steps if verbose)]
    terminal.show(found, "\n".join(lines))
    if found.outcome.startswith("refused:") and not found.steps:
        raise click.exceptions.Exit(UrlRefused.exit_code)
    if found.outcome != "stored":
        raise click.exceptions.Exit(1)


@click.command("why", short_help="Explain why a photo exists or not.")
@click.argument("url")
@click.pass_obj
def why(terminal: Terminal, url: str) -> None:
    """Show whether URL is allowed and its last outcome per customer."""
    found = terminal.run(Fetch, lambda fetch: fetch.links.why(url))
    terminal.show(found, describe_url(found))


@click.group("schema", cls=CommandGroup)
def schema_group() -> None:
    """Fields that the rows of a category must have."""


@schema_group.command("set", short_help="Create or replace the schema of a category.")
@click.argument("category")
@click.argument("file", type=click.File("rb"))
def set_schema(terminal: Terminal, category: str, file: IO[bytes]) -> None:
    """Set FILE (TOML or JSON, - for standard input) as the schema of CATEGORY.

    The schema of the category `default` applies to categories without one.
    """
    try:
        schema = parse_schema(_read_document(file))
    except ValueError as error:
        raise InvalidSchema(f"the file is neither TOML nor JSON: {error}") from error
    found = terminal.run(Fetch, lambda fetch: fetch.schemas.set(category, schema))
    terminal.show(found, _schema_line(found))


@schema_group.command("ls", short_help="List schemas.")
def list_schemas(terminal: Terminal) -> None:
    """List every category that has a schema: the fields that its rows must have."""
    found = terminal.run(Fetch, lambda fetch: fetch.schemas.all())
    rows = [(one.category, _others(one.schema.others), _fields(one)) for one in found]
    text = table(("category", "other fields", "fields"), rows)
    terminal.show(listing(found), text if found else "no schemas")


@schema_group.command("show", short_help="Show the schema of a category.")
@click.argument("category")
def show_schema(terminal: Terminal, category: str) -> None:
    """Show the schema of CATEGORY as JSON; `schema set` accepts it."""
    found = terminal.run(Fetch, lambda fetch: fetch.schemas.get(category))
    terminal.show(found, _pretty(found.schema))


@schema_group.command("rm", short_help="Delete the schema of a category.")
@click.argument("category")
def remove_schema(terminal: Terminal, category: str) -> None:
    """Delete the schema of CATEGORY; the default one then applies."""
    terminal.run(Fetch, lambda fetch: fetch.schemas.remove(category))
    terminal.show({"removed": category}, f"the schema of {category} is deleted")


@click.group("mapping", cls=CommandGroup)
def mapping_group() -> None:
    """Mappings of the column names of catalogue files to ours."""


@mapping_group.command("set", short_help="Create or replace a mapping.")
@click.argument("name")
@click.argument("file", type=click.File("rb"))
def set_mapping(terminal: Terminal, name: str, file: IO[bytes]) -> None:
    """Set FILE (TOML or JSON, - for standard input) as mapping NAME."""
    try:
        mapping = parse_mapping(_read_document(file))
    except ValueError as error:
        raise InvalidMapping(f"the file is neither TOML nor JSON: {error}") from error
    found = terminal.run(Fetch, lambda fetch: fetch.mappings.set(name, mapping))
    terminal.show(found, _mapping_line(found))


@mapping_group.command("ls", short_help="List mappings.")
def list_mappings(terminal: Terminal) -> None:
    """List every mapping of a file's column names to ours."""
    found = terminal.run(Fetch, lambda fetch: fetch.mappings.all())
    rows = [
        (one.name, one.mapping.format or "any", one.mapping.rows or "-", _id_paths(one))
        for one in found
    ]
    text = table(("mapping", "format", "rows at", "id from"), rows)
    terminal.show(listing(found), text if found else "no mappings")


@mapping_group.command("show", short_help="Show a mapping.")
@click.argument("name")
def show_mapping(terminal: Terminal, name: str) -> None:
    """Show mapping NAME as JSON; `mapping set` accepts it."""
    found = terminal.run(Fetch, lambda fetch: fetch.mappings.get(name))
    terminal.show(found, _pretty(found.mapping))


@mapping_group.command("rm", short_help="Delete a mapping.")
@click.argument("name")
def remove_mapping(terminal: Terminal, name: str) -> None:
    """Delete mapping NAME; sources that use it then fail."""
    terminal.run(Fetch, lambda fetch: fetch.mappings.remove(name))
    terminal.show({"removed": name}, f"mapping {name} is deleted")


def _read_document(file: IO[bytes]) -> Any:
    """The parsed file. Raises: ValueError."""
    text = file.read().decode("utf-8-sig")
    try:
        return json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep: flatten it") from None


def _pretty(value: msgspec.Struct) -> str:
    return msgspec.json.format(msgspec.json.encode(value)).decode()


def _schema_line(found: CategorySchema) -> str:
    return f"{found.category}: {_fields(found)}; others are {_others(found.schema.others)}"


def _fields(found: CategorySchema) -> str:
    fields = found.schema.fields.items()
    texts = [
        f"{name} ({rule.type}{', required' if rule.required else ''})" for name, rule in fields
    ]
    return ", ".join(texts) or "no fields"


def _mapping_line(found: NamedMapping) -> str:
    mapping = found.mapping
    rows = f", rows at {mapping.rows}" if mapping.rows else ""
    return f"{found.name}: {mapping.format or 'any format'}{rows}, id from {_id_paths(found)}"


def _id_paths(found: NamedMapping) -> str:
    paths = found.mapping.id
    return paths if isinstance(paths, str) else " or ".join(paths)


def _others(choice: str) -> str:
    return "kept" if choice == "keep" else "dropped"
