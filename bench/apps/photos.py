"""An application with nothing of its own: its workers run the tasks of fetch."""

from __future__ import annotations

from headrace import Headrace

app = Headrace()
