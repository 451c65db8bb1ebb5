"""Checkers of a history: pure functions that return every violation of a promise.

    assert not lost(history, stored=jobs_in_the_database)

They read these facts: `job` and `lane` of a `start` (lists in a batch), `lease` for fencing, and
the fact of a result that the caller names. They never report a false violation: an unknown result
is no acknowledgement, and a run ends when its process is recorded as lost or its job starts again.
Each checker has a test with a planted bug that it reports.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tests.kit.history import END, INVOKE, LOST, OK, START, Event, History

EVENTS_SHOWN_MAX = 12


@dataclass(frozen=True, slots=True, repr=False)
class Finding:
    """A violation: its kind, subject, description and events."""

    fault: str
    subject: Hashable
    text: str
    events: tuple[Event, ...] = ()

    def __repr__(self) -> str:
        shown = [f"\n    {event}" for event in self.events[:EVENTS_SHOWN_MAX]]
        more = len(self.events) - len(shown)
        rest = f"\n    and {more} more" if more else ""
        return f"\n{self.fault} {self.subject}: {self.text}{''.join(shown)}{rest}"


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of a job; `end_ns` is None for a run without an end."""

    job: Hashable
    lane: Hashable
    start_ns: int
    end_ns: int | None
    event: Event


def lost(
    history: History,
    *,
    stored: Collection[Hashable],
    what: str = "enqueue",
    fact: str = "job",
) -> list[Finding]:
    """Jobs that `what` acknowledged, that no handler completed and that are not stored."""
    done = {run for event in history.of(END) if "error" not in event.facts for run in _jobs(event)}
    findings = []
    for event in history.of(OK, what=what):
        for job in _listed(event.facts[fact]):
            if job in done or job in stored:
                continue
            about = [e for e in history.events if e is event or job in _jobs(e)]
            text = "it was acknowledged, is not stored, and no handler finished it"
            findings.append(Finding("lost", job, text, tuple(about)))
    return findings


def doubled(
    history: History, *, what: str, by: str, witness: str | None = None, kind: str = OK
) -> list[Finding]:
    """Repeated effects: two events of `what` with the same `by` but different `witness`.

    A repeated equal ack is no second effect: give `witness="lease"`. A group's callback
    or a cron's slot that two jobs run: `kind=START, by="group", witness="job"`. Without a witness
    no event may repeat.
    """
    seen: dict[Hashable, dict[Hashable, Event]] = defaultdict(dict)
    for number, event in enumerate(history.of(kind, what=what)):
        if by in event.facts:
            reported = number if witness is None else event.facts.get(witness)
            for subject in _listed(event.facts[by]):
                seen[subject].setdefault(_hashable(reported), event)
    return [
        Finding("doubled", subject, f"{what} took effect {len(events)} times", (*events.values(),))
        for subject, events in seen.items()
        if len(events) > 1
    ]


def counted_twice(what: str, rows: Iterable[Hashable]) -> list[Finding]:
    """Repeated rows of a table of effects."""
    counts: dict[Hashable, int] = defaultdict(int)
    for row in rows:
        counts[row] += 1
    return [
        Finding("doubled", row, f"{what} is stored {count} times")
        for row, count in counts.items()
        if count > 1
    ]


def over_limit(
    history: History, *, starts_max: int, window_s: float, lane: Hashable = None
) -> list[Finding]:
    """Lanes with more than `starts_max` starts in a window of `window_s`, with the worst window.

    A window holds its first instant and not its last: a start exactly `window_s` later belongs to
    the next.
    """
    window_ns = round(window_s * 1e9)
    findings = []
    for name, runs in _by_lane(history, lane).items():
        over = [
            first
            for first in range(len(runs) - starts_max)
            if runs[first + starts_max].start_ns - runs[first].start_ns < window_ns
        ]
        if over:
            tightest = min(over, key=lambda i: runs[i + starts_max].start_ns - runs[i].start_ns)
            shown = runs[tightest : tightest + starts_max + 1]
            within_s = (shown[-1].start_ns - shown[0].start_ns) / 1e9
            text = (
                f"{len(over)} windows of {window_s:g} s are over {starts_max} starts; the tightest"
                " has"
                f" {len(shown)} within {within_s:.6f} s"
            )
            events = tuple(run.event for run in shown)
            findings.append(Finding("over limit", name, text, events))
    return findings


