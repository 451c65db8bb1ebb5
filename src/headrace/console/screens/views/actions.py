"""What can be done about counts; each says the command and the call that do the same."""

from __future__ import annotations

from typing import Any, Final

from headrace.console import shown
from headrace.console.actions import Action, Field
from headrace.console.seeing import Ask
from headrace.kernel.terminal import parse_moment
from headrace.views.errors import InvalidSpan
from headrace.views.model import CLASSES

READ: Final = "views:read"
WRITE: Final = "views:write"
ENTITY: Final = Field(name="id", label="Entity")
CHOICES: Final = tuple((name.value, name.value) for name in CLASSES)


async def delete_entity(ask: Ask, given: dict[str, Any]) -> str:
    """Remove an entity's counts."""
    found = await ask.service("views").delete(given["id"])
    until = f"{found.until_at:%Y-%m-%d %H:%M} UTC"
    gone = shown.counted(found.total, f"view of {found.id} is", f"views of {found.id} are")
    return f"{gone} removed; nothing is counted for it until {until}"


async def preview_delete(ask: Ask, given: dict[str, Any]) -> str:
    """What would be removed."""
    [total] = await ask.service("views").totals([given["id"]])
    known = "an unknown number of views"
    if total.total is not None:
        known = shown.counted(total.total, "view", "views")
    return f"{known} of {given['id']} would be removed, with every hour of its series."


async def reclassify(ask: Ask, given: dict[str, Any]) -> str:
    """Move views between classes."""
    job = await ask.service("views").corrections.reclassify(
        given["id"],
        from_at=_moment("from", given["from"]),
        to_at=_moment("to", given["to"]),
        source=given["source"],
        target=given["target"],
    )
    return f"job {job} moves them"


def reclassify_body(given: dict[str, Any]) -> Any:
    """The body of the call."""
    return {
        "id": given["id"],
        "from_at": given["from"],
        "to_at": given["to"],
        "source": given["source"],
        "target": given["target"],
    }


async def verify(ask: Ask, given: dict[str, Any]) -> str:  # noqa: ARG001 - every action is called so
    """Prove that totals are the sums of their hours."""
    found = await ask.service("views").analytics.verify()
    all_of_it = f"{found.entities:,} totals of {found.views:,} views"
    if not found.differences:
        return f"{all_of_it}: each is the sum of its hours"
    first = found.differences[0]
    return (
        f"{all_of_it}: {len(found.differences)} are not the sum of their hours, such as {first.id}"
        f" ({first.traffic}): {first.total:,} where its hours have {first.hours:,}"
    )


def _moment(name: str, text: str) -> Any:
    try:
        return parse_moment(text)
    except ValueError as error:
        raise InvalidSpan(f"{name}: expected a moment such as 2026-11-21T10:00Z") from error


ACTIONS: Final = (
    Action(
        name="views-verify",
        title="Prove the totals",
        scope=READ,
        what="Compares every total with the sum of its hours, as of one moment. Changes nothing.",
        command="headrace views verify",
        method="GET",
        path="/v1/views/verify",
        run=verify,
    ),
    Action(
        name="views-delete",
        title="Remove the views of an entity",
        scope=WRITE,
        what="Removes totals and series of {id}, for good; for 30 days nothing is counted for it.",
        command="headrace views rm {id}",
        method="DELETE",
        path="/v1/views/items/{id}",
        run=delete_entity,
        fields=(ENTITY,),
        is_danger=True,
        preview=preview_delete,
    ),
    Action(
        name="views-reclassify",
        title="Move views to another class",
        scope=WRITE,
        what="Moves the counted views of {id} of whole hours from one class to another, as a job.",
        command="headrace views reclassify {id} --from {from} --to {to} --source {source} --target {target}",
        method="POST",
        path="/v1/views/reclassify",
        run=reclassify,
        body=reclassify_body,
        fields=(
            ENTITY,
            Field(name="from", label="From", hint="a whole hour of UTC, such as 2026-11-21T10:00Z"),
            Field(name="to", label="Until before", hint="a whole hour of UTC"),
            Field(name="source", label="From class", kind="select", options=CHOICES),
            Field(name="target", label="To class", kind="select", options=CHOICES),
        ),
    ),
)
