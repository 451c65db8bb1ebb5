"""Values of views: hits, totals, their shards, the text form of a hit.

A hit is stored as one line of text: `id`, optionally followed by a weight, class, event and viewer.
`id*5/b+phone!event=viewer` is five views by bots, one for the counter phone, with an event id and a
viewer. Ids cannot contain these separators or commas, so the hits of a call are joined by commas
without escaping.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from datetime import UTC, date, datetime
from enum import StrEnum
from typing import Final, NamedTuple
from zlib import crc32

import msgspec

from headrace.kernel.ids import USER_ID
from headrace.views.errors import InvalidHit, TooManyHits, TooManyIds

HITS_PER_CALL_MAX: Final = 1_000
IDS_PER_READ_MAX: Final = 1_000
VIEWS_OF_HIT_MAX: Final = 1_000_000
TOP_MAX: Final = 1_000
TOMBSTONE_S: Final = 30 * 86_400
"""How long hits of a deleted item are dropped."""
EVENT_S: Final = 86_400
"""How long an event id counts only once."""
UNIQUE_S: Final = 3 * 86_400
"""How long the viewers of a day are kept; their number stays longer."""
START: Final = "0-1"
"""Offset of a shard that was never flushed: the id of the first entry of its stream."""
FIELDS: Final = ("total", "today", "unique", "classes", "counters")
NAME: Final = (
    "1 to 128 of the characters A-Z a-z 0-9 . _ : @ ~ - (use a hash of a name that has others)"
)


class Traffic(StrEnum):
    """Class of a viewer. Each class is counted separately; `total` counts humans only."""

    HUMAN = "human"
    BOT = "bot"
    OWNER = "owner"
    STAFF = "staff"


CLASSES: Final = tuple(Traffic)
"""Ordered by their numbers in PostgreSQL."""
NUMBER: Final[dict[str, int]] = {traffic: number for number, traffic in enumerate(CLASSES)}
DELETED: Final = "deleted"
"""The class of a change that deletes an item; its number is -1."""
COUNTER_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")
COUNTERS_MAX: Final = 32
MARKS_MAX: Final = 1_000
_MARKS: Final = re.compile(
    r"([^*/!=+]+)(?:\*([0-9]{1,7}))?(?:/([hbos]))?((?:\+[a-z][a-z0-9_]{0,31}){0,32})"
)


class Hit(msgspec.Struct, frozen=True, kw_only=True):
    """One view of an item, or `n` views."""

    id: str
    n: int = 1
    viewer: str | None = None
    """Used for the estimated number of viewers per day; the name itself is not kept."""
    event: str | None = None
    """An event id counts once in 24 hours, so a call without a reply can be repeated."""
    traffic: Traffic = Traffic.HUMAN
    counters: tuple[str, ...] = ()
    """Names of `views.counters` that count one each; `n=0` counts only them."""


class Total(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """View counts of an item."""

    id: str
    total: int | None
    """Human views; None: unavailable now."""
    stale: bool = False
    """Whether the most recent hits may be missing."""
    today: int | None = None
    unique: int | None = None
    """Estimated viewers today (within 2 % for 95 of 100 items)."""
    classes: dict[str, int] | None = None
    counters: dict[str, int] | None = None
    """Of humans, by name."""


class SeriesPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Views in one hour or day. Hours and days without views are omitted."""

    start_at: datetime
    human: int = 0
    bot: int = 0
    owner: int = 0
    staff: int = 0
    counters: dict[str, int] | msgspec.UnsetType = msgspec.UNSET
    """Of humans, by name, without zeros."""


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A named span of an item's time, such as `promoted`; `to_at` None: it has not ended."""

    name: str
    from_at: datetime
    to_at: datetime | None = None


class DayViewers(msgspec.Struct, frozen=True, kw_only=True):
    """Estimated viewers on a day, or in the week or month that begins with it."""

    day: date
    viewers: int


class ExportRow(msgspec.Struct, frozen=True, kw_only=True, rename={"traffic": "class"}):
    """Views of an item, hour, day or month, and class; or a change of these views."""

    id: str
    start_at: datetime
    traffic: str
    """A class, or a counter: `phone` of humans, `phone/bot` of bots. In changes also `deleted`: the
    item was deleted, with all its views."""
    views: int


class ExportPage(msgspec.Struct, frozen=True, kw_only=True):
    """Series of some items, by id; `after`: the id to continue after, None on the last page."""

    rows: list[ExportRow]
    after: str | None


class ChangePage(msgspec.Struct, frozen=True, kw_only=True):
    """Changes of views by hour, and the position to continue at."""

    changes: list[ExportRow]
    position: str


class TopEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a top list."""

    id: str
    views: int


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A total that differs from the sum of its hours."""

    id: str
    traffic: Traffic
    total: int
    hours: int


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """Result of comparing totals with hours, and the first 100 differences."""

    entities: int
    views: int
    differences: list[Difference]


