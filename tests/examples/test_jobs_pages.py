"""The code on the pages about jobs runs as it stands.

Declarations first, then the awaits beside a worker.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from pathlib import Path

import asyncpg
import pytest
from tests.kit.waiting import wait_true

from headrace.jobs.worker import Worker
from headrace.testing import drain

pytestmark = pytest.mark.slow
DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
TABLES = "CREATE TABLE accounts (id int PRIMARY KEY, sum int); INSERT INTO accounts VALUES (1, 0)"


def codes(page, *, leave_out=()):
    """The page's blocks: those that declare, and those that await."""
    declaring, awaiting = [], []
    for text in BLOCK.findall((DOCS / page).read_text()):
        if any(word in text for word in leave_out):
            compile(text, page, "exec")
            continue
        code = compile(text, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        (awaiting if code.co_flags & inspect.CO_COROUTINE else declaring).append(code)
    return declaring, awaiting


async def run_page(page, *, leave_out=()):
    """Run the page's code in one namespace, with a worker for its tasks; the namespace."""
    declaring, awaiting = codes(page, leave_out=leave_out)
    names = {"__name__": page}
    for code in declaring:
        exec(code, names)
    app, stop = names["app"], asyncio.Event()
    worker = Worker(app.engines.postgres, app.jobs, app.jobs.config, host_name="page")
    working = asyncio.create_task(worker.run(stop))
    try:
        for code in awaiting:
            await eval(code, names)
    finally:
        stop.set()
        await asyncio.wait_for(working, 60)
    return names


async def test_the_guide(surroundings, capsys):
    accounts = await asyncpg.connect(surroundings)
    await accounts.execute(TABLES)
    names = await run_page("jobs.md")
    app = names["app"]
    done = await names["charge"].enqueue_many({"amount": n} for n in (0, -1, 5_000, 50))
    await names["add_to_account"].enqueue(account=1, amount=5)
    await names["index_documents"].enqueue_many({"id": n} for n in range(10))

    async def is_charged():
        await drain(app)
        return (await done[3].job()).state == "gone"

    await wait_true(is_charged)
    assert [(await job.job()).state for job in done] == ["cancelled", "failed", "ready", "gone"]
    assert await accounts.fetchval("SELECT sum FROM accounts") == 5
    await accounts.close()
    assert (await app.jobs.queues.get("index")).failed == 1
    await names["test_mail"]()
    reported = capsys.readouterr().out
    assert "1 {'id': 1, 'done': 100, " in reported
    assert "6\n" in reported
    assert names["counted"].matched >= 1
    await app.close()


async def test_the_guide_to_workflows(surroundings, capsys):
    names = await run_page("workflows.md")
    app = names["app"]
    started = [
        await names["report"].enqueue([1, 22]),
        await names["order"].enqueue(order_id=3),
        await names["book"].enqueue(order_id=4),
        await names["letters"].enqueue(address="main street"),
        await app.workflows.start("letters", {"address": "side street"}, version=1),
    ]

    async def are_done():
        await drain(app)
        return {(await app.jobs.job(one)).state.value for one in started} == {"done"}

    await wait_true(are_done)
    results = [(await app.workflows.get(one)).result for one in started]
    assert results == [13, None, "card declined", "MAIN STREET", "SIDE STREET"]
    told = capsys.readouterr().out
    assert "to ann: receipt 17: RX8\nshipped\n" in told
    assert "[('charge', 'done'), ('time to object', 'done'), ('shipped order:7', 'done')" in told
    await app.close()


async def test_the_page_about_celery(surroundings):
    names = await run_page("from-celery.md", leave_out=("# Celery",))
    await drain(names["app"])
    await names["app"].close()
