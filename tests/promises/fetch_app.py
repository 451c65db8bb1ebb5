"""The application of a site that fetches while everything dies: it writes down which items it was told."""

from __future__ import annotations

import os
from pathlib import Path

from penstock import Penstock
from penstock.fetch import Item
from penstock.testing.history import Recorder

app = Penstock()
recorder = Recorder(Path(os.environ["HISTORY"]))


@app.on_item
async def publish(item: Item) -> None:
    """Note it."""
    told = {"customer": item.customer, "item": item.id, "version": item.version}
    with recorder.running("item", **told, photos=[photo.outcome for photo in item.photos]):
        pass
