"""An application with one consumer of items, as the README shows it; it counts photos."""

from __future__ import annotations

from bench.tally import Tally
from headrace import Headrace
from headrace.fetch import Item

app = Headrace()
_tally = Tally()


@app.on_item
async def publish(item: Item) -> None:
    """Make the URLs of an item's photos."""
    urls = [app.media.objects.url(photo.key) for photo in item.photos if photo.key]
    _tally.add(len(urls))