def over_concurrency(history: History, *, concurrency: int, lane: Hashable = None) -> list[Finding]:
    """Lanes with more than `concurrency` concurrent runs, at the worst moment."""
    findings = []
    for name, runs in _by_lane(history, lane).items():
        worst: list[_Run] = []
        open_runs: list[_Run] = []
        for run in runs:
            open_runs = [r for r in open_runs if r.end_ns is None or r.end_ns > run.start_ns]
            open_runs.append(run)
            worst = max(worst, list(open_runs), key=len)
        if len(worst) > concurrency:
            text = f"{len(worst)} at once, {concurrency} are allowed"
            events = tuple(run.event for run in worst)
            findings.append(Finding("over concurrency", name, text, events))
    return findings


def overlapping(history: History, *, what: str = "effect") -> list[Finding]:
    """Effects that a fence must refuse: committed under an old lease, or twice under one.

    Effects are operations `what` with the facts `job` and `lease`; the transaction lies between
    `invoke` and `ok`, so what was invoked after another's start was committed after it.
    """
    began: dict[Hashable, dict[Hashable, Event]] = defaultdict(dict)
    for event in history.of(START):
        for job in _jobs(event):
            began[job].setdefault(event.facts.get("lease"), event)
    invoked = {event.call: event for event in history.of(INVOKE, what=what)}
    committed: dict[tuple[Hashable, Hashable], Event] = {}
    findings = []
    for effect in history.of(OK, what=what):
        job, lease = effect.facts["job"], effect.facts["lease"]
        earlier = committed.setdefault((job, lease), effect)
        if earlier is not effect:
            text = f"two effects were committed under lease {lease}"
            findings.append(Finding("overlapping", job, text, (earlier, effect)))
        asked = invoked[effect.call]
        own = began[job].get(lease, asked)
        later = [e for e in began[job].values() if own.at_ns < e.at_ns < asked.at_ns]
        if later:
            text = f"lease {lease} committed when lease {later[0].facts.get('lease')} had the job"
            findings.append(Finding("overlapping", job, text, (own, later[0], effect)))
    return findings


def _by_lane(history: History, lane: Hashable) -> dict[Hashable, list[_Run]]:
    """The runs of each lane in the order of their starts."""
    found: dict[Hashable, list[_Run]] = defaultdict(list)
    for run in _runs(history):
        if run.lane is not None and lane in (None, run.lane):
            found[run.lane].append(run)
    return found


def _runs(history: History) -> list[_Run]:
    """Each start with its end: its own, its process's, or the next start of its job."""
    ended = {event.call: event.at_ns for event in history.of(END) if event.call}
    gone: dict[int, list[int]] = defaultdict(list)
    for event in history.of(LOST):
        gone[event.pid].append(event.at_ns)
    runs: list[_Run] = []
    last: dict[Hashable, int] = {}
    for event in history.of(START):
        ends = [at_ns for at_ns in gone[event.pid] if at_ns >= event.at_ns]
        ends += [ended[event.call]] if event.call in ended else []
        for job, lane in _jobs_and_lanes(event):
            before = last.get(job)
            if before is not None:
                runs[before] = _cut(runs[before], event.at_ns)
            last[job] = len(runs)
            runs.append(_Run(job, lane, event.at_ns, min(ends, default=None), event))
    return runs


def _cut(run: _Run, at_ns: int) -> _Run:
    return replace(run, end_ns=at_ns if run.end_ns is None else min(run.end_ns, at_ns))


def _jobs_and_lanes(event: Event) -> Iterator[tuple[Hashable, Hashable]]:
    jobs, lanes = _jobs(event), event.facts.get("lane")
    return zip(jobs, lanes if isinstance(lanes, list) else [lanes] * len(jobs), strict=True)


def _jobs(event: Event) -> list[Hashable]:
    job = event.facts.get("job")
    return [] if job is None else _listed(job)


def _listed(value: Any) -> list[Hashable]:
    return value if isinstance(value, list) else [value]


def _hashable(value: Any) -> Hashable:
    return tuple(value) if isinstance(value, list) else value
