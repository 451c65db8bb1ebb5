"""The values of fetch: customers, runs, items and outcomes.

An outcome is a text of one of four shapes, kept as written in every table and answer:
`stored`, `unchanged`, `refused:<code>` (we declined what was offered) and `failed:<code>` (the host did
not deliver). `known` counts photos that needed no request at all. A `refused` outcome and most answers
of 4xx are final at once; 5xx, TEMPORARY_STATUSES and faults of the way are tried again with backoff.
"""

from __future__ import annotations

import re
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

import msgspec

from headrace.fetch.errors import FileFault, InvalidRate
from headrace.jobs.model import Lane, Why
from headrace.kernel import metrics

LIMITER: Final = "fetch"
RESULTS_LIMITER: Final = "fetch.results"
"""A lane a customer without limits, for the turns: 300,000 results of one held up another's two for minutes."""
PUBLISH_QUEUE: Final = "fetch.publish"
ITEM_QUEUE: Final = "fetch.item"
CATALOGUE_QUEUE: Final = "fetch.catalogue"
WEBHOOK_QUEUE: Final = "fetch.webhook"
DEADLINES_QUEUE: Final = "fetch.deadlines"
LINKS_QUEUE: Final = "fetch.links"
PHOTO_RETRIES: Final = 3
"""Tries after the first one, of a link that did not fail the last time; one that did has one try a run."""
BIGINT_MAX: Final = 2**63 - 1
PHOTOS_OF_ITEM_MAX: Final = 30
URL_CHARACTERS_MAX: Final = 2048
FIELD_BYTES_MAX: Final = 64 * 1024
FIELDS_BYTES_MAX: Final = 256 * 1024
COLUMNS_MAX: Final = 500
ROWS_MAX: Final = 5_000_000
PROBLEMS_KEPT_MAX: Final = 1000
RUNS_KEPT: Final = 20
SENT_RUNS_KEPT: Final = 100  # of items sent by themselves
DRY_RUNS_KEPT: Final = 5
UNDOABLE_RUNS: Final = 5
ITEMS_SENT_MAX: Final = 1000
CONSUMER_CHARACTERS_MAX: Final = 400

TEMPORARY_STATUSES: Final = frozenset({408, 421, 425, 429})
OUTCOME_CODES: Final = (
    "stored",
    "unchanged",
    "known",
    "refused:forbidden_address",
    "refused:not_an_image",
    "refused:too_large",
    "refused:too_many_pixels",
    "refused:too_many_frames",
    "refused:undecodable",
    "failed:dns",
    "failed:connect",
    "failed:timeout",
    "failed:http_404",
    "failed:http_503",
    "failed:rate_limited",
    "failed:truncated",
    "failed:tls",
    "failed:tls_expired",
    "failed:tls_not_yet_valid",
    "failed:tls_wrong_name",
    "failed:tls_self_signed",
    "failed:tls_untrusted",
    "failed:tls_incomplete",
)
PHOTOS_DECIDED: Final = metrics.counter(
    "fetch_photos_total", "Photos decided, by outcome.", outcome=OUTCOME_CODES
)
BYTES_RECEIVED: Final = metrics.counter(
    "fetch_received_bytes_total", "Bytes of photo bodies received."
)
WEBHOOK_POSTS: Final = metrics.counter(
    "fetch_webhook_posts_total",
    "Messages sent to webhooks, by what came of them.",
    outcome=("taken", "refused", "gone"),
)


class RunState(StrEnum):
    """Where a run is; RUN_MOVES has the moves."""

    BRINGING = "bringing"
    READING = "reading"
    REFUSED = "refused"
    ABANDONED = "abandoned"
    DRY = "dry"
    HELD = "held"
    SUPERSEDED = "superseded"
    APPLIED = "applied"
    DONE = "done"


