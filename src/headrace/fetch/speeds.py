"""What is measured of the hosts of each customer: gathered in the slot, kept in PostgreSQL, read for a while.

    download ended -> noted here -> every second ONE statement for all hosts -> fetch_host, fetch_speed
    enqueue a page -> one read of its hosts -> `routing` says the queue of each photo

A slot learns from its own downloads at once and from those of others within LOOK_S. What a killed slot had
gathered of its last second is lost, and nothing depends on it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from headrace.engines.postgres import Postgres, Runner
from headrace.fetch import store
from headrace.fetch.gathering import Gathering
from headrace.fetch.routing import Classes, TimeClass, faded, host_of
from headrace.fetch.store.speeds import Noted
from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import logger

FLUSH_S: Final = 1.0
LOOK_S: Final = 5.0
"""How old a slot's knowledge of a host may be before it is read again."""
STALE_S: Final = 30.0
"""How old it may be while it is read: a start that waits for it may come too late."""
HOSTS_MAX: Final = 20_000
FORGET_EVERY_S: Final = 3600.0
HOST_KEPT_S: Final = 90 * 86_400.0
_LOG: Final = logger(__name__)


@dataclass(slots=True)
class HostKnown:
    """What a slot knows of a host."""

    read_s: float
    weights: dict[float, float] = field(default_factory=dict)
    paused_until_s: float = 0.0
    """By `time.monotonic`."""

    @property
    def pause_s(self) -> float:
        """For how long the host asks to be left alone; 0 where it does not."""
        return max(0.0, self.paused_until_s - time.monotonic())


