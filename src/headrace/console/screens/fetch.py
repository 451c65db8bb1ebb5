"""The fetch room: catalogue runs, customers and items."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.console.screens.fetch_actions import ACTIONS
from headrace.console.screens.fetch_photos import (
    view_deliveries,
    view_hosts,
    view_sources,
    view_study,
    view_wall,
    view_why,
)
from headrace.console.screens.fetch_review import REVIEW_ACTIONS, view_review
from headrace.console.views import NO_DATA, PanelData, Room, Screen, ViewContext, attempt, choices
from headrace.fetch.catalogues import REVIEW as REVIEW_REASON
from headrace.fetch.errors import SourceUnknown, WebhookUnknown
from headrace.fetch.i18n import Texts, languages
from headrace.fetch.model import (
    FINAL_STATES,
    LIMITER,
    Change,
    Customer,
    Host,
    PhotoProblem,
    Result,
    RowProblem,
    Run,
    RunState,
    Source,
    StoredItem,
    Webhook,
)
from headrace.fetch.outcomes import count_bad
from headrace.jobs.errors import LaneUnknown
from headrace.jobs.model import Lane

RUNS_SHOWN: Final = 100
LINES_SHOWN: Final = 100
BOARDS: Final = ("problems", "photos", "changes")
NOT_UNDOABLE: Final = ("same", "items", "undo", "links", "supplemental")
"""Formats of runs without a catalogue file."""
GROUPS: Final[dict[str, frozenset[RunState]]] = {
    "active": frozenset(RunState) - FINAL_STATES,
    "held": frozenset({RunState.HELD}),
    "finished": FINAL_STATES - {RunState.HELD},
}
"""Filters of the run list."""
WORDS: Final[dict[RunState, str]] = {
    RunState.BRINGING: "The catalogue is being downloaded.",
    RunState.READING: "The catalogue is being read and compared.",
    RunState.REFUSED: "The catalogue was refused. No items were changed.",
    RunState.ABANDONED: "The process ended before the catalogue was read. No items were changed.",
    RunState.DRY: "Dry run: shows the changes without applying them.",
    RunState.HELD: "The catalogue looks wrong, so no items were changed. Apply or discard it.",
    RunState.SUPERSEDED: "Replaced by a newer run or discarded. No items were changed.",
    RunState.APPLIED: "Applied. Photos and deliveries are in progress.",
    RunState.DONE: "Applied. All photos are processed and all results delivered.",
}
REVIEW: Final = "The catalogue was read and compared. No items were changed. Apply or discard it."
TONES: Final[dict[RunState, str]] = {
    RunState.BRINGING: "warn",
    RunState.READING: "warn",
    RunState.REFUSED: "bad",
    RunState.ABANDONED: "bad",
    RunState.DRY: "",
    RunState.HELD: "warn",
    RunState.SUPERSEDED: "",
    RunState.APPLIED: "good",
    RunState.DONE: "good",
}


@dataclass(frozen=True, slots=True)
class RunLine:
    """A run with derived figures."""

    run: Run
    tone: str
    photos_decided: int
    photos_bad: int

    @property
    def ratio(self) -> float | None:
        """Share of processed photos; None without photos."""
        return self.photos_decided / self.run.photos if self.run.photos else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsView:
    """Data of the runs page."""

    runs: PanelData[list[RunLine]]
    customer: str
    group: str
    groups: Sequence[tuple[str, str]]
    is_cut: bool
    looked_at: int = RUNS_SHOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """Data of a run's page, with one of its three lists."""

    line: RunLine
    words: str
    reason: str
    board: str
    boards: Sequence[str]
    lang: str
    langs: Sequence[str]
    outcomes: list[tuple[str, int, str]]
    """Outcome, number of photos, description."""
    problems: PanelData[list[tuple[int, RowProblem]]]
    photos: PanelData[list[tuple[int, PhotoProblem]]]
    changes: PanelData[list[Change]]
    more: str | None
    """URL of the list's next page."""

    @property
    def can_undo(self) -> bool:
        """Whether it is an applied catalogue that was not undone yet."""
        run = self.line.run
        is_applied = run.state in (RunState.APPLIED, RunState.DONE)
        return is_applied and run.undone_by is None and run.format not in NOT_UNDOABLE


def line_of(run: Run) -> RunLine:
    """A run with derived figures."""
    bad = count_bad(run.photos_by_outcome)
    decided = max(0, run.photos - run.photos_pending)
    return RunLine(run=run, tone=TONES[run.state], photos_decided=decided, photos_bad=bad)


