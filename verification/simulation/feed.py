"""The scenario `feed`: writers, readers, sweepers and a worker that publishes, on modelled engines.

Promises: a page equals the merge of the committed posts, where concurrent changes may show or not.
An acknowledged change is on the next read, in other processes later if its process could not reach
Valkey. No walk through pages repeats or skips a post. After any loss of Valkey's data the index
becomes equal to PostgreSQL again.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from tests.kit.checkers import Finding

from headrace.engines.sql import compile_query
from headrace.feed import Feed, FeedConfig
from headrace.feed.posts import Publish
from headrace.feed.worker import Sweeper
from headrace.kernel.errors import HeadraceError, Unavailable
from headrace.kernel.signing import derive_key
from verification.simulation.faults import FaultKind, process_kinds
from verification.simulation.feed_ledger import Change, Fact, FeedLedger, Post, Read
from verification.simulation.feed_sql import FeedTables
from verification.simulation.loop import CURRENT, Process
from verification.simulation.postgres import PostgresModel
from verification.simulation.postgres_client import SimulatedPostgres
from verification.simulation.run import SETTLE_MAX_S
from verification.simulation.valkey import ValkeyModel
from verification.simulation.valkey_faults import (
    Disturbance,
    link_kind,
    postgres_kinds,
    valkey_kinds,
)
from verification.simulation.views import engines_for
from verification.simulation.world import World

APIS: Final = ("api-0", "api-1", "api-2")
SWEEPERS: Final = ("sweeper-0", "sweeper-1")
WORKER: Final = "worker"
PEOPLE: Final = tuple(range(1, 7))
"""Each is a viewer and an author."""
CLIENTS_PER_PROCESS: Final = 2
KEY: Final = derive_key("a secret of the simulation, 32 characters", "cursor")
FAULT_MAX_S: Final = 30.0
POSTS_MAX: Final = 150
PAGES_MAX: Final = 60
SETTLE_S: Final = 40.0
ENQUEUE: Final = compile_query("enqueue", "-- Store a job.\nSELECT :at, :posts")
DUE: Final = compile_query("due", "-- Due jobs.\nSELECT 1")
DONE: Final = compile_query("done", "-- Delete a job.\nSELECT :id")


class PublishJobs:
    """Has the methods of `headrace.jobs.Jobs` that the feed calls: jobs that publish posts."""

    def __init__(self, postgres: SimulatedPostgres) -> None:
        self._postgres = postgres

    async def enqueue_many(self, jobs: Sequence[Any], *, tx: Any) -> None:
        """As `Jobs.enqueue_many`."""
        for job in jobs:
            await tx.run(ENQUEUE, at=job.at, posts=job.payload.posts)

    async def enqueue(self, job: Any) -> int:
        """No index of a run is too large for the process that needs it."""
        raise AssertionError(job)


class FeedScenario:
    """See the module."""

    gap_s = 20.0
    settle_max_s = SETTLE_MAX_S

    def __init__(self, world: World) -> None:
        self.world = world
        chance = world.stream("feed")
        self.ledger = FeedLedger()
        self.postgres = PostgresModel(world)
        self.tables = FeedTables(self.postgres)
        self._model_jobs()
        replicas, policy = chance.choice([0, 1]), chance.choice(["everysec", "always"])
        self.valkey = ValkeyModel(world, policy=policy, replicas=replicas)
        self.config = FeedConfig(
            shards=chance.choice([1, 2]),
            index_for_s=chance.choice([86_400.0, 365 * 86_400.0]),
            sweep_every_s=chance.choice([1.0, 1.0, 5.0]),
        )
        self.disturbance = Disturbance()
        self._gap_s = chance.choice([1.0, 3.0, 10.0])
        self._starts: Counter[str] = Counter()
        self._number = 0
        self._is_working = True
        self._outside: Feed | None = None
        self._busy: dict[Process, dict[int, Fact]] = {}
        """Facts that a process is changing."""
        world.on_death(self._release)

    def _model_jobs(self) -> None:
        model, jobs = self.postgres, self.postgres.table()

        @model.on(ENQUEUE)
        def enqueue(at: datetime, posts: list[str]) -> int:
            jobs.put(model.next_id("job"), (at, posts))
            return 1

        @model.on(DUE)
        def due() -> list[dict[str, Any]]:
            now = model.now()
            return [{"id": key, "posts": job[1]} for key, job in jobs.items() if job[0] <= now]

        @model.on(DONE)
        def done(id: int) -> int:  # noqa: A002 - of the query
            jobs.pop(id)
            return 1

    def fault_kinds(self) -> Sequence[FaultKind]:
        """Faults of processes and both engines. PostgreSQL loses no commits."""
        kinds = [
            *process_kinds([*APIS, *SWEEPERS, WORKER], lasts_max_s=FAULT_MAX_S),
            link_kind([*APIS, *SWEEPERS, WORKER], self.valkey, lasts_max_s=FAULT_MAX_S),
            *valkey_kinds(self.valkey, lasts_max_s=FAULT_MAX_S),
            *(
                kind
                for kind in postgres_kinds(self.postgres, lasts_max_s=FAULT_MAX_S)
                if kind.name != "postgres_failover"
            ),
        ]
        return [self.disturbance.noting(kind) for kind in kinds]

    async def begin(self) -> None:
        """Start the processes."""
        for name in APIS:
            self.world.start(name, lambda name=name: self._api(name))  # type: ignore[misc]  # mypy cannot infer lambdas with defaults
        for name in SWEEPERS:
            self.world.start(name, self._sweeper)
        self.world.start(WORKER, self._worker)

    async def work(self, until_s: float) -> None:
        """Let clients call until the time."""
        await asyncio.sleep(max(0.0, until_s - self.world.now_s))
        self._is_working = False

    async def is_settled(self) -> bool:
        """Whether the index equals PostgreSQL, and all pages are right."""
        if self.disturbance.calm_s(self.world.now_s) < SETTLE_S:
            return False
        feed = self._outside = self._outside or self._feed()
        try:
            states = {shard.state for shard in await feed.index.stats()}
            verified = await feed.index.verify()
            pages = [await self._walk(feed, viewer, 7, None) for viewer in PEOPLE]
        except Unavailable:
            return False
        right = [[post for _, post in self.tables.page_of(viewer)] for viewer in PEOPLE]
        return states == {"ready"} and not verified.differences and pages == right

    def findings(self) -> list[Finding]:
        """Broken promises."""
        return self.ledger.findings

    # Processes

    def _feed(self) -> Feed:
        engines = engines_for(self.postgres, self.valkey)
        jobs: Any = PublishJobs(SimulatedPostgres(self.postgres))
        return Feed(engines, jobs, self.config, make_key=lambda: KEY)

    async def _sweeper(self) -> None:
        await Sweeper(self._feed()).run(asyncio.Event())

    async def _worker(self) -> None:
        """Publish due posts, as the jobs do."""
        feed = self._feed()
        self._starts[WORKER] += 1
        by = f"{WORKER}/{self._starts[WORKER]}"
        while True:
            await asyncio.sleep(1.0)
            try:
                for job in await feed.posts._postgres.all(DUE):
                    await self._publish(feed, job["posts"], by)
                    await feed.posts._postgres.run(DONE, id=job["id"])
            except HeadraceError:
                continue

    async def _publish(self, feed: Feed, posts: list[str], by: str) -> None:
        """The handler of the job, at least once. Raises: HeadraceError."""
        facts = [self.ledger.posts[post].is_visible for post in posts]
        while any(fact.is_busy for fact in facts):
            await asyncio.sleep(1.0)
        facts = [self.ledger.posts[post].is_visible for post in posts if post in self.tables.posts]
        publish = feed.posts._publish(Publish(posts=posts))
        await self._change(feed, by, publish, facts, value=True, posts=posts)

    async def _api(self, name: str) -> None:
        self._starts[name] += 1
        by = f"{name}/{self._starts[name]}"
        feed, chance = self._feed(), self.world.stream(by)
        await asyncio.gather(*[self._client(feed, by, chance) for _ in range(CLIENTS_PER_PROCESS)])

    async def _client(self, feed: Feed, by: str, chance: random.Random) -> None:
        actions: list[tuple[Callable[..., Awaitable[None]], int]] = [
            (self._post, 30),
            (self._delete, 12),
            (self._follow, 25),
            (self._unfollow_all, 2),
            (self._hide, 12),
            (self._read, 50),
        ]
        verbs, weights = [verb for verb, _ in actions], [weight for _, weight in actions]
        while self._is_working:
            await asyncio.sleep(chance.expovariate(1 / self._gap_s))
            [verb] = chance.choices(verbs, weights)
            await verb(feed, by, chance)
        await asyncio.Event().wait()

    async def _post(self, feed: Feed, by: str, chance: random.Random) -> None:
        author, kind = chance.choice(PEOPLE), chance.choice([None, "photo", "video"])
        if len(self.tables.posts) > POSTS_MAX:
            return
        self._number += 1
        name = f"item:{self._number}"
        now, is_later = self.postgres.now(), False
        at = None
        if chance.random() < 0.15:
            at = now - timedelta(seconds=chance.uniform(0, 3 * 86_400))
        elif chance.random() < 0.15:
            at, is_later = now + timedelta(seconds=chance.uniform(5, 120)), True
        post = self.ledger.posts[name] = Post(author, kind)
        call = feed.post(author, name, at=at, kind=kind)
        facts = [] if is_later else [post.is_visible]
        await self._try_change(feed, by, call, facts, value=True, posts=[name])

    async def _delete(self, feed: Feed, by: str, chance: random.Random) -> None:
        names = [name for name, _ in self.tables.posts.items()]
        if names:
            name = chance.choice(names)
            fact = self.ledger.posts[name].is_visible
            call = feed.delete(name)
            await self._try_change(feed, by, call, [fact], value=False, posts=[name])

    async def _follow(self, feed: Feed, by: str, chance: random.Random) -> None:
        viewer = chance.choice(PEOPLE)
        authors = chance.sample(PEOPLE, chance.choice([1, 1, 3]))
        facts = [self.ledger.follow(viewer, author) for author in authors]
        is_follow = chance.random() < 0.7
        call = (feed.follow if is_follow else feed.unfollow)(viewer, authors)
        await self._try_change(feed, by, call, facts, value=is_follow)

    async def _unfollow_all(self, feed: Feed, by: str, chance: random.Random) -> None:
        viewer = chance.choice(PEOPLE)
        facts = [self.ledger.follow(viewer, author) for author in PEOPLE]
        await self._try_change(feed, by, feed.follows.unfollow_all(viewer), facts, value=False)

    async def _hide(self, feed: Feed, by: str, chance: random.Random) -> None:
        viewer, author = chance.sample(PEOPLE, 2)
        kind, is_set = chance.choice(["mute", "block"]), chance.random() < 0.4
        follows: Any = feed.follows
        name = kind if is_set else f"un{kind}"
        fact = self.ledger.hiding(viewer, author, kind)
        await self._try_change(
            feed, by, getattr(follows, name)(viewer, author), [fact], value=is_set
        )

    async def _try_change(
        self,
        feed: Feed,
        by: str,
        call: Any,
        facts: Sequence[Fact],
        *,
        value: bool,
        posts: Sequence[str] = (),
    ) -> None:
        """Make a change unless one of its facts is being changed."""
        if any(fact.is_busy for fact in facts):
            call.close()
            return
        try:
            await self._change(feed, by, call, facts, value=value, posts=posts)
        except Unavailable as error:
            self.world.trace("refused", type(error).__name__)

    async def _change(
        self,
        feed: Feed,
        by: str,
        call: Any,
        facts: Sequence[Fact],
        *,
        value: bool,
        posts: Sequence[str] = (),
    ) -> None:
        changes = []
        busy = self._busy.setdefault(CURRENT.get(), {})
        for fact in facts:
            fact.is_busy, busy[id(fact)] = True, fact
            changes.append(Change(value, self.world.now_s, by))
            fact.changes.append(changes[-1])
        try:
            await call
        finally:
            for fact in facts:
                fact.is_busy = False
                busy.pop(id(fact), None)
            self._note_positions(posts)
        is_deferred = feed.index.applier.has_deferred
        for change in changes:
            change.acknowledged_s, change.is_deferred = self.world.now_s, is_deferred
        self.world.trace("changed", by, value, len(facts), is_deferred)

    def _release(self, process: Process) -> None:
        """A killed process changes no fact any more; its changes have no answer."""
        for fact in self._busy.pop(process, {}).values():
            fact.is_busy = False

    def _note_positions(self, posts: Sequence[str]) -> None:
        for name in posts:
            row = self.tables.posts.get(name)
            if row is not None and name in self.ledger.posts:
                is_visible = row.state == 0
                self.ledger.posts[name].position = (row.score, name) if is_visible else None

    async def _read(self, feed: Feed, by: str, chance: random.Random) -> None:
        viewer, limit = chance.choice(PEOPLE), chance.choice([1, 3, 10, 200])
        kinds = frozenset({"photo"}) if chance.random() < 0.2 else None
        pages_max = chance.choice([1, 1, 3, PAGES_MAX])
        began_s, found, cursor = self.world.now_s, list[str](), None
        calm_s = self.disturbance.calm_s(began_s)
        for _ in range(pages_max):
            try:
                page = await feed.page(viewer, limit, cursor=cursor, kinds=kinds)
            except Unavailable:
                if cursor is None:
                    return
                break
            found += [post.id for post in page.posts]
            cursor = page.next
            if cursor is None:
                break
        self.world.trace("page", viewer, found)
        self._note_positions(list(self.ledger.posts))
        read = Read(began_s, self.world.now_s, by, calm_s)
        self.ledger.check_pages(viewer, read, found, is_end=cursor is None, kinds=kinds)

    async def _walk(self, feed: Feed, viewer: int, limit: int, kinds: Any) -> list[str]:
        found, cursor = list[str](), None
        while True:
            page = await feed.page(viewer, limit, cursor=cursor, kinds=kinds)
            found += [post.id for post in page.posts]
            cursor = page.next
            if cursor is None:
                return found
