"""The sellers' catalogue files: CSV for half of the shops, Yandex YML for the others.

A shop's present wares are kept beside its file, so that the next version follows from the last
one also when the demo is started again. Both are written whole and then renamed.
"""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

from examples.bazaar.scenes import CATEGORIES
from examples.bazaar.shops import Shop, Ware, first_wares, next_wares


class Shelf:
    """The folder with the catalogue files, and what each shop sells at present."""

    def __init__(self, folder: Path, *, port: int) -> None:
        self._folder = folder
        self._port = port
        folder.mkdir(parents=True, exist_ok=True)

    def wares(self, shop: Shop) -> list[Ware]:
        """What the shop sells now: as last written, else its first wares."""
        try:
            rows = json.loads(self._notes(shop).read_text(encoding="utf-8"))["wares"]
        except FileNotFoundError:
            return first_wares(shop)
        return [Ware(**{**row, "photos": tuple(row["photos"])}) for row in rows]

    def write_present(self, shop: Shop) -> Path:
        """Write the catalogue of what the shop sells now; return its file."""
        return self._write(shop, self.wares(shop), self._version(shop))

    def write_next(self, shop: Shop, *, has_new_photo: bool = False) -> Path:
        """Write the seller's next version, one item changed and one gone; return its file.

        With `has_new_photo` the changed item has one for certain, else on odd versions.
        """
        version = self._version(shop) + 1
        if has_new_photo and version % 2 == 0:
            version += 1
        return self._write(shop, next_wares(self.wares(shop), shop=shop, version=version), version)

    def links(self, shop: Shop, ware: Ware) -> list[str]:
        """The photo links of an item as written in the catalogue."""
        return [f"{self._origin(shop)}{path}" for path in ware.photos]

    def _write(self, shop: Shop, wares: list[Ware], version: int) -> Path:
        file = self._folder / f"{shop.name}.{shop.format}"
        text = self._csv(shop, wares) if shop.format == "csv" else self._yml(shop, wares)
        _replace(file, text)
        rows = [asdict(ware) for ware in wares]
        _replace(self._notes(shop), json.dumps({"version": version, "wares": rows}))
        return file

    def _version(self, shop: Shop) -> int:
        try:
            return int(json.loads(self._notes(shop).read_text(encoding="utf-8"))["version"])
        except FileNotFoundError:
            return 0

    def _notes(self, shop: Shop) -> Path:
        return self._folder / f"{shop.name}.json"

    def _origin(self, shop: Shop) -> str:
        return f"http://{shop.address}:{self._port}"

    def _csv(self, shop: Shop, wares: list[Ware]) -> str:
        out = io.StringIO()
        rows = csv.writer(out)
        rows.writerow(["id", "name", "price", "category", "description", "url", "photos"])
        for ware in wares:
            page = f"{self._origin(shop)}/items/{ware.id}"
            photos = "|".join(self.links(shop, ware))
            about = [ware.id, ware.title, ware.price, ware.category, ware.text]
            rows.writerow([*about, page, photos])
        return out.getvalue()

    def _yml(self, shop: Shop, wares: list[Ware]) -> str:
        # A shop's categories keep their numbers: an item whose number changes is another row.
        number = {name: index + 1 for index, name in enumerate(CATEGORIES)}
        lines = [
            '<?xml version="1.0" encoding="UTF-8"?>',
            '<yml_catalog date="2026-01-01T00:00:00+00:00">',
            f"<shop><name>{escape(shop.title)}</name><company>{escape(shop.title)}</company>",
            f"<url>{self._origin(shop)}/</url>",
            '<currencies><currency id="EUR" rate="1"/></currencies>',
            "<categories>",
            *(f'<category id="{number[name]}">{escape(name)}</category>' for name in CATEGORIES),
            "</categories><offers>",
        ]
        for ware in wares:
            lines += [
                f'<offer id={quoteattr(ware.id)} available="true">',
                f"<name>{escape(ware.title)}</name><price>{ware.price}</price>",
                f"<currencyId>EUR</currencyId><categoryId>{number[ware.category]}</categoryId>",
                f"<description>{escape(ware.text)}</description>",
                f"<url>{self._origin(shop)}/items/{escape(ware.id)}</url>",
                *(f"<picture>{escape(link)}</picture>" for link in self.links(shop, ware)),
                "</offer>",
            ]
        return "\n".join([*lines, "</offers></shop></yml_catalog>", ""])


def _replace(file: Path, text: str) -> None:
    draft = file.with_name(file.name + ".new")
    draft.write_text(text, encoding="utf-8", newline="")
    draft.replace(file)
