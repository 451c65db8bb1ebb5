"""What a person sees: tables, colors and progress bars on a terminal.

rich draws them. It is imported only for a terminal, as scripts need plain and stable text and its
import takes as long as a short command. `NO_COLOR` and `TERM=dumb` are respected.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final, TextIO

from headrace.kernel.terminal import Cell, Lines, Table, duration_text, is_visible, visible

if TYPE_CHECKING:
    from rich.text import Text

LINE_EVERY_S: Final = 30.0
BAR_AFTER_S: Final = 0.5
"""A shorter command shows no bar."""
REDRAW_S: Final = 0.2
DUMB: Final = ("", "dumb", "unknown")
NUMBER: Final = re.compile(r"-?[\d,]*\.?\d+(\+|%| %| [A-Za-z/]{1,5})?")
NAMED: Final = frozenset(
    {"id", "job", "run", "last job", "port", "seq", "pair", "step", "undone by", "sent up to"}
)
"""Columns of numbers that are names, without separators of thousands."""
BAD: Final = frozenset({"failed", "lost", "failures", "bad", "rotten", "wrong", "missing"})
"""Columns of counts that should be 0."""
STYLES: Final = {
    **dict.fromkeys(("failed", "dead", "lost", "refused", "no", "silent", "fail"), "red"),
    **dict.fromkeys(("damaged", "quarantined", "failing", "expired", "out"), "red"),
    **dict.fromkeys(("paused", "draining", "drained", "held", "warn", "stale", "open"), "yellow"),
    **dict.fromkeys(("cancelled", "disabled", "retired", "revoked", "rebuilding"), "yellow"),
    **dict.fromkeys(("done", "alive", "ok", "yes", "up", "valid", "published", "active"), "green"),
    **dict.fromkeys(("none", "-", "never", "unknown", "default", "gone", "0"), "dim"),
}
"""Color of a cell with exactly this text."""
ERROR_STYLE: Final = "\x1b[1;31m"


def is_screen(stream: TextIO) -> bool:
    """Whether `stream` is a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM", "") not in DUMB


def painted(text: str, style: str, stream: TextIO) -> str:
    """`text` in an ANSI style if `stream` is a terminal and `NO_COLOR` is not set."""
    if not is_screen(stream) or os.environ.get("NO_COLOR"):
        return text
    return f"{style}{text}\x1b[0m"


def draw(text: str) -> None:
    """Print `text` on the terminal, with its tables in columns that fit the width."""
    if isinstance(text, Lines):
        for part in text.parts:
            draw(part)
    elif isinstance(text, Table):
        _draw_table(text)
    else:
        print(_safe(text))


def _safe(text: str) -> str:
    """`text` with control characters escaped, as names come from other people."""
    return "".join(c if c in "\n\t" or is_visible(c) else visible(c) for c in text)


def _draw_table(table: Table) -> None:
    from rich.console import Console
    from rich.table import Table as Grid

    grid = Grid(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold underline")
    columns = [
        (place, name, [_text(row[place]) for row in table.rows])
        for place, name in enumerate(table.head)
    ]
    # Remarks have no name; without any, their column is left out.
    shown = [column for column in columns if column[1] or any(column[2])]
    for place, name, cells in shown:
        is_number = all(NUMBER.fullmatch(cell) for cell in cells if cell) and any(cells)
        grid.add_column(
            name,
            justify="right" if is_number else "left",
            no_wrap=is_number or place == 0,
            overflow="fold",
        )
    for row in table.rows:
        grid.add_row(*(_drawn(row[place], name) for place, name, _ in shown))
    Console(highlight=False, emoji=False, markup=False).print(grid)


def _text(value: Any) -> str:
    return value.human if isinstance(value, Cell) else str(value)


def _drawn(value: Any, name: str) -> Text:
    from rich.text import Text

    text = _safe(_text(value))
    if isinstance(value, int) and not isinstance(value, bool) and name not in NAMED:
        text = f"{value:,}"
    if text[:1].isdigit() and name in BAD:
        return Text(text, style="dim" if text == "0" else "red")
    return Text(text, style=STYLES.get(text.lower(), ""))


class ProgressView:
    """Progress of one command on standard error, written by a thread.

    A terminal shows a bar from BAR_AFTER_S on; a file gets a line every LINE_EVERY_S. A thread
    writes it, so that it also moves while the command waits for one long call.
    """

    def __init__(self) -> None:
        self._state: tuple[str, float, float | None] = ("", 0, None)
        self._begun_s = time.monotonic()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def update(self, text: str, done: float = 0, total: float | None = None) -> None:
        """Replace what is shown; the bar shows a share if `total` is known."""
        self._state = (text, done, total)
        if self._thread is None:
            self._ended.clear()
            self._begun_s = time.monotonic()
            target = self._draw if is_screen(sys.stderr) else self._write
            self._thread = threading.Thread(target=target, daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Remove the bar."""
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._thread = None

    def _write(self) -> None:
        while not self._ended.wait(LINE_EVERY_S):
            text, done, total = self._state
            share = f", {done / total:.0%}" if total else ""
            elapsed = duration_text(time.monotonic() - self._begun_s)
            print(f"headrace: {text}{share} ({elapsed})", file=sys.stderr, flush=True)

    def _draw(self) -> None:
        if self._ended.wait(BAR_AFTER_S):
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
        )

        bar = Progress(
            SpinnerColumn("line"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[share]}"),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=Console(stderr=True, highlight=False, emoji=False),
            transient=True,
        )
        task = bar.add_task("", total=None, share="")
        with bar:
            while True:
                text, done, total = self._state
                share = f"{done / total:4.0%}" if total else ""
                bar.update(
                    task, description=_safe(text), completed=done, total=total or None, share=share
                )
                if self._ended.wait(REDRAW_S):
                    return