class ShardLag(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of the flush of a shard."""

    shard: int
    through: str
    """The last stream entry counted in PostgreSQL."""
    pending: int
    """Entries after it; one entry per call."""
    oldest_s: float
    """Age of the oldest pending entry."""
    flusher: str | None
    """Name of the flusher that owns the shard; None: no flusher."""


class Deleted(msgspec.Struct, frozen=True, kw_only=True):
    """A deleted item, and the end of its tombstone."""

    id: str
    total: int
    until_at: datetime


class Correction(msgspec.Struct, frozen=True):
    """A deletion, or a move between classes, with its number in the shard."""

    number: int
    id: str
    is_deleted: bool


class Reclassify(msgspec.Struct, frozen=True, kw_only=True):
    """Payload of the job that moves views of whole hours between classes."""

    id: str
    from_at: datetime
    to_at: datetime
    source: Traffic
    target: Traffic


class Count(NamedTuple):
    """Views of one item, class and hour."""

    id: str
    traffic: int
    hour: int
    """Hours since 1970."""
    views: int
    counter: str = ""
    """Name of a counter instead of the views."""


def class_name(number: int, counter: str | None) -> str:
    """The name of a class by its number, and of a counter in it."""
    if number < 0:
        return DELETED
    traffic = CLASSES[number % len(CLASSES)]
    if counter is None:
        return traffic.value
    return counter if traffic == Traffic.HUMAN else f"{counter}/{traffic}"


def shard_of(entity: str, shards: int) -> int:
    """The shard of an item: CRC-32 of its id modulo `shards`."""
    return crc32(entity.encode()) % shards


def require_traffic(name: object, *, counts: bool = True) -> Traffic:
    """Validate the name of a class; `counts`: it belongs to a hit. Raises: InvalidHit."""
    if not isinstance(name, str) or name not in NUMBER:
        raise InvalidHit("class", name, f"one of {', '.join(CLASSES)}", counts=counts)
    return Traffic(name)


def require_mark(name: object) -> None:
    """Validate the name of a mark. Raises: InvalidHit."""
    if not isinstance(name, str) or COUNTER_NAME.fullmatch(name) is None:
        raise InvalidHit("mark", name, "up to 32 of a-z 0-9 _, first a letter", counts=False)


def require_ids(ids: Iterable[str]) -> list[str]:
    """Validate ids to read or delete. Raises: InvalidHit, TooManyIds."""
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        raise InvalidHit("ids", ids, "a list of ids", counts=False)
    found = list(ids)
    if len(found) > IDS_PER_READ_MAX:
        raise TooManyIds(len(found), IDS_PER_READ_MAX)
    for entity in found:
        if not isinstance(entity, str) or USER_ID.fullmatch(entity) is None:
            raise InvalidHit("id", entity, NAME, counts=False)
    return found


def require_hits(
    hits: Iterable[Hit | str], counters: Collection[str] = ()
) -> list[tuple[str, str]]:
    """Validate hits; return item and text line of each. Raises: InvalidHit, TooManyHits."""
    if isinstance(hits, str | bytes) or not isinstance(hits, Iterable):
        raise InvalidHit("hits", hits, "a list of hits")
    found = list(hits)
    if len(found) > HITS_PER_CALL_MAX:
        raise TooManyHits(len(found), HITS_PER_CALL_MAX)
    matches = USER_ID.fullmatch
    lines: list[tuple[str, str]] = []
    for hit in found:
        if isinstance(hit, str):
            if matches(hit) is None:
                raise InvalidHit("id", hit, NAME)
            lines.append((hit, hit))
        elif isinstance(hit, Hit):
            lines.append((hit.id, line_of(hit, counters)))
        else:
            raise InvalidHit("hit", hit, "a Hit or an id")
    return lines


def line_of(hit: Hit, counters: Collection[str] = ()) -> str:
    """The text line of a hit with some of `counters`. Raises: InvalidHit."""
    names: tuple[tuple[str, object], ...] = (
        ("id", hit.id),
        ("viewer", hit.viewer),
        ("event", hit.event),
    )
    for name, value in names:
        if value is None and name != "id":
            continue
        if not isinstance(value, str) or USER_ID.fullmatch(value) is None:
            raise InvalidHit(name, value, NAME)
    for name in require_counters(hit.counters):
        if name not in counters:
            raise InvalidHit("counter", name, "a name of the setting views.counters")
    least = 0 if hit.counters else 1
    if type(hit.n) is not int or not least <= hit.n <= VIEWS_OF_HIT_MAX:
        raise InvalidHit("n", hit.n, f"a whole number from {least} to {VIEWS_OF_HIT_MAX}")
    traffic = require_traffic(hit.traffic)
    line = hit.id if hit.n == 1 else f"{hit.id}*{hit.n}"
    if traffic != Traffic.HUMAN:
        line += f"/{traffic[0]}"
    line += "".join([f"+{name}" for name in hit.counters])
    if hit.event is not None:
        line += f"!{hit.event}"
    return line if hit.viewer is None else f"{line}={hit.viewer}"


_BY_LETTER: Final = {traffic[0]: number for number, traffic in enumerate(CLASSES)}


def parse_line(line: str) -> tuple[str, int, int, list[str]] | None:
    """Item, class number, views and counters of a stream line; None: not a valid hit."""
    match = _MARKS.fullmatch(line)
    if match is None or USER_ID.fullmatch(match[1]) is None:
        return None
    views, counters = int(match[2] or 1), match[4].split("+")[1:]
    if views > VIEWS_OF_HIT_MAX:
        return None
    return match[1], _BY_LETTER[match[3] or "h"], views, counters


def require_counters(names: object) -> tuple[str, ...]:
    """Validate the form of names of counters. Raises: InvalidHit."""
    if not isinstance(names, tuple | list) or len(names) > COUNTERS_MAX:
        raise InvalidHit("counters", names, f"up to {COUNTERS_MAX} names")
    if len(set(map(str, names))) < len(names):
        raise InvalidHit("counters", names, "each name once")
    return tuple(names)


def id_key(entry_id: str) -> tuple[int, int]:
    """The id of a stream entry as comparable numbers."""
    ms, _, number = entry_id.partition("-")
    return int(ms), int(number)


def hour_at(hour: int) -> datetime:
    """The beginning of an hour counted since 1970."""
    return datetime.fromtimestamp(hour * 3600, UTC)
