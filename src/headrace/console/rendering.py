"""Render templates: one Jinja environment with autoescape, and the static assets.

User values appear as text, whatever they contain: autoescape is on for every template, `safe` is
not used, and an undefined variable is an error. The security policy forbids inline scripts too.
"""

from __future__ import annotations

import gzip
import hashlib
import mimetypes
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, Final
from urllib.parse import urlencode

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from headrace.console.actions import Action, decimal_text
from headrace.console.format import (
    format_bytes,
    format_count,
    format_duration,
    format_in_unit,
    format_limit,
    format_percent,
    format_short,
    format_timestamp,
    path_segment,
    pretty_json,
    spark_points,
    tone_of,
)
from headrace.console.model import PREFIX
from headrace.kernel.terminal import is_visible, visible

COMPRESSED_FROM_BYTES: Final = 1_024
CARDS_FROM: Final = 3
"""Columns from which a table is shown as cards on a phone; `console.css` has the same number."""
ROWS_UNFOLDED: Final = 20
"""Rows of a table on a phone whose fold is closed; `console.css` has the same number."""
NO_VALUE: Final = "\N{EN DASH}"
"""The text of a table's cell without a value."""
LEFT_OUT: Final = " data-less"
"""The attribute of cells that cards leave out."""
_ROW_EDGE: Final = re.compile(r"</?tr\b")
_COLUMN: Final = re.compile(r'<th scope="col"(?: class="([^"]*)")?>(.*?)</th>', re.DOTALL)
_CELL: Final = re.compile(r'<(tr|td|th)\b(?:[^>]*? colspan="(\d+)")?')
_HIDDEN_OR_TAG: Final = re.compile(r'<span class="hidden">.*?</span>|<[^>]*>', re.DOTALL)
_WORDS: Final = re.compile(r"(\s+)")
_SHORT_WORD: Final = re.compile(r"(?=.*\W)\S{2,24}")
"""A word that browsers may break, as after a hyphen, and that fits the narrowest code box."""
_TAG_OR_TEXT: Final = re.compile(
    r'(<textarea\b.*?</textarea>|<span data-live="[^"]*" hidden>[^<]*|<[^>]*>)|[^<]+', re.DOTALL
)
"""Markup to keep, or text to escape. Values are escaped: they hold no `<`, `>` or quote."""
_PLAIN: Final = bytes((*b"\t\r\n", *range(0x20, 0x7F)))
_DOUBTFUL: Final = re.compile(r"[^\t\r\n -~]")
_OF_SCRIPTS: Final = frozenset("\u00a0\u00ad\u200c\u200d\u202f\u3000")
"""Invisible characters of ordinary text: in prices, Persian words, emoji sequences."""


def _ticks(text: str) -> Markup:
    """Text with backtick spans as `<code>`, as messages of Headrace mark commands."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        return escape(text)
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if index % 2 else escape(part)
        for index, part in enumerate(parts)
    )


def _whole(text: str) -> Markup:
    """A command whose short words, such as options, are not broken over two lines."""
    return Markup("").join(
        Markup('<span class="whole">{}</span>').format(part)
        if _SHORT_WORD.fullmatch(part)
        else part
        for part in _WORDS.split(text)
    )


def _labelled(table: Markup) -> Markup:
    """A wide table whose cells carry the name of their column, which cards show on a phone.

    Cards show cells of a column of class `bare` without its name, as their values explain
    themselves, and leave out empty cells and those of class `less`, which the page of the row has.
    """
    head, edge, rows = str(table).partition("</thead>")
    columns = [_card_attribute(*one) for one in _COLUMN.findall(head)]
    if len(columns) < CARDS_FROM:
        return table
    column = 0

    def cell(found: re.Match[str]) -> str:
        nonlocal column
        if found[1] == "tr":
            column = 0
            return found[0]
        attribute = columns[column] if found[1] == "td" and not found[2] else ""
        column += int(found[2] or 1)
        if attribute and rows.startswith(f"{NO_VALUE}</td>", rows.index(">", found.end()) + 1):
            attribute = LEFT_OUT
        return f"<td{attribute}{found[0][3:]}" if attribute else found[0]

    return Markup(head + edge + _CELL.sub(cell, rows))  # noqa: S704 - escaped


def _folded_rows(table: Markup) -> int:
    """The number of rows of a table that a phone folds; 0 for a shorter one."""
    rows = table.partition("</thead>")[2].count("<tr")
    return rows if rows > ROWS_UNFOLDED else 0


def _card_attribute(classes: str, label: str) -> str:
    """The attribute of a column's cells that cards need."""
    name, given = _HIDDEN_OR_TAG.sub("", label).strip(), classes.split()
    if "less" in given:
        return LEFT_OUT
    return f' data-label="{name}"' if name and "bare" not in given else ""


def _plain(html: str) -> str:
    """HTML whose text has escapes, `\\u202e`, for characters that hide or reverse text.

    Tags, text areas and chart documents stay unchanged. Pages without such characters take a fast
    path.
    """
    if html.isascii() and html.isprintable():
        return html
    doubtful = html.encode("utf-8", "surrogatepass").translate(None, _PLAIN)
    held = set(doubtful.decode("utf-8", "surrogatepass")) - _OF_SCRIPTS
    if all(map(is_visible, held)):
        return html
    return _TAG_OR_TEXT.sub(lambda found: found[1] or _plain_text(found[0]), html)


def _plain_text(text: str) -> str:
    return _DOUBTFUL.sub(
        lambda found: found[0] if found[0] in _OF_SCRIPTS else visible(found[0]), text
    )


