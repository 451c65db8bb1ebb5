"""Reports of a run for people: lines, CSV for a spreadsheet, and an HTML page.

Reports contain text from files of sellers, so every cell is untrusted. The CSV puts a quote before
a cell that a spreadsheet would run as a formula. The page escapes all text, has no links and no
scripts, and forbids scripts by its Content-Security-Policy.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
from collections.abc import Iterable, Sequence
from html import escape
from typing import Final, TypeAlias

from headrace.fetch.i18n import Texts
from headrace.fetch.model import PhotoProblem, RowProblem, Run, RunState
from headrace.fetch.outcomes import count_bad


def policy_of(style: str) -> str:
    """The Content-Security-Policy of a page that has this style and no other content to load."""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'"
    )


COLUMNS: Final = ("row", "line", "item", "field", "code", "text", "link")
BOM: Final = "\ufeff"
"""The byte order mark, by which spreadsheets recognize UTF-8."""
_FORMULA: Final = tuple("=+-@\t\r\n|%\uff1d\uff0b\uff0d\uff20")
_ROW_HEADS: Final = ("row", "line", "item", "field", "problem")
_PHOTO_HEADS: Final = ("item", "link", "problem")
STYLE: Final = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%;margin:1rem 0 2rem}"
    "th,td{border-bottom:1px solid #ddd;padding:.4rem .6rem;text-align:left;vertical-align:top;"
    "overflow-wrap:anywhere}th{white-space:nowrap}code{color:#666}"
)
POLICY: Final = policy_of(STYLE)
"""The Content-Security-Policy of the page, which allows only its own style."""


Line: TypeAlias = tuple[str | int | None, ...]
"""One problem: its values in the order of COLUMNS."""


def line_of_file(run: Run, text: str) -> Line:
    """The reason why a run is held, refused or abandoned, as a line."""
    code = run.fault.code if run.fault else (run.reason or "").partition(":")[0]
    return None, run.fault.line if run.fault else None, None, "file", code, text, None


def line_of_row(one: RowProblem) -> Line:
    """The problem of a row as a line."""
    return one.row, one.line, one.item, one.field, one.code, one.text, None


def line_of_photo(photo: PhotoProblem) -> Line:
    """The problem of a photo as a line."""
    return None, None, photo.item, "photos", photo.outcome, photo.text, photo.url


def csv_head() -> str:
    """The first line of the CSV."""
    return BOM + _csv([COLUMNS])


def csv_of(lines: Iterable[Line]) -> str:
    """Lines as CSV with cells that are safe in a spreadsheet."""
    return _csv([safe_cell(value) for value in line] for line in lines)


def safe_cell(value: str | int | None) -> str:
    """`value` as a cell that a spreadsheet does not run as a formula."""
    if not isinstance(value, str):
        return "" if value is None else str(value)
    return (
        f"'{value}" if value.startswith(_FORMULA) or value.lstrip().startswith(_FORMULA) else value
    )


def _csv(rows: Iterable[Sequence[str]]) -> str:
    out = io.StringIO()
    csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\r\n").writerows(rows)
    return out.getvalue()


def page_of(
    run: Run, rows: Sequence[RowProblem], photos: Sequence[PhotoProblem], texts: Texts
) -> str:
    """The report as one self-contained page."""
    title = escape(texts.heading("title", run=run.run))
    parts = [_facts(run, texts)]
    is_accepted = run.state in (RunState.APPLIED, RunState.DONE) or not run.reason
    if is_accepted and not rows and not photos:
        parts.append(f"<p>{escape(texts.heading('no_problems'))}</p>")
    if rows:
        cells = [(p.row, p.line, p.item, p.field, _problem(p.text, p.code)) for p in rows]
        parts += [_heading(texts, "row_problems"), table(texts, _ROW_HEADS, cells)]
        parts += _more(texts, len(rows), run.problems)
    if photos:
        listed = [(p.item, p.url, _problem(p.text, p.outcome)) for p in photos]
        parts += [_heading(texts, "photo_problems"), table(texts, _PHOTO_HEADS, listed)]
        parts += _more(texts, len(photos), count_bad(run.photos_by_outcome))
    return (
        f'<!DOCTYPE html>\n<html lang="{escape(texts.lang)}">\n<head><meta charset="utf-8">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n"
        f"<body><h1>{title}</h1>\n{''.join(parts)}</body></html>\n"
    )


class Html(str):
    """Text that is already HTML."""

    __slots__ = ()


def _facts(run: Run, texts: Texts) -> str:
    state = f"{run.state}: {texts.of_run(run)}" if run.reason else str(run.state)
    photos = ", ".join(f"{count} {texts.outcome(o)}" for o, count in run.photos_by_outcome.items())
    facts: list[tuple[str, object]] = [
        ("customer", run.customer),
        ("file", run.file_name),
        ("started", f"{run.started_at:%Y-%m-%d %H:%M:%S} UTC"),
        ("state", state),
        ("rows", run.rows),
        ("photos", f"{run.photos}; {photos}" if photos else run.photos),
    ]
    rows = "".join(
        f"<tr><th>{escape(texts.heading(name))}</th><td>{escape(str(value))}</td></tr>"
        for name, value in facts
    )
    return f"<table>{rows}</table>\n"


def _heading(texts: Texts, name: str) -> str:
    return f"<h2>{escape(texts.heading(name))}</h2>\n"


def _problem(text: str, code: str) -> Html:
    return Html(f"{escape(text)} <code>{escape(code)}</code>")


def table(texts: Texts, names: Sequence[str], rows: Iterable[Sequence[str | int | None]]) -> str:
    """A table with translated headings; all cells are escaped, except `Html`."""
    head = "".join(f"<th>{escape(texts.heading(name))}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{_cell(value)}</td>" for value in row) + "</tr>\n" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>\n"


def _cell(value: str | int | None) -> str:
    if isinstance(value, Html):
        return value
    return "" if value is None else escape(str(value))


def _more(texts: Texts, shown: int, count: int) -> list[str]:
    return [f"<p>{escape(texts.heading('more', shown=shown))}</p>"] if count > shown else []
