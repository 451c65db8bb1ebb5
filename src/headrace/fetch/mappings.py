"""Field names: which column or path of a file holds which field, by mapping or by synonyms.

Without a mapping, the table `synonyms.toml` recognizes common column names. A mapping names them:

    format = "json"                                   # only if the content does not show the format
    rows   = "catalog.products"                       # the path of the rows, in JSON and XML
    id     = "sku"
    name   = ["title.ru", "title"]                    # the first that has a value
    photos = ["images[].url", "pic1", "pic2"]         # all, in this order
    fields = { brand = "maker.name" }                 # any further fields, under your names

A path is the name of a column, or nested names separated by `.` or `/`. The `[]` after a list may
be omitted; `@url` is an XML attribute. Case is ignored. Unmapped values keep their own path as the
name, unless `others = "drop"`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from functools import lru_cache
from importlib.resources import files
from typing import Any, Final, Literal, TypeAlias

import msgspec

from headrace.fetch.errors import InvalidMapping
from headrace.kernel.errors import FieldProblem
from headrace.kernel.faults import find_faults

Paths: TypeAlias = str | list[str]
Value: TypeAlias = str | list[str]
"""The value of a field: one text, or several texts for a repeated field."""
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
    """How to read a file whose fields have other names; the module docstring has an example."""

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
    """A stored mapping with its name."""

    name: str
    mapping: Mapping
    updated_at: datetime


def plain_path(path: str) -> str:
    """A path in normalized form, in which paths are compared."""
    return path.strip().lower().replace("[]", "").replace("/", ".").strip(".")


def paths_of(paths: Paths | None) -> list[str]:
    """The normalized paths that a field is mapped to."""
    return [plain_path(path) for path in ([paths] if isinstance(paths, str) else paths or ())]


def parse_mapping(data: Any) -> Mapping:
    """The mapping in decoded JSON or TOML. Raises: InvalidMapping."""
    try:
        mapping = msgspec.convert(data, Mapping)
    except msgspec.ValidationError:
        InvalidMapping.require_none(find_faults(data, Mapping), "the mapping is not valid")
        raise
    return require_mapping(mapping)


def require_mapping(mapping: Mapping) -> Mapping:
    """Return `mapping` if it is valid. Raises: InvalidMapping, with every fault."""
    InvalidMapping.require_none(_faults(mapping), "the mapping is not valid", shown_max=3)
    return mapping


def _faults(mapping: Mapping) -> Iterator[FieldProblem]:
    for name, value, allowed in (
        ("format", mapping.format, MAPPED_FORMATS),
        ("encoding", mapping.encoding, ENCODINGS),
        ("delimiter", mapping.delimiter, _DELIMITERS),
    ):
        if value is not None and value not in allowed:
            choices = ", ".join(repr(choice) for choice in allowed)
            yield FieldProblem(f"/{name}", "invalid", f"{value[:40]!r} is not one of {choices}")
    if mapping.rows is not None and not plain_path(mapping.rows):
        text = "the path is empty: remove it, or set the path of the rows"
        yield FieldProblem("/rows", "invalid", text)
    if len(mapping.fields) > FIELDS_MAX:
        yield FieldProblem("/fields", "too_many", f"more than {FIELDS_MAX} fields")
    for name in mapping.fields:
        if name in (*_SINGLE, "photos") or not _is_name(name):
            text = (
                f"{name[:40]!r} cannot name a further field: use 1 to 200 printable characters,"
                " and no name of a standard field"
            )
            yield FieldProblem("/fields", "invalid", text)
    if not paths_of(mapping.id):
        yield FieldProblem("/id", "missing", "the path of the id is missing: set it")
    mapped = {name: getattr(mapping, name) for name in (*_SINGLE, "photos")} | {
        f"fields/{name}": paths for name, paths in mapping.fields.items()
    }
    for name, paths in mapped.items():
        if len(paths_of(paths)) > PATHS_MAX or not all(map(_is_name, paths_of(paths))):
            text = f"expected 1 to {PATHS_MAX} paths of 1 to {PATH_CHARACTERS_MAX} characters"
            yield FieldProblem(f"/{name}", "invalid", text)


def _is_name(name: str) -> bool:
    return 0 < len(name) <= PATH_CHARACTERS_MAX and name.isprintable() and bool(name.strip())


_WORDS_KEPT: Final = 10_000
_WORD_CHARACTERS_MAX: Final = 100
_TABLES: Final[dict[str, dict[str, list[str]]]] = tomllib.loads(
    files("headrace.fetch").joinpath("synonyms.toml").read_text(encoding="utf-8")
)
_REMARK: Final = re.compile(r"[\s*:]*(?:\([^()]*\)|\[[^\[\]]*\]|,.*)?[\s*:]*$", re.DOTALL)
_NUMBER: Final = re.compile(r"[ _-]?№?[0-9]*(?:\.(?:url|src|href|link))?$")


def plain_word(word: str) -> str:
    """A word in normalized form, in which words are compared."""
    return " ".join(word.lower().replace("ё", "е").split())  # noqa: RUF001


def by_word(table: str) -> dict[str, str]:
    """The meanings of the words in a table of `synonyms.toml`, by normalized word."""
    return {
        plain_word(word): meaning for meaning, words in _TABLES[table].items() for word in words
    }


_FIELDS: Final = by_word("columns")
_RANKS: Final = {word: rank for rank, word in enumerate(_FIELDS)}
ID_WORDS: Final = tuple(_TABLES["columns"]["id"])


def field_of(name: str) -> tuple[str, int] | None:
    """The field that a column name means, with the rank of the name; None if it is unknown."""
    return _field_of(name) if len(name) <= _WORD_CHARACTERS_MAX else None


@lru_cache(_WORDS_KEPT)
def _field_of(name: str) -> tuple[str, int] | None:
    plain = plain_word(name)
    for word in (plain, plain_word(_REMARK.sub("", plain))):
        if word in _FIELDS:
            return _FIELDS[word], _RANKS[word]
        unnumbered = _NUMBER.sub("", word).rstrip()
        if _FIELDS.get(unnumbered) == "photos":
            return "photos", _RANKS[unnumbered]
    return None


KNOWN: Final = frozenset({"name", "price", "category", "url", "availability", "stock"})
_BETWEEN_PHOTOS: Final = re.compile(r"\s*[|\n\r]\s*|[,;\s]+(?=[A-Za-z][A-Za-z0-9+.-]*://)")
_UNUSUAL: Final = re.compile(r"[ ,;]")
"""Characters that need the general split, which is ten times slower than `str.split`."""


def known_names(names: Sequence[str]) -> list[str]:
    """The names with synonyms replaced by the fields that they mean.

    If several names mean one field, the first one in the table is replaced. Unknown names and names
    of photo columns are not replaced.
    """
    found = [field_of(name) for name in names]
    best: dict[str, int] = {}
    for known in found:
        if known is not None:
            best[known[0]] = min(known[1], best.get(known[0], known[1]))
    return [
        known[0] if known and known[0] != "photos" and known[1] == best[known[0]] else name
        for name, known in zip(names, found, strict=True)
    ]


def is_photos(name: str) -> bool:
    """Whether a column of that name contains photo links."""
    found = field_of(name)
    return found is not None and found[0] == "photos"


def split_photos(text: str) -> list[str]:
    """The links in one text, in order."""
    if text.isprintable() and not _UNUSUAL.search(text):
        return [link for link in text.split("|") if link]
    return [link for link in (part.strip() for part in _BETWEEN_PHOTOS.split(text.strip())) if link]


def one_or_all(texts: list[str]) -> Value:
    """The only text, or the list of texts."""
    return texts[0] if len(texts) == 1 else texts


def apply_synonyms(cells: dict[str, list[str]]) -> tuple[dict[str, Value], list[str]]:
    """The fields and photos in the cells of a row, by synonyms."""
    values: dict[str, Value] = {}
    photos: list[str] = []
    for name, texts in zip(known_names(list(cells)), cells.values(), strict=True):
        if is_photos(name):
            photos.extend(links_of(texts))
        else:
            values.setdefault(name, texts[0] if name in _SINGLE else one_or_all(texts))
    return values, photos


def links_of(texts: Iterable[str]) -> list[str]:
    """The links in several texts, in order."""
    return [link for text in texts for link in split_photos(text)]


class Names:
    """A mapping prepared to be applied to rows. Cells are keyed by normalized paths."""

    def __init__(self, mapping: Mapping) -> None:
        self._single = [(name, paths_of(getattr(mapping, name))) for name in _SINGLE]
        self._fields = [(name, paths_of(paths)) for name, paths in mapping.fields.items()]
        self._photos = paths_of(mapping.photos)
        self._keeps_others = mapping.others == "keep"
        self._used = {path for _, paths in self._single + self._fields for path in paths}
        self._used.update(self._photos)
        self.id_paths = self._single[0][1]

    def apply(self, cells: dict[str, list[str]]) -> tuple[dict[str, Value], list[str]]:
        """The fields and photos in the cells of a row; the first path with a value wins."""
        values: dict[str, Value] = {}
        for name, paths in self._single:
            texts = next((cells[path] for path in paths if path in cells), None)
            if texts:
                values[name] = texts[0]
        for name, paths in self._fields:
            texts = next((cells[path] for path in paths if path in cells), None)
            if texts:
                values[name] = one_or_all(texts)
        if self._keeps_others:
            for path, texts in cells.items():
                if path not in self._used:
                    values.setdefault(path, one_or_all(texts))
        return values, links_of(text for path in self._photos for text in cells.get(path, ()))
