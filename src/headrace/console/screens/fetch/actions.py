"""What can be done about catalogues, photos and their receivers; each says the command and the call that do the same."""

from __future__ import annotations

from typing import Any, Final

from headrace.console import shown
from headrace.console.actions import Action, Field
from headrace.console.seeing import Ask
from headrace.fetch.errors import InvalidCustomer, InvalidRate
from headrace.fetch.model import parse_rate
from headrace.fetch.service.customers import CONNECTIONS_MAX
from headrace.fetch.settings import parse_refresh_s
from headrace.kernel.config import parse_count, parse_share

WRITE: Final = "fetch:write"
CUSTOMER: Final = Field(name="customer", label="Customer")
RUN: Final = Field(name="run", label="Run", kind="number")
CONSUMER: Final = Field(name="name", label="Consumer")
NEW_WEBHOOK: Final = (
    "its webhook is made: `headrace fetch webhook rotate {}` shows a secret for its receiver"
)
"""A secret goes through no page of the console, whose answers lie in cookies and histories."""


async def confirm_run(ask: Ask, given: dict[str, Any]) -> str:
    """Apply a held run."""
    run = await ask.service("fetch").runs.confirm(given["run"])
    counts = f"{run.new} new, {run.changed} changed, {run.gone} gone"
    return f"run {run.run} is {run.state}: {counts}, {run.photos_pending} photos to ask"


async def preview_confirm(ask: Ask, given: dict[str, Any]) -> str:
    """What confirming would change."""
    if not isinstance(given["run"], int):
        return ""
    run = await ask.service("fetch").runs.get(given["run"])
    return (
        f"Run {run.run} of {run.customer} is {run.state}. As its file was compared it makes {run.new} items,"
        f" changes {run.changed} and unpublishes {run.gone}; it is compared anew when it is applied."
    )


async def discard_run(ask: Ask, given: dict[str, Any]) -> str:
    """Do not apply a held run."""
    run = await ask.service("fetch").runs.discard(given["run"])
    return f"run {run.run} is discarded; nothing was changed"


async def undo_run(ask: Ask, given: dict[str, Any]) -> str:
    """Undo an applied run."""
    run = await ask.service("fetch").runs.undo(given["run"])
    counts = f"{run.new} published again, {run.changed} put back, {run.gone} unpublished"
    return f"run {run.run} undoes run {given['run']}: {counts}"


async def preview_undo(ask: Ask, given: dict[str, Any]) -> str:
    """What undoing would change."""
    if not isinstance(given["run"], int):
        return ""
    run = await ask.service("fetch").runs.get(given["run"])
    return (
        f"Run {run.run} of {run.customer} added {run.new} items, changed {run.changed} and removed {run.gone}."
        " Items sent by themselves since then stay as they were sent."
    )


async def set_customer(ask: Ask, given: dict[str, Any]) -> str:
    """Make a customer or change its limits."""
    starts_max, window_s = parse_rate(given["rate"])
    more = {**kept_values(given), **({"webhook": given["webhook"]} if given["webhook"] else {})}
    found = await ask.service("fetch").customers.set(
        given["customer"],
        starts_max=starts_max,
        window_s=window_s,
        connections=given["connections"],
        **more,
    )
    limits = f"{found.starts_max} requests in {found.window_s:g} s, {found.connections} at once"
    told = f"; {NEW_WEBHOOK.format(found.customer)}" if found.webhook_secret else ""
    return f"{found.customer}: {limits}{told}"


def customer_body(given: dict[str, Any]) -> Any:
    """The body of the call. Raises: ValueError where the rate means nothing yet."""
    try:
        starts_max, window_s = parse_rate(given["rate"])
        more = kept_values(given)
    except (InvalidRate, InvalidCustomer) as fault:
        raise ValueError(fault.text) from fault
    body = {
        "starts_max": starts_max,
        "window_s": window_s,
        "connections": given["connections"],
    }
    body |= more
    return {**body, "webhook": {"url": given["webhook"]}} if given["webhook"] else body


def kept_values(given: dict[str, Any]) -> dict[str, Any]:
    """The values of the form that stay as they are where they are left empty. Raises: InvalidCustomer."""
    parsers = (
        ("hold_share", parse_share),
        ("hold_items", parse_count),
        ("refresh_s", parse_refresh_s),
    )
    found: dict[str, Any] = {}
    for name, parse in parsers:
        text = (given[name] or "").strip()
        if text:
            try:
                found[name] = None if text == "default" else parse(text)
            except ValueError as error:
                raise InvalidCustomer(
                    f"{name} {text[:40]!r}: expected {error}, or default"
                ) from None
    return found


