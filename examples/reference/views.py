"""Examples of views."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from headrace import Headrace

app = Headrace()


async def main() -> None:
    """Every call, in an order that works."""
    #: app.views.hit
    total = await app.views.hit("item:1", viewer="user:7", event="request-81")
    print(total.total)
    #: app.views.totals
    one, two = await app.views.totals(["item:1", "item:2"], fields=("total", "unique"))
    #: -
    assert (total.total, one.total, one.unique, two.total) == (1, 1, 1, 0)
    #: app.views.analytics.series
    for point in await app.views.analytics.series("item:1", by="day"):
        print(point.start_at, point.human, point.bot)
    #: app.views.analytics.top
    for entry in await app.views.analytics.top(window_s=3_600, limit=10):
        print(entry.id, entry.views)
    #: app.views.analytics.viewers
    for day in await app.views.analytics.viewers(["item:1", "item:2"], by="week"):
        print(day.day, day.viewers)
    #: app.views.analytics.marks
    marks = await app.views.analytics.marks("item:1")
    #: app.views.analytics.lag
    print(max(shard.pending for shard in await app.views.analytics.lag()))
    #: app.views.analytics.verify
    verified = await app.views.analytics.verify()
    #: -
    assert (marks, verified.differences) == ([], [])
    #: app.views.corrections.mark
    began_at = datetime.now(UTC)
    await app.views.corrections.mark("item:1", "sale", from_at=began_at)
    #: app.views.corrections.unmark
    await app.views.corrections.unmark("item:1", "sale")
    #: app.views.corrections.reclassify
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    job_id = await app.views.corrections.reclassify(
        "item:1", from_at=hour - timedelta(hours=2), to_at=hour, source="human", target="bot"
    )
    #: app.views.corrections.delete
    await app.views.corrections.delete("item:1")
    #: -
    assert job_id
    #: app.views.exports.series
    page = await app.views.exports.series(by="hour", from_at=hour - timedelta(days=1), to_at=hour)
    while page.after is not None:
        page = await app.views.exports.series(
            by="hour", from_at=hour - timedelta(days=1), to_at=hour, after=page.after
        )
    #: -
    await app.close()


#: app.views.exports.changes
async def copy_changes(position: str) -> str:
    """Read changes behind a stored position (setting `views.changes_kept`)."""
    page = await app.views.exports.changes(position)
    for change in page.changes:
        print(change)
    return page.position
