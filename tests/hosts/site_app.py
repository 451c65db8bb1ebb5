"""The application of sites on several hosts: its handlers append what they receive to files."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from headrace import Headrace

app = Headrace()


def append(name: str, row: dict[str, Any]) -> None:
    """Append one line to a file of the folder RECEIVED, which all hosts share."""
    line = json.dumps({**row, "at_s": time.monotonic()}) + "\n"
    file = os.open(Path(os.environ["RECEIVED"]) / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


@app.task("notes", retries=20, keep_done="1h", concurrency=20)
async def note(text: str) -> None:
    append("notes.jsonl", {"text": text})


@app.on_item
async def publish(item) -> None:
    photos = [(photo.key, photo.url) for photo in item.photos if photo.key]
    append("items.jsonl", {"item": item.id, "version": item.version, "photos": photos})
