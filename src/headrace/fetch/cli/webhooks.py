"""Commands `headrace fetch webhook ...`."""

from __future__ import annotations

import click

from headrace.fetch.cli.text import describe_webhook
from headrace.fetch.service import Fetch
from headrace.kernel.terminal import Terminal


@click.group("webhook")
def webhook_group() -> None:
    """Where customers' results are sent by themselves; `customer set --webhook URL` makes one."""


@webhook_group.command("ls", short_help="List webhooks.")
@click.option("--after", default="", help="Customers after this one alone.")
@click.option("--limit", default=100, show_default=True, type=click.IntRange(1, 1000))
@click.pass_obj
def list_webhooks(terminal: Terminal, after: str, limit: int) -> None:
    """List webhooks by customer, with what waits and what failed."""
    found = terminal.run(Fetch, lambda fetch: fetch.webhooks.list(after=after, webhooks_max=limit))
    terminal.show(found, "\n".join(map(describe_webhook, found)) or "no webhooks")


@webhook_group.command("show", short_help="Show a customer's webhook.")
@click.argument("customer")
@click.pass_obj
def show_webhook(terminal: Terminal, customer: str) -> None:
    """Show where the results of CUSTOMER go, how far the receiver is, and what was wrong last."""
    found = terminal.run(Fetch, lambda fetch: fetch.webhooks.get(customer))
    terminal.show(found, describe_webhook(found))


@webhook_group.command("rm", short_help="Forget a customer's webhook.")
@click.argument("customer")
@click.pass_obj
def remove_webhook(terminal: Terminal, customer: str) -> None:
    """Send the results of CUSTOMER nowhere any more; they stay for whoever polls."""
    terminal.run(Fetch, lambda fetch: fetch.webhooks.remove(customer))
    terminal.show({"removed": customer}, f"the webhook of {customer} is forgotten")


@webhook_group.command("rotate", short_help="Give a webhook a new secret.")
@click.argument("customer")
@click.pass_obj
def rotate_secret(terminal: Terminal, customer: str) -> None:
    """Give the webhook of CUSTOMER a new secret, shown this once; the one before signs as well for a day."""
    found = terminal.run(Fetch, lambda fetch: fetch.webhooks.rotate(customer))
    terminal.show(
        found,
        f"{found.secret}\nthe secret before it signs as well until {found.old_until:%Y-%m-%d %H:%M} UTC",
    )


@webhook_group.command("replay", short_help="Send a webhook its results once more.")
@click.argument("customer")
@click.option("--after", default=0, show_default=True, help="Results after this number alone.")
@click.pass_obj
def replay_webhook(terminal: Terminal, customer: str, after: int) -> None:
    """Send every result of CUSTOMER to its webhook once more, in order."""
    found = terminal.run(Fetch, lambda fetch: fetch.webhooks.replay(customer, after=after))
    terminal.show(found, f"{found.waiting} results of {customer} are on their way")


@webhook_group.command("test", short_help="Send a webhook a test message.")
@click.argument("customer")
@click.pass_obj
def try_webhook(terminal: Terminal, customer: str) -> None:
    """Send the webhook of CUSTOMER one signed message without results and say what it answers."""
    found = terminal.run(Fetch, lambda fetch: fetch.webhooks.test(customer))
    terminal.show(found, f"{found.url}: {found.text}, in {found.took_s:.3f} s")
    if not found.is_taken:
        raise click.exceptions.Exit(1)
