"""The values of fetch: settings, customers, runs, items, outcomes, and the errors of this room.

An outcome is a text of one of four shapes, kept as written in every table and answer:
`stored`, `unchanged`, `refused:<code>` (we declined what was offered) and `failed:<code>` (the host did
not deliver). `known` counts photos that needed no request at all. A `refused` outcome and the HTTP
errors of PERMANENT_STATUSES are final at once; every other failure is tried again with backoff.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

import msgspec

from penstock.kernel import metrics
from penstock.kernel.config import (
    parse_count,
    parse_duration_s,
    parse_networks,
    parse_ports,
    parse_size_bytes,
    parse_text,
    setting,
)
from penstock.kernel.errors import Conflict, InvalidInput, NotFound, TooLarge, Unavailable

LIMITER: Final = "fetch"
PHOTO_QUEUE: Final = "fetch.30s"
PUBLISH_QUEUE: Final = "fetch.publish"
ITEM_QUEUE: Final = "fetch.item"

PHOTO_RETRIES: Final = 3
"""Tries after the first one; a link that still fails waits for the next run."""

PHOTOS_OF_ITEM_MAX: Final = 30
URL_CHARACTERS_MAX: Final = 2048
FIELD_BYTES_MAX: Final = 64 * 1024
FIELDS_BYTES_MAX: Final = 256 * 1024
COLUMNS_MAX: Final = 500
ROWS_MAX: Final = 5_000_000
PROBLEMS_KEPT_MAX: Final = 1000
RUNS_KEPT: Final = 20
CONSUMER_CHARACTERS_MAX: Final = 400

TEMPORARY_STATUSES: Final = frozenset({408, 421, 425, 429, 500, 502, 503, 504})
OUTCOME_CODES: Final = (
    "stored",
    "unchanged",
    "known",
    "refused:forbidden_address",
    "refused:not_an_image",
    "refused:too_large",
    "refused:too_many_pixels",
    "failed:dns",
    "failed:connect",
    "failed:timeout",
    "failed:http_404",
    "failed:http_503",
    "failed:rate_limited",
    "failed:truncated",
    "failed:tls",
)
PHOTOS_DECIDED: Final = metrics.counter(
    "fetch_photos_total", "Photos decided, by outcome.", outcome=OUTCOME_CODES
)
BYTES_RECEIVED: Final = metrics.counter(
    "fetch_received_bytes_total", "Bytes of photo bodies received."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchConfig:
    """Section `fetch`."""

    user_agent: str = setting(
        "PenstockFetch/0.1 (+https://example.org/about-our-fetcher)",
        "The User-Agent sent to every host; put an address there where its owner reaches you.",
        parse_text,
    )
    allow_networks: tuple[str, ...] = setting(
        "", "Networks that may be connected to although they are not public.", parse_networks
    )
    allow_ports: tuple[int, ...] = setting(
        "80, 443", "Ports that may be connected to.", parse_ports
    )
    timeout_s: float = setting(
        "30s", "Longest time of one photo, with its redirects.", parse_duration_s
    )
    photo_max_bytes: int = setting("25MiB", "Largest photo accepted.", parse_size_bytes)
    catalogue_max_bytes: int = setting(
        "1GiB", "Largest catalogue accepted, also after unpacking.", parse_size_bytes
    )
    host_connections: int = setting(
        "8", "Connections a process opens to one host at most.", parse_count
    )
    recheck_s: float = setting(
        "24h",
        "A stored photo whose host gave no ETag and no Last-Modified is not asked for again sooner.",
        parse_duration_s,
    )
    handler_timeout_s: float = setting(
        "60s",
        "Longest time of one call of an on_item handler; over it the item is delivered again later.",
        parse_duration_s,
    )
    name_servers: str | None = setting(
        None,
        "Name servers such as 10.0.0.2, 10.0.0.3:5353; unset: those of the machine.",
        parse_text,
    )
    ca_file: str | None = setting(
        None, "File of trusted certificates for https; unset: those of certifi.", parse_text
    )


class CustomerUnknown(NotFound):
    """No customer of that name was set."""

    code = "fetch.customer_unknown"

    def __init__(self, customer: str) -> None:
        super().__init__(
            f"customer {customer[:128]!r} is not known: make it with"
            f" `penstock fetch customer set {customer[:128]} --rate 600/m --connections 8` or"
            f" `PUT /v1/fetch/customers/{customer[:128]}`"
        )


class RunUnknown(NotFound):
    """No run has that number."""

    code = "fetch.run_unknown"

    def __init__(self, run_id: int) -> None:
        super().__init__(f"run {run_id} is not known: `penstock fetch catalogue ls` lists the runs")


class ConsumerUnknown(NotFound):
    """No worker ever recorded an `on_item` handler of that name, or it was removed."""

    code = "fetch.consumer_unknown"

    def __init__(self, name: str) -> None:
        super().__init__(
            f"consumer {name[:CONSUMER_CHARACTERS_MAX]!r} is not known: `penstock fetch consumer ls` or"
            " `GET /v1/fetch/consumers` lists those there are"
        )


class ItemUnknown(NotFound):
    """The customer never had an item of that id."""

    code = "fetch.item_unknown"


class NotACatalogue(InvalidInput):
    """The file is of no format that can be read."""

    code = "fetch.not_a_catalogue"


class CatalogueBroken(InvalidInput):
    """The file is a catalogue with a fault that makes the rest of it unreadable; nothing was applied."""

    code = "fetch.catalogue_broken"


class CatalogueTooLarge(TooLarge):
    """The file, packed or unpacked, is over `fetch.catalogue_max`."""

    code = "fetch.catalogue_too_large"


class InvalidRate(InvalidInput):
    """A customer's rate or connections cannot be meant."""

    code = "fetch.invalid_rate"


