"""Commands `headrace fetch consumer ...`."""

from __future__ import annotations

import click

from headrace.fetch.service import Fetch
from headrace.kernel.terminal import Terminal


@click.group("consumer")
def consumer_group() -> None:
    """The on_item handlers that items are told to."""


@consumer_group.command("ls", short_help="List consumers.")
@click.pass_obj
def list_consumers(terminal: Terminal) -> None:
    """List every consumer that a worker recorded."""
    found = terminal.run(Fetch, lambda fetch: fetch.consumers())
    lines = [
        f"{consumer.name}: since {consumer.added_at:%Y-%m-%d %H:%M:%S}, told of {consumer.items} items"
        for consumer in found
    ]
    terminal.show(found, "\n".join(lines) or "no consumers: no worker ran with an on_item handler")


@consumer_group.command("rm", short_help="Forget a consumer.")
@click.argument("name")
@click.pass_obj
def remove_consumer(terminal: Terminal, name: str) -> None:
    """Forget consumer NAME and drop what waits for it.

    A worker that starts with a handler of that name records it anew.
    """
    terminal.run(Fetch, lambda fetch: fetch.remove_consumer(name))
    terminal.show({"removed": name}, f"{name} is forgotten; what waited for it is dropped")


@consumer_group.command("replay", short_help="Tell a consumer every item once more.")
@click.argument("name")
@click.option("--customer", help="Only this customer's items.")
@click.pass_obj
def replay_consumer(terminal: Terminal, name: str, customer: str | None) -> None:
    """Tell consumer NAME the newest version of every item once more.

    For a handler that came when items were published already, or that lost what it was told.
    """
    items = terminal.run(Fetch, lambda fetch: fetch.replay(name, customer=customer))
    terminal.show({"consumer": name, "items": items}, f"{items} items are on their way to {name}")
