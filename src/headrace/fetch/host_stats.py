"""Host statistics per customer, and the timeout class in which a photo starts.

    download ended -> recorded here -> every second ONE statement for all hosts -> fetch_host
    enqueue a page -> one read of its hosts -> the queue of each photo

Statistics are stored in PostgreSQL and cached for seconds. A worker learns from its own downloads
at once, and from those of others FLUSH_S + REFRESH_S later at most, with their pauses. A killed
worker loses the measurements and pauses of its last second.

**Timeout classes.** A pure rule selects the class in which a photo starts:

    a download ended -> the class that was enough -> decaying weight of (customer, host, class)
    a photo is enqueued -> the shortest class that was enough for FIT of the weight -> its queue

A share decides, not the mean: a host whose photos take 0.3 s and 4 s has a mean that fits neither.
The simulation in `tests/fetch/test_routing.py` limits photos that start in too small a class to 5
%.

**Decay.** Weights decay by age (`fetch.speed_half_life`) and by number: RECENT downloads count. So
a host that became faster moves back after some hundred photos. Probes are unnecessary: a long
class measures a short download as well as a short class does.

**Evidence.** Received bodies, and timeouts, which prove that a longer class is needed. A response
without a body (404, 304) shows nothing, unless it took longer than the shortest class.

Weights are stored by the length of a class, so they stay valid when a class is added or removed.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from headrace.engines.postgres import Postgres, Row, Runner
from headrace.fetch.sql import SQL
from headrace.kernel.batching import Batcher
from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import logger

FIT: Final = 0.95
"""Share of a host's weight that must fit into its class."""
HEADROOM: Final = 1.25
"""A download that used more than 1/HEADROOM of a class counts for the next one."""
RECENT: Final = 50
"""Downloads of a host that count, by weight."""
FORGOTTEN: Final = 0.05
"""A host with less weight is treated as new."""
_HOST: Final = re.compile(r"(https?)://([^/?#]+)", re.IGNORECASE)
_PORTS: Final = {"http": ":80", "https": ":443"}


@dataclass(frozen=True, slots=True)
class TimeClass:
    """A timeout class: its queue, and the time limit of a photo with its redirects."""

    time_s: float

    @property
    def name(self) -> str:
        """`1s`, `500ms`."""
        if self.time_s == int(self.time_s):
            return f"{self.time_s:.0f}s"
        return f"{self.time_s * 1000:g}ms"

    @property
    def queue(self) -> str:
        """`fetch.1s`."""
        return f"fetch.{self.name}"

    @property
    def concurrency(self) -> int:
        """Concurrent downloads per slot; longer timeouts need more of them."""
        return min(1000, int(200 + 20 * self.time_s))


class Classes:
    """The timeout classes, shortest first, and former ones that still have jobs."""

    def __init__(self, times_s: Iterable[float], former_s: Iterable[float] = ()) -> None:
        self.listed = tuple(TimeClass(s) for s in sorted(set(times_s))) or (TimeClass(30.0),)
        kept = {c.time_s for c in self.listed}
        self.former = tuple(TimeClass(s) for s in sorted(set(former_s) - kept))
        self._by_queue = {c.queue: c for c in (*self.listed, *self.former)}

    @property
    def first(self) -> TimeClass:
        """The shortest class."""
        return self.listed[0]

    @property
    def last(self) -> TimeClass:
        """The longest class."""
        return self.listed[-1]

    def of_queue(self, queue: str) -> TimeClass:
        """The class of a queue; the longest for an unknown queue."""
        return self._by_queue.get(queue, self.last)

    def after(self, here: TimeClass) -> TimeClass | None:
        """The next longer class; None after the longest."""
        return next((c for c in self.listed if c.time_s > here.time_s), None)

    def enough_for(self, took_s: float) -> TimeClass:
        """The shortest class with headroom for a download of `took_s`, or the longest."""
        return next((c for c in self.listed if c.time_s >= took_s * HEADROOM), self.last)

    def starting(self, weights: Mapping[float, float]) -> TimeClass:
        """The class in which a photo starts, from its host's weights by length of class."""
        total = sum(weights.values())
        if total < FORGOTTEN:
            return self.first
        for found in self.listed:
            fits = sum(weight for time_s, weight in weights.items() if time_s <= found.time_s)
            if fits >= FIT * total:
                return found
        return self.last

    def needed(self, outcome: str, took_s: float, here: TimeClass) -> float | None:
        """Length of the class that a download in `here` needed; None: no evidence."""
        if outcome == "failed:timeout":
            following = self.after(here)
            return (following or self.last).time_s
        if outcome != "received" and took_s <= self.first.time_s:
            return None
        return self.enough_for(took_s).time_s


