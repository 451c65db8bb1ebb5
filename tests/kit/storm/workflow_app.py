"""The application of the workflow test: an effect is a line, or a row in a transaction."""

from __future__ import annotations

import os
from pathlib import Path

from headrace import Headrace
from headrace.engines.sql import compile_query
from headrace.jobs import WorkflowContext

app = Headrace()
NOTES = Path(os.environ["HISTORY"]).parent / "notes.txt"
ADD_EFFECT = compile_query("add", "-- One effect.\nINSERT INTO effect VALUES (:job, 0)")


def note(word: str) -> str:
    with NOTES.open("a") as notes:
        notes.write(f"{word}\n")
    return word


@app.task("parcel", keep_result=True, retries=50)
async def parcel(n: int) -> int:
    note(f"parcel {n}")
    return n


@app.workflow("order", retries=50)
async def order(ctx: WorkflowContext, order_id: int) -> list:
    async def charge(tx) -> str:
        await tx.run(ADD_EFFECT, job=ctx.id)
        return note("charge")

    one = await ctx.step("reserve", note, "reserve")
    async with app.engines.postgres.transaction() as tx:
        two = await ctx.step("charge", charge, tx, tx=tx)
    three = await ctx.run_all("parcels", [parcel.job(n=n) for n in (1, 2)])
    await ctx.sleep("pause", 0.05)
    four = await ctx.wait_event("delivered", order_id, timeout_s=60)
    return [one, two, three, four, await ctx.step("thank", note, "thank")]
