"""Actions on customers, catalogues, runs, webhooks and consumers."""

from __future__ import annotations

from typing import Any, Final

from headrace.console.actions import Action, Done, Field
from headrace.console.model import PREFIX
from headrace.console.views import ViewContext
from headrace.fetch.errors import InvalidCustomer, InvalidRate
from headrace.fetch.model import parse_rate
from headrace.fetch.service.customers import CONNECTIONS_MAX
from headrace.fetch.service.sellers import DAYS, DAYS_MAX
from headrace.fetch.settings import parse_refresh_s
from headrace.kernel.config import parse_count, parse_share
from headrace.kernel.terminal import pluralize

CUSTOMER: Final = Field("customer", "Customer")
RUN: Final = Field("run", "Run", kind="number")
CONSUMER: Final = Field("name", "Consumer")
NEW_WEBHOOK: Final = (
    "webhook created: run `headrace fetch webhook rotate {}` to get the secret for its receiver"
)
"""The console never shows a secret, as cookies and browser history could keep it."""


async def preview_confirm(context: ViewContext, given: dict[str, Any]) -> str:
    """Changes that a confirmation would apply."""
    if not isinstance(given["run"], int):
        return ""
    run = await context.fetch.runs.get(given["run"])
    return (
        f"Run {run.run} of {run.customer} is {run.state}. It adds {run.new} items, changes"
        f" {run.changed} and removes {run.gone}. It is compared again before it is applied"
        + ("; if the changes differ, it is refused." if run.review_until else ".")
    )


async def upload_catalogue(context: ViewContext, given: dict[str, Any]) -> Done:
    """Read an uploaded catalogue, and hold its run for review."""
    run = await context.fetch.run_catalogue(
        given["path"],
        given["customer"],
        file_name=given["file"],
        mapping=given["mapping"],
        is_review=True,
    )
    counts = f"{run.new} new, {run.changed} changed, {run.gone} removed, {run.invalid} invalid"
    return Done(
        f"run {run.run} would change: {counts}; apply or discard it",
        url=f"{PREFIX}/fetch/runs/{run.run}",
    )


async def create_seller_link(context: ViewContext, given: dict[str, Any]) -> Done:
    """Create a link to the page of a seller; the audit log does not contain it."""
    link = await context.fetch.sellers.link(
        given["customer"], days=given["days"], origin=context.origin
    )
    until = f"{link.expires_at:%Y-%m-%d %H:%M} UTC"
    return Done(
        f"link to the page of {link.customer}, valid until {until}", unlogged=f": `{link.url}`"
    )


async def preview_undo(context: ViewContext, given: dict[str, Any]) -> str:
    """Changes that an undo would revert."""
    if not isinstance(given["run"], int):
        return ""
    run = await context.fetch.runs.get(given["run"])
    return (
        f"Run {run.run} of {run.customer} added {run.new} items, changed {run.changed} and removed"
        f" {run.gone}."
        " Items sent individually since then are kept."
    )


async def set_customer(context: ViewContext, given: dict[str, Any]) -> str:
    """Create a customer or change its limits."""
    starts_max, window_s = parse_rate(given["rate"])
    more = {**kept_values(given), **({"webhook": given["webhook"]} if given["webhook"] else {})}
    found = await context.fetch.customers.set(
        given["customer"],
        starts_max=starts_max,
        window_s=window_s,
        connections=given["connections"],
        **more,
    )
    limits = f"{found.starts_max} requests per {found.window_s:g} s, {found.connections} concurrent"
    text = f"; {NEW_WEBHOOK.format(found.customer)}" if found.webhook_secret else ""
    return f"{found.customer}: {limits}{text}"


def customer_body(given: dict[str, Any]) -> Any:
    """The body of the call. Raises: ValueError if the rate is invalid."""
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
    """The optional values that are given. Raises: InvalidCustomer."""
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


async def set_source(context: ViewContext, given: dict[str, Any]) -> str:
    """Set the catalogue source of a customer."""
    found = await context.fetch.sources.set(
        given["customer"],
        url=given["url"],
        cron=given["cron"],
        tz=given["tz"] or "UTC",
        mapping=given["mapping"],
    )
    when = f"{found.next_at:%Y-%m-%d %H:%M:%S} UTC" if found.next_at else "never, as it is paused"
    return f"next import of the catalogue of {found.customer}: {when}"


def source_body(given: dict[str, Any]) -> Any:
    """The body of the call."""
    names = ("url", "cron", "tz", "mapping")
    return {name: given[name] for name in names if given[name]}


