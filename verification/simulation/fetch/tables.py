"""The tables of the fetch room in the model of PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, TypeAlias

import msgspec
from msgspec.structs import replace

from headrace.engines.sql import Query
from verification.simulation.jobs.tables import ALWAYS, Grouped, JobsTables
from verification.simulation.postgres import PostgresModel, Table

GOOD: Final = ("stored", "unchanged")


class Customer(msgspec.Struct, frozen=True, kw_only=True):
    """A row of fetch_customer."""

    customer: str
    starts_max: int
    window_s: float
    connections: int
    hold_share: float | None = None
    hold_items: int | None = None
    refresh_s: float | None = None


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A row of fetch_run."""

    id: int
    customer: str
    state: str
    file_name: str
    format: str
    is_whole: bool
    started_at: datetime
    has_line_break: bool | None = None
    reason: str | None = None
    fault: str | None = None
    sample: str | None = None
    rows_read: int = 0
    invalid: int = 0
    new: int = 0
    changed: int = 0
    unchanged: int = 0
    gone: int = 0
    problems: int = 0
    items_pending: int = 0
    items_late: int = 0
    photos: int = 0
    round: int = 0
    is_round: bool = False
    prior_at: datetime | None = None
    asks_before: datetime = ALWAYS
    undone_by: int | None = None
    review_until: datetime | None = None
    applied_at: datetime | None = None
    ended_at: datetime | None = None


class Staged(msgspec.Struct, frozen=True, kw_only=True):
    """A row of fetch_staged."""

    run_id: int
    item: str
    hash: bytes | None = None
    raw_hash: bytes | None = None
    fields: str = ""
    photos: tuple[str, ...] = ()
    refused: Mapping[str, str] = {}
    is_gone: bool = False


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A row of fetch_change."""

    run_id: int
    item: str
    kind: str
    version: int
    has_other_photos: bool = False
    fields: tuple[str, ...] = ()
    late_at: datetime | None = None
    published_at: datetime | None = None


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """A row of fetch_need."""

    run_id: int
    item: str
    url: str
    outcome: str | None = None
    is_late: bool = False


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """A row of fetch_item."""

    customer: str
    item: str
    version: int
    is_gone: bool
    run_id: int
    hash: bytes
    raw_hash: bytes | None
    fields: str
    photos: tuple[str, ...]
    sent_run: int = 0


class Photo(msgspec.Struct, frozen=True, kw_only=True):
    """A row of fetch_photo."""

    sha256: str
    key: str
    format: str
    size_bytes: int
    width: int
    height: int


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A row of fetch_link."""

    customer: str
    url: str
    outcome: str
    checked_at: datetime
    run_id: int
    sha256: str | None = None
    etag: str | None = None
    last_modified: str | None = None
    failures: int = 0
    due_round: int = 0
    recheck_at: datetime | None = None
    copied_at: datetime | None = None

    @property
    def is_good(self) -> bool:
        """Whether its last attempt succeeded."""
        return self.outcome in GOOD

    def is_due(self, run: Run, now: datetime) -> bool:
        """fetch_is_due_v1, or checked before the moment that the run names."""
        is_due = self.due_round <= run.round
        is_late = self.recheck_at is not None and self.recheck_at <= now
        return is_due or is_late or self.checked_at < run.asks_before


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """A row of fetch_host with its rows of fetch_speed."""

    last_seen_at: datetime
    requests: int = 0
    photos: float = 0.0
    seconds: float = 0.0
    left_share: float = 1.0
    paused_until: datetime | None = None
    weights: Mapping[float, float] = {}


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A row of fetch_result."""

    seq: int
    customer: str
    item: str
    version: int
    action: str
    fields: str
    photos: str
    at: datetime

    @property
    def place(self) -> tuple[str, str]:
        """Customer and item."""
        return self.customer, self.item


class Photos(Table[str, Photo]):
    """fetch_photo, which calls `on_insert` for each new row, also before its commit."""

    def __init__(self, model: PostgresModel) -> None:
        super().__init__(model)
        self.on_insert: Callable[[Photo], None] = lambda _photo: None

    def note_change(self, key: str, before: Photo | None, after: Photo | None) -> None:
        """See `Table`."""
        if before is None and after is not None:
            self.on_insert(after)


Contract: TypeAlias = Callable[..., Any]
STATEMENTS: Final[list[tuple[Query, Contract]]] = []
"""The statements of the room that the simulated code runs, with the functions that model them."""


def statement(query: Query) -> Callable[[Contract], Contract]:
    """Decorate the model of a statement: the tables, and the query's parameters by name."""

    def add(contract: Contract) -> Contract:
        STATEMENTS.append((query, contract))
        return contract

    return add


class FetchTables:
    """All tables of the room that are modelled."""

    def __init__(self, model: PostgresModel, jobs: JobsTables) -> None:
        self.model = model
        self.now = model.now
        self.jobs = jobs
        self.on_decide: Callable[[Sequence[tuple[int, str, str]], Sequence[str]], None]
        self.on_decide = lambda _photos, _outcomes: None
        """Called with the photos of each `decide` and their outcomes."""
        self.customer: Table[str, Customer] = Table(model)
        self.run: Grouped[Run] = Grouped(model, "customer")
        self.staged: Grouped[Staged] = Grouped(model, "run_id")
        self.change: Grouped[Change] = Grouped(model, "run_id")
        self.need: Grouped[Need] = Grouped(model, "run_id")
        self.before: Grouped[Staged] = Grouped(model, "run_id")
        """Of fetch_before only run and item."""
        self.count: Table[tuple[int, str], int] = Table(model)
        self.pace: Table[tuple[int, datetime], int] = Table(model)
        self.problem: Table[tuple[int, int], str | None] = Table(model)
        """The item of a problem, by run and number."""
        self.item: Grouped[Item] = Grouped(model, "customer")
        self.photo = Photos(model)
        self.link: Grouped[Link] = Grouped(model, "customer")
        self.host: Table[tuple[str, str], Host] = Table(model)
        self.host_outcome: Table[tuple[str, str, str], int] = Table(model)
        self.attempt: Table[tuple[Any, ...], int] = Table(model)
        self.result: Grouped[Result] = Grouped(model, "place")

    def get_run(self, run_id: int) -> Run:
        """The row of a run that exists."""
        run = self.run.get(run_id)
        assert run is not None, f"run {run_id} exists"
        return run  # type: ignore[no-any-return]

    def put_run(self, run: Run, **changes: Any) -> None:
        """Replace a run's row."""
        self.run.put(run.id, replace(run, **changes))

    def counts_of(self, run_id: int) -> dict[str, int]:
        """Photos of a run by outcome."""
        return {key[1]: n for key, n in self.count.items() if key[0] == run_id}

    def add_count(self, run_id: int, outcome: str, photos: int) -> None:
        """Add photos to a run's count."""
        key = run_id, outcome
        self.count.lock(key)
        self.count.put(key, (self.count.get(key) or 0) + photos)

    def add_need(self, run_id: int, item: str, url: str) -> None:
        """Insert a photo to request, unless the run has it."""
        if (run_id, item, url) not in self.need:
            self.need.put((run_id, item, url), Need(run_id=run_id, item=item, url=url))

    def needs_of(self, run_id: int, item: str) -> list[tuple[Any, Need]]:
        """The photos that a run requests for an item."""
        return [(key, need) for key, need in self.need.of(run_id) if need.item == item]
