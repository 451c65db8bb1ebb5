"""The values of fetch: customers, runs, items, results, hosts and links."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

import msgspec

from headrace.fetch.errors import FileFault, InvalidRate
from headrace.jobs.model import Lane, Why
from headrace.kernel import config, metrics
from headrace.kernel.config import parse_as

LIMITER: Final = "fetch"
RESULTS_LIMITER: Final = "fetch.results"
"""Limiter without limits; its lanes make customers take turns, so none delays another."""
PUBLISH_QUEUE: Final = "fetch.publish"
ITEM_QUEUE: Final = "fetch.item"
CATALOGUE_QUEUE: Final = "fetch.catalogue"
WEBHOOK_QUEUE: Final = "fetch.webhook"
DEADLINES_QUEUE: Final = "fetch.deadlines"
LINKS_QUEUE: Final = "fetch.links"
DUPLICATES_QUEUE: Final = "fetch.duplicates"
PHOTO_RETRIES: Final = 3
"""Retries of a link in a run; a link that failed in its last run has none."""
BIGINT_MAX: Final = 2**63 - 1
PHOTOS_OF_ITEM_MAX: Final = 30
URL_CHARACTERS_MAX: Final = 2048
FIELD_BYTES_MAX: Final = 64 * 1024
FIELDS_BYTES_MAX: Final = 256 * 1024
COLUMNS_MAX: Final = 500
ROWS_MAX: Final = 5_000_000
PROBLEMS_KEPT_MAX: Final = 1000
RUNS_KEPT: Final = 20
SENT_RUNS_KEPT: Final = 100
"""Kept runs of uploaded items."""
DRY_RUNS_KEPT: Final = 5
CHANGE_CHARACTERS_MAX: Final = 300
"""Longest old or new value that a change shows."""
UNDOABLE_RUNS: Final = 5
ITEMS_SENT_MAX: Final = 1000
CONSUMER_CHARACTERS_MAX: Final = 400
SUPPLEMENTAL: Final = "supplemental"
"""The format of a run of a supplemental feed."""
SAME_FORMAT: Final = "same"
"""The format of a run whose file did not change."""
UNDO_FORMAT: Final = "undo"
"""The format of a run that undoes another run."""

WEBHOOK_POSTS: Final = metrics.counter(
    "fetch_webhook_posts_total",
    "Messages sent to webhooks, by result.",
    outcome=("taken", "refused", "gone"),
)


class RunState(StrEnum):
    """State of a run.

    A file is fetched (`bringing`) and read; then the run is refused, held, dry, or applied until
    its items are published (`done`). A person confirms a held run or discards it (`superseded`).
    """

    BRINGING = "bringing"
    READING = "reading"
    REFUSED = "refused"
    ABANDONED = "abandoned"
    DRY = "dry"
    HELD = "held"
    SUPERSEDED = "superseded"
    APPLIED = "applied"
    DONE = "done"


FINAL_STATES: Final = frozenset(
    {
        *(RunState.REFUSED, RunState.ABANDONED, RunState.DRY, RunState.HELD),
        *(RunState.SUPERSEDED, RunState.DONE),
    }
)
"""States without further automatic transitions."""


class Customer(msgspec.Struct, frozen=True, kw_only=True):
    """A seller: at most `starts_max` requests in any `window_s`, `connections` at once."""

    customer: str
    starts_max: int
    window_s: float
    connections: int
    hold_share: float | None = None
    """A catalogue that removes more than this share of the items is held; null:
    `fetch.hold_share`.
    """
    hold_items: int | None = None
    """It must also remove more than this number of items; null: `fetch.hold_items`."""
    refresh_s: float | None = None
    """Good photos are requested again after this time; 0: never; null: `fetch.refresh`."""


class SampledPhoto(msgspec.Struct, frozen=True, kw_only=True):
    """A photo that a dry run downloaded; nothing was stored."""

    url: str
    outcome: str
    text: str
    took_s: float


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled photos of a dry run, and the expected time of the real run."""

    photos: list[SampledPhoto]
    expected_s: float
    """At the customer's rate and connections, and at the speed of the sampled photos."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One reading of a catalogue; new + changed + unchanged + invalid = rows.

    An unchanged item becomes changed if its photos changed when they were requested again. The
    counts of a dry or held run are what it would change; `photos_pending` would be requested.
    Special formats: `items`: uploaded items, where gone ones have a row too; `same`: an unchanged
    file, whose due links are requested; `undo`: undoes another run; `links`: requests failed links
    and old photos again; `supplemental`: overlays fields, where gone counts the items whose overlay
    ended with a change.
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
    photos_per_s: float | None = None
    """Photos decided per second in the last two to three minutes; null: unknown."""
    eta_s: float | None = None
    """Seconds until the last photo is decided at this rate; null: unknown."""
    sample: Sample | None = None
    """Only for a dry run."""
    undone_by: int | None = None
    """The run that restored the items."""
    can_undo: bool = False
    """Whether it can be undone now: it changed items, and no later run that did is in force."""
    items_late: int = 0
    """Items published at their deadline without all of their photos."""
    fault: FileFault | None = None
    """Fault of the whole file; reports show it in the chosen language."""
    review_until: datetime | None = None
    """Until when an upload for review can be confirmed; null: it was not for review."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Change of an item by a run: `new`, `changed` or `gone`."""

    item: str
    kind: str
    version: int
    fields: list[str]
    """Fields of a changed item that differ, including `photos`."""
    values: dict[str, list[str | None]] = msgspec.field(default_factory=dict)
    """Old and new value of each such field, name and price of other items; cut at 300 characters.

    Stored for a held run and for the last applied ones.
    """


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Source of a customer's catalogue: URL, schedule and last result."""

    customer: str
    url: str
    cron: str
    tz: str
    format: str | None
    mapping: str | None
    next_at: datetime | None
    """Null: its cron is paused."""
    tried_at: datetime | None
    outcome: str | None
    """`applied`, `done`, `held`, `unchanged`, `refused:<code>` or `failed:<code>`."""
    text: str | None
    """Reason of a failure."""
    run: int | None
    """The last run of this source."""
    failures: int
    """Consecutive attempts without a readable file."""


