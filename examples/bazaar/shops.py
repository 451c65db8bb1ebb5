"""The sellers of the demo: who they are, how their hosts behave, what they sell.

Fifty shops, each on a loopback address of its own and all on one port. Most hosts are fast; a few
are slow, hang now and then or have broken links. How a photo link behaves is written in the first
part of its path, so that the host needs no table and a reader of the log sees it. Everything is
computed from the shop's number and the item's name: two runs of the demo see the same world.
"""

from __future__ import annotations

import dataclasses
import random
import re
from dataclasses import dataclass
from typing import Final, Literal

from examples.bazaar.scenes import CATEGORIES, LOOKS, words_of

Manner = Literal["fast", "slow", "hanging", "broken"]
SHOPS_COUNT: Final = 50
ITEMS_PER_SHOP: Final = 12
ITEMS_MIN: Final = 8
STOCK_PHOTOS: Final = 6
_BROKEN_KINDS: Final = ("ok", "gone", "page", "flaky", "moved", "trap")
_UNRULY: Final[dict[int, Manner]] = {
    3: "hanging",
    8: "slow",
    13: "broken",
    23: "hanging",
    33: "broken",
}
"""Numbers of the shops whose hosts are not fast."""
_SELLERS: Final = """
Sofa Circus, Leipzig|Velo Ada, Gent|Blende Acht, Wien|Sleepy Moss, Porto|Six String Sue, Leeds
Lumen Loft, Lyon|Paper Moon, Turku|Motor Mila, Brno|The Slow Barn, Galway|Spoke Folk, Utrecht
Silver Halide, Gdansk|Fern Bureau, Aarhus|Luthier Lou, Cremona|Broken Lamp Bob, Ulm|Dust Jacket, Ayr
Garage Nord, Kiel|Chair Affair, Malmo|Chain Reaction, Bern|F-Stop Fran, Sligo|Kaktus Kai, Jena
Fret Nation, Bilbao|Glow & Co, Tartu|Chapter House, York|Hang Tight Motors, Graz|Oak & Ember, Oulu
Pedal Pals, Lille|Shutter Bay, Split|Leaf Letter, Delft|Chord Yard, Cork|Warm Watt, Turin
Margin Notes, Lund|Coast Cars, Faro|Velvet Hour, Prague|Dead Link Dan, Essen|Analog Attic, Riga
Green Thumb Gus, Namur|Riff Raff, Hull|Shade Trade, Brest|Page Turner, Tours|Second Gear, Linz
Walnut Wharf, Bremen|Tandem Tom, Breda|Pinhole Pia, Como|Root Cause, Vigo|Pick & Choose, Kaunas
Night Switch, Zadar|Foxed Corner, Derby|Rosso Garage, Parma|Hygge Heap, Odense|Wheel Meet, Dijon
"""
SELLERS: Final = tuple(re.split(r"[|\n]", _SELLERS.strip()))
_NOTES: Final = (
    "hardly used",
    "one careful owner",
    "with receipt",
    "restored by hand",
    "small scratch",
    "from a smoke-free home",
    "from 1974",
    "moving house",
    "collector's piece",
    "pick-up only",
)
_PRICES: Final = {
    "furniture": 240,
    "bikes": 310,
    "cameras": 180,
    "plants": 24,
    "guitars": 270,
    "lamps": 65,
    "books": 18,
    "cars": 4900,
}


@dataclass(frozen=True, slots=True)
class Shop:
    """One seller: a customer of `fetch`, with an HTTP host of its own."""

    number: int
    name: str
    address: str
    manner: Manner
    format: Literal["csv", "yml"]
    title: str
    town: str

    @property
    def main_category(self) -> str:
        """What most of its items are."""
        return CATEGORIES[self.number % len(CATEGORIES)]


@dataclass(frozen=True, slots=True)
class Ware:
    """One row of a catalogue. `photos` are paths on the shop's host, in the seller's order."""

    id: str
    title: str
    price: int
    category: str
    text: str
    photos: tuple[str, ...]


def shops(count: int = SHOPS_COUNT) -> list[Shop]:
    """The sellers; five of fifty are not fast: slow, hanging or broken."""
    found = []
    for number, seller in enumerate(SELLERS[:count]):
        title, _, town = seller.partition(", ")
        name = re.sub(r"[^a-z]+", "-", title.lower()).strip("-")
        kind: Literal["csv", "yml"] = "yml" if number % 2 else "csv"
        manner = _UNRULY.get(number, "fast")
        found.append(Shop(number, name, f"127.0.0.{10 + number}", manner, kind, title, town))
    return found


def shop_named(name: str) -> Shop | None:
    """The seller of that name, if it is one of the demo's."""
    return next((shop for shop in shops() if shop.name == name), None)


def first_wares(shop: Shop) -> list[Ware]:
    """What the shop sells at the beginning."""
    return [new_ware(shop, index) for index in range(ITEMS_PER_SHOP)]


def new_ware(shop: Shop, index: int) -> Ware:
    """Item number `index` of the shop, two photos of its own.

    Of the first ones every fourth has the maker's too.
    """
    dice = random.Random(f"{shop.name} {index}")
    category = shop.main_category if index % 3 else dice.choice(CATEGORIES)
    look = (shop.number * 5 + index * 7) % LOOKS
    color, thing = words_of(category, look)
    note = dice.choice(_NOTES)
    item = f"{shop.name}-{index + 1:04}"
    stem = f"{category}-{look:02}-{item}"
    photos = [f"/{_kind(shop, index)}/{stem}-a.jpg", f"/{_calm(shop)}/{stem}-b.jpg"]
    # Not for later items: a removed item may have had the link, and then it is not requested again.
    if index % 4 == 0 and index < ITEMS_PER_SHOP:
        photos.append(f"/ok/{shop.name}/stock-{(shop.number + index) % STOCK_PHOTOS}.png")
    price = max(5, round(_PRICES[category] * dice.uniform(0.5, 1.8)))
    title = f"{color.capitalize()} {thing}, {note}"
    text = (
        f"A {thing} in {color}, {note}. To be seen in {shop.town} after six, or sent at the"
        f" buyer's cost. Questions are answered the same day. {shop.title}."
    )
    return Ware(item, title, price, category, text, tuple(photos))


def next_wares(wares: list[Ware], *, shop: Shop, version: int) -> list[Ware]:
    """The seller's next catalogue: first item changed, last one gone, one new when few remain.

    On odd versions the changed item gets a new photo: the one download to be seen.
    """
    first = wares[0]
    photos = first.photos
    if version % 2:
        stem = first.photos[0].rpartition("/")[2].removesuffix("-a.jpg")
        photos = (*photos[:2], f"/ok/{stem}-v{version}.jpg")
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
