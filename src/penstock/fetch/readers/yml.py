"""Yandex YML: `yml_catalog/shop/offers/offer`, read by expat in blocks, one offer in memory.

Taken: offer's `id` and `available`; name (or typePrefix, vendor and model), price, categoryId (with the
name from `categories`), url, every `picture` in order, each `param` under `param:<name>`, and any other
simple child under its own name. expat stops entity bombs by itself but parses 200,000 levels of nesting
(measured on 2.5.0), so depth and text are bounded here. The line `<!DOCTYPE yml_catalog SYSTEM "shops.dtd">`,
which the format long asked for, is let pass and never loaded; one that declares anything is refused.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Final
from xml.parsers import expat

from penstock.fetch.model import FIELD_BYTES_MAX, FIELDS_BYTES_MAX, ROWS_MAX
from penstock.fetch.readers.row import RawRow, Truncated, broken
from penstock.kernel.errors import FieldProblem

DEPTH_MAX: Final = 64
CATEGORIES_MAX: Final = 200_000
BLOCK_BYTES: Final = 64 * 1024
_AT_END: Final = frozenset(
    expat.errors.codes[text]
    for text in (
        expat.errors.XML_ERROR_NO_ELEMENTS,
        expat.errors.XML_ERROR_UNCLOSED_TOKEN,
        expat.errors.XML_ERROR_PARTIAL_CHAR,
        expat.errors.XML_ERROR_UNCLOSED_CDATA_SECTION,
    )
)
_NAMES: Final = {"categoryId": "category"}


def refuse_declarations(
    _name: str, _system_id: str | None, _public_id: str | None, has_internal_subset: int
) -> None:
    """A DOCTYPE may name its format, as YML's does, but declare nothing. Raises: CatalogueBroken."""
    if has_internal_subset:
        raise broken(
            "dtd_forbidden", "the XML declares entities or a grammar in its DOCTYPE: remove it"
        )


def refuse_entity(name: str, _is_parameter: int) -> None:
    """Beside a DOCTYPE expat would drop an unknown entity silently. Raises: CatalogueBroken."""
    raise broken(
        "entity_unknown", f"the entity &{name[:40]}; is not known: write the character itself"
    )


def read_offers(stream: io.BufferedReader) -> Iterator[RawRow]:
    """Every offer, in order. Raises: CatalogueBroken, Truncated, CatalogueTooLarge."""
    offers = _Offers()
    with stream:
        while block := stream.read(BLOCK_BYTES):
            offers.feed(block)
            yield from offers.take()
        offers.finish()
        yield from offers.take()


class _Offers:
    """The handlers of one document and the offers finished since they were last taken."""

    def __init__(self) -> None:
        self._parser = parser = expat.ParserCreate()
        parser.buffer_text = True
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._text
        parser.StartDoctypeDeclHandler = refuse_declarations
        parser.SkippedEntityHandler = refuse_entity
        self._path: list[str] = []
        self._offer: RawRow | None = None
        self._offer_bytes = 0
        self._param = ""
        self._pieces: list[str] = []
        self._piece_characters = 0
        self._categories: dict[str, str] = {}
        self._category = ""
        self._finished: list[RawRow] = []
        self._count = 0

    def feed(self, block: bytes) -> None:
        """Parse one block."""
        try:
            self._parser.Parse(block, False)
        except expat.ExpatError as error:
            raise broken(
                "malformed_xml",
                f"the XML is not well-formed ({expat.ErrorString(error.code)})",
                error.lineno,
            ) from None
        except (ValueError, LookupError) as error:
            raise broken("invalid_encoding", f"the encoding cannot be read: {error}") from None

    def finish(self) -> None:
        """The file ended. Raises: Truncated."""
        try:
            self._parser.Parse(b"", True)
        except expat.ExpatError as error:
            if error.code in _AT_END:
                place = "/".join(self._path) or "the root"
                raise Truncated(f"line {error.lineno}: the XML ends inside {place}") from None
            raise broken(
                "malformed_xml", "the XML is not well-formed at its end", error.lineno
            ) from None

    def take(self) -> list[RawRow]:
        """The offers finished since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self._path.append(name)
        line = self._parser.CurrentLineNumber
        if len(self._path) > DEPTH_MAX:
            raise broken("too_deep", f"elements are nested over {DEPTH_MAX} levels deep", line)
        if any(len(value) > FIELD_BYTES_MAX for value in attributes.values()):
            raise broken("field_too_large", f"an attribute of <{name[:40]}> is over 64 KiB", line)
        self._pieces, self._piece_characters = [], 0
        if name == "offer" and self._path[-2:-1] == ["offers"]:
            self._count += 1
            if self._count > ROWS_MAX:
                raise broken(
                    "too_many_rows", f"more than {ROWS_MAX:,} offers: split the file", line
                )
            self._offer = RawRow(self._count, line)
            self._offer_bytes = 0
            self._offer.values.update(attributes)
        elif name == "param":
            self._param = attributes.get("name", "")[:100]
        elif name == "category":
            self._category = attributes.get("id", "")

    def _text(self, data: str) -> None:
        self._piece_characters += len(data)
        if self._piece_characters > FIELD_BYTES_MAX:
            where = self._path[-1] if self._path else "?"
            raise broken(
                "field_too_large",
                f"the text of <{where[:40]}> is over 64 KiB",
                self._parser.CurrentLineNumber,
            )
        self._pieces.append(data)

    def _end(self, name: str) -> None:
        self._path.pop()
        text = "".join(self._pieces).strip()
        self._pieces, self._piece_characters = [], 0
        if self._offer is None:
            if name == "category" and len(self._categories) < CATEGORIES_MAX:
                self._categories[self._category] = text
        elif name == "offer" and self._path[-1:] == ["offers"]:
            self._finished.append(self._finish_offer(self._offer))
            self._offer = None
        elif self._path[-1:] == ["offer"] and text:
            self._add(self._offer, name, text)

    def _add(self, offer: RawRow, name: str, text: str) -> None:
        """Keep one child of an offer, whole or not at all."""
        self._offer_bytes += len(text)
        if self._offer_bytes > FIELDS_BYTES_MAX:
            offer.fault = FieldProblem(
                name, "row_too_large", f"the offer is over {FIELDS_BYTES_MAX} bytes"
            )
        elif name == "picture":
            offer.photos.append(text)
        else:
            key = f"param:{self._param}" if name == "param" else _NAMES.get(name, name)
            offer.values.setdefault(key, text)

    def _finish_offer(self, offer: RawRow) -> RawRow:
        values = offer.values
        if "name" not in values:
            parts = [values[k] for k in ("typePrefix", "vendor", "model") if k in values]
            if parts:
                values["name"] = " ".join(parts)
        category = self._categories.get(values.get("category", ""))
        if category:
            values["category_name"] = category
        return offer