class SellerLink(msgspec.Struct, frozen=True, kw_only=True):
    """A link to a seller's page; who has it can read the page."""

    customer: str
    url: str
    expires_at: datetime


class SentItem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An uploaded item. Without `fields` the stored ones stay; `gone` unpublishes it."""

    customer: str
    item: str
    photos: list[str] = msgspec.field(default_factory=list)
    fields: dict[str, str | int | float | bool | None] | None = None
    gone: bool = False


class RowProblem(msgspec.Struct, frozen=True, kw_only=True):
    """A problem of one row: position, code and the values that its message shows."""

    row: int
    line: int
    item: str | None
    field: str
    code: str
    values: dict[str, str | int | float] = msgspec.field(default_factory=dict)
    text: str = ""
    """The message from `i18n/`; empty until it is rendered in a language."""


class PhotoProblem(msgspec.Struct, frozen=True, kw_only=True):
    """A photo of a run that failed or was refused."""

    item: str
    url: str
    outcome: str
    text: str


class Consumer(msgspec.Struct, frozen=True, kw_only=True):
    """An `on_item` handler that receives results; `items`: number of items delivered."""

    name: str
    added_at: datetime
    items: int


class Webhook(msgspec.Struct, frozen=True, kw_only=True):
    """URL that receives a customer's results, and its progress."""

    customer: str
    url: str
    taken_seq: int
    """The last accepted result."""
    waiting: int
    """Backlog after it, counted up to 10,000."""
    failures: int
    """Failed messages since the last accepted one."""
    failing_since: datetime | None
    next_at: datetime | None
    """Time of the next retry."""
    last_at: datetime | None
    last_status: int | None
    last_error: str | None
    disabled_at: datetime | None
    """The receiver responded 410; set the webhook again to enable it."""
    old_until: datetime | None
    """Until then the previous secret also signs."""
    created_at: datetime


class NewSecret(msgspec.Struct, frozen=True, kw_only=True):
    """A new secret, returned only once; until `old_until` the previous one also signs."""

    customer: str
    secret: str
    old_until: datetime


class WebhookReplay(msgspec.Struct, frozen=True, kw_only=True):
    """Number of results, counted up to 10,000, that are sent again."""

    customer: str
    after: int
    waiting: int


