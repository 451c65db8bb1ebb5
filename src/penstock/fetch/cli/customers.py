"""Commands `penstock fetch customer ...`."""

from __future__ import annotations

from typing import Any, Final

import click
import msgspec

from penstock.fetch.cli.text import describe_customer
from penstock.fetch.errors import CustomerUnknown
from penstock.fetch.model import Customer, CustomerSet, parse_rate
from penstock.fetch.service import Fetch
from penstock.kernel.terminal import Terminal

NEW: Final[dict[str, Any]] = {"starts_max": 600, "window_s": 60.0, "connections": 8}


@click.group("customer")
def customer_group() -> None:
    """Whose catalogues, and how fast their hosts may be asked."""


@customer_group.command("set", short_help="Make a customer or change its limits.")
@click.argument("customer")
@click.option("--rate", help="Requests, such as 10/s, 20/5s or 600/m, which a new one has.")
@click.option("--connections", type=int, help="Requests at once; a new one has 8.")
@click.option("--webhook", metavar="URL", help="Send its results there, signed.")
@click.pass_obj
def set_customer(
    terminal: Terminal,
    customer: str,
    *,
    rate: str | None,
    connections: int | None,
    webhook: str | None,
) -> None:
    """Make CUSTOMER or change its limits; what is left out stays as it is.

    With --webhook for the first time, the secret that its messages are signed with is shown this once.
    """

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
        )

    found = terminal.run(Fetch, change)
    secret = f"\nsecret: {found.webhook_secret}" if found.webhook_secret else ""
    terminal.show(found, describe_customer(found) + secret)


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
