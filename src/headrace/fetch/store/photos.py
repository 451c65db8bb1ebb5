"""Photos: what runs need, which contents are stored, what was decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from headrace.engines.postgres import Row, Runner
from headrace.fetch.model import ItemPhoto
from headrace.fetch.store.sql import SQL


@dataclass(frozen=True, slots=True)
class NewPhoto:
    """A content whose bytes are stored."""

    sha256: str
    key: str
    format: str
    size_bytes: int
    width: int
    height: int


_NO_PHOTO: Final = NewPhoto("", "", "", 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Decision:
    """What became of one photo of one run."""

    run: int
    customer: str
    item: str
    url: str
    outcome: str
    photo: NewPhoto | None = None
    etag: str | None = None
    last_modified: str | None = None
    touches_link: bool = True
    """False where the outcome was taken over from the link itself."""


async def photo_states(runner: Runner, keys: Sequence[tuple[int, str, str, str]]) -> list[Row]:
    """For each (run, customer, item, url), in order: is it needed, decided, and what is its link."""
    rows = await runner.all(
        SQL.photo_states,
        runs=[key[0] for key in keys],
        customers=[key[1] for key in keys],
        items=[key[2] for key in keys],
        urls=[key[3] for key in keys],
    )
    return sorted(rows, key=lambda row: int(row["position"]))


async def known_photos(runner: Runner, hashes: list[str]) -> set[str]:
    """Which of these contents are recorded, hence stored."""
    return {row["sha256"] for row in await runner.all(SQL.known_photos, hashes=hashes)}


async def decide(runner: Runner, decisions: Sequence[Decision]) -> None:
    """Record contents, write outcomes to links and needs, count them; a need that has one keeps it."""
    photos = [d.photo or _NO_PHOTO for d in decisions]
    await runner.run(
        SQL.decide,
        runs=[d.run for d in decisions],
        customers=[d.customer for d in decisions],
        items=[d.item for d in decisions],
        urls=[d.url for d in decisions],
        outcomes=[d.outcome for d in decisions],
        etags=[d.etag for d in decisions],
        last_modifieds=[d.last_modified for d in decisions],
        touch_links=[d.touches_link for d in decisions],
        hashes=[p.sha256 or None for p in photos],
        keys=[p.key for p in photos],
        formats=[p.format for p in photos],
        sizes_bytes=[p.size_bytes for p in photos],
        widths=[p.width for p in photos],
        heights=[p.height for p in photos],
    )


async def item_photos(
    runner: Runner, keys: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], list[ItemPhoto]]:
    """The photos of each (customer, item), in the order of the item's list."""
    found: dict[tuple[str, str], list[ItemPhoto]] = {key: [] for key in keys}
    rows = await runner.all(
        SQL.photos_of_items, customers=[k[0] for k in keys], items=[k[1] for k in keys]
    )
    for row in rows:
        values = {name: row[name] for name in ItemPhoto.__struct_fields__}
        found[row["customer"], row["item"]].append(ItemPhoto(**values))
    return found
