"""Alert rules over what the leader observes at each plan. No I/O.

A rule must be violated several times in a row to raise an alert, and met several times in a row to
clear it. A value at its threshold and short troubles that the next plan corrects raise none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Final, NamedTuple

import msgspec

from headrace.jobs.model import JobsConfig
from headrace.kernel.metrics import gauge
from headrace.kernel.terminal import pluralize

GROWTH_S: Final = 600.0
"""Span over which growth is measured."""
ACTIVE_GROWTH: Final = 1.5
LEASED_GROWTH: Final = 2.0
LEASED_MIN: Final = 200
ENDED_MIN: Final = 20
SHORT_OLDEST_S: Final = 30.0
"""A fleet without room is no alert while due jobs wait no longer than this."""
MINUTES_SEEN: Final = 10
"""Minutes over which the share of failures is measured."""


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """A violation of a rule by a queue or a host."""

    id: int
    rule: str
    subject: str
    text: str
    raised_at: datetime
    cleared_at: datetime | None = None


class QueueObservation(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a queue at an evaluation."""

    active: int
    leased: int
    oldest_age_s: float
    done: int
    """In the last minutes."""
    failed: int
    is_at_max: bool = False
    """It needs more slots than its maximum."""
    is_short: bool = False
    """The fleet has too little room for it."""
    is_loaded: bool = False
    """Hosts that could work it add no slots now, since their slots are short of CPU."""
    idle_elsewhere: int = 0
    """Slots of other queues that were without work."""
    slots: int = 0
    slots_min: int = 0


