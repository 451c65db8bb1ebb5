"""What a run of the scenario `fetch` must not do: limits, stored bytes, outcomes, results."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final

from tests.kit.checkers import Finding

from headrace.fetch.host_stats import FLUSH_S, REFRESH_S
from verification.simulation.fetch.sellers import LoggedRequest, Sellers
from verification.simulation.fetch.tables import FetchTables, Photo, Run
from verification.simulation.media_model import StoreModel
from verification.simulation.world import World

FINDINGS_MAX: Final = 20
CALM_S: Final = 60.0
"""After a fault, what processes know of the fleet and of hosts may be old for this time."""
OWN_GRACE_S: Final = 4.0
"""Requests that passed the check of a pause leave within this time."""
OTHERS_GRACE_S: Final = FLUSH_S + REFRESH_S + OWN_GRACE_S
"""Until all workers know a pause: a write every second, a read after 5 s, and the same grace."""
LIMIT_SEEN_S: Final = 40.0
"""The pool of a process follows the newest limit; older requests may hold connections so long."""
LATE_S: Final = 0.1
"""A request that connected for so long may have been late, and paid a second token."""
EARLY_S: Final = 0.15
"""Such a request that was not left out may have been late by this at most."""


class FetchLedger:
    """The checks of one run."""

    def __init__(
        self, world: World, tables: FetchTables, sellers: Sellers, store: StoreModel
    ) -> None:
        self._world, self._tables = world, tables
        self._sellers, self._store = sellers, store
        self._found: list[Finding] = []
        self._pauses: dict[tuple[str, str], list[LoggedRequest]] = defaultdict(list)
        self._disturbed_s: dict[str, float] = {}
        self._recent: dict[tuple[int, str], list[LoggedRequest]] = defaultdict(list)
        self.polled: list[tuple[int, str, str, int]] = []
        """Number, customer, item and version of each result that the poller received."""
        tables.photo.on_insert = self._check_bytes
        tables.on_decide = self._check_fence
        sellers.on_request, sellers.on_response = self._check_request, self._note_response

    def note(self, fault: str, subject: Any, text: str) -> None:
        """Add a finding."""
        if len(self._found) < FINDINGS_MAX:
            self._found.append(Finding(fault, subject, f"at {self._world.now_s:.3f} s: {text}"))

    # Disturbances

    def note_disturbed(self, *names: str) -> None:
        """A fault touches these processes or servers now."""
        for name in names:
            self._disturbed_s[name] = self._world.now_s

    def calm_s(self, *names: str) -> float:
        """How long none of these was touched by a fault."""
        return min(self._world.now_s - self._disturbed_s.get(name, -1e9) for name in names)

    def _is_calm(self, request: LoggedRequest) -> bool:
        """Whether no fault touched what a request's process needs."""
        name = request.process.name
        return self.calm_s("postgres", "dns", name, name.partition(".")[0]) > CALM_S

    # Photos

    def _check_bytes(self, photo: Photo) -> None:
        stored = self._store.objects.get(photo.key)
        if stored is None:
            self.note("no bytes", photo.key, "its row is written, and its bytes are not stored")
        elif hashlib.sha256(stored.data).hexdigest() != photo.sha256:
            self.note("wrong bytes", photo.key, "the stored bytes have another hash")

    def _check_fence(self, photos: Sequence[tuple[int, str, str]], outcomes: Sequence[str]) -> None:
        """An outcome is written under a lease of its photo's job; a lost one by its item's job."""
        leases = self._tables.jobs.lease
        session = self._tables.model.session
        assert session is not None, "called by a statement"
        held: set[tuple[Any, ...]] = set()
        for table, key in session.locked:
            lease = leases.get(key) if table is leases else None  # type: ignore[arg-type]
            for job in () if lease is None else lease.open_jobs:
                payload = json.loads(job.payload)
                held.add((payload.get("run"), payload.get("item"), payload.get("url")))
        for photo, outcome in zip(photos, outcomes, strict=True):
            needed = photo if outcome != "failed:lost" else (*photo[:2], None)
            if needed not in held:
                self.note("not fenced", photo[2], f"{outcome} is written without a lease")

    # Requests

    def _check_request(self, request: LoggedRequest) -> None:
        self._check_connections(request)
        self._check_pause(request)
        self._check_concurrency(request)

    def _check_connections(self, request: LoggedRequest) -> None:
        """A process has no more connections to a host than its share of the fleet's limit."""
        key, now_s = (id(request.process), request.host), self._world.now_s
        recent = [
            one
            for one in self._recent[key]
            if one.ended_s is None or one.at_s > now_s - LIMIT_SEEN_S
        ]
        recent.append(request)
        self._recent[key] = recent
        limit = max(one.connections for one in recent)
        count = sum(one.ended_s is None for one in recent)
        if count > limit:
            text = f"{count} requests of {request.process.name} at once, {limit} are allowed"
            self.note("over connections", request.host, text)

    def _check_pause(self, request: LoggedRequest) -> None:
        """After a Retry-After no photo of the customer is requested from the host until then."""
        now_s = self._world.now_s
        pauses = self._pauses[request.customer, request.host]
        pauses[:] = [one for one in pauses if _end_s(one) > now_s]
        for pause in pauses:
            is_own = pause.process is request.process
            grace_s = OWN_GRACE_S if is_own else OTHERS_GRACE_S
            after_s = now_s - (pause.received_s or 0)
            if after_s > grace_s and self._is_calm(request) and self._is_calm(pause):
                text = (
                    f"{request.process.name} requested {request.path} {after_s:.3f} s"
                    f" after {pause.process.name} received Retry-After {pause.retry_after_s:.0f}"
                )
                self.note("not paused", request.host, text)
                return

    def _note_response(self, request: LoggedRequest) -> None:
        """A process has received a pause."""
        if request.retry_after_s is not None:
            self._pauses[request.customer, request.host].append(request)

    def _check_concurrency(self, request: LoggedRequest) -> None:
        """A customer has no more requests at once than its connections, while leases hold."""
        customer = self._tables.customer.get(request.customer)
        own = (one for one in self._sellers.open.values() if one.customer == request.customer)
        count = sum(self._is_calm(one) for one in own)
        if customer is not None and count > customer.connections:
            text = f"{count} requests at once, {customer.connections} are allowed"
            self.note("over concurrency", request.customer, text)

    # The end

    def findings(self) -> list[Finding]:
        """All broken promises."""
        tables = self._tables
        for run in tables.run.values():
            self._check_run(run)
        for customer in tables.customer.values():
            self._check_rate(customer.customer, customer.starts_max, customer.window_s)
        for photo in tables.photo.values():
            self._check_bytes(photo)
        for link in tables.link.values():
            urls = self._sellers.final_urls(link.url)
            if link.sha256 is not None and not any(
                link.sha256 in self._sellers.served[url] for url in urls
            ):
                self.note("wrong photo", link.url, f"{link.sha256} was never sent for it")
        self._check_results()
        return self._found

    def _check_rate(self, customer: str, starts_max: int, window_s: float) -> None:
        times = sorted(
            one.sent_s
            for one in self._sellers.log
            if one.customer == customer and one.connect_s <= LATE_S
        )
        for first, last in zip(times, times[starts_max:], strict=False):
            if last - first < window_s - EARLY_S:
                text = f"{starts_max + 1} requests within {last - first:.3f} s from {first:.3f} s"
                self.note("over limit", customer, text)
                return

    def _check_run(self, run: Run) -> None:
        """A run is over, its counts add up, and each of its photos has one outcome."""
        if run.state not in ("done", "applied"):
            return
        counts = self._tables.counts_of(run.id)
        needs = [need for _, need in self._tables.need.of(run.id)]
        decided = Counter(need.outcome for need in needs)
        if run.state == "applied" or None in decided:
            left = [need.url for need in needs if need.outcome is None]
            self.note("no end", run.id, f"the run is {run.state}; without outcome: {left[:3]}")
            return
        if sum(counts.values()) != run.photos:
            self.note("counts", run.id, f"{run.photos} photos, the outcomes are {counts}")
        for outcome, photos in decided.items():
            if counts.get(str(outcome), 0) < photos:
                text = f"{photos} photos are {outcome}, {counts.get(str(outcome), 0)} are counted"
                self.note("counts", run.id, text)
        rows = run.new + run.changed + run.unchanged + run.invalid
        gone = 0 if run.is_whole else run.gone
        if run.items_pending or (run.format != "links" and rows + gone != run.rows_read):
            self.note("counts", run.id, f"its rows do not add up: {run}")

    def _check_results(self) -> None:
        """Each published item has its newest version as its last result, in order."""
        tables = self._tables
        rows = sorted(tables.result.values(), key=lambda row: row.seq)
        last: dict[tuple[str, str], Any] = {}
        for row in rows:
            before = last.get(row.place)
            if before is not None and before.version >= row.version:
                text = f"version {row.version} follows {before.version}"
                self.note("results out of order", row.place, text)
            last[row.place] = row
        for item in tables.item.values():
            row = last.get((item.customer, item.item))
            is_shown = row is not None and row.action != "unpublish"
            if is_shown == item.is_gone:
                self.note("wrong result", item.item, f"the item is {item}, its result {row}")
            elif row is not None and is_shown:
                urls = [photo["url"] for photo in json.loads(row.photos)]
                if row.fields != item.fields or urls != list(item.photos):
                    self.note("wrong result", item.item, f"the item is {item}, its result {row}")
        published = [(row.seq, *row.place, row.version) for row in rows]
        if self.polled != published:
            missing = set(published) - set(self.polled)
            self.note("results missed", "poller", f"{len(missing)}: {sorted(missing)[:3]}")

    def check_items(self, customer: str, states: Iterable[Any]) -> None:
        """A customer has the items of its acknowledged uploads, or of unclear later ones."""
        stored = {
            item.item: (json.loads(item.fields)["name"], item.photos)
            for _, item in self._tables.item.of(customer)
            if not item.is_gone
        }
        states = list(states)
        if stored not in states:
            keys = {key for key in stored | states[0] if stored.get(key) != states[0].get(key)}
            text = f"items {sorted(keys)[:5]} are not those of {len(states)} possible states"
            self.note("wrong items", customer, text)


def _end_s(pause: LoggedRequest) -> float:
    """When a pause that a process received ends."""
    return (pause.received_s or 0) + (pause.retry_after_s or 0)
