"""Examples of fetch: customers, catalogues, items and photos."""

from __future__ import annotations

from pathlib import Path

from headrace import Headrace
from headrace.fetch import FieldRule, Hold, Mapping, Schema, SentItem

app = Headrace()
CATALOGUE = "id,name,price\nbike,Bicycle,250\nlamp,Lamp,20\n"


@app.on_item
async def publish(item) -> None:
    """Show an imported item on the site."""
    print(item.action, item.id, item.fields.get("name"))


@app.before_publish()
async def check(item):
    """Hold bicycles until a person has looked at them."""
    return Hold("check the frame number") if item.id == "bike" else None


async def main() -> None:
    """Every call that needs no host of a seller, in an order that works."""
    file = Path("catalogue.csv")
    file.write_text(CATALOGUE)
    await customers_and_runs(file)
    await settings()
    await sellers_and_webhooks()
    await items()
    await reports()
    await app.close()


async def customers_and_runs(file: Path) -> None:
    """Customers, catalogues and runs."""
    #: app.fetch.customers.set
    await app.fetch.customers.set("shop", starts_max=600, window_s=60, connections=8)
    #: app.fetch.customers.get
    connections = (await app.fetch.customers.get("shop")).connections
    #: app.fetch.customers.all
    names = [customer.customer for customer in await app.fetch.customers.all()]
    #: app.fetch.run_catalogue
    run = await app.fetch.run_catalogue(file, "shop")
    print(run.new, run.changed, run.gone, run.invalid)
    #: app.fetch.send_items
    lamp = SentItem(customer="shop", item="lamp", fields={"name": "Lamp", "price": 25})
    await app.fetch.send_items([lamp])
    #: app.fetch.catalogue_permit
    async with app.fetch.catalogue_permit("shop"), app.engines.postgres.transaction() as tx:
        await app.fetch.run_catalogue(file, "shop", has_permit=True, tx=tx)
    #: app.fetch.study
    study = await app.fetch.study(weeks=2)
    #: app.fetch.runs.get
    state = (await app.fetch.runs.get(run.run)).state
    #: app.fetch.runs.newest
    newest = await app.fetch.runs.newest("shop", runs_max=10)
    #: app.fetch.runs.changes
    for change in await app.fetch.runs.changes(run.run):
        print(change.kind, change.item, change.fields)
    #: app.fetch.runs.undo
    undo = await app.fetch.runs.undo(newest[0].run)
    #: -
    assert (connections, names) == (8, ["shop"])
    assert study
    assert state in ("applied", "done")
    assert undo


#: app.fetch.bring_catalogue
async def import_from(url: str) -> int:
    """Download a catalogue and run it, by a job; return the id of the run."""
    return (await app.fetch.bring_catalogue("shop", url)).run


#: app.fetch.runs.confirm
async def apply(run_id: int) -> None:
    """Apply a run that was held because it removes many items."""
    if (await app.fetch.runs.get(run_id)).state == "held":
        await app.fetch.runs.confirm(run_id)


#: app.fetch.runs.discard
async def drop(run_id: int) -> None:
    """Close a held run without applying it."""
    await app.fetch.runs.discard(run_id)


#: -
async def settings() -> None:
    """Mappings, schemas and sources."""
    #: app.fetch.mappings.set
    mapping = Mapping(id=["sku"], name=["title"], price=["offer.price"], photos=["images[]"])
    await app.fetch.mappings.set("their-format", mapping)
    #: app.fetch.mappings.get
    stored = await app.fetch.mappings.get("their-format")
    #: app.fetch.mappings.all
    mappings = [one.name for one in await app.fetch.mappings.all()]
    #: app.fetch.schemas.set
    price = FieldRule(type="number", required=True, least=1)
    await app.fetch.schemas.set("Bicycles", Schema(fields={"price": price}))
    #: app.fetch.schemas.get
    schema = await app.fetch.schemas.get("Bicycles")
    #: app.fetch.schemas.all
    categories = [one.category for one in await app.fetch.schemas.all()]
    #: app.fetch.schemas.remove
    await app.fetch.schemas.remove("Bicycles")
    #: app.fetch.sources.set
    await app.fetch.sources.set(
        "shop", url="https://shop.example.com/items.csv", cron="0 * * * *", mapping="their-format"
    )
    #: app.fetch.sources.get
    source = await app.fetch.sources.get("shop")
    #: app.fetch.sources.all
    print([(one.customer, one.next_at) for one in await app.fetch.sources.all()])
    #: app.fetch.sources.bring
    job_id = await app.fetch.sources.bring("shop")
    #: app.fetch.sources.remove
    await app.fetch.sources.remove("shop")
    #: app.fetch.mappings.remove
    await app.fetch.mappings.remove("their-format")
    #: -
    assert stored.mapping == mapping
    assert (mappings, categories, source.mapping) == (
        ["their-format"],
        ["Bicycles"],
        "their-format",
    )
    assert schema
    assert job_id


