"""Any order of hits, flushes, crashes, deletions, races and lost engines, against two dictionaries.

`flushed` is what PostgreSQL has counted, `pending` what Valkey alone knows. Each step says what it
does to both; after each step every total, cached or not, must be their sum, and the hours must add
up.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from headrace.engines import Engines
from headrace.engines.blobs import Blobs
from headrace.engines.multiplex import Multiplexer
from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.sql import compile_query
from headrace.engines.valkey import Valkey, ValkeyConfig
from headrace.jobs import Jobs, JobsConfig, Registry
from headrace.views import Hit, Views, ViewsConfig
from headrace.views import store as shard_store
from headrace.views.model import shard_of
from headrace.views.valkey_store import ValkeyStore
from headrace.views.worker import Flusher

IDS = st.sampled_from(["a", "b", "c", "d", "e"])
SHARDS = 2
HITS = st.lists(
    st.one_of(
        IDS, st.builds(Hit, id=IDS, n=st.integers(1, 5), traffic=st.sampled_from(["human", "bot"]))
    ),
    min_size=1,
    max_size=8,
)
TABLES = ("views_shard", "views_total", "views_hour", "views_tombstone")


class Counts:
    """People's views, and all views with those of bots."""

    def __init__(self) -> None:
        self.flushed: Counter = Counter()
        self.pending: Counter = Counter()

    def add(self, hits) -> None:
        """Hits that Valkey took."""
        for hit in hits:
            entity, n = (hit, 1) if isinstance(hit, str) else (hit.id, hit.n)
            traffic = "human" if isinstance(hit, str) else hit.traffic
            self.pending[entity, str(traffic)] += n

    def flush(self) -> None:
        """PostgreSQL took all that was pending."""
        self.flushed += self.pending
        self.pending.clear()

    def total(self, entity) -> int:
        """What a reader must see."""
        return self.flushed[entity, "human"] + self.pending[entity, "human"]


