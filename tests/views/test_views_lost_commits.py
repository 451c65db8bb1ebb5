"""PostgreSQL loses deletions and moves that Valkey has applied."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from tests.kit.own_postgres import OwnPostgres, missing_server

from headrace.app import PACKAGES
from headrace.engines import Engines
from headrace.engines.migrate import apply_migrations
from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.views import Views, ViewsConfig, store
from headrace.views.model import Correction, Traffic
from headrace.views.worker import TIMELINE, Flusher, unapplied

NEXT = TIMELINE + 1
"""The first number after a failover."""
ALWAYS = {"from_at": datetime(2020, 1, 1, tzinfo=UTC), "to_at": datetime(2120, 1, 1, tzinfo=UTC)}


@pytest.mark.parametrize(
    ("stored", "applied", "highest", "left"),
    [
        ([1, 2], 0, 0, [1, 2]),
        ([5, 6, 7], 5, 7, [6, 7]),
        ([6, 7], 5, 5, [6, 7]),
        ([NEXT], 0, 0, [NEXT]),
        ([5, NEXT, NEXT + 1], 5, 5, [NEXT, NEXT + 1]),
        ([4, 5, 6, NEXT], 4, 6, [5, 6, NEXT]),
        ([5, 6], 5, 900, [6]),
    ],
)
def test_what_follows_is_applied(stored, applied, highest, left):
    found = [Correction(number, "ad:1", is_deleted=False) for number in stored]
    result = unapplied(found, applied=applied, highest=highest)
    assert [each.number for each in result] == left


@pytest.mark.parametrize(
    ("stored", "applied", "highest"),
    [
        ([], 5, 5),
        ([7, 8], 5, 5),
        ([5, 7], 5, 5),
        ([NEXT], 5, 5),
        ([NEXT + 1], NEXT - 2, 5),
        ([4, NEXT], 4, 6),
    ],
)
def test_nothing_is_applied_after_a_loss(stored, applied, highest):
    found = [Correction(number, "ad:1", is_deleted=False) for number in stored]
    assert unapplied(found, applied=applied, highest=highest) == []


@pytest.mark.slow
@pytest.mark.skipif(missing_server("18") is not None, reason=str(missing_server("18")))
async def test_a_correction_lost_by_a_failover_is_undone(servers_folder, engines):
    """The standby stops, views are moved, the primary is killed, and the standby promoted.

    The next move comes before a flusher. With the number of the lost one it would hide the loss.
    """
    primary = OwnPostgres(servers_folder / "p", "18")
    standby = OwnPostgres(servers_folder / "s", "18")
    await primary.make()
    await primary.start()
    try:
        before = Postgres(primary.url, PostgresConfig())
        await apply_migrations(before, PACKAGES)
        views, flusher = _on(engines, before)
        await views.hits(["ad:1"] * 3 + ["ad:2"])
        await flusher.run_once()
        await _move(views, "ad:2")
        await flusher.run_once()
        await store.leave_shards(before, flusher.name)
        await standby.copy(primary, name="standby")
        await _move(views, "ad:1")
        assert (await views.hit("ad:1")).total == 1
        await before.close()
        primary.kill()
        await standby.start()
        standby.run("pg_ctl", "promote", "-D", standby.data)
        after = Postgres(standby.url, PostgresConfig())
        views, flusher = _on(engines, after)
        await _move(views, "ad:2")
        await flusher.run_once()
        assert [each.total for each in await views.hits(["ad:1", "ad:2"])] == [5, 1]
        await after.close()
    finally:
        primary.end()
        standby.end()


def _on(engines, postgres):
    """The service and a flusher of a process that has just started."""
    own = Engines(postgres, engines.valkey, engines.multiplexer, engines.blobs)
    config = ViewsConfig(shards=1)
    return Views(own, None, config), Flusher(own, config, name="test")


async def _move(views, entity):
    move = {"id": entity, "source": Traffic.HUMAN, "target": Traffic.BOT}
    await views.corrections.move(SimpleNamespace(**move, **ALWAYS))
