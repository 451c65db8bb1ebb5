"""The model of the fetch room gives the results of the real statements.

Each call runs the product's own code on both: uploads, outcomes of photos, publishing, sweeps.
Compared are its results and all rows, without moments and ids of jobs.
"""

from __future__ import annotations

import json

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.simulation.both import Both
from verification.simulation.fetch.model import add_fetch
from verification.simulation.jobs.model import add_jobs
from verification.simulation.postgres import PostgresModel
from verification.simulation.postgres_client import SimulatedPostgres
from verification.simulation.world import World

from headrace.engines.sql import compile_query
from headrace.fetch import FetchConfig, SentItem, store
from headrace.fetch.host_stats import Measurements, host_states, note_hosts
from headrace.fetch.publishing import PublishJob
from headrace.fetch.service import Fetch
from headrace.fetch.service.sellers import LinkSigning
from headrace.fetch.sql import SQL
from headrace.fetch.store.outcomes import Decision, NewPhoto, OutcomeStore
from headrace.jobs import Jobs, JobsConfig, Registry

few = settings(
    max_examples=5,
    phases=[Phase.generate],
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
TABLES = (
    *("run", "staged", "change", "need", "pace", "before", "count", "item", "photo", "link"),
    *("host", "speed", "host_outcome", "attempt", "result", "problem", "customer"),
)
EMPTY = compile_query(
    "empty",
    "-- Empty the tables of the room.\nTRUNCATE "
    + ", ".join(f"headrace.fetch_{table}" for table in TABLES)
    + " RESTART IDENTITY CASCADE",
)
COLUMNS = {
    "run": "id, customer, state, format, is_whole, reason, rows_read, invalid, new, changed,"
    " unchanged, gone, problems, items_pending, items_late, photos, coalesce(round, 0) AS round,"
    " is_round",
    "change": "run_id, item, kind, version, has_other_photos,"
    " array_to_json(fields)::text AS fields, late_at IS NOT NULL AS is_late,"
    " published_at IS NOT NULL AS is_published",
    "need": "run_id, item, url, outcome, is_late",
    "count": "run_id, outcome, photos",
    "item": "customer, item, version, is_gone, run_id, sent_run, fields,"
    " array_to_json(photos)::text AS photos, raw_hash IS NULL AS is_new",
    "photo": "sha256, key, format, size_bytes, width, height",
    "link": "customer, url, outcome, sha256, etag, last_modified, failures, run_id, due_round,"
    " recheck_at IS NULL AS is_good, copied_at IS NOT NULL AS is_copied",
    "result": "seq, customer, item, version, action, fields, photos",
    "before": "run_id, item",
    "staged": "run_id, item, fields",
    "host_outcome": "customer, host, outcome, photos",
    "attempt": "class_s, outcome, bucket, attempts",
}
QUERIES = {
    name: compile_query(f"rows_of_{name}", f"-- Rows.\nSELECT {columns} FROM headrace.fetch_{name}")
    for name, columns in COLUMNS.items()
}
HOSTS = ("fast.example", "slow.example")
customers = st.sampled_from(["c0", "c1"])
names = st.sampled_from(["a", "b", "c", "d"])
urls = st.builds("https://{}/{}.png".format, st.sampled_from(HOSTS), st.integers(1, 4))
bad_urls = st.sampled_from(["ftp://fast.example/1.png", "https://10.0.0.1/1.png"])
links = st.lists(st.one_of(urls, urls, urls, bad_urls), max_size=3)
contents = st.tuples(st.sampled_from(["one", "two"]), links)
outcomes = st.sampled_from(
    ["stored", "stored", "unchanged", "failed:http_404", "failed:timeout", "failed:lost"]
)
CALLS = st.one_of(
    st.tuples(st.just("catalogue"), customers, st.dictionaries(names, contents, min_size=1)),
    st.tuples(
        st.just("items"),
        customers,
        st.dictionaries(names, st.one_of(contents, st.none()), min_size=1),
    ),
    st.tuples(
        st.just("decide"), st.integers(0, 9), st.lists(outcomes, min_size=1), st.integers(1, 3)
    ),
    st.tuples(st.just("publish"), st.integers(0, 9), st.booleans()),
    st.tuples(
        st.just("late"),
    ),
    st.tuples(st.just("links"), st.booleans()),
    st.tuples(st.just("hosts"), customers, st.integers(1, 9), st.sampled_from([0.0, 30.0])),
)


class Side:
    """The room on one engine."""

    def __init__(self, postgres, folder, tables=None):
        self.postgres, self._folder, self._tables = postgres, folder, tables
        registry = Registry()
        self._jobs = Jobs(postgres, JobsConfig(), registry)
        config = FetchConfig(classes=(1.0, 5.0), decode_share=0.0, item_deadline_s=0.0)
        self._fetch = Fetch(
            postgres, None, self._jobs, config, link_signing=LinkSigning(lambda: None)
        )
        registry.add_room(self._fetch.register)
        self._outcomes = OutcomeStore(postgres, self._jobs)

    async def __call__(self, verb, *rest):
        found = await getattr(self, "_" + verb)(*rest)
        return found, await self.rows()

    async def _begin(self):
        await self._jobs.queues.declare()
        for customer in ("c0", "c1"):
            await self._fetch.customers.set(
                customer, starts_max=100, window_s=60, connections=5, hold_share=0.6, hold_items=1
            )

    async def _catalogue(self, customer, items):
        path = self._folder / "items.json"
        rows = [{"id": i, "name": n, "photos": photos} for i, (n, photos) in items.items()]
        path.write_text(json.dumps(rows))
        run = await self._fetch.run_catalogue(path, customer)
        return run.run, run.state, run.reason, run.photos_by_outcome, run.photos

    async def _items(self, customer, items):
        sent = [
            SentItem(customer=customer, item=item, gone=True)
            if content is None
            else SentItem(
                customer=customer, item=item, photos=content[1], fields={"name": content[0]}
            )
            for item, content in items.items()
        ]
        [run] = await self._fetch.send_items(sent)
        return run.run, run.state, run.photos_by_outcome, run.photos

    async def _needs(self):
        """All photos of runs, in one order."""
        rows = await self.rows()
        owner = {row["id"]: row["customer"] for row in rows["run"]}
        needs = [(row["run_id"], row["item"], row["url"], row["outcome"]) for row in rows["need"]]
        return [(owner[need[0]], *need) for need in sorted(needs, key=str)]

    async def _decide(self, first, given, version):
        needs = [need for need in await self._needs() if need[4] is None][first:][: len(given)]
        decisions = []
        for (customer, run_id, item, url, _), outcome in zip(needs, given, strict=False):
            photo = None
            if outcome in ("stored", "unchanged"):
                sha256 = f"{url[-9:]}/{version if outcome == 'stored' else 1}"
                photo = NewPhoto(sha256, f"photos/{sha256}", "png", 5, 2, 3)
            etag = f"e{version}" if photo is not None and version != 2 else None
            decisions.append(Decision(run_id, customer, item, url, outcome, photo, etag, None))
        async with self.postgres.transaction() as tx:
            await store.outcomes.decide(tx, decisions)
        states = [await self._outcomes.state(n[1], n[0], n[2], n[3]) for n in needs]
        names = ("decided", "is_needed", "outcome", "sha256", "etag", "failures", "link_run_id")
        known = await self.postgres.all(SQL.known_photos, hashes=["1.png/1", "none"])
        return [{name: row[name] for name in names} for row in states], [dict(k) for k in known]

    async def _publish(self, first, is_late):
        rows = await self.rows()
        open_ = sorted((r["run_id"], r["item"]) for r in rows["change"] if not r["is_published"])
        payloads = [PublishJob(run=run, item=item, late=is_late) for run, item in open_[first:][:3]]
        publishing = self._fetch._publishing
        async with self.postgres.transaction() as tx:
            prepared = await publishing.prepare(tx, payloads)
            await publishing.store(tx, prepared)
        results = await self._fetch.items.results(after=0)
        return [(r.seq, r.customer, r.id, r.version, r.action, r.fields, r.photos) for r in results]

    async def _late(self):
        await self._fetch.upkeep.enforce_deadlines()

    async def _links(self, is_old):
        await self._fetch.upkeep.recheck_links()

    async def _hosts(self, customer, photos, pause_s):
        measured = {}
        for host in HOSTS:
            one = Measurements(requests=photos, photos=photos, seconds=photos / 2, pause_s=pause_s)
            one.needed[1.0 if photos > 4 else 5.0] += photos
            one.outcomes["stored"] += photos
            measured[customer, host] = one
        await note_hosts(self.postgres, measured, {(1.0, "stored", 3): 2}, half_life_s=1e9)
        states = await host_states(self.postgres, [(c, h) for c in ("c0", "c1") for h in HOSTS])
        return {
            place: (
                row["classes_s"],
                [round(weight, 5) for weight in row["weights"]],
                None if row["paused_s"] is None else round(row["paused_s"] / 10),
            )
            for place, row in states.items()
        }

    async def rows(self):
        """All rows, in one order, without moments."""
        if self._tables is None:
            found = {
                name: [dict(row) for row in await self.postgres.all(query)]
                for name, query in QUERIES.items()
            }
        else:
            found = rows_of_model(self._tables)
        return {name: sorted(rows, key=str) for name, rows in found.items()}


def rows_of_model(t):
    """The rows of the model, as QUERIES return them."""
    plain = {
        name: [
            {column: getattr(row, column) for column in columns}
            for row in getattr(t, name).values()
        ]
        for name, columns in {
            "need": ("run_id", "item", "url", "outcome", "is_late"),
            "photo": ("sha256", "key", "format", "size_bytes", "width", "height"),
            "result": ("seq", "customer", "item", "version", "action", "fields", "photos"),
            "before": ("run_id", "item"),
            "staged": ("run_id", "item", "fields"),
            "run": (
                *("id", "customer", "state", "format", "is_whole", "reason", "rows_read"),
                *("invalid", "new", "changed", "unchanged", "gone", "problems", "items_pending"),
                *("items_late", "photos", "round", "is_round"),
            ),
        }.items()
    }
    plain["count"] = [
        {"run_id": key[0], "outcome": key[1], "photos": n} for key, n in t.count.items()
    ]
    plain["change"] = [
        {
            **{c: getattr(row, c) for c in ("run_id", "item", "kind", "version")},
            "has_other_photos": row.has_other_photos,
            "fields": json.dumps(list(row.fields), separators=(",", ":")),
            "is_late": row.late_at is not None,
            "is_published": row.published_at is not None,
        }
        for row in t.change.values()
    ]
    plain["item"] = [
        {
            **{c: getattr(row, c) for c in ("customer", "item", "version", "is_gone", "run_id")},
            "sent_run": row.sent_run,
            "fields": row.fields,
            "photos": json.dumps(list(row.photos), separators=(",", ":")),
            "is_new": row.raw_hash is None,
        }
        for row in t.item.values()
    ]
    plain["link"] = [
        {
            **{c: getattr(row, c) for c in ("customer", "url", "outcome", "sha256", "etag")},
            **{c: getattr(row, c) for c in ("last_modified", "failures", "run_id", "due_round")},
            "is_good": row.recheck_at is None,
            "is_copied": row.copied_at is not None,
        }
        for row in t.link.values()
    ]
    plain["host_outcome"] = [
        dict(zip(("customer", "host", "outcome", "photos"), (*key, n), strict=True))
        for key, n in t.host_outcome.items()
    ]
    plain["attempt"] = [
        dict(zip(("class_s", "outcome", "bucket", "attempts"), (*key[1:], n), strict=True))
        for key, n in t.attempt.items()
    ]
    return plain


@few
@given(st.lists(CALLS, min_size=25, max_size=60))
async def test_statements_return_what_postgresql_returns(postgres, tmp_path, calls):
    await postgres.run(EMPTY)
    world = World(1)
    model = PostgresModel(world)
    tables = add_fetch(model, add_jobs(model))
    real = Side(postgres, tmp_path)
    modelled = Side(SimulatedPostgres(model), tmp_path, tables)
    await Both(world).compare(real, modelled, [("begin",), *calls])