class WebhookTrial(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a test message to a webhook."""

    customer: str
    url: str
    is_accepted: bool
    status: int | None
    text: str
    took_s: float


class CustomerSet(Customer, frozen=True, kw_only=True):
    """A customer after a change; `webhook_secret` is returned once, for a new webhook."""

    webhook: str | None = None
    """The URL that receives its results."""
    webhook_secret: str | None = None


class ItemPhoto(msgspec.Struct, frozen=True, kw_only=True):
    """A photo of an item; `key` is set while a good copy is stored, even after a failed attempt.

    `outcome` is `pending` until the photo is requested for the first time.
    """

    url: str
    outcome: str
    key: str | None = None
    sha256: str | None = None
    width: int | None = None
    height: int | None = None
    size_bytes: int | None = None


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """Argument of an `on_item` handler; `action` is publish, edit or unpublish."""

    customer: str
    id: str
    version: int
    action: str
    fields: dict[str, Any]
    photos: list[ItemPhoto]


class Result(Item, frozen=True, kw_only=True):
    """A published version of an item; `seq` grows in the order of commits."""

    seq: int
    at: datetime


class StoredItem(msgspec.Struct, frozen=True, kw_only=True):
    """Current state of an item with its photos."""

    customer: str
    id: str
    version: int
    is_gone: bool
    run: int
    fields: dict[str, Any]
    """As published: with those of the supplemental feed."""
    photos: list[ItemPhoto]
    supplemental: dict[str, Any] = {}
    """Fields that the supplemental feed sets."""


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """The last result of a URL of a customer."""

    customer: str
    url: str
    outcome: str
    sha256: str | None
    etag: str | None
    last_modified: str | None
    checked_at: datetime
    failures: int
    """Consecutive failures."""
    rounds_left: int
    """Whole catalogues that skip it before the next request."""
    recheck_at: datetime | None
    """Latest time of the next request of a failed link."""
    run: int
    text: str
    """The outcome as a sentence."""


class UrlReport(msgspec.Struct, frozen=True, kw_only=True):
    """Why a photo exists or not: whether the URL is allowed, and the last outcome per customer."""

    url: str
    allowed: bool
    judgement: str
    links: list[Link]
    customers: list[UrlCustomer]
    """Customers whose runs requested it or will."""


class UrlCustomer(msgspec.Struct, frozen=True, kw_only=True):
    """State that determines a customer's next request of a URL."""

    customer: str
    waiting_runs: list[int]
    """Runs that will request it."""
    job: Why | None
    """Why the photo's job waits; in a long backlog, why another job of the customer waits."""
    host: Host | None
    """Statistics of its host; null: none."""
    lane: Lane | None
    """The customer's limits and running requests."""
    ahead: str
    """When it is requested next, as a sentence."""


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a host of a customer's links, and its requested pauses."""

    host: str
    customer: str
    starts_in: str
    """Timeout class in which its next photo starts."""
    needs: dict[str, float]
    """Share of recent photos by the class that was enough for them."""
    mean_s: float | None
    """Mean time of a recent photo; null: none measured."""
    requests: int
    photos_by_outcome: dict[str, int]
    first_seen_at: datetime
    last_seen_at: datetime
    paused_until: datetime | None
    """End of the pause that it requested."""
    crawl_delay_s: float | None
    """Crawl-delay of its robots.txt, if that is read."""


class PhotoStep(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a download; times are measured from its start."""

    url: str
    address: str
    status: int
    """0: no response."""
    connect_s: float
    """Connected, including TLS; 0 for a kept or failed connection."""
    first_byte_s: float
    took_s: float
    is_sent: bool
    """Whether a request was sent to the host."""


class PhotoReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a test download; nothing was stored."""

    url: str
    outcome: str
    text: str
    hops: list[str]
    took_s: float
    steps: list[PhotoStep] = []
    size_bytes: int | None = None
    sha256: str | None = None
    format: str | None = None
    width: int | None = None
    height: int | None = None
    etag: str | None = None


def photo_key(sha256: str, extension: str) -> str:
    """The blob key of a photo: `photos/ab/<sha256>.<extension>`."""
    return f"photos/{sha256[:2]}/{sha256}.{extension}"


@dataclass(slots=True)
class ValidatedRow:
    """One row with a valid id; an invalid row has no hash, but keeps its item from removal."""

    number: int
    line: int
    item: str
    fields: bytes = b"{}"
    photos: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """Code of the refusal by URL, for photo links that are not allowed."""
    hash: bytes | None = None


def parse_rate(text: str) -> tuple[int, float]:
    """Starts and window in seconds of `600/m`, `10/s`, `20/5s`, `5000/h`. Raises: InvalidRate."""
    return parse_as(config.parse_rate, "rate", text, InvalidRate)
