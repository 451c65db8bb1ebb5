"""The demo's readers accept correct totals and detect a single extra view."""

from __future__ import annotations

import asyncio

from examples.bazaar.adverts import Advert
from examples.bazaar.readers import Readers
from tests.kit.waiting import wait_true
from views_surfaces import client_of

ADVERTS = [Advert("shop", f"item{n}", 1, "Sofa", "10", ()) for n in range(6)]


async def read(engines, views, until):
    """Let readers read until `until` holds. Return what they found."""
    async with client_of(engines, views) as client:
        token = client.headers["authorization"].removeprefix("Bearer ")
        readers = Readers(str(client.base_url).rstrip("/"), token)
        readers.show(ADVERTS)
        reading = asyncio.create_task(readers.run())
        await wait_true(lambda: until(readers.viewed) or reading.done(), what="they read")
        assert not reading.done()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        return readers.viewed


async def test_each_total_is_one_more_than_the_last(engines, views):
    viewed = await read(engines, views, lambda seen: seen.views > 40 and seen.lists > 5)
    assert viewed.faults == []
    assert viewed.unchanged == viewed.lists
    counted = await views.totals([f"shop:item{n}" for n in range(6)])
    assert viewed.views <= sum(one.total for one in counted) <= viewed.views + 4


async def test_a_view_too_many_is_seen(engines, views):
    wrong = asyncio.Event()

    def until(seen):
        if seen.views > 20 and not wrong.is_set():
            wrong.set()
            return False
        return seen.faults_count > 0

    async def meddle():
        await wrong.wait()
        await views.hits([f"shop:item{n}" for n in range(6)])

    meddling = asyncio.create_task(meddle())
    viewed = await read(engines, views, until)
    await meddling
    assert "expected" in viewed.faults[0]
