"""Commands of fetch: `headrace fetch ...`; each calls one method and prints."""

from __future__ import annotations

from typing import Final

import click

from headrace.fetch.cli.catalogues import catalogue_group, run_group
from headrace.fetch.cli.customers import consumer_group, customer_group, seller_link, webhook_group
from headrace.fetch.cli.items import (
    host_group,
    item_group,
    list_results,
    mapping_group,
    schema_group,
    show_study,
    try_photo,
    why,
)
from headrace.fetch.cli.moderation import duplicates_group, held_group
from headrace.fetch.cli.text import describe_run

__all__ = ["COMMANDS", "describe_run", "fetch"]


@click.group("fetch")
def fetch() -> None:
    """Catalogues and photos of sellers."""


for _command in (
    customer_group,
    catalogue_group,
    run_group,
    schema_group,
    mapping_group,
    item_group,
    list_results,
    held_group,
    duplicates_group,
    consumer_group,
    webhook_group,
    host_group,
    show_study,
    try_photo,
    why,
    seller_link,
):
    fetch.add_command(_command)

COMMANDS: Final[list[click.Command]] = [fetch]