class ViewsMachine(RuleBasedStateMachine):
    """Steps on the engines that a subclass names."""

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
        self.counts = Counts()
        self.dead: set[str] = set()
        self.backup: Counter | None = None

    def run(self, coroutine):
        return self.loop.run_until_complete(coroutine)

    def sql(self, text):
        return self.run(self.engines.postgres.all(compile_query("t", f"-- Of a test.\n{text}")))

    def new_views(self):
        jobs = Jobs(self.engines.postgres, JobsConfig(), Registry())
        return Views(self.engines, jobs, self.config)

    @initialize()
    def begin(self):
        for table in ("views_lease", "views_flusher", *TABLES):
            self.sql(f"DELETE FROM headrace.{table}")
        self.views = [self.new_views(), self.new_views()]
        self.flushers = [Flusher(self.engines, self.config, name=f"f{n}") for n in range(2)]
        self.run(self.views[0].hit("nobody", traffic="staff"))

    @rule(hits=HITS, which=st.integers(0, 1))
    def hit(self, hits, which):
        totals = self.run(self.views[which].hits(hits))
        self.counts.add(h for h in hits if (h if isinstance(h, str) else h.id) not in self.dead)
        for total in {total.id: total for total in totals}.values():
            assert total.total == self.counts.total(total.id), total

    @rule(which=st.integers(0, 1))
    def flush(self, which):
        self.own(which)
        self.run(self.flushers[which].run_once())
        self.run(self.flushers[which].run_once())
        self.counts.flush()

    @rule()
    def race(self):
        for which in (0, 1):
            self.own(which)

        async def both():
            await asyncio.gather(*[f.run_once() for f in self.flushers])
            await asyncio.gather(*[f.run_once() for f in self.flushers])

        self.run(both())
        self.counts.flush()

    def own(self, which):
        """Let a flusher believe that all shards are its own, from wherever it was."""
        self.sql("UPDATE headrace.views_lease SET flusher = NULL, expires_at = NULL")
        self.sql("DELETE FROM headrace.views_flusher")
        self.flushers[which]._leased_s = float("-inf")
        self.run(self.flushers[which]._lease())

    @rule()
    def crash_before_the_commit(self):
        self.own(0)

        async def read():
            for shard in self.flushers[0]._shards.values():
                await shard.read()

        self.run(read())
        self.flushers[0] = Flusher(self.engines, self.config, name="again")

    @rule()
    def crash_after_the_commit(self):
        self.own(0)

        async def commit():
            for shard in self.flushers[0]._shards.values():
                tally = await shard.read()
                if tally is not None:
                    await shard_store.flush(
                        self.engines.postgres,
                        shard.shard,
                        from_id=shard.through,
                        to_id=tally.through,
                        counts=tally.counts(),
                    )

        self.run(commit())
        self.flushers[0] = Flusher(self.engines, self.config, name="again")
        # What it read may have been counted by the other one: then its offset was an old one.
        self.flush(1)

    @rule(entity=IDS)
    def delete(self, entity):
        self.run(self.views[0].delete(entity))
        self.dead.add(entity)
        for counter in (self.counts.flushed, self.counts.pending):
            for key in [key for key in counter if key[0] == entity]:
                del counter[key]

    @rule(which=st.integers(0, SHARDS - 1))
    def forget_totals(self, which):
        self.run(self.valkey_store.drop_totals([which]))

    @rule()
    def restart_a_process(self):
        self.views[0] = self.new_views()

    @rule()
    def empty_valkey(self):
        """Its loss is what was pending, nothing else."""
        self.run(self._empty())
        self.counts.pending.clear()

    async def _empty(self):
        valkey = self.engines.valkey
        keys = await valkey.command("KEYS", f"{valkey.prefix}:*")
        if keys:
            await valkey.command("DEL", *keys)

    @rule()
    def fail_over_to_an_older_postgres(self):
        """Flushes since the copy are undone, and come again out of the stream.

        Nobody deleted meanwhile.
        """
        for table in TABLES:
            self.sql(f"DROP TABLE IF EXISTS public.old_{table}")
            self.sql(f"CREATE TABLE public.old_{table} AS TABLE headrace.{table}")
        before = self.counts.flushed.copy()
        self.hit(["a", "b", "c"], 0)
        self.flush(0)
        self.sql(
            "UPDATE headrace.views_shard s SET through = o.through FROM public.old_views_shard o"
            " WHERE o.shard = s.shard"
        )
        for table in TABLES[1:]:
            self.sql(f"DELETE FROM headrace.{table}")
            self.sql(f"INSERT INTO headrace.{table} TABLE public.old_{table}")
        self.counts.pending = self.counts.flushed - before
        self.counts.flushed = before

    @invariant()
    def totals_are_told(self):
        if not hasattr(self, "views"):
            return
        ids = ["a", "b", "c", "d", "e"]
        found = self.run(self.views[1].totals(ids))
        cached = self.run(self.valkey_store.totals(self.keys_of(ids)))
        for total, kept in zip(found, cached, strict=True):
            wanted = self.counts.total(total.id)
            if kept is None:
                # Read from PostgreSQL: what is pending comes with the next flush.
                assert total.total == self.counts.flushed[total.id, "human"]
            else:
                assert total.total == wanted

    def keys_of(self, ids):
        return self.valkey_store.total_keys(ids, [shard_of(name, SHARDS) for name in ids])

    def teardown(self):
        try:
            if hasattr(self, "views"):
                self.flush(0)
                self.require_stored()
        finally:
            self.run(self._empty())
            self.run(self.engines.close())
            self.loop.close()

    def require_stored(self):
        rows = self.sql("SELECT id, class, total FROM headrace.views_total WHERE id <> 'nobody'")
        names = ("human", "bot")
        found = {(r["id"], names[r["class"]]): r["total"] for r in rows if r["total"]}
        assert found == {k: v for k, v in self.counts.flushed.items() if v}
        assert self.run(self.views[0].analytics.verify()).differences == []


def explore(database_url, running_engines, tmp_path, *, examples, steps):
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
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.slow
def test_every_order_of_steps_counts_right(database_url, running_engines, tmp_path):
    explore(database_url, running_engines, tmp_path, examples=15, steps=15)


@pytest.mark.soak
def test_many_orders_of_many_steps_count_right(database_url, running_engines, tmp_path):
    explore(database_url, running_engines, tmp_path, examples=300, steps=50)