async def view_runs(context: ViewContext) -> RunsView:
    """The newest runs, of one customer or of all."""
    customer = context.query.text("customer", most=128)
    group = context.query.choice("show", ("all", *GROUPS), "all")
    found = await attempt(context.fetch.runs.newest(customer or None, runs_max=RUNS_SHOWN))
    lines = None
    if found.value is not None:
        wanted = GROUPS.get(group, frozenset(RunState))
        lines = [line_of(run) for run in found.value if run.state in wanted]
    return RunsView(
        runs=PanelData(lines, found.error),
        customer=customer,
        group=group,
        groups=choices(("all", *GROUPS)),
        is_cut=found.value is not None and len(found.value) == RUNS_SHOWN,
    )


async def view_run(context: ViewContext) -> RunView:
    """The page of a run. Raises: RunUnknown."""
    fetch, run_id = context.fetch, run_number(context.params["run"])
    run = await fetch.runs.get(run_id)
    board = context.query.choice("list", BOARDS, "problems" if run.problems else "changes")
    langs = languages()
    lang = context.query.choice("lang", langs, langs[0])
    after = context.query.number("after", 0)
    problems: PanelData[list[tuple[int, RowProblem]]] = NO_DATA
    photos: PanelData[list[tuple[int, PhotoProblem]]] = NO_DATA
    changes: PanelData[list[Change]] = NO_DATA
    more = None
    if board == "problems":
        problems = await attempt(
            fetch.reports.problems(run_id, after=after, rows_max=LINES_SHOWN, lang=lang)
        )
        more = _more_by_position(context, problems.value)
    elif board == "photos":
        asked = fetch.reports.photo_problems(run_id, after=after, rows_max=LINES_SHOWN, lang=lang)
        photos = await attempt(asked)
        more = _more_by_position(context, photos.value)
    else:
        item = context.query.text("item", most=400)
        changes = await attempt(fetch.runs.changes(run_id, after=item, rows_max=LINES_SHOWN))
        if changes.value and len(changes.value) == LINES_SHOWN:
            more = context.url(item=changes.value[-1].item)
    texts = Texts.load(lang, fetch.config)
    counts = sorted(run.photos_by_outcome.items(), key=lambda pair: -pair[1])
    return RunView(
        line=line_of(run),
        words=REVIEW if run.reason == REVIEW_REASON else WORDS[run.state],
        reason=texts.of_run(run),
        board=board,
        boards=BOARDS,
        lang=lang,
        langs=langs,
        outcomes=[(outcome, photos_, texts.outcome(outcome)) for outcome, photos_ in counts],
        problems=problems,
        photos=photos,
        changes=changes,
        more=more,
    )