class RunUnderWay(Conflict):
    """Another catalogue of the same customer is being read right now."""

    code = "fetch.run_under_way"


class RunsBusy(Unavailable):
    """As many catalogues as this process reads at once are being read; nothing was changed."""

    code = "fetch.busy"


class RunNotHeld(Conflict):
    """Only a held run that nothing newer replaced can be confirmed."""

    code = "fetch.run_not_held"


class UrlRefused(InvalidInput):
    """The URL may not be asked; `reason` is the code of the outcome `refused:<reason>`."""

    code = "fetch.url_refused"

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class RunState(StrEnum):
    """Where a run is; RUN_MOVES has the moves."""

    READING = "reading"
    REFUSED = "refused"
    ABANDONED = "abandoned"
    DRY = "dry"
    HELD = "held"
    SUPERSEDED = "superseded"
    APPLIED = "applied"
    DONE = "done"


RUN_MOVES: Final[dict[RunState, frozenset[RunState]]] = {
    RunState.READING: frozenset(
        {
            RunState.REFUSED,
            RunState.ABANDONED,
            RunState.DRY,
            RunState.HELD,
            RunState.APPLIED,
            RunState.DONE,
        }
    ),
    RunState.HELD: frozenset({RunState.SUPERSEDED, RunState.APPLIED, RunState.DONE}),
    RunState.APPLIED: frozenset({RunState.DONE}),
    RunState.REFUSED: frozenset(),
    RunState.ABANDONED: frozenset(),
    RunState.DRY: frozenset(),
    RunState.SUPERSEDED: frozenset(),
    RunState.DONE: frozenset(),
}
FINAL_STATES: Final = frozenset(s for s in RunState if not RUN_MOVES[s]) | {RunState.HELD}
"""Nothing more happens by itself."""


class Customer(msgspec.Struct, frozen=True, kw_only=True):
    """Whose catalogues and photos: `starts_max` requests in any `window_s`, `connections` at once."""

    customer: str
    starts_max: int
    window_s: float
    connections: int


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One reading of a catalogue; new + changed + unchanged + invalid = rows.

    An unchanged item whose photos changed when asked again becomes a changed one. `photos` of a dry
    run are those of a real one, `photos_pending` of them would be asked.
    """

    run: int
    customer: str
    state: RunState
    file_name: str
    format: str
    reason: str | None
    started_at: datetime
    ended_at: datetime | None
    rows: int
    invalid: int
    new: int
    changed: int
    unchanged: int
    gone: int
    problems: int
    items_pending: int
    photos: int
    photos_pending: int
    photos_by_outcome: dict[str, int]


class RowProblem(msgspec.Struct, frozen=True, kw_only=True):
    """A fault of one row: where it is and what to do, in the seller's words."""

    row: int
    line: int
    item: str | None
    field: str
    code: str
    text: str


