"""The application of the gallery: queues with names, loads and failures as a shop has them."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec

from headrace import Headrace

app = Headrace()
app.limiter("partners", rate="30/m", concurrency=2)
app.queue("moderation", decisions={"approve": "search-index", "reject": None})


class Work(msgspec.Struct):
    """What a job of the gallery does."""

    name: str = ""
    seconds: float = 0.0
    error: str = ""


async def work(job: Work) -> str:
    """Wait for the seconds of the job; fail if it has an error."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.Event().wait(), job.seconds)
    if job.error:
        raise RuntimeError(job.error)
    return job.name


app.task("mail", importance=3, retries=2, keep_done="1h")(work)
app.task("thumbnails", slots=(0, 4), keep_done="1h")(work)
app.task("invoices", importance=2, retries=1, keep_done="1h", keep_result=True)(work)
app.task("search-index", keep_done="1h")(work)
app.task("partner-feed", limiter="partners", retries=1)(work)
app.task("payments", importance=5, retries=0)(work)
app.task("weekly-report", retries=0)(work)
app.task("convert-videos-of-listings-for-phones", slots=(0, 2))(work)


@app.cron("0 4 * * *", name="nightly-cleanup")
async def clean_up() -> None:
    """Run daily at 04:00."""


@app.cron("*/15 * * * *", name="exchange-rates")
async def load_rates() -> None:
    """Run every 15 minutes."""
