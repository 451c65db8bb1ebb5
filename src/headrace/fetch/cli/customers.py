"""Commands of customers, their webhooks, and consumers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click
import msgspec

from headrace.fetch.cli.text import (
    customers_table,
    describe_customer,
    describe_webhook,
    webhooks_table,
)
from headrace.fetch.errors import CustomerUnknown, InvalidCustomer
from headrace.fetch.model import Customer, CustomerSet, parse_rate
from headrace.fetch.service import Fetch
from headrace.fetch.service.sellers import DAYS, DAYS_MAX
from headrace.fetch.settings import parse_refresh_s
from headrace.kernel.config import parse_count, parse_share
from headrace.kernel.terminal import (
    CommandGroup,
    Terminal,
    cursor_after,
    listing,
    paged,
    pluralize,
    table,
)

NEW: Final[dict[str, Any]] = {"starts_max": 600, "window_s": 60.0, "connections": 8}


@click.group("customer", cls=CommandGroup)
def customer_group() -> None:
    """Customers (sellers) and their limits."""


@customer_group.command("set", short_help="Create a customer or change its limits.")
@click.argument("customer")
@click.option("--rate", help="Rate limit, e.g. 10/s, 20/5s or 600/m (the default).")
@click.option("--connections", type=int, help="Concurrent requests; default: 8.")
@click.option("--webhook", metavar="URL", help="Send its results to this URL, signed.")
@click.option(
    "--hold-share",
    metavar="SHARE",
    help="Require a confirmation of a catalogue that removes more than this share of items,"
    " 0 to 1, or default.",
)
@click.option(
    "--hold-items",
    metavar="COUNT",
    help="Require it only if the catalogue also removes more items than this number, or default.",
)
@click.option(
    "--refresh",
    metavar="TIME",
    help="Check stored photos for changes after this time, such as 7d; off, or default.",
)
def set_customer(
    terminal: Terminal,
    customer: str,
    *,
    rate: str | None,
    connections: int | None,
    webhook: str | None,
    hold_share: str | None,
    hold_items: str | None,
    refresh: str | None,
) -> None:
    """Create CUSTOMER or change its limits; the value `default` uses that of the settings.

    Omitted options stay as they are. The secret of a new webhook is shown only once, by this
    command.
    """
    more = {
        "hold_share": _value("--hold-share", hold_share, parse_share),
        "hold_items": _value("--hold-items", hold_items, parse_count),
        "refresh_s": _value("--refresh", refresh, parse_refresh_s),
    }

    async def change(fetch: Fetch) -> CustomerSet:
        try:
            now = await fetch.customers.get(customer)
        except CustomerUnknown:
            now = Customer(customer=customer, **NEW)
        starts_max, window_s = parse_rate(rate) if rate else (now.starts_max, now.window_s)
        return await fetch.customers.set(
            customer,
            starts_max=starts_max,
            window_s=window_s,
            connections=now.connections if connections is None else connections,
            webhook=msgspec.UNSET if webhook is None else webhook,
            **more,
        )

    found = terminal.run(Fetch, change)
    secret = f"\nsecret: {found.webhook_secret}" if found.webhook_secret else ""
    terminal.show(found, describe_customer(found) + secret)


def _value(option: str, text: str | None, parse: Callable[[str], Any]) -> Any:
    """Value of an option; UNSET if omitted, None for `default`. Raises: InvalidCustomer."""
    if text is None:
        return msgspec.UNSET
    if text.strip() == "default":
        return None
    try:
        return parse(text)
    except ValueError as error:
        raise InvalidCustomer(f"{option} {text[:40]!r}: expected {error}, or default") from None


@customer_group.command("show", short_help="Show a customer.")
@click.argument("customer")
def show_customer(terminal: Terminal, customer: str) -> None:
    """Show the limits of CUSTOMER."""
    found = terminal.run(Fetch, lambda fetch: fetch.customers.get(customer))
    terminal.show(found, describe_customer(found))


@customer_group.command("ls", short_help="List customers.")
def list_customers(terminal: Terminal) -> None:
    """List every customer with its limits."""
    everyone = terminal.run(Fetch, lambda fetch: fetch.customers.all())
    text = customers_table(everyone) if everyone else "no customers"
    terminal.show(listing(everyone), text)


@click.command("seller-link", short_help="Create a link to a seller's page.")
@click.argument("customer")
@click.option(
    "--days",
    default=DAYS,
    show_default=True,
    type=click.IntRange(1, DAYS_MAX),
    help="How long the link is valid.",
)
@click.option("--revoke", is_flag=True, help="Revoke all links of CUSTOMER instead.")
@click.pass_obj
def seller_link(terminal: Terminal, customer: str, *, days: int, revoke: bool) -> None:
    """Create a link to the page of CUSTOMER: runs, errors, and an example of a correct row.

    Anyone with the link can read the page, without an account. Nothing else can be read or changed.
    """
    if revoke:
        terminal.run(Fetch, lambda fetch: fetch.sellers.revoke(customer))
        terminal.show({"revoked": customer}, f"all links to the page of {customer} are revoked")
        return
    found = terminal.run(Fetch, lambda fetch: fetch.sellers.link(customer, days=days))
    terminal.show(found, f"{found.url}\nvalid until {found.expires_at:%Y-%m-%d %H:%M} UTC")


@click.group("webhook", cls=CommandGroup)
def webhook_group() -> None:
    """URLs that receive results; `customer set --webhook URL` creates one."""


@webhook_group.command("ls", short_help="List webhooks.")
@click.option("--after", default="", help="Only customers after this one.")
@click.option("--limit", default=100, show_default=True, type=click.IntRange(1, 1000))
def list_webhooks(terminal: Terminal, after: str, limit: int) -> None:
    """List webhooks by customer, with backlog and failures."""
    found = terminal.run(Fetch, lambda fetch: fetch.webhooks.list(after=after, webhooks_max=limit))
    text = webhooks_table(found) if found else "no webhooks"
    cursor = cursor_after(found, limit, "customer")
    terminal.show(listing(found, next_cursor=cursor), paged(text, cursor, "more: --after"))


@webhook_group.command("show", short_help="Show a customer's webhook.")
@click.argument("customer")
def show_webhook(terminal: Terminal, customer: str) -> None:
    """Show URL, progress and last error of CUSTOMER's webhook."""
    found = terminal.run(Fetch, lambda fetch: fetch.webhooks.get(customer))
    terminal.show(found, describe_webhook(found))


