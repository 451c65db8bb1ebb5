"""What judges the views' promises can fail: planted faults are found."""

from __future__ import annotations

import asyncio
import secrets

import pytest
from counted_views import CountedViews

from headrace.engines.sql import compile_query
from headrace.views.worker import Flusher

FLUSH = "headrace.flush_views_v1"


@pytest.fixture
async def counted(running_engines, database_url, tmp_path):
    """Some hits, all answered and flushed."""
    prefix = f"test-{secrets.token_hex(4)}"
    found = CountedViews(
        database_url, running_engines.endpoints.valkey_url, tmp_path, prefix=prefix, lease_s=1.0
    )
    for _ in range(20):
        await found.hit()
    await found.settle()
    yield found
    await found.close()


async def plant(counted, text):
    """Change what is stored behind everybody's back."""
    async with counted.engines.postgres.session() as session:
        await session.connection.execute(text)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["+ 1", "- 1"], ids=["doubled", "lost"])
async def test_a_hit_too_many_or_too_few_is_seen(counted, change):
    await counted.require_exact()
    for table, column in (("total", "total"), ("hour", "views")):
        where = f"SET {column} = {column} {change} WHERE id = 'ad:1'"
        await plant(counted, f"UPDATE headrace.views_{table} {where}")
    with pytest.raises(AssertionError, match="acked, counted, asked"):
        await counted.require_exact()


@pytest.mark.slow
async def test_an_hour_that_contradicts_its_total_is_seen(counted):
    await plant(counted, "UPDATE headrace.views_hour SET views = views + 1 WHERE id = 'ad:1'")
    with pytest.raises(AssertionError):
        await counted.require_exact()


@pytest.mark.slow
async def test_a_cached_total_that_is_off_is_seen(counted):
    valkey = counted.engines.valkey
    await valkey.command("INCR", f"{valkey.prefix}:{{v:1}}:c:ad:1")
    with pytest.raises(AssertionError):
        await counted.require_exact()


@pytest.mark.slow
async def test_a_read_below_what_was_answered_is_seen(counted):
    counted.acked["ad:1"] += 1
    await counted.read()
    assert len(counted.wrong_reads) == 1


@pytest.mark.slow
async def test_a_flush_that_does_not_look_at_the_offset_is_seen(counted):
    """Two flushers read the same, and nothing keeps the second from counting it again."""
    query = f"-- The function.\nSELECT pg_get_functiondef('{FLUSH}'::regproc)"
    text = await counted.engines.postgres.value(compile_query("text", query))
    guard = " AND s.through = p_from"
    assert guard in text
    await plant(counted, text.replace(guard, ""))
    flushers = [Flusher(counted.engines, counted.config, name=f"r{n}") for n in range(2)]
    for each in flushers:
        await plant(counted, "UPDATE headrace.views_lease SET flusher = NULL")
        await plant(counted, "DELETE FROM headrace.views_flusher")
        await each.run_once()
    await counted.hit()
    await asyncio.gather(*[each.run_once() for each in flushers])
    with pytest.raises(AssertionError, match="acked, counted, asked"):
        await counted.require_exact()
