"""The application of the console tests: queues that succeed, fail, wait or have no handler."""

from __future__ import annotations

from hostile import TEXT

from headrace import Headrace
from headrace.fetch import Hold, Item
from headrace.jobs import Batch, WorkflowContext

app = Headrace()
app.limiter("partners", rate="2/m", concurrency=1)
app.queue("approve")
app.queue("moderation", decisions={"approve": "thumbs", "reject": None}, keep_result=True)


@app.task("mail", importance=2, retries=2, keep_done="1h")
async def send_mail(to: str) -> None:
    """Finish immediately."""


@app.task("thumbs", batch=20, slots=(0, 4))
async def make_thumbs(photos: Batch[dict]) -> None:
    """Finish a batch of twenty immediately."""


@app.task("broken", retries=0)
async def fail(text: str) -> None:
    """Fail with the payload as message."""
    raise ValueError(text)


@app.task("partner", limiter="partners", retries=1)
async def notify_partner(text: str) -> None:
    """Run within the limits of a lane."""


@app.workflow("trip")
async def plan_trip(ctx: WorkflowContext) -> None:
    """Do a step, then wait for an event that nothing sends."""
    await ctx.step("book", list)
    await ctx.wait_event("paid", ctx.id)


@app.cron("0 4 * * *", name="nightly")
async def tidy() -> None:
    """Run daily at 04:00."""


@app.before_publish()
async def check(item: Item) -> Hold | None:
    """Hold the items that are named so."""
    return Hold(f"to look at: {TEXT}") if item.id.startswith("look-") else None


@app.on_item
async def publish(item: Item) -> None:
    """Accept every item."""
