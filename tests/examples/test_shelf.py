"""The sellers' catalogues, version after version.

What the demo expects of each follows from the one before.
"""

from __future__ import annotations

import re

import pytest
from examples.bazaar.catalogues import Shelf
from examples.bazaar.shops import shops


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4))
def test_in_forty_versions_no_photo_comes_back_and_one_item_changes(tmp_path, number):
    shop = shops(10)[number]
    shelf = Shelf(tmp_path, port=80)
    shelf.write_present(shop)
    seen: set[str] = set()
    categories: dict[str, str] = {}
    for _ in range(40):
        before = {ware.id: ware for ware in shelf.wares(shop)}
        held = {link for ware in before.values() for link in shelf.links(shop, ware)}
        seen |= held
        text = shelf.write_next(shop).read_text()
        after = shelf.wares(shop)
        links = {link for ware in after for link in shelf.links(shop, ware)}
        assert not (links - held) & seen
        assert sum(ware.id in before and ware != before[ware.id] for ware in after) == 1
        for key, name in re.findall(r'<category id="(\d+)">([^<]+)<', text):
            assert categories.setdefault(name, key) == key
