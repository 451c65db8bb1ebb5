"""The fetch room: catalogue runs, customers and items."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, ParamSpec, TypeVar

from headrace.console.history import board_of
from headrace.console.model import ROWS_SHOWN
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
from headrace.console.views import (
    NO_DATA,
    PanelData,
    Room,
    Screen,
    ViewContext,
    attempt,
    choices,
    row_id,
)
from headrace.fetch.catalogues import REVIEW as REVIEW_REASON
from headrace.fetch.i18n import Texts, languages
from headrace.fetch.model import (
    FINAL_STATES,
    LIMITER,
    Change,
    Customer,
    PhotoProblem,
    RowProblem,
    Run,
    RunState,
)
from headrace.fetch.outcomes import count_bad
from headrace.jobs.model import Lane
from headrace.kernel.errors import NotFound

Found = TypeVar("Found")
Arguments = ParamSpec("Arguments")
BOARDS: Final = ("problems", "photos", "changes")
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
NAMES: Final[dict[RunState, str]] = {
    RunState.BRINGING: "downloading",
    RunState.DRY: "dry run",
    RunState.SUPERSEDED: "replaced",
}
"""States whose name is not that of the API."""
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
    def state(self) -> str:
        """The state for people."""
        return NAMES.get(self.run.state, self.run.state.value)

    @property
    def words(self) -> str:
        """The state as a sentence."""
        return REVIEW if self.run.reason == REVIEW_REASON else WORDS[self.run.state]

    @property
    def ratio(self) -> float | None:
        """Share of processed photos; None without photos."""
        return self.photos_decided / self.run.photos if self.run.photos else None


def line_of(run: Run) -> RunLine:
    """A run with derived figures."""
    bad = count_bad(run.photos_by_outcome)
    decided = max(0, run.photos - run.photos_pending)
    return RunLine(run=run, tone=TONES[run.state], photos_decided=decided, photos_bad=bad)


async def view_runs(context: ViewContext) -> dict[str, Any]:
    """The newest runs before the id in the URL, of one customer or of all."""
    customer = context.query.text("customer", most=128)
    group = context.query.choice("show", ("all", *GROUPS), "all")
    history, found = await asyncio.gather(
        board_of(context, "fetch"),
        attempt(
            context.fetch.runs.newest,
            customer or None,
            states=GROUPS.get(group),
            before=context.query.number("before", 0) or None,
            runs_max=ROWS_SHOWN + 1,
        ),
    )
    shown, next_url = context.cut(found.value or (), ROWS_SHOWN, before="run")
    return {
        "history": history,
        "runs": PanelData([line_of(run) for run in shown], found.error),
        "customer": customer,
        "group": group,
        "groups": choices(("all", *GROUPS)),
        "next_url": next_url,
    }


async def view_run(context: ViewContext) -> dict[str, Any]:
    """The page of a run. Raises: RunUnknown."""
    fetch, run_id = context.fetch, row_id(context.params["run"])
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
            fetch.reports.problems, run_id, after=after, rows_max=ROWS_SHOWN, lang=lang
        )
        more = _more_by_position(context, problems.value)
    elif board == "photos":
        photos = await attempt(
            fetch.reports.photo_problems, run_id, after=after, rows_max=ROWS_SHOWN, lang=lang
        )
        more = _more_by_position(context, photos.value)
    else:
        item = context.query.text("item", most=400)
        changes = await attempt(fetch.runs.changes, run_id, after=item, rows_max=ROWS_SHOWN)
        if changes.value and len(changes.value) == ROWS_SHOWN:
            more = context.url(item=changes.value[-1].item)
    texts = Texts.load(lang, fetch.config)
    counts = sorted(run.photos_by_outcome.items(), key=lambda pair: -pair[1])
    return {
        "line": line_of(run),
        "reason": texts.of_run(run),
        "board": board,
        "boards": BOARDS,
        "lang": lang,
        "langs": langs,
        "outcomes": [(outcome, photos_, texts.outcome(outcome)) for outcome, photos_ in counts],
        "problems": problems,
        "photos": photos,
        "changes": changes,
        "more": more,
    }


def _more_by_position(
    context: ViewContext, lines: Sequence[tuple[int, object]] | None
) -> str | None:
    if lines is None or len(lines) < ROWS_SHOWN:
        return None
    return context.url(after=lines[-1][0])


LANES_MAX: Final = 1_000
RUNS_LOOKED_AT: Final = 500
CUSTOMER_RUNS_SHOWN: Final = 10
RESULTS_SHOWN: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomerLine:
    """A customer with its lane and newest run."""

    customer: Customer
    lane: Lane | None
    run: RunLine | None
    """None if the customer has no recent run."""


async def view_customers(context: ViewContext) -> dict[str, Any]:
    """Customers whose name contains the filter text, by name."""
    fetch, jobs = context.fetch, context.jobs
    match = context.query.text("match", most=128)
    everyone, lanes, runs = await asyncio.gather(
        attempt(fetch.customers.all),
        attempt(jobs.lanes.list, LIMITER, lanes_max=LANES_MAX),
        attempt(fetch.runs.newest, runs_max=RUNS_LOOKED_AT),
    )
    lane_of = {lane.lane: lane for lane in lanes.value or ()}
    run_of = newest_of(runs.value or ())

    after = context.query.text("after", most=128)
    matching = [one for one in everyone.value or () if match.lower() in one.customer.lower()]
    following = sorted(
        (one for one in matching if one.customer > after), key=lambda one: one.customer
    )
    shown, more = context.cut(following, ROWS_SHOWN, after="customer")
    lines = [
        CustomerLine(customer=one, lane=lane_of.get(one.customer), run=run_of.get(one.customer))
        for one in shown
    ]
    return {
        "customers": PanelData(lines, everyone.error),
        "lanes_error": lanes.error or runs.error,
        "limiter": LIMITER,
        "match": match,
        "matching": len(matching),
        "total": len(everyone.value or ()),
        "more": more,
    }


async def view_customer(context: ViewContext) -> dict[str, Any]:
    """The page of a customer. Raises: CustomerUnknown."""
    fetch, name = context.fetch, context.params["customer"]
    customer = await fetch.customers.get(name)
    lane, runs, hosts, source, webhook, results = await asyncio.gather(
        attempt(_if_any, context.jobs.lanes.get, LIMITER, name),
        attempt(fetch.runs.newest, name, runs_max=CUSTOMER_RUNS_SHOWN),
        attempt(fetch.hosts.page, customer=name, hosts_max=ROWS_SHOWN),
        attempt(_if_any, fetch.sources.get, name),
        attempt(_if_any, fetch.webhooks.get, name),
        attempt(fetch.items.newest_results, results_max=RESULTS_SHOWN, customer=name),
    )
    return {
        "customer": customer,
        "lane": lane,
        "runs": runs.map(lambda found: [line_of(run) for run in found]),
        "hosts": hosts,
        "source": source,
        "webhook": webhook,
        "results": results,
    }


async def view_item(context: ViewContext) -> dict[str, Any]:
    """The page of an item. Raises: ItemUnknown."""
    item = await context.fetch.items.get(
        context.params["customer"], context.query.text("id", most=400)
    )
    texts = Texts.load(config=context.fetch.config)
    return {"item": item, "texts": {one.outcome: texts.outcome(one.outcome) for one in item.photos}}


def newest_of(runs: Iterable[Run]) -> dict[str, RunLine]:
    """The newest run of each customer; `runs` are sorted newest first."""
    found: dict[str, RunLine] = {}
    for run in runs:
        if run.customer not in found:
            found[run.customer] = line_of(run)
    return found


async def _if_any(
    call: Callable[Arguments, Awaitable[Found]],
    /,
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> Found | None:
    """What `call` returns, or None if there is no such thing."""
    try:
        return await call(*args, **kwargs)
    except NotFound:
        return None


READ: Final = "fetch:read"

ROOM: Final = Room(
    name="fetch",
    title="Fetch",
    key="f",
    scope=READ,
    screens=(
        Screen("/fetch", "Runs", "fetch/runs.html", view_runs, tab="Runs"),
        Screen(
            "/fetch/customers", "Customers", "fetch/customers.html", view_customers, tab="Customers"
        ),
        Screen(
            "/fetch/photos", "Photo wall", "fetch/photos.html", view_wall, tab="Photos", live=False
        ),
        Screen(
            "/fetch/review", "Review", "fetch/review.html", view_review, tab="Review", live=False
        ),
        Screen(
            "/fetch/why", "Photo status", "fetch/why.html", view_why, tab="Photo status", live=False
        ),
        Screen("/fetch/hosts", "Hosts", "fetch/hosts.html", view_hosts, tab="Hosts"),
        Screen(
            "/fetch/study",
            "Download times",
            "fetch/study.html",
            view_study,
            tab="Download times",
            live=False,
        ),
        Screen("/fetch/sources", "Sources", "fetch/sources.html", view_sources, tab="Sources"),
        Screen(
            "/fetch/deliveries",
            "Deliveries",
            "fetch/deliveries.html",
            view_deliveries,
            tab="Deliveries",
        ),
        Screen("/fetch/runs/{run:str}", "Run", "fetch/run.html", view_run),
        Screen("/fetch/customers/{customer:str}", "Customer", "fetch/customer.html", view_customer),
        Screen(
            "/fetch/customers/{customer:str}/item", "Item", "fetch/item.html", view_item, live=False
        ),
    ),
    actions=(*ACTIONS, *REVIEW_ACTIONS),
)
