"""The run as a table for people, JSON for tools and bars for the README."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from bench.figures import Figure, shown
from bench.machine import ROOT

RESULTS = ROOT / "bench" / "results"
"""The record, which full runs alone write."""
QUICK_RESULTS = ROOT / "build" / "bench"
WIDTH = 860
BAR_HEIGHT = 16
LABEL_WIDTH = 150


def write_results(
    room: str, head: dict[str, Any], figures: list[Figure], questions: list[str], *, folder: Path
) -> Path:
    """Write `<room>.json`, `<room>.svg` and `<room>.md`; returns the JSON's path.

    In the record the entries of questions that were not measured now stay, in the order of
    `questions`. A quick run's files have the rows of that run alone.
    """
    path = folder / f"{room}.json"
    measured = {figure.question for figure in figures}
    is_record = folder == RESULTS
    kept = [row for row in recorded(room) if is_record and row.question not in measured]
    figures = sorted(
        (f for f in [*kept, *figures] if f.question in questions),
        key=lambda figure: questions.index(figure.question),
    )
    document = {"room": room, **head, "figures": [figure.as_json() for figure in figures]}
    write_plot(folder, room, bars(room, head, figures))
    path.write_text(json.dumps(document, indent=1) + "\n")
    (folder / f"{room}.md").write_text(page(room, head, figures))
    return path


def write_plot(folder: Path, name: str, svg: str) -> None:
    """Write a plot beside the tables."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.svg").write_text(svg)


def page(room: str, head: dict[str, Any], figures: list[Figure]) -> str:
    """The table with where it comes from, as a page of its own."""
    machine = head["machine"]
    origin = (
        f"`{head['command']}`, {machine['cores']} cores ({machine['cpu']}),"
        f" {machine['memory_gib']} GiB, {head['date'][:10]}; ratios of one run count, absolute"
        f" figures are this machine's. `{room}.json` has versions, settings, commit and moment of"
        " each row."
    )
    notes = "".join(f"- {note}\n" for note in head["notes"])
    if notes:
        notes = f"\n{notes}"
    others = "".join(f"- {line}\n" for line in remarks(figures))
    if others:
        others = f"\nNotes on single rows:\n\n{others}"
    return f"# Figures of {room}\n\n{origin}\n\n{table(figures)}\n{notes}{others}"


def recorded(room: str) -> list[Figure]:
    """The rows of the record."""
    path = RESULTS / f"{room}.json"
    if not path.exists():
        return []
    return [Figure(**entry) for entry in json.loads(path.read_text())["figures"]]


def table(figures: list[Figure]) -> str:
    """The figures as Markdown."""
    lines = [
        "| figure | size | ours | spread | peers | limit | goal | holds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in figures:
        peers = ", ".join(
            f"{peer} {shown(value)}{_times(row, value)}" for peer, value in row.peers.items()
        )
        limit = ", ".join(f"{shown(value)} {what}" for what, value in row.limit.items())
        spread = row.spread.get("headrace", [])
        range_text = f"{shown(spread[0])} - {shown(spread[1])}" if row.runs > 1 else ""
        holds = {None: "", True: "yes", False: f"**no**: {row.why}"}[row.holds]
        cells = [row.name, row.size, f"{shown(row.ours)} {row.unit}", range_text, peers, limit]
        lines.append("| " + " | ".join([*cells, row.goal or "", holds]) + " |")
    return "\n".join(lines)


def remarks(figures: list[Figure]) -> list[str]:
    """What was not measured and other notes, by figure."""
    return [
        f"{row.name}, {row.size}: {'; '.join(row.not_measured)}"
        for row in figures
        if row.not_measured
    ]


def broken(figures: list[Figure]) -> list[Figure]:
    """The rows that do not hold."""
    return [row for row in figures if row.holds is False]


def bars(room: str, head: dict[str, Any], figures: list[Figure]) -> str:
    """Figures that have peers as bars, each row on a scale of its own."""
    rows = [row for row in figures if row.peers and row.ours is not None]
    machine = head["machine"]
    title = f"{room}: {head['commit']}, {head['date']}, {machine['cores']} cores, {machine['cpu']}"
    parts, y = [_text(8, 20, title, "title")], 44
    for row in rows:
        parts.append(_text(8, y, f"{row.name} ({row.size}), {row.unit}", "name"))
        y += 8
        values = {"headrace": row.ours, **row.peers}
        most = max(value for value in values.values() if value is not None) or 1.0
        for name, value in values.items():
            length = max(1.0, (WIDTH - LABEL_WIDTH - 110) * (value or 0.0) / most)
            kind = "ours" if name == "headrace" else "peer"
            parts.append(_text(8, y + 12, name, "label"))
            parts.append(
                f'<rect class="{kind}" x="{LABEL_WIDTH}" y="{y}" width="{length:.1f}"'
                f' height="{BAR_HEIGHT - 3}"/>'
            )
            parts.append(_text(int(LABEL_WIDTH + length + 6), y + 12, shown(value), "label"))
            y += BAR_HEIGHT
        y += 22
    style = (
        "text{font-family:sans-serif;fill:#444}.title{font-size:11px}.name{font-size:13px;"
        "font-weight:bold}.label{font-size:12px}.ours{fill:#1f6feb}.peer{fill:#9aa4b2}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}"'
        f' height="{y}"><style>{style}</style><rect width="{WIDTH}" height="{y}" fill="#fff"/>'
        + "".join(parts)
        + "</svg>\n"
    )


def _text(x: int, y: int, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(text)}</text>'


def _times(row: Figure, value: float) -> str:
    if row.ours is None or not value or not row.ours:
        return ""
    is_less_better = row.unit in ("us", "ms", "s", "%", "MiB")
    times = value / row.ours if is_less_better else row.ours / value
    return f" ({times:.3g} x)"
