"""The protocol of shard flushes: any order of its steps, compared with two dictionaries.

Hits, known events, flushes, races, crashes between the steps, swept totals, deletions, moves
between classes, and losses of both engines. `flushed` is what PostgreSQL has counted, `pending`
what only Valkey has. Each step changes both as the contract states. After each step every total,
cached or not, must be their sum, and at the end the hours must add up to the totals.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from tests.kit.storm.room_views import sweep_totals
from tests.views.room_harness import KeysCopy

from headrace.engines import Engines
from headrace.engines.blobs import Blobs
from headrace.engines.multiplex import Multiplexer
from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.sql import compile_query
from headrace.engines.valkey import Valkey, ValkeyConfig, ValkeyDown
from headrace.jobs import Jobs, JobsConfig, Registry
from headrace.views import Hit, Views, ViewsConfig
from headrace.views import store as shard_store
from headrace.views.flush import FlushBatch
from headrace.views.model import START, hour_at, require_hits, shard_of
from headrace.views.valkey_store import ValkeyStore
from headrace.views.worker import Flusher

NAMES = ["a", "b", "c", "d", "e"]
IDS = st.sampled_from(NAMES)
CLASSES = ("human", "bot", "owner", "staff")
SHARDS = 2
HITS = st.lists(
    st.one_of(
        IDS,
        st.builds(
            Hit,
            id=IDS,
            n=st.integers(1, 5),
            traffic=st.sampled_from(CLASSES),
            event=st.sampled_from([None, None, "e1", "e2", "e3"]),
        ),
    ),
    min_size=1,
    max_size=8,
)
WHICH = st.integers(0, 1)
TABLES = (
    "views_shard",
    "views_total",
    "views_hour",
    "views_day",
    "views_history",
    "views_tombstone",
    "views_correction",
)


class Counts:
    """The oracle: views by entity and class, and the known events."""

    def __init__(self) -> None:
        self.flushed: Counter = Counter()
        self.pending: Counter = Counter()
        self.events: set[tuple[str, str]] = set()
        self.dead: set[str] = set()

    def add(self, hits) -> None:
        """Add acknowledged hits."""
        for hit in [Hit(id=hit) if isinstance(hit, str) else hit for hit in hits]:
            if hit.event and (hit.id, hit.event) in self.events:
                continue
            if hit.event:
                self.events.add((hit.id, hit.event))
            if hit.id not in self.dead:
                self.pending[hit.id, str(hit.traffic)] += hit.n

    def flush(self) -> None:
        """Move all pending views to PostgreSQL."""
        self.flushed += self.pending
        self.pending.clear()

    def flush_only(self, counts) -> None:
        """Move some pending views to PostgreSQL."""
        for count in counts:
            if count.id not in self.dead and count.id != "nobody":
                key = count.id, CLASSES[count.traffic]
                self.pending[key] -= count.views
                self.flushed[key] += count.views

    def delete(self, entity) -> None:
        """Forget an entity for good."""
        self.dead.add(entity)
        for counter in (self.flushed, self.pending):
            for traffic in CLASSES:
                del counter[entity, traffic]

    def move(self, entity) -> None:
        """Move the counted human views of an entity to bots."""
        self.flushed[entity, "bot"] += self.flushed.pop((entity, "human"), 0)

    def total(self, entity) -> int:
        """The exact total."""
        return self.flushed[entity, "human"] + self.pending[entity, "human"]


class ViewsMachine(RuleBasedStateMachine):
    """Steps on the engines of a subclass."""

    database_url = valkey_url = ""
    folder = Path()

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        config = ValkeyConfig(prefix=f"test-{secrets.token_hex(4)}")
        self.engines = Engines(
            Postgres(self.database_url, PostgresConfig()),
            Valkey(self.valkey_url, config),
            Multiplexer(self.valkey_url, config),
            Blobs((self.folder / "blobs").as_uri()),
        )
        self.config = ViewsConfig(shards=SHARDS)
        self.valkey_store = ValkeyStore(self.engines.valkey, self.engines.multiplexer)
        self.keys = KeysCopy(self.engines.valkey)
        self.counts = Counts()

    def run(self, *coroutines):
        """The result of the last one; they run at once."""

        async def all_of():
            return await asyncio.gather(*coroutines)

        return self.loop.run_until_complete(all_of())[-1]

    def sql(self, text):
        return self.run(self.engines.postgres.all(compile_query("t", f"-- Of a test.\n{text}")))

    def valkey(self, *words):
        return self.run(self.engines.valkey.command(*words))

    def stream(self, shard):
        return f"{self.engines.valkey.prefix}:{{v:{shard}}}:q"

    def new_views(self):
        jobs = Jobs(self.engines.postgres, JobsConfig(), Registry())
        return Views(self.engines, jobs, self.config)

    @initialize()
    def begin(self):
        for table in ("views_lease", "views_flusher", *TABLES):
            self.sql(f"DELETE FROM headrace.{table}")
        self.sql("INSERT INTO headrace.views_history DEFAULT VALUES")
        self.views = [self.new_views(), self.new_views()]
        self.flushers = [Flusher(self.engines, self.config, name=f"f{n}") for n in range(2)]
        self.run(self.views[0].hit("nobody", traffic="staff"))

    @rule(hits=HITS, which=WHICH)
    def hit(self, hits, which):
        answers = self.run(self.views[which].hits(hits))
        self.counts.add(hits)
        for last in {answer.id: answer for answer in answers}.values():
            assert last.total == self.counts.total(last.id), last

    @rule(which=WHICH, is_swept=st.booleans())
    def flush(self, which, *, is_swept=False):
        self.own(which)
        self.run(self.flushers[which].run_once())
        self.run(self.flushers[which].run_once())
        self.counts.flush()
        if is_swept:
            self.run(sweep_totals(self.valkey_store, range(SHARDS)))

    @rule(hits=HITS)
    def flushers_race(self, hits):
        for which in (0, 1):
            self.own(which)
        self.run(self.views[0].hits(hits), *[each.run_once() for each in self.flushers])
        self.counts.add(hits)
        self.run(*[each.run_once() for each in self.flushers])
        self.flush(1)

    @rule(entries=st.integers(1, 3), is_recorded=st.booleans())
    def flush_some_entries(self, entries, is_recorded):
        """The offset moves into the middle of the pending entries."""
        for state in self.run(shard_store.all_shards(self.engines.postgres)):
            through = state.through
            pending = self.run(
                self.valkey_store.pending(state.shard, through=through, entries_max=entries)
            )
            if not pending.has_anchor or not pending.rows:
                continue
            batch = FlushBatch(through)
            batch.add(pending.rows)
            counts = batch.counts()
            written = shard_store.flush(
                self.engines.postgres,
                state.shard,
                setups=state.setups,
                from_id=through,
                to_id=batch.through,
                counts=counts,
            )
            assert self.run(written) is not None
            if is_recorded:
                record = self.valkey_store.note_flushed
                self.run(record(state.shard, through=batch.through, trim_to=None))
            self.counts.flush_only(counts)

    def own(self, which):
        """Let a flusher lease all shards."""
        self.sql("UPDATE headrace.views_lease SET flusher = NULL, expires_at = NULL")
        self.sql("DELETE FROM headrace.views_flusher")
        self.flushers[which]._leased_s = float("-inf")
        self.run(self.flushers[which]._lease())

    @rule(is_committed=st.booleans())
    def a_flusher_crashes_around_its_commit(self, is_committed):
        """It has read, and perhaps committed, but not recorded its offset in Valkey."""
        self.own(0)
        for shard in self.flushers[0]._shards.values():
            batch = self.run(shard.read())
            if batch is not None and is_committed:
                self.run(
                    shard_store.flush(
                        self.engines.postgres,
                        shard.shard,
                        setups=shard.setups,
                        from_id=shard.through,
                        to_id=batch.through,
                        counts=batch.counts(),
                    )
                )
        self.flushers[0] = Flusher(self.engines, self.config, name="again")
        if is_committed:
            # The other flusher may have counted it before: then its offset was an old one.
            self.flush(1)

    @rule(entity=IDS, hits=HITS)
    def delete(self, entity, hits):
        """Hits that race a deletion of their entity are dropped, now or with the next flush."""
        racing = [hit for hit in hits if (hit if isinstance(hit, str) else hit.id) == entity]
        self.run(self.views[1].hits(racing), self.views[0].delete(entity))
        self.counts.add(racing)
        self.counts.delete(entity)

    @rule(entity=IDS, hits=HITS)
    def deletions_end(self, entity, hits):
        """Hits that wait at that moment are counted."""
        self.delete(entity, [])
        for _ in range(2):
            self.hit(NAMES, 0)
            self.flush(0)
        hits = [*hits, entity]
        self.run(self.views[0].hits(hits))
        for name in self.counts.dead:
            self.valkey("DEL", *self.valkey_store.total_keys([name], [shard_of(name, SHARDS)]))
        self.sql("DELETE FROM headrace.views_tombstone")
        self.counts.dead.clear()
        self.counts.add(hits)
        self.hit([entity], 0)

    @rule(entity=IDS)
    def move_to_bots(self, entity):
        self.run(self.move(entity))
        [row] = self.sql("SELECT hours_from > now() AS is_closed FROM headrace.views_history")
        if not row["is_closed"]:
            self.counts.move(entity)

    def move(self, entity):
        [row] = self.sql("SELECT extract(epoch FROM now())::bigint / 3600 AS hour")
        span = {"from_at": hour_at(row["hour"] - 2), "to_at": hour_at(row["hour"] + 2)}
        request = SimpleNamespace(id=entity, **span, source="human", target="bot")
        return self.views[0].corrections.move(request)

    @rule(hits=HITS)
    def hit_without_a_fill(self, hits):
        """As programs in other languages do, or a process that died after its hit."""
        for shard in range(SHARDS):
            part = [line for name, line in require_hits(hits) if shard_of(name, SHARDS) == shard]
            if part:
                sent = self.valkey_store.hit(shard, part, floor_ms="0", offset_s=0)
                if self.run(sent).entry is not None:
                    self.counts.add([hit for hit in hits if self.is_of(hit, shard)])

    def is_of(self, hit, shard):
        return shard_of(hit if isinstance(hit, str) else hit.id, SHARDS) == shard

    @rule()
    def sweep_totals(self):
        """Sooner than a flusher does: some have pending hits."""
        self.run(sweep_totals(self.valkey_store, range(SHARDS)))

    @rule(which=st.integers(0, SHARDS - 1))
    def forget_totals(self, which):
        self.run(self.valkey_store.drop_totals([which]))

    @rule()
    def restart_a_process(self):
        self.views[0] = self.new_views()

    @rule()
    def lose_the_functions(self):
        with suppress(ValkeyDown):
            self.valkey("FUNCTION", "DELETE", "headrace_views_v1")

    @rule()
    def lose_the_anchors(self):
        """The entry at each offset is missing: the stream cannot be proved whole."""
        for row in self.sql("SELECT shard, through FROM headrace.views_shard"):
            if row["through"] != START:
                self.valkey("XDEL", self.stream(row["shard"]), row["through"])
        self.flush(0)

    @rule(is_flushed_first=st.booleans())
    def empty_valkey(self, is_flushed_first):
        """It loses the pending hits and the known events, nothing else."""
        self.run(self.keys.empty())
        self.counts.pending.clear()
        self.counts.events.clear()
        if is_flushed_first:
            self.flush(1)

    @rule(
        lost=HITS,
        late=HITS,
        is_flushed=st.booleans(),
        entity=IDS,
        correction=st.sampled_from(["none", "move", "deletion"]),
    )
    def put_back_an_older_valkey(self, lost, late, is_flushed, entity, correction):
        """It loses the hits since the copy, unless PostgreSQL had counted them.

        A deletion or a move between classes is repeated.
        """
        self.run(self.keys.take())
        before = self.counts.pending.copy(), self.counts.events.copy()
        self.hit(lost, 0)
        if is_flushed:
            self.flush(0)
        if correction == "move":
            self.move_to_bots(entity)
        if correction == "deletion":
            self.delete(entity, [])
        self.run(self.keys.put_back())
        self.counts.pending, self.counts.events = before
        if correction == "deletion":
            self.counts.delete(entity)
        if is_flushed:
            self.counts.pending = Counter()
        self.run(self.views[1].hits(late))
        self.counts.add(late)
        self.flush(1)

    @rule(steps=st.integers(1, 4))
    def roll_up(self, steps):
        """Replace hours by days, even those of this month: later flushes count into days."""
        before = datetime.now(UTC) + timedelta(days=62)
        for _ in range(steps):
            self.run(
                shard_store.roll_up(
                    self.engines.postgres, before=before, time_zone="UTC", ids_max=2
                )
            )

    @rule(entity=IDS, is_moved=st.booleans(), hits=HITS)
    def fail_over_to_an_older_postgres(self, entity, is_moved, hits):
        """Flushes since the copy are repeated from the stream; a move is lost."""
        for table in TABLES:
            self.sql(f"DROP TABLE IF EXISTS public.old_{table}")
            self.sql(f"CREATE TABLE public.old_{table} AS TABLE headrace.{table}")
        before = self.counts.flushed.copy()
        self.hit_without_a_fill(hits)
        self.flush(0)
        self.hit(["a", "b", "c"], 0)
        self.flush(0)
        again = self.counts.flushed - before
        if is_moved:
            self.run(self.move(entity))
        self.sql(
            "UPDATE headrace.views_shard s SET through = o.through, corrections = o.corrections"
            " FROM public.old_views_shard o WHERE o.shard = s.shard"
        )
        for table in TABLES[1:]:
            self.sql(f"DELETE FROM headrace.{table}")
            self.sql(f"INSERT INTO headrace.{table} TABLE public.old_{table}")
        self.counts.flushed, self.counts.pending = before, again
        if is_moved:
            self.flush(1)

    @invariant()
    def totals_are_exact(self):
        if not hasattr(self, "views"):
            return
        found = self.run(self.views[1].totals(NAMES))
        keys = self.valkey_store.total_keys(NAMES, [shard_of(name, SHARDS) for name in NAMES])
        for total, cached in zip(found, self.run(self.valkey_store.totals(keys)), strict=True):
            if cached is None:
                # Read from PostgreSQL: the next flush adds the pending views.
                assert total.total == self.counts.flushed[total.id, "human"]
            else:
                assert total.total == self.counts.total(total.id)

    def teardown(self):
        try:
            if hasattr(self, "views"):
                self.flush(0)
                self.totals_are_exact()
                self.require_stored()
        finally:
            self.run(self.keys.empty())
            self.run(self.engines.close())
            self.loop.close()

    def require_stored(self):
        rows = self.sql("SELECT id, class, total FROM headrace.views_total WHERE id <> 'nobody'")
        found = {(row["id"], CLASSES[row["class"]]): row["total"] for row in rows if row["total"]}
        assert found == {key: views for key, views in self.counts.flushed.items() if views}
        assert self.run(self.views[0].analytics.verify()).differences == []


def explore(database_url, running_engines, tmp_path, *, examples, steps, is_random=False):
    named = {
        "database_url": database_url,
        "valkey_url": running_engines.endpoints.valkey_url,
        "folder": tmp_path,
    }
    machine = type("Machine", (ViewsMachine,), named)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=not is_random,
            phases=[Phase.generate, Phase.shrink] if is_random else [Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.slow
def test_every_order_of_steps_counts_exactly(database_url, running_engines, tmp_path):
    explore(database_url, running_engines, tmp_path, examples=12, steps=25)


@pytest.mark.soak
def test_many_orders_of_many_steps_count_exactly(database_url, running_engines, tmp_path):
    explore(database_url, running_engines, tmp_path, examples=300, steps=50, is_random=True)
