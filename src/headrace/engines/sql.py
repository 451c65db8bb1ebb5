"""Named SQL statements in files, with `:name` parameters compiled to `$1, $2, ...`.

    -- name: lease_jobs
    -- Lease up to :jobs_max due jobs of a queue, oldest first.
    DELETE FROM ...

`load_queries("headrace.jobs")` reads every `sql/*.sql` of that package once, without migrations,
and returns the queries as attributes. Each block needs a line that states its purpose.

Drivers that accept only `%(name)s` receive the same query in that style, with each array as one
literal (`{1,NULL}`). Drivers convert lists differently: psycopg refuses a list of mixed numbers,
and psycopg2 writes `ARRAY[...]` with one expression per element.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from types import SimpleNamespace
from typing import Any, Final

_BLOCK: Final = re.compile(r"^-- name: *(\w+) *$", re.MULTILINE)
# Skips strings, comments and casts (`::int`); `:name` is a parameter.
_TOKEN: Final = re.compile(r"'(?:[^']|'')*'|--[^\n]*|::\w+|:=|:([a-z_][a-z0-9_]*)")
_NUMBERED: Final = re.compile(r"'(?:[^']|'')*'|--[^\n]*|%|\$(\d+)")


@dataclass(frozen=True, slots=True)
class Query:
    """One named statement; `parameters` are in the order of `$1, $2, ...`."""

    name: str
    purpose: str
    text: str
    parameters: tuple[str, ...]

    def arguments(self, values: dict[str, Any]) -> list[Any]:
        """`values` in the order of `parameters`, which must be complete."""
        assert values.keys() == set(self.parameters), (
            f"query {self.name} takes {sorted(self.parameters)}, got {sorted(values)}"
        )
        return [values[name] for name in self.parameters]

    def named_arguments(self, values: dict[str, Any]) -> dict[str, Any]:
        """`values` for `percent_text`: arrays as literals, other values unchanged."""
        return {
            name: array_literal(value) if isinstance(value, list | tuple) else value
            for name, value in zip(self.parameters, self.arguments(values), strict=True)
        }


@cache
def percent_text(query: Query) -> str:
    """The query with parameters as `%(name)s`, for psycopg, psycopg2 and Django."""

    def name(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0].replace("%", "%%")
        return f"%({query.parameters[int(match[1]) - 1]})s"

    return _NUMBERED.sub(name, query.text)


def array_literal(values: Sequence[Any]) -> str:
    """`values` as the text of a PostgreSQL array; a cast in the query sets its type."""
    return "{" + ",".join([_element(value) for value in values]) + "}"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


_WRITERS: Final[dict[type, Callable[[Any], str]]] = {
    type(None): lambda _: "NULL",
    bool: lambda value: "t" if value else "f",
    # Of the base class: a subclass may differ, such as numpy's "np.float64(1.5)".
    int: int.__repr__,
    float: float.__repr__,
    str: _quoted,
    bytes: lambda value: f'"\\\\x{value.hex()}"',
    datetime: lambda value: datetime.isoformat(value.astimezone(UTC)),
}


def _element(value: Any) -> str:
    writer = _WRITERS.get(type(value))
    if writer is None:
        parents = (_WRITERS[kind] for kind in type(value).__mro__ if kind in _WRITERS)
        writer = next(parents, None)
        assert writer is not None, f"an array of a query cannot hold a {type(value).__name__}"
    return writer(value)


def compile_query(name: str, block: str) -> Query:
    """The query in the text after a `-- name:` line."""
    lines = block.strip().split("\n")
    count = next((i for i, line in enumerate(lines) if not line.startswith("--")), len(lines))
    purpose = " ".join(line.removeprefix("--").strip() for line in lines[:count])
    assert purpose, f"query {name} has no line of purpose"
    parameters: list[str] = []

    def number(match: re.Match[str]) -> str:
        parameter = match[1]
        if parameter is None:
            return match[0]
        if parameter not in parameters:
            parameters.append(parameter)
        return f"${parameters.index(parameter) + 1}"

    text = _TOKEN.sub(number, "\n".join(lines[count:]).strip()).rstrip(";")
    return Query(name, purpose, text, tuple(parameters))


def parse_queries(text: str) -> Iterator[Query]:
    """The queries of one file."""
    parts = _BLOCK.split(text)
    for name, block in zip(parts[1::2], parts[2::2], strict=True):
        yield compile_query(name, block)


@cache
def load_queries(package: str) -> Any:
    """The queries of `package`'s `sql` folder as attributes, such as `SQL.lease_jobs`."""
    queries: dict[str, Query] = {}
    for file in sorted(files(package).joinpath("sql").iterdir(), key=lambda f: f.name):
        if file.name.endswith(".sql"):
            for query in parse_queries(file.read_text(encoding="utf-8")):
                assert query.name not in queries, f"{package}: two queries named {query.name}"
                queries[query.name] = query
    return SimpleNamespace(**queries)
