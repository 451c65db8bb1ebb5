"""Runs: how far they are, what was wrong in the seller's words, what they change, and those that wait for a person."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from headrace.console.screens.words import same
from headrace.console.seeing import Ask, Found, attempt
from headrace.fetch.i18n import Texts, languages
from headrace.fetch.model import FINAL_STATES, Change, PhotoProblem, RowProblem, Run, RunState

NOTHING: Final[Found[Any]] = Found()
"""Where nothing was asked."""
RUNS_SHOWN: Final = 100
LINES_SHOWN: Final = 100
BOARDS: Final = ("problems", "photos", "changes")
NOT_UNDOABLE: Final = ("same", "items", "undo", "links")
"""Formats of runs that are of no catalogue file."""
GROUPS: Final[dict[str, frozenset[RunState]]] = {
    "under way": frozenset(RunState) - FINAL_STATES,
    "held": frozenset({RunState.HELD}),
    "ended": FINAL_STATES - {RunState.HELD},
}
"""What the list of runs can be narrowed to."""
WORDS: Final[dict[RunState, str]] = {
    RunState.BRINGING: "The file is being brought.",
    RunState.READING: "The file is being read and compared.",
    RunState.REFUSED: "The file was refused; nothing was changed.",
    RunState.ABANDONED: "Its process ended before the file was read; nothing was changed.",
    RunState.DRY: "A trial: it says what would change, and changed nothing.",
    RunState.HELD: "The file looks like an accident, so nothing was changed: a person decides.",
    RunState.SUPERSEDED: "A newer run took its place, or a person discarded it; nothing was changed.",
    RunState.APPLIED: "Applied; photos and results are under way.",
    RunState.DONE: "Applied, with every photo decided and every result told.",
}
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
    """A run with what is worked out of its counts."""

    run: Run
    tone: str
    photos_decided: int
    photos_bad: int

    @property
    def ratio(self) -> float | None:
        """Share of its photos that are decided; None: it has none to decide."""
        return self.photos_decided / self.run.photos if self.run.photos else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsView:
    """The newest runs."""

    runs: Found[list[RunLine]]
    customer: str
    group: str
    groups: Sequence[tuple[str, str]]
    is_cut: bool
    looked_at: int = RUNS_SHOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """One run, with one of its three lists."""

    line: RunLine
    words: str
    reason: str
    board: str
    boards: Sequence[str]
    lang: str
    langs: Sequence[str]
    outcomes: list[tuple[str, int, str]]
    """Outcome, photos, and what it means."""
    problems: Found[list[tuple[int, RowProblem]]]
    photos: Found[list[tuple[int, PhotoProblem]]]
    changes: Found[list[Change]]
    more: str | None
    """Address of the list's next page."""

    @property
    def can_undo(self) -> bool:
        """Whether it is an applied catalogue that was not undone."""
        run = self.line.run
        is_applied = run.state in (RunState.APPLIED, RunState.DONE)
        return is_applied and run.undone_by is None and run.format not in NOT_UNDOABLE


def line_of(run: Run) -> RunLine:
    """A run as a line of the list."""
    bad = sum(
        photos
        for outcome, photos in run.photos_by_outcome.items()
        if outcome.startswith(("failed:", "refused:"))
    )
    decided = max(0, run.photos - run.photos_pending)
    return RunLine(run=run, tone=TONES[run.state], photos_decided=decided, photos_bad=bad)


async def see_runs(ask: Ask) -> RunsView:
    """The newest runs of one customer or of all."""
    customer = ask.query.text("customer", most=128)
    group = ask.query.choice("show", ("all", *GROUPS), "all")
    found = await attempt(ask.service("fetch").runs(customer or None, runs_max=RUNS_SHOWN))
    lines = None
    if found.value is not None:
        wanted = GROUPS.get(group, frozenset(RunState))
        lines = [line_of(run) for run in found.value if run.state in wanted]
    return RunsView(
        runs=Found(lines, found.error),
        customer=customer,
        group=group,
        groups=same(("all", *GROUPS)),
        is_cut=found.value is not None and len(found.value) == RUNS_SHOWN,
    )


async def see_run(ask: Ask) -> RunView:
    """One run. Raises: RunUnknown."""
    fetch, run_id = ask.service("fetch"), run_number(ask.params["run"])
    run = await fetch.run(run_id)
    board = ask.query.choice("list", BOARDS, "problems" if run.problems else "changes")
    langs = languages()
    lang = ask.query.choice("lang", langs, langs[0])
    after = ask.query.number("after", 0)
    problems: Found[list[tuple[int, RowProblem]]] = NOTHING
    photos: Found[list[tuple[int, PhotoProblem]]] = NOTHING
    changes: Found[list[Change]] = NOTHING
    more = None
    if board == "problems":
        problems = await attempt(
            fetch.problems(run_id, after=after, rows_max=LINES_SHOWN, lang=lang)
        )
        more = _more_by_position(ask, problems.value)
    elif board == "photos":
        asked = fetch.photo_problems(run_id, after=after, rows_max=LINES_SHOWN, lang=lang)
        photos = await attempt(asked)
        more = _more_by_position(ask, photos.value)
    else:
        item = ask.query.text("item", most=400)
        changes = await attempt(fetch.changes(run_id, after=item, rows_max=LINES_SHOWN))
        if changes.value and len(changes.value) == LINES_SHOWN:
            more = ask.url(item=changes.value[-1].item)
    texts = Texts.load(lang, fetch.config)
    counts = sorted(run.photos_by_outcome.items(), key=lambda pair: -pair[1])
    return RunView(
        line=line_of(run),
        words=WORDS[run.state],
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
    """The number of a run in an address; 0, which no run has, for what is none."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else 0


def _more_by_position(ask: Ask, lines: Sequence[tuple[int, object]] | None) -> str | None:
    if lines is None or len(lines) < LINES_SHOWN:
        return None
    return ask.url(after=lines[-1][0])
