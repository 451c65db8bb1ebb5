"""Commands `headrace fetch customer ...`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click
import msgspec

from headrace.fetch.cli.text import describe_customer
from headrace.fetch.errors import CustomerUnknown, InvalidCustomer
from headrace.fetch.model import Customer, CustomerSet, parse_rate
from headrace.fetch.service import Fetch
from headrace.fetch.settings import parse_refresh_s
from headrace.kernel.config import parse_count, parse_share
from headrace.kernel.terminal import Terminal

NEW: Final[dict[str, Any]] = {"starts_max": 600, "window_s": 60.0, "connections": 8}


@click.group("customer")
def customer_group() -> None:
    """Whose catalogues, and how fast their hosts may be asked."""


@customer_group.command("set", short_help="Make a customer or change its limits.")
@click.argument("customer")
@click.option("--rate", help="Requests, such as 10/s, 20/5s or 600/m, which a new one has.")
@click.option("--connections", type=int, help="Requests at once; a new one has 8.")
@click.option("--webhook", metavar="URL", help="Send its results there, signed.")
@click.option(
    "--hold-share",
    metavar="SHARE",
    help="Hold a catalogue that removes more than this share of its items, 0 to 1; 1: none; or default.",
)
@click.option(
    "--hold-items",
    metavar="COUNT",
    help="Hold it only if it removes more items than this as well; or default.",
)
@click.option(
    "--refresh",
    metavar="TIME",
    help="Ask for good photos again after this time, such as 7d; off, or default.",
)
@click.pass_obj
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
    """Make CUSTOMER or change its limits; what is left out stays as it is, `default` is the deployment's.

    With --webhook for the first time, the secret that its messages are signed with is shown this once.
    """
    more = {
        "hold_share": _value("--hold-share", hold_share, parse_share),
        "hold_items": _value("--hold-items", hold_items, parse_count),
        "refresh_s": _value("--refresh", refresh, parse_refresh_s),
    }

    async def change(fetch: Fetch) -> CustomerSet:
        try:
            now = await fetch.customer(customer)
        except CustomerUnknown:
            now = Customer(customer=customer, **NEW)
        starts_max, window_s = parse_rate(rate) if rate else (now.starts_max, now.window_s)
        return await fetch.set_customer(
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
    """What an option says; UNSET where it was left out, None for `default`. Raises: InvalidCustomer."""
    if text is None:
        return msgspec.UNSET
    if text.strip() == "default":
        return None
    try:
        return parse(text)
    except ValueError as error:
        raise InvalidCustomer(f"{option} {text[:40]!r}: expected {error}, or default") from None


@customer_group.command("show", short_help="Show a customer, or all.")
@click.argument("customer", required=False)
@click.pass_obj
def show_customer(terminal: Terminal, customer: str | None) -> None:
    """Show the limits of CUSTOMER, or of every customer."""
    if customer is None:
        _show_customers(terminal)
    else:
        found = terminal.run(Fetch, lambda fetch: fetch.customer(customer))
        terminal.show(found, describe_customer(found))


@customer_group.command("ls", short_help="List customers.")
@click.pass_obj
def list_customers(terminal: Terminal) -> None:
    """List every customer with its limits."""
    _show_customers(terminal)


def _show_customers(terminal: Terminal) -> None:
    everyone = terminal.run(Fetch, lambda fetch: fetch.customers())
    text = "\n".join(describe_customer(found) for found in everyone)
    terminal.show(everyone, text or "no customers")