FILTERS: Final[Mapping[str, Callable[..., Any]]] = {
    "count": format_count,
    "short": format_short,
    "seconds": format_duration,
    "limit": format_limit,
    "bytes": format_bytes,
    "in_unit": format_in_unit,
    "percent": format_percent,
    "stamp": format_timestamp,
    "pretty": pretty_json,
    "path": path_segment,
    "tone": tone_of,
    "points": spark_points,
    "ticks": _ticks,
    "visible": visible,
    "labelled": _labelled,
    "folded_rows": _folded_rows,
    "whole": _whole,
}


class LiveFragments:
    """Collects the live fragments of a page: `{% call fragment("name") %}...{% endcall %}`.

    While the page renders, placeholders replace the fragments, so the layout around them has a
    digest of its own. Placeholders contain a random token, so user text cannot imitate them.
    """

    def __init__(self) -> None:
        self.parts: dict[str, str] = {}
        self._held: list[str] = []
        self._token = secrets.token_hex(8)
        self._marks = re.compile(rf"\[{self._token}:(\d+)\]")
        self.edge = Markup(f"[{self._token}:edge]")  # noqa: S704 - hexadecimal digits
        self.layout = Markup(f"[{self._token}:layout]")  # noqa: S704 - hexadecimal digits

    def __call__(self, name: str, tag: str = "span", *, caller: Callable[[], Markup]) -> Markup:
        html = _plain(self._filled(str(caller()).strip()))
        name = self._unused(name)
        self.parts[name] = html
        # Markup.format would double the rendering time of a large page.
        return Markup(f'<{tag} data-live="{escape(name)}">{self._hold(html)}</{tag}>')  # noqa: S704 - escaped

    def text(self, name: str, value: str) -> Markup:
        """A fragment for the JSON of a chart, as hidden text."""
        name = self._unused(name)
        self.parts[name] = str(escape(value))
        held = self._hold(self.parts[name])
        return Markup(f'<span data-live="{escape(name)}" hidden>{held}</span>')  # noqa: S704 - escaped

    def unwatched(self, *, caller: Callable[[], Markup]) -> Markup:
        """A part that the script updates itself, so its change does not count as layout."""
        return Markup(self._hold(_plain(self._filled(str(caller())))))  # noqa: S704 - escaped

    def finish(self, text: str) -> tuple[bytes, str]:
        """The page with its fragments inserted, and the digest of its layout."""
        before, main, after = _plain(text).split(str(self.edge))
        # Sorting makes the digest ignore the order of rows, which changes with their values.
        still = "<tr>".join(sorted(_ROW_EDGE.split("".join(self._marks.split(main)[::2]))))
        digest = hashlib.sha256(still.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        page = self._filled(f"{before}{main}{after}").replace(str(self.layout), digest)
        return page.encode(), digest

    def _hold(self, html: str) -> str:
        self._held.append(html)
        return f"[{self._token}:{len(self._held) - 1}]"

    def _filled(self, text: str) -> str:
        return self._marks.sub(lambda mark: self._held[int(mark[1])], text)

    def _unused(self, name: str) -> str:
        found, number = name, 1
        while found in self.parts:
            number += 1
            found = f"{name} #{number}"
        return found


@dataclass(frozen=True, slots=True)
class Asset:
    """A static file; `tag` is a hash of its content."""

    body: bytes
    packed: bytes | None
    media_type: str
    tag: str


class Assets:
    """Every file under `assets/`, read once. The set is fixed, so no name escapes the folder."""

    def __init__(self) -> None:
        self._found = dict(_read(files("headrace.console") / "assets", ""))

    def find(self, name: str) -> Asset | None:
        """The file with this name, if any."""
        return self._found.get(name)

    def url(self, name: str) -> str:
        """URL with the content hash, so browsers may cache the file forever."""
        return f"{PREFIX}/assets/{name}?v={self._found[name].tag}"


def make_environment(assets: Assets, **globals_: Any) -> Environment:
    """The Jinja environment of all templates."""
    environment = Environment(
        loader=PackageLoader("headrace.console"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters.update(FILTERS)
    environment.globals.update(
        asset=assets.url,
        prefix=PREFIX,
        document=_document,
        do_url=_do_url,
        do_label=_do_label,
        **globals_,
    )
    return environment


def packed(body: bytes) -> bytes:
    """`body` compressed with gzip."""
    return gzip.compress(body, compresslevel=3, mtime=0)


def _document(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _do_url(action: str, values: Mapping[str, Any], back: str) -> str:
    given = {name: _typed(value) for name, value in values.items() if value not in (None, "")}
    return f"{PREFIX}/do/{action}?{urlencode({**given, 'back': back})}"


def _do_label(action: Action, values: Mapping[str, Any], label: str) -> str:
    """Accessible label of a button: its text and its object."""
    fixed = [values.get(field.name) for field in action.fields if field.kind == "fixed"]
    return " ".join([label, *(str(value) for value in fixed if value not in (None, ""))])


def _typed(value: Any) -> Any:
    if isinstance(value, bool):
        return "1" if value else ""
    if isinstance(value, float):
        return decimal_text(value)
    return _document(value) if isinstance(value, dict | list) else value


def _read(folder: Traversable, prefix: str) -> Any:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _read(entry, f"{prefix}{entry.name}/")
        elif not entry.name.startswith("."):
            body = entry.read_bytes()
            media_type = mimetypes.guess_type(entry.name)[0] or "application/octet-stream"
            packed = gzip.compress(body, mtime=0) if len(body) > COMPRESSED_FROM_BYTES else None
            tag = hashlib.sha256(body).hexdigest()[:12]
            yield prefix + entry.name, Asset(body, packed, media_type, tag)
