"""The application under the console of the tests: queues that do well, fail, wait, and are worked by people."""

from __future__ import annotations

from headrace import Headrace
from headrace.fetch import Item
from headrace.jobs import Batch

app = Headrace()
app.limiter("partners", rate="2/m", concurrency=1)
app.queue("approve")


@app.task("mail", importance=2, retries=2, keep_done="1h")
async def send_mail(to: str) -> None:
    """Is done at once."""


@app.task("thumbs", batch=20, slots=(0, 4))
async def make_thumbs(photos: Batch[dict]) -> None:
    """Is done at once, twenty at a time."""


@app.task("broken", retries=0)
async def fail(text: str) -> None:
    """Fails with what it was given."""
    raise ValueError(text)


@app.task("partner", limiter="partners", retries=1)
async def tell_partner(text: str) -> None:
    """Waits for a start of its lane."""


@app.cron("0 4 * * *", name="nightly")
async def tidy() -> None:
    """Is due at four."""


@app.on_item
async def publish(item: Item) -> None:
    """Takes every item."""
