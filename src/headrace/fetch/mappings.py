"""Mappings: which names of a foreign file mean what, as data.

    format = "json"                                   # only where recognition by content is not enough
    rows   = "catalog.products"                       # where the rows are, in JSON and XML
    id     = "sku"
    name   = ["title.ru", "title"]                    # the first that has a value
    photos = ["images[].url", "pic1", "pic2"]         # all, in this order
    fields = { brand = "maker.name" }                 # any others, under names of your own

A path is the name of a column, or the names on the way down parted by `.` or `/`; `[]` after a list may be
left out; `@url` is an attribute of XML. Case does not matter. What is not mapped is kept under its own
path, unless `others = "drop"`.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final, Literal, TypeAlias

import msgspec

from headrace.fetch.errors import InvalidMapping
from headrace.kernel.errors import FieldProblem

Paths: TypeAlias = str | list[str]
PATH_CHARACTERS_MAX: Final = 200
PATHS_MAX: Final = 100
FIELDS_MAX: Final = 500
MAPPED_FORMATS: Final = ("sheet", "csv", "tsv", "json", "ndjson", "xml")
ENCODINGS: Final = (
    *("utf-8", "utf-16", "windows-1251", "windows-1252", "iso-8859-1"),
    *("koi8-r", "koi8-u", "iso-8859-5", "cp866"),
)
_DELIMITERS: Final = (",", ";", "\t", "|")
_SINGLE: Final = ("id", "name", "price", "category", "url")


class Mapping(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """How to read a file with names of its own; see the head of this module."""

    id: Paths
    name: Paths | None = None
    price: Paths | None = None
    category: Paths | None = None
    url: Paths | None = None
    photos: Paths = msgspec.field(default_factory=list)
    fields: dict[str, Paths] = msgspec.field(default_factory=dict)
    others: Literal["keep", "drop"] = "keep"
    rows: str | None = None
    format: str | None = None
    encoding: str | None = None
    delimiter: str | None = None


class NamedMapping(msgspec.Struct, frozen=True, kw_only=True):
    """A mapping and what it is called."""

    name: str
    mapping: Mapping
    updated_at: datetime


def plain_path(path: str) -> str:
    """A path in the one form that paths are compared in."""
    return path.strip().lower().replace("[]", "").replace("/", ".").strip(".")


def paths_of(paths: Paths | None) -> list[str]:
    """Every path that a field is mapped to, in the one form."""
    return [plain_path(path) for path in ([paths] if isinstance(paths, str) else paths or ())]


def parse_mapping(data: Any) -> Mapping:
    """The mapping that decoded JSON or TOML describes. Raises: InvalidMapping."""
    try:
        mapping = msgspec.convert(data, Mapping)
    except msgspec.ValidationError as error:
        text = str(error).replace("`", "")
        raise InvalidMapping(f"the mapping is not valid: {text[:1].lower()}{text[1:]}") from None
    return require_mapping(mapping)


def require_mapping(mapping: Mapping) -> Mapping:
    """`mapping`, if it can be meant. Raises: InvalidMapping, with every fault."""
    problems = tuple(_faults(mapping))
    if problems:
        said = "; ".join(f"{p.pointer}: {p.text}" for p in problems[:3])
        raise InvalidMapping(f"the mapping is not valid: {said}", problems=problems)
    return mapping


def _faults(mapping: Mapping) -> Iterator[FieldProblem]:
    for name, value, allowed in (
        ("format", mapping.format, MAPPED_FORMATS),
        ("encoding", mapping.encoding, ENCODINGS),
        ("delimiter", mapping.delimiter, _DELIMITERS),
    ):
        if value is not None and value not in allowed:
            told = ", ".join(repr(choice) for choice in allowed)
            yield FieldProblem(f"/{name}", "invalid", f"{value[:40]!r} is none of {told}")
    if mapping.rows is not None and not plain_path(mapping.rows):
        yield FieldProblem("/rows", "invalid", "the path is empty: leave it out or name the rows")
    if len(mapping.fields) > FIELDS_MAX:
        yield FieldProblem("/fields", "too_many", f"more than {FIELDS_MAX} fields")
    for name in mapping.fields:
        if name in (*_SINGLE, "photos") or not _is_name(name):
            text = f"{name[:40]!r} is no name for a further field: 1 to 200 printed characters"
            yield FieldProblem("/fields", "invalid", text)
    if not paths_of(mapping.id):
        yield FieldProblem("/id", "missing", "name the field that holds the id")
    mapped = {name: getattr(mapping, name) for name in (*_SINGLE, "photos")} | {
        f"fields/{name}": paths for name, paths in mapping.fields.items()
    }
    for name, paths in mapped.items():
        if len(paths_of(paths)) > PATHS_MAX or not all(map(_is_name, paths_of(paths))):
            text = f"expected 1 to {PATHS_MAX} paths of 1 to {PATH_CHARACTERS_MAX} characters"
            yield FieldProblem(f"/{name}", "invalid", text)


def _is_name(name: str) -> bool:
    return 0 < len(name) <= PATH_CHARACTERS_MAX and name.isprintable() and bool(name.strip())