def decayed(weight: float, *, age_s: float, half_life_s: float, new: int) -> float:
    """A weight after `age_s` and `new` further downloads; fetch_note_hosts_v1 computes the same."""
    return weight * float(0.5 ** (age_s / half_life_s)) * max(0.0, 1 - new / RECENT)


def host_of(url: str) -> str:
    """Host of a URL in lower case, with a port other than the default; "" for no URL."""
    match = _HOST.match(url)
    if match is None:
        return ""
    return match[2].lower().removesuffix(_PORTS[match[1].lower()])


FORGOTTEN_AT_ONCE: Final = 1000
FLUSH_S: Final = 1.0
REFRESH_S: Final = 5.0
"""Age up to which cached statistics are used: other processes store pauses meanwhile."""
HOSTS_MAX: Final = 20_000
FORGET_EVERY_S: Final = 3600.0
HOST_KEPT_S: Final = 90 * 86_400.0
COUNTS_EVERY_S: Final = 10.0
"""All slots add to the same counts of attempts, so each writes them less often than its hosts."""
COUNT_DAYS_KEPT: Final = 400
AttemptKey: TypeAlias = tuple[float, str, int]
"""Length of the class, outcome, bucket of the download time: see `study.py`."""
_LOG: Final = logger(__name__)


@dataclass(slots=True)
class Measurements:
    """Measurements of a host since the last flush."""

    requests: int = 0
    photos: int = 0
    seconds: float = 0.0
    pause_s: float = 0.0
    needed: Counter[float] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class HostState:
    """Cached statistics of a host."""

    read_s: float
    """Time at which the read began, by `time.monotonic`."""
    weights: dict[float, float] = field(default_factory=dict)
    paused_until_s: float = 0.0
    """By `time.monotonic`."""

    @property
    def pause_s(self) -> float:
        """Remaining pause of the host; 0 if none."""
        return max(0.0, self.paused_until_s - time.monotonic())