async def set_source(ask: Ask, given: dict[str, Any]) -> str:
    """Bring a catalogue from a URL."""
    found = await ask.service("fetch").sources.set(
        given["customer"],
        url=given["url"],
        cron=given["cron"],
        tz=given["tz"] or "UTC",
        mapping=given["mapping"],
    )
    when = f"{found.next_at:%Y-%m-%d %H:%M:%S} UTC" if found.next_at else "never, it is paused"
    return f"the catalogue of {found.customer} is brought next: {when}"


def source_body(given: dict[str, Any]) -> Any:
    """The body of the call."""
    names = ("url", "cron", "tz", "mapping")
    return {name: given[name] for name in names if given[name]}


async def bring_source(ask: Ask, given: dict[str, Any]) -> str:
    """Bring a catalogue now."""
    job = await ask.service("fetch").sources.bring(given["customer"])
    return f"job {job} brings the catalogue of {given['customer']}"


async def remove_source(ask: Ask, given: dict[str, Any]) -> str:
    """Bring a catalogue no more."""
    await ask.service("fetch").sources.remove(given["customer"])
    return f"the source of {given['customer']} is removed; its items stay"


async def try_webhook(ask: Ask, given: dict[str, Any]) -> str:
    """Send a test message."""
    found = await ask.service("fetch").webhooks.test(given["customer"])
    return f"{found.url}: {found.text}, in {found.took_s:.3f} s"


async def replay_webhook(ask: Ask, given: dict[str, Any]) -> str:
    """Send a webhook its results once more."""
    found = await ask.service("fetch").webhooks.replay(given["customer"], after=given["after"] or 0)
    told = shown.counted(found.waiting, "result is on its way", "results are on their way")
    return f"{found.customer}: {told}"


async def remove_webhook(ask: Ask, given: dict[str, Any]) -> str:
    """Send results nowhere any more."""
    await ask.service("fetch").webhooks.remove(given["customer"])
    return f"the webhook of {given['customer']} is forgotten; its results stay for whoever polls"


async def replay_consumer(ask: Ask, given: dict[str, Any]) -> str:
    """Tell a consumer every item once more."""
    items = await ask.service("fetch").consumers.replay(given["name"], customer=given["customer"])
    told = shown.counted(items, "item is on its way", "items are on their way")
    return f"{told} to {given['name']}"


async def remove_consumer(ask: Ask, given: dict[str, Any]) -> str:
    """Forget a consumer."""
    await ask.service("fetch").consumers.remove(given["name"])
    return f"{given['name']} is forgotten; a worker that starts with it records it anew"


