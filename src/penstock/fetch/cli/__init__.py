"""Commands of fetch: `penstock fetch ...`; each calls one verb and prints."""

from __future__ import annotations

from typing import Final

import click

from penstock.fetch.cli.catalogues import catalogue_group
from penstock.fetch.cli.consumers import consumer_group
from penstock.fetch.cli.customers import customer_group
from penstock.fetch.cli.hosts import host_group
from penstock.fetch.cli.items import item_group, list_results
from penstock.fetch.cli.runs import run_group
from penstock.fetch.cli.schemas import mapping_group, schema_group
from penstock.fetch.cli.text import describe_run
from penstock.fetch.cli.urls import try_photo, why
from penstock.fetch.cli.webhooks import webhook_group

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
    consumer_group,
    webhook_group,
    host_group,
    try_photo,
    why,
):
    fetch.add_command(_command)

COMMANDS: Final[list[click.Command]] = [fetch]
