"""Draw the diagram of each room's guide: `python -m tools.diagrams` writes `docs/diagrams/*.svg`.

A diagram is data: boxes on a grid and arrows between their sides. Schemdraw draws it, because it is
plain Python, writes SVG without a browser, and the page needs no script.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import schemdraw
from schemdraw import elements, flow

FOLDER: Final = Path(__file__).parents[1] / "docs" / "diagrams"
COLUMN: Final = 6.2
ROW: Final = 2.6
WIDTH: Final = 4.2
HEIGHT: Final = 1.3
# Dark text on light boxes and gray arrows: readable on light and dark pages alike.
FILLS: Final = {"code": "#fdf1d8", "process": "#dce8f7", "store": "#dcefe0", "outside": "#ececec"}
TEXT: Final = "#16202c"
LINE: Final = "#76849a"


@dataclass(frozen=True)
class Diagram:
    """`boxes`: name to (column, row, kind, text); `arrows`: (from side, to side, text)."""

    boxes: dict[str, tuple[float, float, str, str]]
    arrows: list[tuple[str, str, str]]


DIAGRAMS: Final = {
    "jobs": Diagram(
        boxes={
            "app": (0, 0, "code", "your site"),
            "rows": (1, 0, "store", "PostgreSQL\njobs · leases · lanes"),
            "agent": (2, 0, "process", "agent\none per host"),
            "slots": (3, 0, "process", "slots: processes\nwith your handlers"),
            "scheduler": (1, 1, "process", "scheduler\none leads"),
        },
        arrows=[
            ("app.E", "rows.W", "enqueue"),
            ("rows.NE", "agent.NW", "claim"),
            ("agent.SW", "rows.SE", "settle"),
            ("agent.NE", "slots.NW", "batch"),
            ("slots.SW", "agent.SE", "ack"),
            ("rows.WS", "scheduler.WN", "backlog"),
            ("scheduler.EN", "rows.ES", "plan of slots"),
        ],
    ),
    "fetch": Diagram(
        boxes={
            "file": (0, 0, "outside", "seller's\ncatalogue"),
            "reader": (1, 0, "process", "reader\nchecks · compares"),
            "rows": (2, 0, "store", "PostgreSQL\nitems · photo jobs"),
            "download": (2, 1, "process", "download in slots\nrate and class of a host"),
            "hosts": (1, 1, "outside", "photo hosts"),
            "blobs": (3, 1, "store", "object store\nphotos by hash"),
            "consumer": (3, 0, "code", "your on_item\nor webhook"),
        },
        arrows=[
            ("file.E", "reader.W", "rows"),
            ("reader.E", "rows.W", "changes"),
            ("rows.WS", "download.WN", "claim"),
            ("download.EN", "rows.ES", "outcome"),
            ("hosts.E", "download.W", "bytes"),
            ("download.E", "blobs.W", "synced"),
            ("rows.E", "consumer.W", "results"),
        ],
    ),
    "views": Diagram(
        boxes={
            "app": (0, 0, "code", "your site"),
            "valkey": (1, 0, "store", "Valkey\nstream + totals"),
            "flusher": (2, 0, "process", "flusher\nsums by hour"),
            "rows": (3, 0, "store", "PostgreSQL\ntotals · hours · offset"),
        },
        arrows=[
            ("app.NE", "valkey.NW", "hit"),
            ("valkey.SW", "app.SE", "total"),
            ("valkey.E", "flusher.W", "after offset"),
            ("flusher.E", "rows.W", "one commit"),
        ],
    ),
    "feed": Diagram(
        boxes={
            "app": (0, 0, "code", "your site"),
            "rows": (1, 0, "store", "PostgreSQL\nposts · follows · outbox"),
            "apply": (2, 0, "process", "apply\nin the writer or a sweep"),
            "valkey": (3, 0, "store", "Valkey\nnewest posts by author"),
            "page": (2, 1, "process", "page\nmerged on read"),
        },
        arrows=[
            ("app.E", "rows.W", "one commit"),
            ("rows.E", "apply.W", "changes"),
            ("apply.E", "valkey.W", "in order"),
            ("valkey.S", "page.E", "newest posts"),
            ("rows.S", "page.W", "older posts"),
        ],
    ),
    "media": Diagram(
        boxes={
            "client": (0, 0, "outside", "client\nsigned URL, range"),
            "node": (1, 0, "process", "node\nchecks · sends"),
            "cache": (1, 1, "store", "memory and disks\nblocks of 256 KiB"),
            "owner": (2, 0, "process", "owner node\nof the object"),
            "filler": (2, 1, "process", "filler\none read per block"),
            "blobs": (3, 1, "store", "object store"),
        },
        arrows=[
            ("client.NE", "node.NW", "GET"),
            ("node.SW", "client.SE", "bytes"),
            ("node.S", "cache.N", "hot"),
            ("node.E", "owner.W", "not here"),
            ("owner.S", "filler.N", "miss"),
            ("filler.W", "cache.E", "verified"),
            ("blobs.W", "filler.E", "range"),
        ],
    ),
}


def drawn(diagram: Diagram) -> str:
    """The diagram as SVG text."""
    schemdraw.use("svg")
    with schemdraw.Drawing(show=False) as drawing:
        drawing.config(fontsize=12, font="sans-serif", color=LINE, lw=1.4, margin=0.2)
        boxes = {}
        for name, (column, row, kind, text) in diagram.boxes.items():
            shape = flow.RoundBox if kind == "store" else flow.Box
            box = shape(w=WIDTH, h=HEIGHT).fill(FILLS[kind]).anchor("center")
            boxes[name] = drawing.add(
                box.at((column * COLUMN, -row * ROW)).label(text, color=TEXT, fontsize=11)
            )
        for start, end, text in diagram.arrows:
            ends = [_side(boxes, side) for side in (start, end)]
            bent = abs(ends[0][0] - ends[1][0]) > 0.01 and abs(ends[0][1] - ends[1][1]) > 0.01
            wire = elements.Wire("|-" if bent else "-", arrow="->")
            drawing.add(wire.at(ends[0]).to(ends[1]))
            drawing.add(_label(ends[0], ends[1], text))
        image: bytes = drawing.get_imagedata("svg")
        return image.decode() + "\n"


def _side(boxes: dict[str, flow.Box], name: str) -> tuple[float, float]:
    """The middle of a box's side, as in `jobs.S`; `jobs.ES` is right of the lower side's middle."""
    box, place = name.split(".")
    center = boxes[box].absanchors["center"]
    steps = {"E": (1, 0), "W": (-1, 0), "N": (0, 1), "S": (0, -1)}
    x, y = steps[place[-1]]
    dx, dy = steps[place[0]] if len(place) > 1 else (0, 0)
    return center.x + (x + dx / 2) * WIDTH / 2, center.y + (y + dy / 2) * HEIGHT / 2


def _label(start: tuple[float, float], end: tuple[float, float], text: str) -> elements.Element:
    """The text beside an arrow: above one to the right, below one to the left."""
    (x, y), (to_x, to_y) = start, end
    label = elements.Label().theta(0)
    halign: Literal["center", "left", "right"] = "center"
    valign: Literal["center", "top", "bottom"] = "center"
    if abs(x - to_x) < abs(y - to_y):
        halign = "right" if to_y < y else "left"
        label.at((x - 0.2 if to_y < y else x + 0.2, (y + to_y) / 2))
    else:
        valign = "top" if to_x < x else "bottom"
        label.at(((x + to_x) / 2, to_y - 0.2 if to_x < x else to_y + 0.12))
    label.label(text, color=LINE, fontsize=10, halign=halign, valign=valign, ofst=0)
    return label


def write() -> None:
    """Write all diagrams."""
    FOLDER.mkdir(exist_ok=True)
    for name, diagram in DIAGRAMS.items():
        (FOLDER / f"{name}.svg").write_text(drawn(diagram))


if __name__ == "__main__":
    write()