class PhotoProblem(msgspec.Struct, frozen=True, kw_only=True):
    """A photo that failed or was refused when a run asked for it."""

    item: str
    url: str
    outcome: str
    text: str


class Consumer(msgspec.Struct, frozen=True, kw_only=True):
    """An `on_item` handler that results are delivered to; `items` is how many it was told of."""

    name: str
    added_at: datetime
    items: int


class ItemPhoto(msgspec.Struct, frozen=True, kw_only=True):
    """A photo of an item; `key` is set while a good copy is stored, also when the last try failed."""

    url: str
    outcome: str
    key: str | None = None
    sha256: str | None = None
    width: int | None = None
    height: int | None = None
    size_bytes: int | None = None


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """What an `on_item` handler gets; `action` is publish, edit or unpublish."""

    customer: str
    id: str
    version: int
    action: str
    fields: dict[str, Any]
    photos: list[ItemPhoto]


class Result(Item, frozen=True, kw_only=True):
    """An item's result as polling sees it: `seq` grows in the order of commits."""

    seq: int
    at: datetime


class StoredItem(msgspec.Struct, frozen=True, kw_only=True):
    """An item as the last catalogues left it, with its photos as they stand now."""

    customer: str
    id: str
    version: int
    is_gone: bool
    run: int
    fields: dict[str, Any]
    photos: list[ItemPhoto]


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a URL of a customer."""

    customer: str
    url: str
    outcome: str
    sha256: str | None
    etag: str | None
    last_modified: str | None
    checked_at: datetime
    failures: int
    run: int
    text: str
    """The outcome in plain words."""


class UrlReport(msgspec.Struct, frozen=True, kw_only=True):
    """Why a photo is or is not there: the judgement of the URL now, every customer's last outcome."""

    url: str
    allowed: bool
    judgement: str
    links: list[Link]


class PhotoReport(msgspec.Struct, frozen=True, kw_only=True):
    """One photo downloaded now, nothing stored."""

    url: str
    outcome: str
    text: str
    hops: list[str]
    took_s: float
    size_bytes: int | None = None
    sha256: str | None = None
    format: str | None = None
    width: int | None = None
    height: int | None = None
    etag: str | None = None


def photo_key(sha256: str, extension: str) -> str:
    """The blob key of a photo: `photos/ab/cd/<sha256>.<extension>`."""
    return f"photos/{sha256[:2]}/{sha256[2:4]}/{sha256}.{extension}"


def is_temporary(outcome: str) -> bool:
    """Whether asking again in this run makes sense."""
    kind, _, code = outcome.partition(":")
    if kind != "failed" or code == "tls":
        return False
    status = re.fullmatch(r"http_(\d+)", code)
    return status is None or int(status[1]) in TEMPORARY_STATUSES


def parse_rate(text: str) -> tuple[int, float]:
    """Starts and window in seconds of `600/m`, `10/s`, `20/5s`, `5000/h`. Raises: InvalidRate."""
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,6}(?:\.[0-9]{1,3})?)?(s|m|h)", text.strip())
    if match is None:
        raise InvalidRate(
            f"rate {text[:40]!r}: expected requests per second, minute or hour such as 600/m, or in a"
            " window such as 20/5s"
        )
    if int(match[1]) == 0:
        raise InvalidRate(
            f"rate {text[:40]!r}: the number of requests must be over 0, such as 600/m"
        )
    return int(match[1]), float(match[2] or 1) * {"s": 1.0, "m": 60.0, "h": 3600.0}[match[3]]


def hold_reason(*, rows_valid: int, published: int, is_truncated: str | None) -> str | None:
    """Why a catalogue is to be confirmed by a person before it is applied, or None.

    `is_truncated` is where the file ends too early. A catalogue of a tenth of what is published, or
    less, is taken for an accident: unpublishing a shop is worse than asking.
    """
    if is_truncated:
        return f"truncated: {is_truncated}"
    if rows_valid == 0:
        return "empty: no valid row"
    if rows_valid * 10 <= published:
        return f"shrunk: {rows_valid} valid rows where {published} items are published"
    return None
