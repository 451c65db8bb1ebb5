"""Commands `headrace fetch schema ...` and `headrace fetch mapping ...`."""

from __future__ import annotations

import json
import tomllib
from typing import IO, Any

import click
import msgspec

from headrace.fetch.errors import InvalidMapping, InvalidSchema
from headrace.fetch.mappings import NamedMapping, parse_mapping
from headrace.fetch.schemas import CategorySchema, parse_schema
from headrace.fetch.service import Fetch
from headrace.kernel.terminal import Terminal


@click.group("schema")
def schema_group() -> None:
    """Fields that the rows of a category must have."""


@schema_group.command("set", short_help="Create or replace the schema of a category.")
@click.argument("category")
@click.argument("file", type=click.File("rb"))
@click.pass_obj
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
@click.pass_obj
def list_schemas(terminal: Terminal) -> None:
    """List every category that has a schema."""
    found = terminal.run(Fetch, lambda fetch: fetch.schemas.all())
    terminal.show(found, "\n".join(map(_schema_line, found)) or "no schemas")


@schema_group.command("show", short_help="Show the schema of a category.")
@click.argument("category")
@click.pass_obj
def show_schema(terminal: Terminal, category: str) -> None:
    """Show the schema of CATEGORY as JSON; `schema set` accepts it."""
    found = terminal.run(Fetch, lambda fetch: fetch.schemas.get(category))
    terminal.show(found, _pretty(found.schema))


@schema_group.command("rm", short_help="Delete the schema of a category.")
@click.argument("category")
@click.pass_obj
def remove_schema(terminal: Terminal, category: str) -> None:
    """Delete the schema of CATEGORY; the default one then applies."""
    terminal.run(Fetch, lambda fetch: fetch.schemas.remove(category))
    terminal.show({"removed": category}, f"the schema of {category} is deleted")


@click.group("mapping")
def mapping_group() -> None:
    """Mappings of the column names of files."""


@mapping_group.command("set", short_help="Create or replace a mapping.")
@click.argument("name")
@click.argument("file", type=click.File("rb"))
@click.pass_obj
def set_mapping(terminal: Terminal, name: str, file: IO[bytes]) -> None:
    """Set FILE (TOML or JSON, - for standard input) as mapping NAME."""
    try:
        mapping = parse_mapping(_read_document(file))
    except ValueError as error:
        raise InvalidMapping(f"the file is neither TOML nor JSON: {error}") from error
    found = terminal.run(Fetch, lambda fetch: fetch.mappings.set(name, mapping))
    terminal.show(found, _mapping_line(found))


@mapping_group.command("ls", short_help="List mappings.")
@click.pass_obj
def list_mappings(terminal: Terminal) -> None:
    """List every mapping."""
    found = terminal.run(Fetch, lambda fetch: fetch.mappings.all())
    terminal.show(found, "\n".join(map(_mapping_line, found)) or "no mappings")


@mapping_group.command("show", short_help="Show a mapping.")
@click.argument("name")
@click.pass_obj
def show_mapping(terminal: Terminal, name: str) -> None:
    """Show mapping NAME as JSON; `mapping set` accepts it."""
    found = terminal.run(Fetch, lambda fetch: fetch.mappings.get(name))
    terminal.show(found, _pretty(found.mapping))


@mapping_group.command("rm", short_help="Delete a mapping.")
@click.argument("name")
@click.pass_obj
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
    fields = ", ".join(
        f"{name} ({rule.type}{', required' if rule.required else ''})"
        for name, rule in found.schema.fields.items()
    )
    return f"{found.category}: {fields or 'no fields'}; others are {_others(found.schema.others)}"


def _mapping_line(found: NamedMapping) -> str:
    mapping = found.mapping
    paths = mapping.id if isinstance(mapping.id, str) else " or ".join(mapping.id)
    rows = f", rows at {mapping.rows}" if mapping.rows else ""
    return f"{found.name}: {mapping.format or 'any format'}{rows}, id from {paths}"


def _others(choice: str) -> str:
    return "kept" if choice == "keep" else "dropped"