RUN_MOVES: Final[dict[RunState, frozenset[RunState]]] = {
    RunState.BRINGING: frozenset({RunState.READING, RunState.REFUSED, RunState.ABANDONED}),
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
    hold_share: float | None = None
    """A catalogue that removes more than this share of the items is held; null: `fetch.hold_share`."""
    hold_items: int | None = None
    """And more than so many items; null: `fetch.hold_items`."""
    refresh_s: float | None = None
    """Good photos are asked for again after so many seconds; 0: never; null: `fetch.refresh`."""


class SampledPhoto(msgspec.Struct, frozen=True, kw_only=True):
    """A photo that a dry run downloaded to see how it goes; nothing of it was kept."""

    url: str
    outcome: str
    text: str
    took_s: float


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """What a dry run saw of the photos it would ask, and how long the real run is expected to take."""

    photos: list[SampledPhoto]
    expected_s: float
    """At the customer's rate and connections, and as fast as the sampled photos came."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One reading of a catalogue; new + changed + unchanged + invalid = rows.

    An unchanged item whose photos changed when asked again becomes a changed one. Of a dry run and of
    a held one all counts say what it would change; `photos_pending` would be asked. A run whose format is `items`
    is of items sent by themselves, where gone ones have a row too; one whose format is `same` is of a
    file that did not change: links that are due are asked again. One whose format is `undo` undoes another run, one whose
    format is `links` asks again for failed links and old photos.
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
    """Photos decided per second in the last two to three minutes; None: not known."""
    eta_s: float | None = None
    """Seconds until the last photo is decided at this pace; None: not known."""
    sample: Sample | None = None
    """Of a dry run."""
    undone_by: int | None = None
    """The run that put the items back."""
    items_late: int = 0
    """Items published at their deadline without all of their photos."""
    fault: FileFault | None = None
    """What is wrong with the whole file; reports show it in the reader's language."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What a run does to an item, or would: `new`, `changed` or `gone`."""

    item: str
    kind: str
    version: int
    fields: list[str]
    """Of a changed item: those that differ, `photos` where its list of links does."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where a customer's catalogue is brought from, when next, and what came of it last."""

    customer: str
    url: str
    cron: str
    tz: str
    format: str | None
    mapping: str | None
    next_at: datetime | None
    """None: its cron is paused."""
    tried_at: datetime | None
    outcome: str | None
    """`applied`, `done`, `held`, `unchanged`, `refused:<code>` or `failed:<code>`."""
    text: str | None
    """Why, where it did not go well."""
    run: int | None
    """The last run made of it."""
    failures: int
    """Tries in a row that brought no readable file."""


class SentItem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An item sent by itself. Without `fields` those it has stay; `gone`: it is to be unpublished."""

    customer: str
    item: str
    photos: list[str] = msgspec.field(default_factory=list)
    fields: dict[str, str | int | float | bool | None] | None = None
    gone: bool = False


class RowProblem(msgspec.Struct, frozen=True, kw_only=True):
    """A fault of one row: where it is, and its code with the values that its sentence shows."""

    row: int
    line: int
    item: str | None
    field: str
    code: str
    values: dict[str, str | int | float] = msgspec.field(default_factory=dict)
    text: str = ""
    """The sentence of `texts/`; whoever finds a fault leaves it empty and gives the values."""


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


class Webhook(msgspec.Struct, frozen=True, kw_only=True):
    """Where a customer's results are sent, and how far its receiver is."""

    customer: str
    url: str
    taken_seq: int
    """The last result that was taken."""
    waiting: int
    """Results after it, counted up to 10,000."""
    failures: int
    """Sends since the last that was taken."""
    failing_since: datetime | None
    next_at: datetime | None
    """When what failed is sent again."""
    last_at: datetime | None
    last_status: int | None
    last_error: str | None
    disabled_at: datetime | None
    """The receiver answered 410; set the webhook again to go on."""
    old_until: datetime | None
    """Until then the secret before the last rotation signs as well."""
    created_at: datetime


class NewSecret(msgspec.Struct, frozen=True, kw_only=True):
    """A webhook's secret, told this once; until `old_until` the one before signs as well."""

    customer: str
    secret: str
    old_until: datetime


class WebhookReplay(msgspec.Struct, frozen=True, kw_only=True):
    """How many results, counted up to 10,000, are on their way to the webhook once more."""

    customer: str
    after: int
    waiting: int


class WebhookTrial(msgspec.Struct, frozen=True, kw_only=True):
    """What a test message to a webhook met."""

    customer: str
    url: str
    is_taken: bool
    status: int | None
    text: str
    took_s: float


class CustomerSet(Customer, frozen=True, kw_only=True):
    """A customer that was set; `webhook_secret` is told once, when its webhook is made."""

    webhook: str | None = None
    """The URL that its results are sent to."""
    webhook_secret: str | None = None


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
    """How many times in a row it failed."""
    rounds_left: int
    """So many whole catalogues pass before it is asked again."""
    recheck_at: datetime | None
    """When a failed link is asked again at the latest, whichever catalogues come."""
    run: int
    text: str
    """The outcome in plain words."""


class UrlReport(msgspec.Struct, frozen=True, kw_only=True):
    """Why a photo is or is not there: the judgement of the URL now, every customer's last outcome."""

    url: str
    allowed: bool
    judgement: str
    links: list[Link]
    customers: list[UrlCustomer]
    """Those whose runs asked it or are about to."""


class UrlCustomer(msgspec.Struct, frozen=True, kw_only=True):
    """What bears on the next time that a customer's run asks a URL."""

    customer: str
    waiting_runs: list[int]
    """Runs that have it to ask and have not yet."""
    job: Why | None
    """Why the photo's job waits; of a long backlog, why another photo of the customer does."""
    host: Host | None
    """How fast its host is and in which class the photo starts; null: nothing was measured."""
    lane: Lane | None
    """The customer's limits and what is under way."""
    ahead: str
    """When it is asked next, in a sentence."""


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of a host of a customer's links, and what it asked of us."""

    host: str
    customer: str
    starts_in: str
    """Timeout class in which its next photo starts."""
    needs: dict[str, float]
    """Share of its recent photos by the class that was enough for them."""
    mean_s: float | None
    """Mean time of a recent photo; null: nothing recent was measured."""
    requests: int
    photos_by_outcome: dict[str, int]
    first_seen_at: datetime
    last_seen_at: datetime
    paused_until: datetime | None
    """Until when it asked to be left alone."""
    crawl_delay_s: float | None
    """What its robots.txt asks, where that is read."""


class PhotoStep(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a download; times count from its beginning."""

    url: str
    address: str
    status: int
    """0: no answer came."""
    connect_s: float
    """Connected, with TLS; 0 for a connection that was kept, and where none came about."""
    first_byte_s: float
    took_s: float
    is_sent: bool
    """Whether a request left; only then the host saw one."""


class PhotoReport(msgspec.Struct, frozen=True, kw_only=True):
    """One photo downloaded now, nothing stored."""

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
    """The blob key of a photo: `photos/ab/cd/<sha256>.<extension>`."""
    return f"photos/{sha256[:2]}/{sha256[2:4]}/{sha256}.{extension}"


def is_temporary(outcome: str) -> bool:
    """Whether asking again in this run makes sense."""
    kind, _, code = outcome.partition(":")
    if kind != "failed" or code.startswith("tls"):
        return False
    status = re.fullmatch(r"http_(\d+)", code)
    return status is None or int(status[1]) in TEMPORARY_STATUSES or int(status[1]) >= 500


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
