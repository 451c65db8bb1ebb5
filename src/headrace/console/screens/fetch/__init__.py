"""Fetch on the console: runs, customers, photos, hosts, and to whom results go."""

from __future__ import annotations

from typing import Final

from headrace.console.screens.fetch.actions import ACTIONS
from headrace.console.screens.fetch.customers import see_customer, see_customers, see_item
from headrace.console.screens.fetch.deliveries import see_deliveries, see_sources
from headrace.console.screens.fetch.photos import see_hosts, see_wall, see_why
from headrace.console.screens.fetch.runs import see_run, see_runs
from headrace.console.seeing import Room, Screen

READ: Final = "fetch:read"

ROOM: Final = Room(
    name="fetch",
    title="Fetch",
    key="f",
    service="fetch",
    screens=(
        Screen(path="/fetch", title="Runs", tab="Runs", template="fetch/runs.html", scope=READ, view=see_runs),
        Screen(
            path="/fetch/customers", title="Customers", tab="Customers",
            template="fetch/customers.html", scope=READ, view=see_customers,
        ),
        Screen(
            path="/fetch/photos", title="Photo wall", tab="Photos",
            template="fetch/photos.html", scope=READ, view=see_wall, live=False,
        ),
        Screen(
            path="/fetch/why", title="Why a photo is there or not", tab="Why",
            template="fetch/why.html", scope=READ, view=see_why, live=False,
        ),
        Screen(
            path="/fetch/hosts", title="Hosts", tab="Hosts",
            template="fetch/hosts.html", scope=READ, view=see_hosts,
        ),
        Screen(
            path="/fetch/sources", title="Sources", tab="Sources",
            template="fetch/sources.html", scope=READ, view=see_sources,
        ),
        Screen(
            path="/fetch/deliveries", title="Consumers and webhooks", tab="Results to",
            template="fetch/deliveries.html", scope=READ, view=see_deliveries,
        ),
        Screen(
            path="/fetch/runs/{run:str}", title="Run", template="fetch/run.html", scope=READ, view=see_run,
        ),
        Screen(
            path="/fetch/customers/{customer:str}", title="Customer",
            template="fetch/customer.html", scope=READ, view=see_customer,
        ),
        Screen(
            path="/fetch/customers/{customer:str}/item", title="Item",
            template="fetch/item.html", scope=READ, view=see_item, live=False,
        ),
    ),
    actions=ACTIONS,
)  # fmt: skip
