"""Examples of `Headrace`, the application object."""

from __future__ import annotations

from headrace import Headrace
from headrace.fetch import Hold

app = Headrace()


#: app.task
@app.task("mail", retries=5, timeout="30s")
async def send_mail(to: str, text: str) -> None:
    """Send one mail."""
    print("to", to, text)


#: app.workflow
@app.workflow("order")
async def order(ctx, number: int) -> str:
    """Charge, wait for the parcel, write to the buyer."""
    charge = await ctx.step("charge", charge_card, number)
    await ctx.wait_event("parcel", number, timeout_s=86_400)
    await ctx.run("mail", send_mail.job(to="ann", text=charge))
    return charge


#: -
def charge_card(number: int) -> str:
    """Charge a card, once."""
    return f"charge of order {number}"


#: app.queue
app.queue("moderation", lane="optional", decisions=["approve", "reject"])

#: app.limiter
app.limiter("smtp", rate="100/m", concurrency=4)


#: app.cron
@app.cron("0 4 * * *", tz="Europe/Berlin")
async def clean_up() -> None:
    """Run every night."""


#: app.on_slot_start
@app.on_slot_start
def connect() -> None:
    """Open a client once per slot."""
    print("open")


#: app.on_slot_stop
@app.on_slot_stop
def disconnect() -> None:
    """Close the client."""
    print("close")


#: app.middleware
@app.middleware
async def log_calls(call, following):
    """Log each call of a handler."""
    print("start of", call.queue, len(call.jobs))
    return await following(call)


#: app.on_item
@app.on_item
async def publish(item) -> None:
    """Show an imported item on the site."""
    print(item.action, item.id, item.fields.get("name"))


#: app.before_publish
@app.before_publish(changes=["name"])
async def check(item):
    """Hold items without a name, and shorten long ones."""
    name = str(item.fields.get("name", ""))
    return {"name": name[:80]} if name else Hold("no name")


#: app.on_post_deleted
@app.on_post_deleted
async def forget(post) -> None:
    """Remove what belongs to a deleted post."""
    print("deleted", post.id)


#: app.feed_ranking
@app.feed_ranking("by_kind", newest=100)
def by_kind(viewer, posts):
    """Photos first."""
    return sorted(posts, key=lambda post: post.kind != "photo")


#: -
async def main() -> None:
    """The calls of a running application."""

    #: app.group
    @app.task("all-sent")
    async def all_sent(group: dict) -> None:
        """Run once, after the last mail; `group` has the counts by outcome."""
        print(group)

    async with app.group(on_done=all_sent.job()) as group:
        for name in ("bob", "carol"):
            await send_mail.enqueue(to=name, text="hello", group=group)
    #: app.tokens.create
    created = await app.tokens.create("site", ("jobs:read", "jobs:write"))
    print(created.token)  # shown once; only its hash is stored
    #: app.tokens.list
    names = [token.name for token in await app.tokens.list()]
    #: app.tokens.revoke
    await app.tokens.revoke("site")
    #: app.audit.lines
    for line in await app.audit.lines(lines_max=10):
        print(line.actor, line.command)
    #: app.history.read
    found = await app.history.read(["views_hits", "http_time"])
    for line in found.series[0].lines:
        print(line.label, line.values[-1])
    #: app.history.marks
    for mark in await app.history.marks():
        print(mark.at, mark.kind, mark.text)
    #: -
    assert "site" in names
    #: app.blobs.put
    await app.blobs.put("notes/1.txt", b"hello")
    #: app.blobs.get
    text = await app.blobs.get("notes/1.txt")
    #: app.blobs.info
    size = (await app.blobs.info("notes/1.txt")).size_bytes
    #: app.blobs.list
    keys = [blob.key async for blob in app.blobs.list("notes")]
    #: app.blobs.delete
    await app.blobs.delete("notes/1.txt")
    #: -
    assert (text, size, keys) == (b"hello", 5, ["notes/1.txt"])
    #: app.close
    await app.close()


#: app.sync.run
async def shown(item: str) -> int:
    """The views of an item."""
    [total] = await app.views.totals([item])
    return total.total


def view(request):
    """A plain function, for example of Django or Flask."""
    app.sync.views.hit("item:1")  # each room's methods, without `await`
    return app.sync.run(shown("item:1"))


#: app.sync.close
def leave() -> None:
    """Close the connections of `app.sync` before the process ends; optional."""
    app.sync.close()