class HostStats:
    """Measures hosts and selects the class in which their photos start."""

    def __init__(self, postgres: Postgres, classes: Classes, *, half_life_s: float) -> None:
        self.classes = classes
        self._postgres = postgres
        self._half_life_s = half_life_s
        self._measured: dict[tuple[str, str], Measurements] = {}
        self._attempts: Counter[AttemptKey] = Counter()
        self._attempts_due_s = 0.0
        self._known: OrderedDict[tuple[str, str], HostState] = OrderedDict()
        self._reading: Batcher[tuple[str, str], HostState] = Batcher(self._read)
        self._renewing: dict[tuple[str, str], asyncio.Task[HostState]] = {}
        self._flushing: asyncio.Task[None] | None = None
        self._forgot_s = time.monotonic()

    def prefetch(self, customer: str, host: str) -> None:
        """Start to read the statistics of a host that will be needed."""
        if self._fresh((customer, host)) is None:
            self._renew((customer, host))

    async def get(self, customer: str, host: str) -> HostState:
        """Statistics of a host, at most REFRESH_S old. Raises: PostgresDown, PostgresBusy."""
        known = self._fresh((customer, host))
        if known is None:
            known = await asyncio.shield(self._renew((customer, host)))
        return known

    def _fresh(self, key: tuple[str, str]) -> HostState | None:
        """Cached statistics that need no read."""
        known = self._known.get(key)
        if known is None or time.monotonic() - known.read_s > REFRESH_S:
            return None
        return known

    def _renew(self, key: tuple[str, str]) -> asyncio.Task[HostState]:
        task = self._renewing.get(key)
        if task is None:
            task = self._renewing[key] = asyncio.create_task(self._read_one(key))
            task.add_done_callback(lambda ended: self._renewed(key, ended))
        return task

    async def _read_one(self, key: tuple[str, str]) -> HostState:
        known = self._known[key] = await self._reading.submit(key)
        if len(self._known) > HOSTS_MAX:
            self._known.popitem(last=False)
        return known

    def _renewed(self, key: tuple[str, str], task: asyncio.Task[HostState]) -> None:
        del self._renewing[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            # A waiting caller gets the error; without one the next caller reads again.
            _LOG.info("host_stats_not_read", host=key[1], error=str(error))

    def first_class(self, known: HostState) -> TimeClass:
        """The class in which a photo of the host starts."""
        return self.classes.starting(known.weights)

    def count_attempt(self, key: AttemptKey) -> None:
        """Count an attempt for the study of download times; `record` follows."""
        self._attempts[key] += 1

    def record(
        self,
        customer: str,
        host: str,
        *,
        outcome: str,
        requests: int,
        took_s: float,
        needed_s: float | None,
    ) -> None:
        """Record a download.

        `needed_s`: length of the class that it needed; None: no evidence.
        """
        measured = self._measured.setdefault((customer, host), Measurements())
        measured.requests += requests
        measured.outcomes[outcome] += 1
        known = self._known.get((customer, host))
        if needed_s is not None:
            measured.photos += 1
            measured.seconds += took_s
            measured.needed[needed_s] += 1
            if known is not None:
                _learn(known, needed_s, half_life_s=self._half_life_s)
        self._flush_later()

    def pause(self, customer: str, host: str, pause_s: float) -> None:
        """Record a pause that the host requested."""
        measured = self._measured.setdefault((customer, host), Measurements())
        measured.pause_s = max(measured.pause_s, pause_s)
        known = self._known.get((customer, host))
        if known is not None:
            known.paused_until_s = max(known.paused_until_s, time.monotonic() + pause_s)
        self._flush_later()

    def _flush_later(self) -> None:
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush_soon())

    async def queues(self, runner: Runner, customer: str, urls: Iterable[str]) -> Mapping[str, str]:
        """The queue in which a photo starts, per URL; one statement."""
        hosts = {url: host_of(url) for url in urls}
        names = sorted(set(hosts.values()))
        states = await host_states(runner, [(customer, name) for name in names])
        queue_of = {
            name: self.classes.starting(self._weights(states.get(index))).queue
            for index, name in enumerate(names)
        }
        return {url: queue_of[host] for url, host in hosts.items()}

    async def flush(self) -> None:
        """Write the measurements to PostgreSQL; keep them on errors.

        Raises: PostgresDown, PostgresBusy.
        """
        measured, self._measured = self._measured, {}
        attempts: Counter[AttemptKey] = Counter()
        if time.monotonic() >= self._attempts_due_s:
            attempts, self._attempts = self._attempts, attempts
        if not measured and not attempts:
            return
        try:
            await note_hosts(self._postgres, measured, attempts, half_life_s=self._half_life_s)
            if attempts:
                self._attempts_due_s = time.monotonic() + COUNTS_EVERY_S
        except BaseException:
            self._attempts += attempts
            for key, one in self._measured.items():
                measured[key] = _sum(measured[key], one) if key in measured else one
            self._measured = measured
            raise

    async def close(self) -> None:
        """Write the remaining measurements if PostgreSQL is available."""
        await asyncio.gather(*self._renewing.values(), return_exceptions=True)
        if self._flushing is not None:
            self._flushing.cancel()
            await asyncio.gather(self._flushing, return_exceptions=True)
        self._attempts_due_s = 0.0
        try:
            await self.flush()
        except HeadraceError as error:
            _LOG.info("host_stats_lost", hosts=len(self._measured), error=error.text)

    async def _flush_soon(self) -> None:
        try:
            while self._measured or self._attempts:
                await asyncio.sleep(FLUSH_S)
                try:
                    await self.flush()
                    await self._forget()
                except HeadraceError as error:
                    _LOG.info("host_stats_delayed", hosts=len(self._measured), error=error.text)
        finally:
            self._flushing = None

    async def _forget(self) -> None:
        """Delete hosts without recent requests, once per FORGET_EVERY_S."""
        if time.monotonic() - self._forgot_s > FORGET_EVERY_S:
            self._forgot_s = time.monotonic()
            await forget_hosts(self._postgres, kept_s=HOST_KEPT_S)
            await self._postgres.run(SQL.forget_attempts, days_kept=COUNT_DAYS_KEPT)

    async def _read(self, keys: list[tuple[str, str]]) -> list[HostState]:
        unique = list(dict.fromkeys(keys))
        began_s = time.monotonic()
        states = await host_states(self._postgres, unique)
        now_s = time.monotonic()
        found = {
            key: HostState(
                began_s,
                self._weights(states.get(index)),
                max(now_s + _paused_s(states.get(index)), self._paused_until_s(key)),
            )
            for index, key in enumerate(unique)
        }
        for key, known in found.items():
            for needed_s, photos in self._measured.get(key, Measurements()).needed.items():
                for _ in range(photos):
                    _learn(known, needed_s, half_life_s=self._half_life_s)
        return [found[key] for key in keys]

    def _paused_until_s(self, key: tuple[str, str]) -> float:
        """End of the pause that is known here and may not be written yet."""
        known = self._known.get(key)
        return 0.0 if known is None else known.paused_until_s

    def _weights(self, state: Any) -> dict[float, float]:
        if state is None:
            return {}
        return {
            class_s: decayed(weight, age_s=state["age_s"], half_life_s=self._half_life_s, new=0)
            for class_s, weight in zip(state["classes_s"], state["weights"], strict=True)
        }


