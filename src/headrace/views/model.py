"""Views as values: what is counted, in which shard, how hits are written down. No I/O.

A hit is one line of text, `id`, with what it has besides: `id*5/b!event=viewer` is five views by bots under an event
id, by a viewer. None of the marks may stand in an id, so hits of a call are joined by commas as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, date, datetime
from enum import StrEnum
from typing import Final, NamedTuple
from zlib import crc32

import msgspec

from headrace.kernel.ids import USER_ID
from headrace.views.bots import is_bot
from headrace.views.errors import InvalidHit, TooManyHits, TooManyIds

HITS_PER_CALL_MAX: Final = 1_000
IDS_PER_READ_MAX: Final = 1_000
VIEWS_OF_HIT_MAX: Final = 1_000_000
TOP_MAX: Final = 1_000
TOMBSTONE_S: Final = 30 * 86_400
"""So long nothing is counted for an entity that was deleted."""
EVENT_S: Final = 86_400
"""So long an event id counts once."""
UNIQUE_S: Final = 3 * 86_400
"""So long the viewers of a day are kept apart; then their number stays."""
START: Final = "0-1"
"""The offset of a shard that was never flushed: the id of the entry its stream begins with."""
FIELDS: Final = ("total", "today", "unique", "classes")
NAME: Final = (
    "1 to 128 of the characters A-Z a-z 0-9 . _ : @ ~ - (what has others: give a hash of it)"
)


class Traffic(StrEnum):
    """Who looked; each class is counted apart, and `total` is the people."""

    HUMAN = "human"
    BOT = "bot"
    OWNER = "owner"
    STAFF = "staff"


CLASSES: Final = tuple(Traffic)
"""In the order of their numbers in PostgreSQL."""
NUMBER: Final[dict[str, int]] = {traffic: number for number, traffic in enumerate(CLASSES)}
_MARKS: Final = re.compile(r"([^*/!=]+)(?:\*([0-9]{1,7}))?(?:/([hbos]))?")


class Hit(msgspec.Struct, frozen=True, kw_only=True):
    """One sight of an entity, or `n` of them."""

    id: str
    n: int = 1
    viewer: str | None = None
    """Who, for the number of viewers a day; only an estimate of how many is kept."""
    event: str | None = None
    """The same id within 24 hours counts once, so that a call whose answer was lost can be repeated."""
    traffic: Traffic = Traffic.HUMAN


class Total(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of an entity's views."""

    id: str
    total: int | None
    """Views by people; None where it cannot be told now."""
    stale: bool = False
    """Whether hits of the last moments may be missing in it."""
    today: int | None = None
    unique: int | None = None
    """About how many viewers today (within 2 % for 95 of 100)."""
    classes: dict[str, int] | None = None


class SeriesPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Views that began in one hour or day; such without any are left out."""

    start_at: datetime
    human: int = 0
    bot: int = 0
    owner: int = 0
    staff: int = 0


class DayViewers(msgspec.Struct, frozen=True, kw_only=True):
    """About how many viewers an entity had on one day (within 2 % for 95 of 100)."""

    day: date
    viewers: int


class TopEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a top list."""

    id: str
    views: int


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A total that is not the sum of its hours."""

    id: str
    traffic: Traffic
    total: int
    hours: int


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """The proof, or what contradicts it (the first 100)."""

    entities: int
    views: int
    differences: list[Difference]


class ShardLag(msgspec.Struct, frozen=True, kw_only=True):
    """How far the flush of a shard is."""

    shard: int
    through: str
    """The last entry of its stream that PostgreSQL has."""
    pending: int
    """Entries after that; a call is one entry."""
    oldest_s: float
    """Age of the oldest of them."""
    flusher: str | None
    """Who carries it; None: nobody does."""


class Deleted(msgspec.Struct, frozen=True, kw_only=True):
    """What was removed, and until when nothing is counted."""

    id: str
    total: int
    until_at: datetime


class Reclassify(msgspec.Struct, frozen=True, kw_only=True):
    """Move the views of an entity in whole hours from one class to another; the payload of a job."""

    id: str
    from_at: datetime
    to_at: datetime
    source: Traffic
    target: Traffic


class Count(NamedTuple):
    """Views of one entity, class and hour."""

    id: str
    traffic: int
    hour: int
    """Hours since 1970."""
    views: int


def shard_of(entity: str, shards: int) -> int:
    """The shard that counts an entity: CRC-32 of its id, as every language has it."""
    return crc32(entity.encode()) % shards


def traffic_of_user_agent(user_agent: str | None) -> Traffic:
    """`bot` for programs by the rules of `bots.toml` and for no user agent, else `human`: where a caller gives no class."""
    if not user_agent or is_bot(user_agent):
        return Traffic.BOT
    return Traffic.HUMAN


def require_traffic(name: object, *, counts: bool = True) -> Traffic:
    """The class of that name; `counts`: of a hit. Raises: InvalidHit."""
    if not isinstance(name, str) or name not in NUMBER:
        raise InvalidHit("class", name, f"one of {', '.join(CLASSES)}", counts=counts)
    return Traffic(name)


def require_ids(ids: Iterable[str]) -> list[str]:
    """The ids to read or remove, if each is one and they are not too many. Raises: InvalidHit, TooManyIds."""
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        raise InvalidHit("ids", ids, "a list of ids", counts=False)
    found = list(ids)
    if len(found) > IDS_PER_READ_MAX:
        raise TooManyIds(len(found), IDS_PER_READ_MAX)
    for entity in found:
        if not isinstance(entity, str) or USER_ID.fullmatch(entity) is None:
            raise InvalidHit("id", entity, NAME, counts=False)
    return found


def require_hits(hits: Iterable[Hit | str]) -> list[tuple[str, str]]:
    """For each hit its entity and its line of text. Raises: InvalidHit, TooManyHits."""
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
            lines.append((hit.id, line_of(hit)))
        else:
            raise InvalidHit("hit", hit, "a Hit or an id")
    return lines


def line_of(hit: Hit) -> str:
    """The hit as text. Raises: InvalidHit."""
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
    if type(hit.n) is not int or not 1 <= hit.n <= VIEWS_OF_HIT_MAX:
        raise InvalidHit("n", hit.n, f"a whole number from 1 to {VIEWS_OF_HIT_MAX}")
    traffic = require_traffic(hit.traffic)
    line = hit.id if hit.n == 1 else f"{hit.id}*{hit.n}"
    if traffic != Traffic.HUMAN:
        line += f"/{traffic[0]}"
    if hit.event is not None:
        line += f"!{hit.event}"
    return line if hit.viewer is None else f"{line}={hit.viewer}"


_BY_LETTER: Final = {traffic[0]: number for number, traffic in enumerate(CLASSES)}


def parse_line(line: str) -> tuple[str, int, int] | None:
    """Entity, number of its class and views of a line as it stands in a stream; None: it is no hit."""
    match = _MARKS.fullmatch(line)
    if match is None or USER_ID.fullmatch(match[1]) is None:
        return None
    views = int(match[2] or 1)
    return (match[1], _BY_LETTER[match[3] or "h"], views) if views <= VIEWS_OF_HIT_MAX else None


def id_key(entry_id: str) -> tuple[int, int]:
    """An id of a stream's entry as numbers, which are in order."""
    ms, _, number = entry_id.partition("-")
    return int(ms), int(number)


def hour_at(hour: int) -> datetime:
    """The moment when an hour since 1970 begins."""
    return datetime.fromtimestamp(hour * 3600, UTC)