class Speeds:
    """Measures hosts, and says in which class their photos start."""

    def __init__(self, postgres: Postgres, classes: Classes, *, half_life_s: float) -> None:
        self.classes = classes
        self._postgres = postgres
        self._half_life_s = half_life_s
        self._noted: dict[tuple[str, str], Noted] = {}
        self._known: OrderedDict[tuple[str, str], HostKnown] = OrderedDict()
        self._reading: Gathering[tuple[str, str], HostKnown] = Gathering(self._read)
        self._renewing: dict[tuple[str, str], asyncio.Task[HostKnown]] = {}
        self._flushing: asyncio.Task[None] | None = None
        self._forgot_s = time.monotonic()

    def expect(self, customer: str, host: str) -> None:
        """Begin to read what is known of a host that is about to be looked at."""
        known = self._known.get((customer, host))
        if known is None or time.monotonic() - known.read_s > LOOK_S:
            self._renew((customer, host))

    async def look(self, customer: str, host: str) -> HostKnown:
        """What is known of a host: read anew after LOOK_S, and not waited for before STALE_S."""
        key = (customer, host)
        known = self._known.get(key)
        age_s = math.inf if known is None else time.monotonic() - known.read_s
        if age_s > LOOK_S:
            renewed = self._renew(key)
            if known is None or age_s > STALE_S:
                known = await asyncio.shield(renewed)
        assert known is not None
        return known

    def _renew(self, key: tuple[str, str]) -> asyncio.Task[HostKnown]:
        task = self._renewing.get(key)
        if task is None:
            task = self._renewing[key] = asyncio.create_task(self._read_one(key))
            task.add_done_callback(lambda ended: self._renewed(key, ended))
        return task

    async def _read_one(self, key: tuple[str, str]) -> HostKnown:
        known = self._known[key] = await self._reading.ask(key)
        if len(self._known) > HOSTS_MAX:
            self._known.popitem(last=False)
        return known

    def _renewed(self, key: tuple[str, str], task: asyncio.Task[HostKnown]) -> None:
        del self._renewing[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            # Whoever waits for it is told; where nobody does, what was known stays for a while.
            _LOG.info("speeds_not_read", host=key[1], error=str(error))

    def starting(self, known: HostKnown) -> TimeClass:
        """Where a photo of the host starts."""
        return self.classes.starting(known.weights)

    def note(
        self,
        customer: str,
        host: str,
        *,
        outcome: str,
        requests: int,
        took_s: float,
        needed_s: float | None,
        pause_s: float = 0.0,
    ) -> None:
        """Remember how a download ended; `needed_s` is the length of the class that it needed, if it shows one."""
        noted = self._noted.setdefault((customer, host), Noted())
        noted.requests += requests
        noted.outcomes[outcome] += 1
        noted.pause_s = max(noted.pause_s, pause_s)
        known = self._known.get((customer, host))
        if needed_s is not None:
            noted.photos += 1
            noted.seconds += took_s
            noted.needed[needed_s] += 1
            if known is not None:
                _learn(known, needed_s, half_life_s=self._half_life_s)
        if known is not None and pause_s > 0:
            known.paused_until_s = max(known.paused_until_s, time.monotonic() + pause_s)
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush_soon())

    async def queues(self, runner: Runner, customer: str, urls: Iterable[str]) -> Mapping[str, str]:
        """The queue in which a photo starts, for each of `urls`; one statement."""
        hosts = {url: host_of(url) for url in urls}
        names = sorted(set(hosts.values()))
        states = await store.speeds.host_states(runner, [(customer, name) for name in names])
        queue_of = {
            name: self.classes.starting(self._weights(states.get(index))).queue
            for index, name in enumerate(names)
        }
        return {url: queue_of[host] for url, host in hosts.items()}

    async def flush(self) -> None:
        """Tell PostgreSQL what was noted. Raises: PostgresDown, PostgresBusy; then it is noted still."""
        noted, self._noted = self._noted, {}
        if not noted:
            return
        try:
            await store.speeds.note_hosts(self._postgres, noted, half_life_s=self._half_life_s)
        except BaseException:
            for key, one in self._noted.items():
                noted[key] = _sum(noted[key], one) if key in noted else one
            self._noted = noted
            raise

    async def close(self) -> None:
        """Tell the rest, if PostgreSQL takes it."""
        await asyncio.gather(*self._renewing.values(), return_exceptions=True)
        if self._flushing is not None:
            self._flushing.cancel()
            await asyncio.gather(self._flushing, return_exceptions=True)
        try:
            await self.flush()
        except HeadraceError as error:
            _LOG.info("speeds_lost", hosts=len(self._noted), error=error.text)

    async def _flush_soon(self) -> None:
        try:
            while self._noted:
                await asyncio.sleep(FLUSH_S)
                try:
                    await self.flush()
                    await self._forget()
                except HeadraceError as error:
                    _LOG.info("speeds_wait", hosts=len(self._noted), error=error.text)
        finally:
            self._flushing = None

    async def _forget(self) -> None:
        """Drop hosts that nobody asked for long, now and then."""
        if time.monotonic() - self._forgot_s > FORGET_EVERY_S:
            self._forgot_s = time.monotonic()
            await store.speeds.forget_hosts(self._postgres, kept_s=HOST_KEPT_S)

    async def _read(self, keys: list[tuple[str, str]]) -> list[HostKnown]:
        asked = list(dict.fromkeys(keys))
        states = await store.speeds.host_states(self._postgres, asked)
        now_s = time.monotonic()
        found = {
            key: HostKnown(
                now_s,
                self._weights(states.get(index)),
                now_s + (states[index]["paused_s"] or 0.0) if index in states else 0.0,
            )
            for index, key in enumerate(asked)
        }
        for key, known in found.items():
            for needed_s, photos in self._noted.get(key, Noted()).needed.items():
                for _ in range(photos):
                    _learn(known, needed_s, half_life_s=self._half_life_s)
        return [found[key] for key in keys]

    def _weights(self, state: Any) -> dict[float, float]:
        if state is None:
            return {}
        return {
            class_s: faded(weight, age_s=state["age_s"], half_life_s=self._half_life_s, new=0)
            for class_s, weight in zip(state["classes_s"], state["weights"], strict=True)
        }


def _learn(known: HostKnown, needed_s: float, *, half_life_s: float) -> None:
    for class_s, weight in known.weights.items():
        known.weights[class_s] = faded(weight, age_s=0.0, half_life_s=half_life_s, new=1)
    known.weights[needed_s] = known.weights.get(needed_s, 0.0) + 1


def _sum(one: Noted, other: Noted) -> Noted:
    return Noted(
        one.requests + other.requests,
        one.photos + other.photos,
        one.seconds + other.seconds,
        max(one.pause_s, other.pause_s),
        one.needed + other.needed,
        one.outcomes + other.outcomes,
    )