class FleetObservation(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the fleet at an evaluation."""

    at_s: float
    queues: Mapping[str, QueueObservation]
    hosts: Mapping[str, bool]
    """By name whether it is silent or lost. Hosts that stopped properly are left out."""


class Change(NamedTuple):
    """An alert to raise or to clear."""

    rule: str
    subject: str
    is_raised: bool
    text: str


class Rule(NamedTuple):
    """`broken(now, before, config)` returns the violation as text; `before` is ten minutes old."""

    broken: Callable[[QueueObservation, QueueObservation | None, JobsConfig], str | None]
    raise_after: int
    """Violations in a row that raise an alert."""
    clear_after: int
    """Evaluations in a row without violation that clear it."""


def _active_grows(
    now: QueueObservation, before: QueueObservation | None, config: JobsConfig
) -> str | None:
    if before is None or now.active < max(config.alert_active_min, ACTIVE_GROWTH * before.active):
        return None
    return (
        f"{now.active} jobs are active, ten minutes ago {before.active}: more arrive than are done"
    )


def _leased_grows(
    now: QueueObservation, before: QueueObservation | None, _: JobsConfig
) -> str | None:
    if before is None or now.leased < max(LEASED_MIN, LEASED_GROWTH * before.leased):
        return None
    return (
        f"{now.leased} jobs are in progress, ten minutes ago {before.leased}: check whether"
        " handlers hang or have become slow"
    )


def _oldest_waits(
    now: QueueObservation, _: QueueObservation | None, config: JobsConfig
) -> str | None:
    if now.oldest_age_s <= config.alert_oldest_s:
        return None
    return _waited(now)


def _waited(now: QueueObservation) -> str:
    """The text is stored with the alert and read later, so it states when this was."""
    return f"its oldest due job had waited {now.oldest_age_s:.0f} s when this alert was raised"


def _many_fail(now: QueueObservation, _: QueueObservation | None, config: JobsConfig) -> str | None:
    ended = now.done + now.failed
    if ended < ENDED_MIN or now.failed * 100 < config.alert_failed_percent * ended:
        return None
    return f"{now.failed} of {ended} jobs failed in the last {MINUTES_SEEN} minutes"


def _is_at_max(now: QueueObservation, _: QueueObservation | None, __: JobsConfig) -> str | None:
    if not now.is_at_max:
        return None
    return "it needs more slots than its maximum: raise that, or see why its handlers are slow"


def _is_short(now: QueueObservation, _: QueueObservation | None, __: JobsConfig) -> str | None:
    if not now.is_short or now.oldest_age_s <= SHORT_OLDEST_S:
        return None
    waited = _waited(now)
    if now.is_loaded:
        return f"{waited}. Hosts short of CPU add no slots: see what else runs there, or add hosts"
    if now.idle_elsewhere:
        idle = pluralize(
            now.idle_elsewhere, "slot of other queues was", "slots of other queues were"
        )
        return (
            f"{waited}. No host had room for another slot, but {idle} idle: lower the minimums of"
            " those queues, or give this one a lower importance number (0 is served first)"
        )
    return f"{waited}. No host had room for another slot, and no slot was idle: add hosts"


def _is_below_min(now: QueueObservation, _: QueueObservation | None, __: JobsConfig) -> str | None:
    if now.slots >= now.slots_min:
        return None
    lacking = "they lack memory or cores, or jobs.slots_per_core is too low"
    why = "their slots are short of CPU" if now.is_loaded else lacking
    return (
        f"it has {now.slots} of its minimum of {now.slots_min} slots: the hosts that can work it"
        f" have no room ({why}): add hosts, or lower minimums"
    )


QUEUE_RULES: Final[Mapping[str, Rule]] = {
    "active_grows": Rule(_active_grows, raise_after=6, clear_after=12),
    "leased_grows": Rule(_leased_grows, raise_after=6, clear_after=12),
    "oldest_waits": Rule(_oldest_waits, raise_after=3, clear_after=6),
    "many_fail": Rule(_many_fail, raise_after=3, clear_after=12),
    "at_max": Rule(_is_at_max, raise_after=12, clear_after=24),
    "fleet_short": Rule(_is_short, raise_after=12, clear_after=24),
    "below_min": Rule(_is_below_min, raise_after=6, clear_after=6),
}
HOST_RULE: Final = "agent_missing"
HOST_RAISE_AFTER: Final = 2
HOST_CLEAR_AFTER: Final = 2
RULES: Final = (*QUEUE_RULES, HOST_RULE)
open_alerts = gauge("jobs_alerts_open", "Open alerts, counted by the leader.", rule=RULES)


class AlertEvaluator:
    """The state of all rules: how often in a row each was violated or met."""

    def __init__(self, config: JobsConfig, open_now: Iterable[tuple[str, str]] = ()) -> None:
        self._config = config
        self._open = dict.fromkeys(open_now, 0)
        """Open alerts, with the evaluations in a row without violation."""
        self._broken: dict[tuple[str, str], int] = {}
        """Rules without an alert, with the violations in a row."""
        self._past: deque[tuple[float, Mapping[str, QueueObservation]]] = deque()

    @property
    def open_counts(self) -> dict[str, int]:
        """Number of open alerts by rule."""
        counts = dict.fromkeys(RULES, 0)
        for rule, _ in self._open:
            counts[rule] = counts.get(rule, 0) + 1
        return counts

    def observe(self, observation: FleetObservation) -> list[Change]:
        """Evaluate every rule. Return the alerts to raise and to clear."""
        before = self._before(observation)
        found = {
            (rule, queue): text
            for queue, seen in observation.queues.items()
            for rule, one in QUEUE_RULES.items()
            if (text := one.broken(seen, before.get(queue), self._config)) is not None
        }
        for host, is_silent in observation.hosts.items():
            if is_silent:
                found[HOST_RULE, host] = (
                    "it stopped reporting: its jobs return to the queues, and it gets no slots"
                    " until it reports again"
                )
        self._remember(observation)
        return [*self._raised(found), *self._cleared(found)]

    def _raised(self, found: Mapping[tuple[str, str], str]) -> Iterable[Change]:
        self._broken = {key: self._broken.get(key, 0) + 1 for key in found if key not in self._open}
        for key in [k for k, n in self._broken.items() if n >= _patience(k[0])[0]]:
            del self._broken[key]
            self._open[key] = 0
            yield Change(*key, is_raised=True, text=found[key])

    def _cleared(self, found: Mapping[tuple[str, str], str]) -> Iterable[Change]:
        for key in list(self._open):
            self._open[key] = 0 if key in found else self._open[key] + 1
            if self._open[key] >= _patience(key[0])[1]:
                del self._open[key]
                yield Change(*key, is_raised=False, text="the rule is met again")

    def _before(self, observation: FleetObservation) -> Mapping[str, QueueObservation]:
        """The state ten minutes ago; empty if observation began later."""
        old: Mapping[str, QueueObservation] = {}
        for at_s, queues in self._past:
            if at_s > observation.at_s - GROWTH_S:
                break
            old = queues
        return old

    def _remember(self, observation: FleetObservation) -> None:
        self._past.append((observation.at_s, observation.queues))
        while len(self._past) > 1 and self._past[1][0] <= observation.at_s - GROWTH_S:
            self._past.popleft()


def _patience(rule: str) -> tuple[int, int]:
    if rule in QUEUE_RULES:
        return QUEUE_RULES[rule].raise_after, QUEUE_RULES[rule].clear_after
    return HOST_RAISE_AFTER, HOST_CLEAR_AFTER