def _paused_s(state: Any) -> float:
    return 0.0 if state is None else float(state["paused_s"] or 0.0)


def _learn(known: HostState, needed_s: float, *, half_life_s: float) -> None:
    for class_s, weight in known.weights.items():
        known.weights[class_s] = decayed(weight, age_s=0.0, half_life_s=half_life_s, new=1)
    known.weights[needed_s] = known.weights.get(needed_s, 0.0) + 1


def _sum(one: Measurements, other: Measurements) -> Measurements:
    return Measurements(
        one.requests + other.requests,
        one.photos + other.photos,
        one.seconds + other.seconds,
        max(one.pause_s, other.pause_s),
        one.needed + other.needed,
        one.outcomes + other.outcomes,
    )


async def note_hosts(
    runner: Runner,
    measured: Mapping[tuple[str, str], Measurements],
    attempts: Mapping[AttemptKey, int],
    *,
    half_life_s: float,
) -> None:
    """Add the measurements per (customer, host) and the counts of attempts, in one statement."""
    needs = [(*key, s, n) for key, one in measured.items() for s, n in one.needed.items()]
    outcomes = [(*key, o, n) for key, one in measured.items() for o, n in one.outcomes.items()]
    await runner.run(
        SQL.note_hosts,
        customers=[customer for customer, _ in measured],
        hosts=[host for _, host in measured],
        requests=[one.requests for one in measured.values()],
        photos=[one.photos for one in measured.values()],
        seconds=[one.seconds for one in measured.values()],
        pauses_s=[one.pause_s for one in measured.values()],
        speed_customers=[row[0] for row in needs],
        speed_hosts=[row[1] for row in needs],
        speed_classes_s=[row[2] for row in needs],
        speed_photos=[row[3] for row in needs],
        outcome_customers=[row[0] for row in outcomes],
        outcome_hosts=[row[1] for row in outcomes],
        outcomes=[row[2] for row in outcomes],
        outcome_photos=[row[3] for row in outcomes],
        attempt_classes_s=[key[0] for key in attempts],
        attempt_outcomes=[key[1] for key in attempts],
        attempt_buckets=[key[2] for key in attempts],
        attempts=list(attempts.values()),
        half_life_s=half_life_s,
        recent=float(RECENT),
    )


async def host_states(runner: Runner, keys: Sequence[tuple[str, str]]) -> dict[int, Row]:
    """Stored state per (customer, host), by position in `keys`; unknown hosts are omitted."""
    rows = await runner.all(
        SQL.host_states, customers=[key[0] for key in keys], hosts=[key[1] for key in keys]
    )
    return {int(row["position"]) - 1: row for row in rows}


async def forget_hosts(runner: Runner, *, kept_s: float) -> int:
    """Delete a batch of hosts without requests for `kept_s`; return the number."""
    rows: list[Any] = await runner.all(SQL.forget_hosts, kept_s=kept_s, rows_max=FORGOTTEN_AT_ONCE)
    return len(rows)