ACTIONS: Final = (
    Action(
        name="fetch-confirm",
        title="Apply the held run",
        scope=WRITE,
        what="Run {run} was held because its file looks like an accident. Confirmed, it is applied as it is.",
        command="headrace fetch catalogue confirm {run}",
        method="POST",
        path="/v1/fetch/runs/{run}/confirm",
        run=confirm_run,
        fields=(RUN,),
        is_danger=True,
        preview=preview_confirm,
    ),
    Action(
        name="fetch-discard",
        title="Discard the held run",
        scope=WRITE,
        what="Run {run} is not applied, now or later; the next catalogue is compared as ever.",
        command="headrace fetch catalogue discard {run}",
        method="POST",
        path="/v1/fetch/runs/{run}/discard",
        run=discard_run,
        fields=(RUN,),
    ),
    Action(
        name="fetch-undo",
        title="Undo the run",
        scope=WRITE,
        what="Puts the items back to their state before run {run}: items that it added are unpublished, items that it"
        " changed or removed are published as they were.",
        command="headrace fetch run undo {run}",
        method="POST",
        path="/v1/fetch/runs/{run}/undo",
        run=undo_run,
        fields=(RUN,),
        is_danger=True,
        preview=preview_undo,
    ),
    Action(
        name="fetch-customer",
        title="Set a customer's limits",
        scope=WRITE,
        what="Makes a customer or changes its limits, at once, for photos not started yet.",
        command="headrace fetch customer set {customer} --rate {rate} --connections {connections}"
        " [--webhook {webhook}] [--hold-share {hold_share}] [--hold-items {hold_items}] [--refresh {refresh_s}]",
        method="PUT",
        path="/v1/fetch/customers/{customer}",
        run=set_customer,
        body=customer_body,
        fields=(
            CUSTOMER,
            Field(name="rate", label="Rate", hint="requests, such as 10/s, 20/5s or 600/m"),
            Field(
                name="connections",
                label="At once",
                kind="number",
                default="8",
                numbers=(1, CONNECTIONS_MAX),
            ),
            Field(
                name="webhook",
                label="Webhook",
                required=False,
                hint="where its results are sent, signed; left empty it stays as it is",
            ),
            Field(
                name="hold_share",
                label="Hold over a share",
                required=False,
                hint="of removed items, such as 0.3; 1: hold none; default; left empty it stays as it is",
            ),
            Field(
                name="hold_items",
                label="Hold over removed items",
                required=False,
                hint="such as 20; default; left empty it stays as it is",
            ),
            Field(
                name="refresh_s",
                label="Refresh photos after",
                required=False,
                hint="such as 7d; off; default; left empty it stays as it is",
            ),
        ),
    ),
    Action(
        name="fetch-source",
        title="Bring a catalogue from a URL",
        scope=WRITE,
        what="Brings the catalogue of a customer at every moment of a cron; replaces the source there was.",
        command="headrace fetch catalogue add {url} --customer {customer} --cron {cron} --tz {tz}"
        " [--mapping {mapping}]",
        method="POST",
        path="/v1/fetch/customers/{customer}/catalogues",
        run=set_source,
        body=source_body,
        fields=(
            CUSTOMER,
            Field(name="url", label="URL", hint="of the catalogue file"),
            Field(name="cron", label="When", hint="five fields, such as 0 * * * *"),
            Field(name="tz", label="Time zone", default="UTC"),
            Field(name="mapping", label="Mapping", required=False, hint="for foreign files"),
        ),
    ),
    Action(
        name="fetch-bring",
        title="Bring the catalogue now",
        scope=WRITE,
        what="Brings the catalogue of {customer} now, besides its moments.",
        command="headrace fetch catalogue bring {customer}",
        method="POST",
        path="/v1/fetch/customers/{customer}/source/bring",
        run=bring_source,
        fields=(CUSTOMER,),
    ),
    Action(
        name="fetch-source-remove",
        title="Bring the catalogue no more",
        scope=WRITE,
        what="Forgets where the catalogue of {customer} is brought from. Its items stay as they are.",
        command="headrace fetch catalogue rm {customer}",
        method="DELETE",
        path="/v1/fetch/customers/{customer}/source",
        run=remove_source,
        fields=(CUSTOMER,),
        is_danger=True,
    ),
    Action(
        name="fetch-webhook-test",
        title="Try the webhook",
        scope=WRITE,
        what="Sends the webhook of {customer} one signed message without results, and says what it answers.",
        command="headrace fetch webhook test {customer}",
        method="POST",
        path="/v1/fetch/customers/{customer}/webhook/test",
        run=try_webhook,
        fields=(CUSTOMER,),
    ),
    Action(
        name="fetch-webhook-replay",
        title="Send the results once more",
        scope=WRITE,
        what="Sends every result of {customer} after a number to its webhook once more, in order.",
        command="headrace fetch webhook replay {customer} [--after {after}]",
        method="POST",
        path="/v1/fetch/customers/{customer}/webhook/replay",
        run=replay_webhook,
        fields=(
            CUSTOMER,
            Field(name="after", label="After number", kind="number", required=False),
        ),
    ),
    Action(
        name="fetch-webhook-remove",
        title="Forget the webhook",
        scope=WRITE,
        what="Sends the results of {customer} nowhere any more; they stay for whoever polls.",
        command="headrace fetch webhook rm {customer}",
        method="DELETE",
        path="/v1/fetch/customers/{customer}/webhook",
        run=remove_webhook,
        fields=(CUSTOMER,),
        is_danger=True,
    ),
    Action(
        name="fetch-consumer-replay",
        title="Tell every item once more",
        scope=WRITE,
        what="Tells {name} the newest version of every item, of one customer or of all.",
        command="headrace fetch consumer replay {name} [--customer {customer}]",
        method="POST",
        path="/v1/fetch/consumers/{name}/replay",
        run=replay_consumer,
        fields=(
            CONSUMER,
            Field(name="customer", label="Customer", required=False, hint="left empty: all"),
        ),
    ),
    Action(
        name="fetch-consumer-remove",
        title="Forget the consumer",
        scope=WRITE,
        what="Forgets {name} and drops what waits for it; a worker that starts with it records it anew.",
        command="headrace fetch consumer rm {name}",
        method="DELETE",
        path="/v1/fetch/consumers/{name}",
        run=remove_consumer,
        fields=(CONSUMER,),
        is_danger=True,
    ),
)
