"""The application of a site that fetches while everything dies.

It writes down which items it was told.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.kit.history import Recorder

from headrace import Headrace
from headrace.fetch import Item

app = Headrace()
recorder = Recorder(Path(os.environ["HISTORY"]))


@app.on_item
async def publish(item: Item) -> None:
    """Note it."""
    told = {"customer": item.customer, "item": item.id, "version": item.version}
    with recorder.running("item", **told, photos=[photo.outcome for photo in item.photos]):
        pass
