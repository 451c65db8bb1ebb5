"""The application of a storm: `fleet_app` that also receives the items of catalogues."""

from __future__ import annotations

from tests.kit.storm.fleet_app import app, recorder

from headrace.fetch import Item


@app.on_item
async def publish(item: Item) -> None:
    outcomes = [photo.outcome for photo in item.photos]
    with recorder.running("item", customer=item.customer, item=item.id, photos=outcomes):
        pass