def run_number(text: str) -> int:
    """The run number in a URL; 0, which no run has, for invalid text."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else 0


def _more_by_position(
    context: ViewContext, lines: Sequence[tuple[int, object]] | None
) -> str | None:
    if lines is None or len(lines) < LINES_SHOWN:
        return None
    return context.url(after=lines[-1][0])


LANES_MAX: Final = 1_000
RUNS_LOOKED_AT: Final = 500
CUSTOMER_RUNS_SHOWN: Final = 10
RESULTS_SHOWN: Final = 12
HOSTS_SHOWN: Final = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomerLine:
    """A customer with its lane and newest run."""

    customer: Customer
    lane: Lane | None
    run: RunLine | None
    """None if the customer has no recent run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomersView:
    """Data of the customers page."""

    customers: PanelData[list[CustomerLine]]
    lanes_error: str | None
    match: str
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomerView:
    """Data of a customer's page."""

    customer: Customer
    lane: PanelData[Lane | None]
    runs: PanelData[list[RunLine]]
    hosts: PanelData[list[Host]]
    source: PanelData[Source | None]
    webhook: PanelData[Webhook | None]
    results: PanelData[list[Result]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemView:
    """Data of an item's page."""

    item: StoredItem
    media_origin: str


async def view_customers(context: ViewContext) -> CustomersView:
    """Customers whose name contains the filter text."""
    fetch, jobs = context.fetch, context.jobs
    match = context.query.text("match", most=128)
    everyone, lanes, runs = await asyncio.gather(
        attempt(fetch.customers.all()),
        attempt(jobs.lanes.list(LIMITER, lanes_max=LANES_MAX)),
        attempt(fetch.runs.newest(runs_max=RUNS_LOOKED_AT)),
    )
    lane_of = {lane.lane: lane for lane in lanes.value or ()}
    run_of = newest_of(runs.value or ())
    lines = None
    if everyone.value is not None:
        lines = [
            CustomerLine(
                customer=found,
                lane=lane_of.get(found.customer),
                run=run_of.get(found.customer),
            )
            for found in everyone.value
            if match.lower() in found.customer.lower()
        ]
    return CustomersView(
        customers=PanelData(lines, everyone.error),
        lanes_error=lanes.error or runs.error,
        match=match,
        total=len(everyone.value or ()),
    )


async def view_customer(context: ViewContext) -> CustomerView:
    """The page of a customer. Raises: CustomerUnknown."""
    fetch, name = context.fetch, context.params["customer"]
    customer = await fetch.customers.get(name)
    lane, runs, hosts, source, webhook, results = await asyncio.gather(
        attempt(_lane(context, name)),
        attempt(fetch.runs.newest(name, runs_max=CUSTOMER_RUNS_SHOWN)),
        attempt(fetch.hosts.page(customer=name, hosts_max=HOSTS_SHOWN)),
        attempt(_source(context, name)),
        attempt(_webhook(context, name)),
        attempt(fetch.items.newest_results(results_max=RESULTS_SHOWN, customer=name)),
    )
    lines = None if runs.value is None else [line_of(run) for run in runs.value]
    return CustomerView(
        customer=customer,
        lane=lane,
        runs=PanelData(lines, runs.error),
        hosts=hosts,
        source=source,
        webhook=webhook,
        results=results,
    )


async def view_item(context: ViewContext) -> ItemView:
    """The page of an item. Raises: ItemUnknown."""
    item = await context.fetch.items.get(
        context.params["customer"], context.query.text("id", most=400)
    )
    return ItemView(item=item, media_origin=context.media_origin)


def newest_of(runs: Iterable[Run]) -> dict[str, RunLine]:
    """The newest run of each customer; `runs` are sorted newest first."""
    found: dict[str, RunLine] = {}
    for run in runs:
        if run.customer not in found:
            found[run.customer] = line_of(run)
    return found


async def _lane(context: ViewContext, customer: str) -> Lane | None:
    try:
        lane: Lane = await context.jobs.lanes.get(LIMITER, customer)
    except LaneUnknown:
        return None
    return lane


async def _source(context: ViewContext, customer: str) -> Source | None:
    try:
        source: Source = await context.fetch.sources.get(customer)
    except SourceUnknown:
        return None
    return source


async def _webhook(context: ViewContext, customer: str) -> Webhook | None:
    try:
        webhook: Webhook = await context.fetch.webhooks.get(customer)
    except WebhookUnknown:
        return None
    return webhook


READ: Final = "fetch:read"

ROOM: Final = Room(
    name="fetch",
    title="Fetch",
    key="f",
    screens=(
        Screen(
            path="/fetch",
            title="Runs",
            tab="Runs",
            template="fetch/runs.html",
            scope=READ,
            view=view_runs,
        ),
        Screen(
            path="/fetch/customers",
            title="Customers",
            tab="Customers",
            template="fetch/customers.html",
            scope=READ,
            view=view_customers,
        ),
        Screen(
            path="/fetch/photos",
            title="Photo wall",
            tab="Photos",
            template="fetch/photos.html",
            scope=READ,
            view=view_wall,
            live=False,
        ),
        Screen(
            path="/fetch/review",
            title="Review",
            tab="Review",
            template="fetch/review.html",
            scope=READ,
            view=view_review,
            live=False,
        ),
        Screen(
            path="/fetch/why",
            title="Photo status",
            tab="Photo status",
            template="fetch/why.html",
            scope=READ,
            view=view_why,
            live=False,
        ),
        Screen(
            path="/fetch/hosts",
            title="Hosts",
            tab="Hosts",
            template="fetch/hosts.html",
            scope=READ,
            view=view_hosts,
        ),
        Screen(
            path="/fetch/study",
            title="Download times",
            tab="Download times",
            template="fetch/study.html",
            scope=READ,
            view=view_study,
            live=False,
        ),
        Screen(
            path="/fetch/sources",
            title="Sources",
            tab="Sources",
            template="fetch/sources.html",
            scope=READ,
            view=view_sources,
        ),
        Screen(
            path="/fetch/deliveries",
            title="Deliveries",
            tab="Deliveries",
            template="fetch/deliveries.html",
            scope=READ,
            view=view_deliveries,
        ),
        Screen(
            path="/fetch/runs/{run:str}",
            title="Run",
            template="fetch/run.html",
            scope=READ,
            view=view_run,
        ),
        Screen(
            path="/fetch/customers/{customer:str}",
            title="Customer",
            template="fetch/customer.html",
            scope=READ,
            view=view_customer,
        ),
        Screen(
            path="/fetch/customers/{customer:str}/item",
            title="Item",
            template="fetch/item.html",
            scope=READ,
            view=view_item,
            live=False,
        ),
    ),
    actions=(*ACTIONS, *REVIEW_ACTIONS),
)