@webhook_group.command("rm", short_help="Delete a customer's webhook.")
@click.argument("customer")
def remove_webhook(terminal: Terminal, customer: str) -> None:
    """Delete the webhook of CUSTOMER. Results remain available by polling."""
    terminal.run(Fetch, lambda fetch: fetch.webhooks.remove(customer))
    terminal.show({"removed": customer}, f"the webhook of {customer} is deleted")


@webhook_group.command("rotate", short_help="Replace a webhook's secret.")
@click.argument("customer")
def rotate_secret(terminal: Terminal, customer: str) -> None:
    """Replace the webhook secret of CUSTOMER and show it once; the previous one signs for a day."""
    found = terminal.run(Fetch, lambda fetch: fetch.webhooks.rotate(customer))
    terminal.show(
        found,
        f"{found.secret}\nthe previous secret also signs until"
        f" {found.old_until:%Y-%m-%d %H:%M} UTC",
    )


@webhook_group.command("replay", short_help="Resend results to a webhook.")
@click.argument("customer")
@click.option("--after", default=0, show_default=True, help="Only results after this number.")
def replay_webhook(terminal: Terminal, customer: str, after: int) -> None:
    """Resend every result of CUSTOMER to its webhook, in order."""
    found = terminal.run(Fetch, lambda fetch: fetch.webhooks.replay(customer, after=after))
    terminal.show(found, f"{pluralize(found.waiting, 'result')} of {customer} to send again")


@webhook_group.command("test", short_help="Send a webhook a test message.")
@click.argument("customer")
def try_webhook(terminal: Terminal, customer: str) -> None:
    """Send a signed test message without results to CUSTOMER's webhook; show the response."""
    found = terminal.run(Fetch, lambda fetch: fetch.webhooks.test(customer))
    terminal.show(found, f"{found.url}: {found.text}, in {found.took_s:.3f} s")
    if not found.is_accepted:
        raise click.exceptions.Exit(1)


@click.group("consumer", cls=CommandGroup)
def consumer_group() -> None:
    """The on_item handlers of the application (consumers)."""


@consumer_group.command("ls", short_help="List consumers.")
def list_consumers(terminal: Terminal) -> None:
    """List the on_item handlers (consumers) that workers have started with."""
    found = terminal.run(Fetch, lambda fetch: fetch.consumers.all())
    rows = [(one.name, f"{one.added_at:%Y-%m-%d %H:%M:%S}", one.items) for one in found]
    text = table(("consumer", "since (UTC)", "delivered"), rows)
    missing = "no consumers: no worker ran with an on_item handler"
    terminal.show(listing(found), text if found else missing)


@consumer_group.command("rm", short_help="Remove a consumer.")
@click.argument("name")
def remove_consumer(terminal: Terminal, name: str) -> None:
    """Remove consumer NAME, an on_item handler, and drop the deliveries that wait for it.

    A worker that starts with a handler of that name records it again.
    """
    terminal.run(Fetch, lambda fetch: fetch.consumers.remove(name))
    terminal.show({"removed": name}, f"{name} is removed; its deliveries are dropped")


@consumer_group.command("replay", short_help="Redeliver every item to a consumer.")
@click.argument("name")
@click.option("--customer", help="Only this customer's items.")
def replay_consumer(terminal: Terminal, name: str, customer: str | None) -> None:
    """Redeliver the newest version of every item to consumer NAME.

    Use it for a handler that was added after items were published, or that lost data.
    """
    items = terminal.run(Fetch, lambda fetch: fetch.consumers.replay(name, customer=customer))
    terminal.show(
        {"consumer": name, "redelivered": items},
        f"{pluralize(items, 'item is', 'items are')} delivered to {name} again",
    )
