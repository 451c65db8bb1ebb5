"""The page of a seller: the last catalogues, their problems with the fix, an example of a row.

The page is a pure function of the values that it shows. Like a report (`reports`), it contains text
of files: everything is escaped, and its Content-Security-Policy allows nothing but its own style.
Each value of the example passes the validation of its field, so it cannot contradict the schema.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from typing import Final, NamedTuple

from headrace.fetch.guard import Policy
from headrace.fetch.i18n import Texts, languages
from headrace.fetch.mappings import Mapping as NameMapping
from headrace.fetch.model import SUPPLEMENTAL, PhotoProblem, RowProblem, Run
from headrace.fetch.outcomes import count_bad
from headrace.fetch.readers import Fault, Value
from headrace.fetch.reports import STYLE, Html, policy_of, table
from headrace.fetch.schemas import ALWAYS, CompiledRule, FieldRule, Schema
from headrace.kernel.terminal import visible

LINES_SHOWN: Final = 20
"""Rows or photos shown for each kind of problem."""
VALUE_CHARACTERS_MAX: Final = 200
"""Longer values of an item are not used in the example."""
_STYLE: Final = (
    f"{STYLE}nav a{{margin-right:.8rem}}"
    "@media(max-width:40rem){body{margin:1rem auto}th{white-space:normal}"
    "th,td{padding:.3rem .25rem;font-size:.85rem}}"
)
POLICY: Final = policy_of(_STYLE)
"""The Content-Security-Policy of the page."""
_STANDARD: Final = ("name", "price", "category", "url", "photos")


class ExampleField(NamedTuple):
    """A field of the example row: its column, a correct value, and what it accepts."""

    column: str
    value: str
    accepted: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SellerView:
    """What the page shows; `run` is the selected one of `runs`."""

    customer: str
    expires_at: datetime
    runs: Sequence[Run]
    run: Run | None
    rows: Sequence[RowProblem]
    photos: Sequence[PhotoProblem]
    example: Sequence[ExampleField]


def example_of(
    schema: Schema,
    mapping: NameMapping | None,
    known: Mapping[str, Value],
    *,
    texts: Texts,
    policy: Policy,
) -> list[ExampleField]:
    """A correct row for `schema`, in the columns of `mapping`; `known` values are tried first."""
    rules = {name: FieldRule() for name in _STANDARD} | ALWAYS | schema.fields
    required = _accepted("text", FieldRule(required=True), texts)
    found = [ExampleField(_column("id", mapping), "A-1001", required)]
    for name, rule in rules.items():
        column = _column(name, mapping) or (name if rule.required else "")
        if column:
            candidates = _candidates(name, rule, known, texts)
            value = _value_of(name, rule, candidates, policy)
            kind = "photos" if name == "photos" else rule.type
            found.append(ExampleField(column, value, _accepted(kind, rule, texts)))
    return found


def _column(name: str, mapping: NameMapping | None) -> str:
    """The column of a field; empty if the mapping has none."""
    if mapping is None:
        return name
    paths = getattr(mapping, name) if name in ("id", *_STANDARD) else mapping.fields.get(name)
    return paths if isinstance(paths, str) else paths[0] if paths else ""


def _value_of(name: str, rule: FieldRule, candidates: Iterable[str], policy: Policy) -> str:
    """The first candidate that the rule accepts; empty if none is, as with most patterns."""
    if name == "photos":
        count = max(1, min(rule.length_least or 1, 30))
        return "|".join(f"https://shop.example/{n}.jpg" for n in range(1, count + 1))
    checked = CompiledRule(name, rule, policy)
    good = (one for one in candidates if one and not isinstance(checked.check(one), Fault))
    return next(good, "")


def _candidates(
    name: str, rule: FieldRule, known: Mapping[str, Value], texts: Texts
) -> Iterator[str]:
    value = known.get(name, "")
    text = value if isinstance(value, str) else "|".join(value)
    yield text if len(text) <= VALUE_CHARACTERS_MAX else ""
    if name in _STANDARD:
        yield texts.heading(f"sample_{name}")
    length = rule.length_least or rule.length_most or 0
    yield "|".join(rule.values[: max(1, length)])
    yield texts.heading(f"sample_{rule.type}")
    yield from (str(bound) for bound in (rule.least, rule.most) if bound is not None)
    yield "|".join(map(str, range(1, length + 1))) if rule.type == "list" else "x" * length


def seller_page(view: SellerView, texts: Texts) -> str:
    """The page in the language of `texts`."""
    run = f"&amp;run={view.run.run}" if view.run else ""
    links = " ".join(
        f'<a href="?lang={lang}{run}" lang="{lang}">{lang}</a>' for lang in languages()
    )
    until = texts.heading("valid_until", until=f"{view.expires_at:%Y-%m-%d}")
    parts = [f"<nav>{links}</nav>\n", _tag("p", until), _runs(view, texts)]
    if view.run is not None:
        parts += _problems(view, view.run, texts)
    parts += [
        _tag("h2", texts.heading("example")),
        table(texts, ("field", "value", "accepted"), view.example),
    ]
    return _page(texts, texts.heading("seller_title", customer=view.customer), parts)


def message_page(name: str, texts: Texts) -> str:
    """A page that shows only the sentence `name`, as for an invalid link."""
    return _page(texts, texts.heading("seller_page"), [_tag("p", texts.heading(name))])


def _page(texts: Texts, title: str, parts: Iterable[str]) -> str:
    return (
        f'<!DOCTYPE html>\n<html lang="{escape(texts.lang)}">\n<head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="robots" content="noindex, nofollow">'
        f"{_tag('title', title)}<style>{_STYLE}</style></head>\n"
        f"<body>{_tag('h1', title)}{''.join(parts)}</body></html>\n"
    )


def _tag(name: str, text: str) -> str:
    return f"<{name}>{escape(visible(text))}</{name}>\n"


def _runs(view: SellerView, texts: Texts) -> str:
    title = _tag("h2", texts.heading("runs"))
    if not view.runs:
        return title + _tag("p", texts.heading("no_runs"))
    rows = []
    for run in view.runs:
        started = f"{run.started_at:%Y-%m-%d %H:%M} UTC"
        url = f"?lang={texts.lang}&amp;run={run.run}"
        rows.append((Html(f'<a href="{url}">{started}</a>'), run.file_name, _result(run, texts)))
    return title + table(texts, ("started", "file", "state"), rows)


def _result(run: Run, texts: Texts) -> str:
    """What became of a run, with its counts."""
    names = ("rows", "new", "changed", "gone", "invalid", "photos")
    counts = {name: getattr(run, name) for name in names}
    state = texts.heading("state_undone" if run.undone_by else f"state_{run.state}")
    if run.format == SUPPLEMENTAL:
        return f"{texts.heading('supplemental')} {state} {texts.heading('overlays', **counts)}"
    return f"{state} {texts.heading('counts', bad=count_bad(run.photos_by_outcome), **counts)}"


def _problems(view: SellerView, run: Run, texts: Texts) -> Iterator[str]:
    title = "supplement_of" if run.format == SUPPLEMENTAL else "run_of"
    yield _tag("h2", texts.heading(title, started=f"{run.started_at:%Y-%m-%d %H:%M}"))
    if reason := texts.of_run(run):
        yield _tag("p", reason)
    elif not view.rows and not view.photos:
        yield _tag("p", texts.heading("no_faults"))
    rows = [
        (one.field, (one.line, one.item, _shown(one.values.get("value")), one.text))
        for one in view.rows
    ]
    yield _groups(texts, "row_problems", ("line", "item", "value", "problem"), rows)
    photos = [(one.text, (one.item, visible(one.url))) for one in view.photos]
    yield _groups(texts, "photo_problems", ("item", "link"), photos)


def _groups(
    texts: Texts,
    title: str,
    heads: Sequence[str],
    lines: Iterable[tuple[str, Sequence[str | int | None]]],
) -> str:
    """Tables of `lines` with equal names, the longest first."""
    groups: dict[str, list[Sequence[str | int | None]]] = {}
    for name, cells in lines:
        groups.setdefault(name, []).append(cells)
    parts = [_tag("h2", texts.heading(title))] if groups else []
    for name, found in sorted(groups.items(), key=lambda pair: -len(pair[1])):
        parts += [_tag("h3", f"{name}: {len(found)}"), table(texts, heads, found[:LINES_SHOWN])]
    return "".join(parts)


def _shown(value: str | float | None) -> str:
    return "" if value is None else visible(str(value)[:VALUE_CHARACTERS_MAX])


def _accepted(kind: str, rule: FieldRule, texts: Texts) -> str:
    """What a field accepts, such as `required; a price; at least 1`."""
    parts = [texts.heading("required")] if rule.required else []
    parts.append(texts.heading(f"type_{kind}"))
    for name in ("least", "most", "length_least", "length_most", "pattern", "values"):
        value = getattr(rule, name)
        if value is not None and value != []:
            shown = ", ".join(value) if isinstance(value, list) else value
            parts.append(texts.heading(name, value=str(shown)))
    return "; ".join(parts)