async def sellers_and_webhooks() -> None:
    """Links for sellers, and webhooks."""
    #: app.fetch.sellers.link
    link = await app.fetch.sellers.link("shop", days=7)
    #: app.fetch.sellers.page
    html = await app.fetch.sellers.page(link.url.rpartition("/")[2])
    #: app.fetch.sellers.revoke
    await app.fetch.sellers.revoke("shop")
    #: -
    assert "<html" in html
    await app.fetch.customers.set(
        "shop",
        starts_max=600,
        window_s=60,
        connections=8,
        webhook="https://shop.example.com/webhook",
    )
    #: app.fetch.webhooks.get
    waiting = (await app.fetch.webhooks.get("shop")).waiting
    #: app.fetch.webhooks.list
    print([webhook.customer for webhook in await app.fetch.webhooks.list()])
    #: app.fetch.webhooks.url_of
    url = await app.fetch.webhooks.url_of("shop")
    #: app.fetch.webhooks.rotate
    secret = (await app.fetch.webhooks.rotate("shop")).secret
    #: app.fetch.webhooks.replay
    await app.fetch.webhooks.replay("shop", after=0)
    #: app.fetch.webhooks.remove
    await app.fetch.webhooks.remove("shop")
    #: -
    assert waiting >= 0
    assert url
    assert secret


#: app.fetch.webhooks.test
async def try_webhook() -> None:
    """Send a signed message without results and print the response."""
    print(await app.fetch.webhooks.test("shop"))


#: -
async def items() -> None:
    """Items, results, consumers and held items."""
    #: app.fetch.items.get
    item = await app.fetch.items.get("shop", "lamp")
    print(item.version, item.fields, item.is_gone)
    #: app.fetch.items.results
    for result in await app.fetch.items.results(after=0, customer="shop"):
        print(result.seq, result.action, result.id)
    #: app.fetch.items.newest_results
    newest = await app.fetch.items.newest_results(results_max=10)
    #: app.fetch.consumers.all
    for consumer in await app.fetch.consumers.all():
        print(consumer.name, consumer.items)
    #: app.fetch.held.list
    held = await app.fetch.held.list("shop")
    #: app.fetch.held.release
    for one in held:
        await app.fetch.held.release("shop", one.item)
    #: -
    assert newest is not None


#: app.fetch.consumers.replay
async def fill_search_index() -> int:
    """Deliver the newest version of every item to one handler again."""
    return await app.fetch.consumers.replay("site.search.publish")


#: app.fetch.consumers.remove
async def forget_old_handler() -> None:
    """Drop the deliveries of a handler that no process has any more."""
    await app.fetch.consumers.remove("site.old.publish")


#: -
async def reports() -> None:
    """Reports, hosts, links and near duplicates."""
    [*_, run] = await app.fetch.runs.newest("shop")
    #: app.fetch.reports.problems
    for row, problem in await app.fetch.reports.problems(run.run, lang="ru"):
        print(row, problem.field, problem.text)
    #: app.fetch.reports.photo_problems
    for row, photo in await app.fetch.reports.photo_problems(run.run):
        print(row, photo.url, photo.text)
    #: app.fetch.reports.csv
    text = "".join([part async for part in app.fetch.reports.csv(run.run)])
    #: app.fetch.reports.page
    html = await app.fetch.reports.page(run.run, lang="en")
    #: app.fetch.reports.reason
    print(await app.fetch.reports.reason(run.run))
    #: -
    assert text
    assert html
    #: app.fetch.hosts.page
    hosts = await app.fetch.hosts.page(customer="shop")
    #: app.fetch.links.why
    print((await app.fetch.links.why("https://shop.example.com/1.jpg")).allowed)
    #: app.fetch.duplicates.list
    pairs = await app.fetch.duplicates.list(across=True)
    #: app.fetch.duplicates.near
    similar = await app.fetch.duplicates.near("0" * 64)
    #: -
    assert (hosts, pairs, similar) == ([], [], [])


#: app.fetch.duplicates.review
async def reviewed(pair: int) -> None:
    """Mark a pair as reviewed."""
    await app.fetch.duplicates.review(pair)


#: app.fetch.hosts.get
async def show_host(url: str) -> None:
    """Print what is recorded about the host of a photo."""
    for host in await app.fetch.hosts.get(url):
        print(host)


#: app.fetch.links.download
async def try_photo(url: str) -> None:
    """Download one photo without storing it."""
    report = await app.fetch.links.download(url)
    print(report.outcome, report.text, report.width, report.height)
