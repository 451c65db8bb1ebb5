"""Run another project's chaos and bloat cells against Headrace and peers; write the page.

It needs git, npm, psql and Python 3.12 on PATH. It installs the peers and PostgreSQL into
`--folder`, below which everything stays. Cells that are recorded already are skipped.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from bench.machine import ROOT
from bench.outside import checkout, page
from bench.outside.cells import CELLS, run_cell


def main() -> None:
    """Run what is not recorded yet, record each run at once, and write the page."""
    arguments = _arguments()
    ready = checkout.prepare(arguments.folder, harness=arguments.harness, absurd=arguments.absurd)
    for name in _names(arguments.cells):
        for system in arguments.systems:
            if not arguments.again and page.is_recorded(name, system, short=arguments.short):
                continue
            print(f"{name}: {system}, load {os.getloadavg()[0]:.1f}", flush=True)
            record = run_cell(ready, name, system, short=arguments.short)
            print(f"  exit code {record['exit_code']}, {record['error'] or 'no error'}", flush=True)
            page.add(record)
            page.write()


def _names(wanted: list[str]) -> list[str]:
    return [name for name, cell in CELLS.items() if {name, cell.kind} & set(wanted)]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.outside", description=__doc__)
    listed = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--harness", default=checkout.HARNESS, help="folder or URL of its git")
    parser.add_argument("--absurd", default=checkout.ABSURD, help="folder or URL of absurd's git")
    parser.add_argument(
        "--cells",
        type=listed,
        default=["chaos", "bloat"],
        help=f"chaos, bloat, or some of: {', '.join(CELLS)}",
    )
    parser.add_argument("--systems", type=listed, default=list(checkout.SYSTEMS))
    parser.add_argument(
        "--short", action="store_true", help="about 75 s a cell, a tenth of the load"
    )
    parser.add_argument("--again", action="store_true", help="repeat recorded cells")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "outside")
    arguments = parser.parse_args()
    if unknown := set(arguments.systems) - set(checkout.SYSTEMS):
        parser.error(f"no such system: {', '.join(unknown)}; known: {', '.join(checkout.SYSTEMS)}")
    if unknown := set(arguments.cells) - {"chaos", "bloat", *CELLS}:
        parser.error(f"no such cell: {', '.join(unknown)}; known: {', '.join(CELLS)}")
    return arguments


if __name__ == "__main__":
    main()
