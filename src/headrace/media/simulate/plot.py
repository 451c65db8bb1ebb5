"""Simulations as SVG: bars of each node at each step, and hit ratios by cache size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import log10
from typing import Final

from headrace.media.simulate.cluster import Simulation, Step

WIDTH: Final = 900
LEFT, RIGHT, TOP = 70, 20, 50
PANEL_HEIGHT, GAP = 120, 54
COLOURS: Final = ("#1f6feb", "#2a9d5c", "#d1495b", "#e09f3e", "#7b5ea7", "#3b8ea5")
STYLE: Final = (
    "text{font-family:sans-serif;font-size:11px;fill:#444}.title{font-size:14px;font-weight:bold}"
    ".name{font-size:12px;font-weight:bold}.axis{stroke:#ccc;stroke-width:.5}"
    ".fair{stroke:#222;stroke-dasharray:4 3}.line{fill:none;stroke-width:1.6}"
)


def loads_svg(simulation: Simulation) -> str:
    """A panel for each step: the load of each node, with its fair share dashed."""
    most = max(node.serves_gbit for step in simulation.steps for node in step.nodes) or 1.0
    panels = "".join(
        _panel(step, TOP + place * (PANEL_HEIGHT + GAP) + 14, most)
        for place, step in enumerate(simulation.steps)
    )
    title = (
        f"{simulation.load_gbit:g} Gbit/s over {len(simulation.steps[0].nodes)} nodes,"
        f" {simulation.replicas} replicas: Gbit/s that each serves (dashed: its fair share)"
    )
    return _page(title, TOP + len(simulation.steps) * (PANEL_HEIGHT + GAP), panels)


def lines_svg(title: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Shares from 0 to 1 by size, on a logarithmic axis."""
    sizes = [log10(size) for points in lines.values() for size, _ in points]
    first, last = min(sizes), max(*sizes, min(sizes) + 1e-9)
    height = 3 * PANEL_HEIGHT

    def x(size: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT - 150) * (log10(size) - first) / (last - first)

    def y(share: float) -> float:
        return TOP + height * (1 - share)

    parts = [
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT - 150}" y1="{y(tenth / 10):.1f}"'
        f' y2="{y(tenth / 10):.1f}"/>{_text(LEFT - 30, y(tenth / 10) + 4, f"{tenth * 10} %")}'
        for tenth in range(11)
    ]
    parts += [
        _text(x(size) - 12, TOP + height + 16, f"{size:,.0f}")
        for size in sorted({size for points in lines.values() for size, _ in points})
    ]
    for place, (name, points) in enumerate(lines.items()):
        colour = COLOURS[place % len(COLOURS)]
        drawn = " ".join(f"{x(size):.1f},{y(share):.1f}" for size, share in points)
        parts.append(f'<polyline class="line" stroke="{colour}" points="{drawn}"/>')
        legend = f'<tspan fill="{colour}">{escape(name)}</tspan>'
        parts.append(f'<text x="{WIDTH - RIGHT - 140}" y="{TOP + 14 + 18 * place}">{legend}</text>')
    return _page(title, TOP + height + 34, "".join(parts))


def _panel(step: Step, top: float, most: float) -> str:
    text = (
        f"{step.name}: at most {step.over_fair_max:.3f} of a fair share, {step.origin_gbit:.2f}"
        f" Gbit/s from the object store, {step.filled_share * 100:.1f} % read again"
    )
    parts = [_text(LEFT, top - 6, text, "name")]
    width = (WIDTH - LEFT - RIGHT) / len(step.nodes)
    centres = list(dict.fromkeys(node.dc for node in step.nodes))
    for place, node in enumerate(step.nodes):
        x = LEFT + place * width
        height = PANEL_HEIGHT * node.serves_gbit / most
        fair_y = top + PANEL_HEIGHT * (1 - node.fair_gbit / most)
        colour = COLOURS[centres.index(node.dc) % len(COLOURS)]
        parts.append(
            f'<rect x="{x + 2:.1f}" y="{top + PANEL_HEIGHT - height:.1f}" width="{width - 4:.1f}"'
            f' height="{height:.1f}" fill="{colour}"/>'
        )
        if node.fair_gbit:
            parts.append(
                f'<line class="fair" x1="{x:.1f}" x2="{x + width:.1f}"'
                f' y1="{fair_y:.1f}" y2="{fair_y:.1f}"/>'
            )
        label = node.name if node.is_up else f"{node.name} lost"
        parts.append(_text(x + 2, top + PANEL_HEIGHT + 12, label))
        parts.append(_text(x + 2, top + PANEL_HEIGHT + 24, f"{node.serves_gbit:.2f}"))
    return "".join(parts)


def _page(title: str, height: float, body: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}"'
        f' height="{height:g}"><style>{STYLE}</style>'
        f'<rect width="{WIDTH}" height="{height:g}" fill="#fff"/>'
        f"{_text(LEFT, 22, title, 'title')}{body}</svg>\n"
    )


def _text(x: float, y: float, text: str, kind: str = "label") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
