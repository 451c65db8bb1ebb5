"""The application of a storm with a check before publishing: it holds every second item."""

from __future__ import annotations

from tests.kit.storm.storm_app import app

from headrace.fetch import Hold, Item


@app.before_publish()
async def check(item: Item) -> Hold | None:
    return Hold("odd") if int(item.id[1:]) % 2 else None
