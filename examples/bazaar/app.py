"""The site's code: all that its author writes to get sellers' items with their photos.

    headrace up examples.bazaar.chores:app

Items come to `publish` once all their photos are decided: stored, or refused with a reason. It
may be called again with the same version (at least once), so it writes by version. The site's own
jobs, which this starts, are in `chores.py`.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
from examples.bazaar.adverts import MODERATED, Advert, Adverts, Photo, field_text
from examples.bazaar.followers import post_of
from examples.bazaar.lock import FOLDER
from examples.bazaar.records import Records

from headrace import Headrace
from headrace.fetch import Item

app = Headrace()
_database = Path(os.environ.get("BAZAAR_DATABASE", FOLDER / "bazaar.sqlite"))
adverts, records = Adverts(_database), Records(_database)
adverts.create()
records.create()
new_photos = app.queue(MODERATED, decisions={"fine": "bazaar.fine", "report": "bazaar.report"})
"""Visitors decide about the photo of a new advert, on the shop's page or in the console."""


class NewPhoto(msgspec.Struct):
    """The photo of a new advert, with what a moderator is shown beside it."""

    photo: str
    text: str
    seller: str
    item: str


@app.on_item
async def publish(item: Item) -> None:
    """Publish, update or remove the advert of an item, and post it to its seller's followers."""
    await asyncio.to_thread(apply, item)
    post = post_of(item.customer, item.id)
    if item.action == "unpublish":
        await app.feed.delete(post)
        return
    # A post that is there already stays as it is: an edited item is no news.
    await app.feed.post(item.customer, post)
    version = {"seller": item.customer, "item": item.id, "version": item.version}
    # Started once a version, however often this handler runs.
    await app.workflows.start("bazaar-publish", version, unique=f"{post}@{item.version}")
    photo = next((photo.key for photo in item.photos if photo.key), None)
    if item.action == "publish" and photo is not None:
        title = field_text(item.fields, "title", "name")
        await new_photos.enqueue(NewPhoto(photo, title, item.customer, item.id))


@app.task("bazaar.fine")
async def praise(new: NewPhoto) -> None:
    """A visitor found the photo fine."""
    await asyncio.to_thread(adverts.judge, new.seller, new.item, "fine")


@app.task("bazaar.report")
async def report(new: NewPhoto) -> None:
    """A visitor reported the photo."""
    await asyncio.to_thread(adverts.judge, new.seller, new.item, "reported")


def apply(item: Item) -> None:
    """Write what happened to the item into the site's table."""
    if item.action == "unpublish":
        adverts.hide(item.customer, item.id, version=item.version)
        return
    photos = tuple(
        Photo(photo.url, photo.key or "", photo.sha256 or "", photo.outcome, photo.size_bytes or 0)
        for photo in item.photos
    )
    title, price = field_text(item.fields, "title", "name"), field_text(item.fields, "price")
    category = field_text(item.fields, "category_name", "category")
    text = field_text(item.fields, "description")
    advert = Advert(item.customer, item.id, item.version, title, price, photos, category, text)
    adverts.show(advert, action=item.action)
