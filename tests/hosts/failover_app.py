"""The application of sites under failover: its handlers append what they receive to files."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from headrace import Headrace

app = Headrace()


def append(name: str, row: dict[str, Any]) -> None:
    """Append one line; handlers run on hosts that share this folder."""
    line = json.dumps({**row, "at_s": time.monotonic()}) + "\n"
    file = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


@app.task("notes", retries=20, keep_done="1h", concurrency=20)
async def note(text: str) -> None:
    append("notes.jsonl", {"text": text})


@app.on_item
async def publish(item) -> None:
    append("items.jsonl", {"item": item.id, "version": item.version})