async def replay_webhook(context: ViewContext, given: dict[str, Any]) -> str:
    """Resend results to a webhook."""
    found = await context.fetch.webhooks.replay(given["customer"], after=given["after"] or 0)
    text = pluralize(found.waiting, "result is queued", "results are queued")
    return f"{found.customer}: {text}"


async def replay_consumer(context: ViewContext, given: dict[str, Any]) -> str:
    """Resend every item to a consumer."""
    items = await context.fetch.consumers.replay(given["name"], customer=given["customer"])
    text = pluralize(items, "item is queued", "items are queued")
    return f"{text} for {given['name']}"


ACTIONS: Final = (
    Action(
        name="fetch-confirm",
        title="Apply held run",
        what="Applies run {run}, which was held for a confirmation.",
        command="headrace fetch catalogue confirm {run}",
        http="POST /v1/fetch/runs/{run}/confirm",
        run=lambda context, given: context.fetch.runs.confirm(given["run"]),
        done="run {found.run} is {found.state}: {found.new} new, {found.changed} changed,"
        " {found.gone} removed, {found.photos_pending} photos to download",
        fields=(RUN,),
        is_danger=True,
        preview=preview_confirm,
    ),
    Action(
        name="fetch-discard",
        title="Discard held run",
        what="Discards run {run} without applying it. Later catalogues are processed as usual.",
        command="headrace fetch catalogue discard {run}",
        http="POST /v1/fetch/runs/{run}/discard",
        run=lambda context, given: context.fetch.runs.discard(given["run"]),
        done="run {found.run} is discarded; no items were changed",
        fields=(RUN,),
    ),
    Action(
        name="fetch-upload",
        title="Upload catalogue",
        what="Reads a catalogue of {customer} and shows what it would change. Nothing is changed"
        " until you apply the run.",
        command="headrace fetch catalogue run {file} --customer {customer}"
        " [--mapping {mapping}] --review",
        http="POST /v1/fetch/customers/{customer}/catalogues?review=true&file_name={file}",
        run=upload_catalogue,
        fields=(
            CUSTOMER,
            Field("file", "File", kind="file", hint="CSV, Excel, JSON, XML, or gzip."),
            Field(
                "mapping", "Mapping", required=False, hint="Name of a mapping for foreign formats."
            ),
        ),
    ),
    Action(
        name="fetch-seller-link",
        title="Create seller link",
        what="Creates a link to a page with the runs and errors of {customer}. Anyone with the link"
        " can read the page without an account.",
        command="headrace fetch seller-link {customer} --days {days}",
        http="POST /v1/fetch/customers/{customer}/seller-link",
        run=create_seller_link,
        body=lambda given: {"days": given["days"]},
        fields=(
            CUSTOMER,
            Field("days", "Days", kind="number", default=str(DAYS), numbers=(1, DAYS_MAX)),
        ),
    ),
    Action(
        name="fetch-undo",
        title="Undo run",
        what="Restores the items to their state before run {run}. Added items are unpublished;"
        " changed and removed items are published in their old version.",
        command="headrace fetch run undo {run}",
        http="POST /v1/fetch/runs/{run}/undo",
        run=lambda context, given: context.fetch.runs.undo(given["run"]),
        done="run {found.run} undoes run {run}: {found.new} published again,"
        " {found.changed} restored, {found.gone} unpublished",
        fields=(RUN,),
        is_danger=True,
        preview=preview_undo,
    ),
    Action(
        name="fetch-customer",
        title="Set customer limits",
        what="Creates a customer or changes its limits. Applies to downloads that have not"
        " started.",
        command="headrace fetch customer set {customer} --rate {rate} --connections {connections}"
        " [--webhook {webhook}] [--hold-share {hold_share}] [--hold-items {hold_items}]"
        " [--refresh {refresh_s}]",
        http="PUT /v1/fetch/customers/{customer}",
        run=set_customer,
        body=customer_body,
        fields=(
            CUSTOMER,
            Field("rate", "Rate", hint="Requests per time, such as 10/s, 20/5s or 600/m."),
            Field(
                "connections",
                "Concurrency",
                kind="number",
                default="8",
                numbers=(1, CONNECTIONS_MAX),
            ),
            Field(
                "webhook",
                "Webhook",
                required=False,
                hint="URL that receives signed results. Empty: unchanged.",
            ),
            Field(
                "hold_share",
                "Hold above removed share",
                required=False,
                hint="Such as 0.3; 1 never holds; default resets. Empty: unchanged.",
            ),
            Field(
                "hold_items",
                "Hold above removed items",
                required=False,
                hint="Such as 20; default resets. Empty: unchanged.",
            ),
            Field(
                "refresh_s",
                "Refresh photos after",
                required=False,
                hint="Such as 7d; off disables; default resets. Empty: unchanged.",
            ),
        ),
    ),
    Action(
        name="fetch-source",
        title="Set catalogue source",
        what="Imports the catalogue of a customer from a URL on a schedule. Replaces the current"
        " source.",
        command="headrace fetch catalogue add {url} --customer {customer} --cron {cron} --tz {tz}"
        " [--mapping {mapping}]",
        http="POST /v1/fetch/customers/{customer}/catalogues",
        run=set_source,
        body=source_body,
        fields=(
            CUSTOMER,
            Field("url", "URL", hint="Of the catalogue file."),
            Field("cron", "Schedule", hint="Cron expression, such as 0 * * * *."),
            Field("tz", "Time zone", default="UTC"),
            Field(
                "mapping", "Mapping", required=False, hint="Name of a mapping for foreign formats."
            ),
        ),
    ),
    Action(
        name="fetch-bring",
        title="Import catalogue now",
        what="Imports the catalogue of {customer} now. Its schedule does not change.",
        command="headrace fetch catalogue bring {customer}",
        http="POST /v1/fetch/customers/{customer}/source/bring",
        run=lambda context, given: context.fetch.sources.bring(given["customer"]),
        done="job {found} imports the catalogue of {customer}",
        fields=(CUSTOMER,),
    ),
    Action(
        name="fetch-source-remove",
        title="Remove catalogue source",
        what="Stops importing the catalogue of {customer}. Its items are kept.",
        command="headrace fetch catalogue rm {customer}",
        http="DELETE /v1/fetch/customers/{customer}/source",
        run=lambda context, given: context.fetch.sources.remove(given["customer"]),
        done="the source of {customer} is removed; its items are kept",
        fields=(CUSTOMER,),
        is_danger=True,
    ),
    Action(
        name="fetch-webhook-test",
        title="Test webhook",
        what="Sends a signed test message to the webhook of {customer} and shows its response.",
        command="headrace fetch webhook test {customer}",
        http="POST /v1/fetch/customers/{customer}/webhook/test",
        run=lambda context, given: context.fetch.webhooks.test(given["customer"]),
        done="{found.url}: {found.text}, in {found.took_s:.3f} s",
        fields=(CUSTOMER,),
    ),
    Action(
        name="fetch-webhook-replay",
        title="Replay results",
        what="Resends every result of {customer} after a sequence number to its webhook, in order.",
        command="headrace fetch webhook replay {customer} [--after {after}]",
        http="POST /v1/fetch/customers/{customer}/webhook/replay",
        run=replay_webhook,
        fields=(
            CUSTOMER,
            Field("after", "After sequence number", kind="number", required=False),
        ),
    ),
    Action(
        name="fetch-webhook-remove",
        title="Delete webhook",
        what="Deletes the webhook of {customer}. Results remain available by polling.",
        command="headrace fetch webhook rm {customer}",
        http="DELETE /v1/fetch/customers/{customer}/webhook",
        run=lambda context, given: context.fetch.webhooks.remove(given["customer"]),
        done="the webhook of {customer} is deleted; results remain available by polling",
        fields=(CUSTOMER,),
        is_danger=True,
    ),
    Action(
        name="fetch-consumer-replay",
        title="Replay items",
        what="Resends the newest version of every item to {name}, of one customer or of all.",
        command="headrace fetch consumer replay {name} [--customer {customer}]",
        http="POST /v1/fetch/consumers/{name}/replay",
        run=replay_consumer,
        fields=(
            CONSUMER,
            Field("customer", "Customer", required=False, hint="Empty: all."),
        ),
    ),
    Action(
        name="fetch-consumer-remove",
        title="Delete consumer",
        what="Deletes {name} and its backlog. A worker that declares it registers it again.",
        command="headrace fetch consumer rm {name}",
        http="DELETE /v1/fetch/consumers/{name}",
        run=lambda context, given: context.fetch.consumers.remove(given["name"]),
        done="{name} is deleted; a worker that declares it registers it again",
        fields=(CONSUMER,),
        is_danger=True,
    ),
)
