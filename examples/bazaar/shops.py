"""The sellers of the demo: who they are, how their hosts behave, what they sell.

Fifty shops, each on a loopback address of its own and all on one port. Most hosts are fast; a few
are slow, hang now and then or have broken links. How a photo link behaves is written in the first
part of its path, so that the host needs no table and a reader of the log sees it. Everything is
computed from the shop's number and the item's name: two runs of the demo see the same world.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final, Literal

Manner = Literal["fast", "slow", "hanging", "broken"]
SHOPS_COUNT: Final = 50
ITEMS_PER_SHOP: Final = 12
ITEMS_MIN: Final = 8
STOCK_PHOTOS: Final = 6
_BROKEN_KINDS: Final = ("ok", "gone", "page", "flaky", "moved", "trap")
_WARES: Final = (
    ("Bicycle", "bikes"),
    ("Sofa", "furniture"),
    ("Winter tyres", "car-parts"),
    ("Camera", "photo"),
    ("Guitar", "music"),
    ("Pram", "children"),
    ("Drill", "tools"),
    ("Skis", "sport"),
)
CATEGORIES: Final = tuple(category for _, category in _WARES)


@dataclass(frozen=True, slots=True)
class Shop:
    """One seller: a customer of `fetch`, with an HTTP host of its own."""

    number: int
    name: str
    address: str
    manner: Manner
    format: Literal["csv", "yml"]


@dataclass(frozen=True, slots=True)
class Ware:
    """One row of a catalogue. `photos` are paths on the shop's host, in the seller's order."""

    id: str
    title: str
    price: int
    category: str
    photos: tuple[str, ...]


def shops(count: int = SHOPS_COUNT) -> list[Shop]:
    """The sellers: of every ten, one is not fast (slow, hanging and broken in turn)."""
    unruly: tuple[Manner, ...] = ("slow", "hanging", "broken", "slow", "broken")
    found = []
    for number in range(count):
        manner: Manner = unruly[number // 10 % 5] if number % 10 == 4 else "fast"
        name = f"shop-{number + 1:02}"
        kind: Literal["csv", "yml"] = "yml" if number % 2 else "csv"
        found.append(Shop(number, name, f"127.0.0.{10 + number}", manner, kind))
    return found


def first_wares(shop: Shop) -> list[Ware]:
    """What the shop sells at the beginning."""
    return [new_ware(shop, index) for index in range(ITEMS_PER_SHOP)]


def new_ware(shop: Shop, index: int) -> Ware:
    """Item number `index` of the shop, two photos of its own.

    Of the first ones every fourth has the maker's too.
    """
    title, category = _WARES[(shop.number + index) % len(_WARES)]
    item = f"{shop.name}-{index + 1:04}"
    photos = [f"/{_kind(shop, index)}/{item}-a.jpg", f"/{_calm(shop)}/{item}-b.png"]
    # Not for later items: a removed item may have had the link, and then it is not requested again.
    if index % 4 == 0 and index < ITEMS_PER_SHOP:
        photos.append(f"/ok/{shop.name}/stock-{(shop.number + index) % STOCK_PHOTOS}.jpg")
    price = 100 + 37 * index + 11 * shop.number
    return Ware(item, f"{title} no. {index + 1}", price, category, tuple(photos))


def next_wares(wares: list[Ware], *, shop: Shop, version: int) -> list[Ware]:
    """The seller's next catalogue: first item changed, last one gone, one new when few remain.

    On odd versions the changed item gets a new photo: the one download to be seen.
    """
    first = wares[0]
    photos = first.photos
    if version % 2:
        photos = (*photos[:2], f"/ok/{first.id}-v{version}.jpg")
    changed = dataclasses.replace(first, price=first.price + version, photos=photos)
    kept = [changed, *wares[1:-1]]
    if len(kept) < ITEMS_MIN:
        kept.append(new_ware(shop, ITEMS_PER_SHOP + version))
    return kept


def _kind(shop: Shop, index: int) -> str:
    if shop.manner == "broken":
        return _BROKEN_KINDS[index % len(_BROKEN_KINDS)]
    if shop.manner == "hanging":
        return "hang" if index % 5 == 0 else "ok"
    return _calm(shop)


def _calm(shop: Shop) -> str:
    return "slow" if shop.manner == "slow" else "ok"
