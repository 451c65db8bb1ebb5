"""A customer with two items does not wait for the results of one with thousands."""

from __future__ import annotations

import pytest
from tests.kit.waiting import wait_true

pytestmark = pytest.mark.slow
HEAD = "id,name,price,photos\n"
ITEMS = 3_000


async def test_the_small_get_their_turn_beside_the_large(shop, process):
    await shop.fetch.customers.set("small", starts_max=600, window_s=60, connections=8)
    told: list[str] = []

    async def publish(item):
        told.append(item.customer)

    await process(publish).fetch.declare_consumers()
    await shop.run(HEAD + "".join(f"big{n},Big,5,\n" for n in range(ITEMS)))
    file = shop.folder / "small.csv"
    file.write_text(HEAD + "a,A,5,\nb,B,5,\n")
    await shop.fetch.run_catalogue(file, "small")
    async with process(publish):
        await wait_true(lambda: told.count("small") == 2, what="both are delivered")
    [first, second] = [place for place, customer in enumerate(told) if customer == "small"]
    assert second < ITEMS / 3, (first, second)
