"""What can be done about objects, nodes and traces; each says the command and the call that do the same."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from headrace.console import shown
from headrace.console.actions import Action, Field
from headrace.console.seeing import Ask

WRITE: Final = "media:write"
KEY: Final = Field(name="key", label="Object")
NODE: Final = Field(name="node", label="Node")


async def purge(ask: Ask, given: dict[str, Any]) -> str:
    """Let every node forget an object, or all below a prefix."""
    media = ask.service("media")
    if given["prefix"]:
        found = await media.purges.purge(prefix=given["prefix"])
    else:
        found = await media.purges.purge([given["key"]] if given["key"] else [])
    what = given["prefix"] or given["key"]
    return f"every node forgets {what} within seconds (generation {found.generation})"


async def remove(ask: Ask, given: dict[str, Any]) -> str:
    """Remove an object."""
    await ask.service("media").objects.rm(given["key"])
    return (
        f"{given['key']} is removed; caches that hold it forget it by a purge, or within a minute"
    )


async def preview_remove(ask: Ask, given: dict[str, Any]) -> str:
    """What would be removed."""
    found = await ask.service("media").objects.info(given["key"])
    return f"{found.key}: {found.size_bytes:,} bytes of {found.content_type}, for good."


async def warm(ask: Ask, given: dict[str, Any]) -> str:
    """Have the owners fetch an object."""
    found = await ask.service("media").warming.warm([given["key"]])
    told = ", ".join(
        f"{one.node}: {shown.counted(one.blocks, 'block', 'blocks')}"
        + (f", {one.failed} failed" if one.failed else "")
        for one in found.nodes
    )
    return f"{given['key']}: {told or 'no node'}"


async def drain(ask: Ask, given: dict[str, Any]) -> str:
    """Give a node no partitions any more."""
    found = await ask.service("media").nodes.drain(given["node"])
    return f"{found.name} is {found.state}"


async def undrain(ask: Ask, given: dict[str, Any]) -> str:
    """Give a node its partitions again."""
    found = await ask.service("media").nodes.undrain(given["node"])
    return f"{found.name} is {found.state}"


async def set_weight(ask: Ask, given: dict[str, Any]) -> str:
    """Give a node more or fewer partitions."""
    found = await ask.service("media").nodes.set_weight(given["node"], given["weight"])
    return f"{found.name} has weight {found.weight:g}"


async def trace(ask: Ask, given: dict[str, Any]) -> str:
    """Log certain requests for a while."""
    found = await ask.service("media").traces.start(given["tag"], for_s=60.0 * given["minutes"])
    return f"{found.name}={found.value} is traced until {found.ends_at:%H:%M:%S} UTC"


async def end_trace(ask: Ask, given: dict[str, Any]) -> str:
    """Log them no more."""
    ended = await ask.service("media").traces.stop(given["tag"])
    return f"{shown.counted(len(ended), 'trace is', 'traces are')} ended"


def trace_body(given: dict[str, Any]) -> Any:
    """The body of the call."""
    return {"tag": given["tag"], "for_s": 60.0 * given["minutes"]}


def purge_body(given: dict[str, Any]) -> Any:
    """The body of the call."""
    if given["prefix"]:
        return {"prefix": given["prefix"]}
    return {"keys": [given["key"]] if given["key"] else []}


DISK: Final = Field(name="disk", label="Disk", hint="its id or path")


def _disk_verb(verb: str) -> Callable[[Ask, dict[str, Any]], Awaitable[str]]:
    async def run(ask: Ask, given: dict[str, Any]) -> str:
        found = await getattr(ask.service("media").disks, verb)(given["disk"])
        return f"{found.path} is {found.state}"

    return run


async def verify(ask: Ask, given: dict[str, Any]) -> str:
    """Read a share of the stored blocks."""
    found = await ask.service("media").disks.verify(given["share"])
    return f"{shown.counted(found.blocks, 'block was', 'blocks were')} read: {found.wrong} wrong, {found.unread} could not be read"


OBJECT_ACTIONS: Final = (
    Action(
        name="media-purge",
        title="Purge from the caches",
        scope=WRITE,
        what="Lets the caches of all nodes forget an object, or all whose keys begin with a prefix; the store keeps them.",
        command="headrace media purge [{key}] [--prefix {prefix}]",
        method="POST",
        path="/v1/media/purge",
        run=purge,
        body=purge_body,
        fields=(
            Field(name="key", label="Object", required=False),
            Field(name="prefix", label="Or all that begin with", required=False),
        ),
    ),
    Action(
        name="media-warm",
        title="Fetch ahead",
        scope=WRITE,
        what="Has every node that owns {key} fetch it now, whole.",
        command="headrace media warm {key}",
        method="POST",
        path="/v1/media/warm",
        run=warm,
        body=lambda given: {"keys": [given["key"]]},
        fields=(KEY,),
    ),
    Action(
        name="media-remove",
        title="Remove the object",
        scope=WRITE,
        what="Removes {key} from the store, for good.",
        command="headrace media rm {key}",
        method="DELETE",
        path="/v1/media/objects/{key}",
        run=remove,
        fields=(KEY,),
        is_danger=True,
        preview=preview_remove,
    ),
)
NODE_ACTIONS: Final = (
    Action(
        name="media-drain",
        title="Drain a node",
        scope=WRITE,
        what="Gives {node} no partitions any more; it serves what still comes to it.",
        command="headrace media drain {node}",
        method="POST",
        path="/v1/media/nodes/{node}/drain",
        run=drain,
        fields=(NODE,),
    ),
    Action(
        name="media-undrain",
        title="Use a node again",
        scope=WRITE,
        what="Gives {node} its partitions again.",
        command="headrace media undrain {node}",
        method="POST",
        path="/v1/media/nodes/{node}/undrain",
        run=undrain,
        fields=(NODE,),
    ),
    Action(
        name="media-weight",
        title="Weigh a node",
        scope=WRITE,
        what="Gives {node} so many times the partitions of a node of weight 1.",
        command="headrace media weight {node} {weight}",
        method="PUT",
        path="/v1/media/nodes/{node}/weight",
        run=set_weight,
        body=lambda given: {"weight": given["weight"]},
        fields=(NODE, Field(name="weight", label="Weight", kind="decimal", default="1")),
    ),
)
DISK_ACTIONS: Final = (
    *(
        Action(
            name=f"media-disk-{verb}",
            title=title,
            scope=WRITE,
            what=what,
            command=f"headrace media disks {verb} {{disk}}",
            method="POST",
            path=f"/v1/media/disks/{{disk}}/{verb}",
            run=_disk_verb(verb),
            fields=(DISK,),
            is_danger=verb == "retire",
        )
        for verb, title, what in (
            (
                "drain",
                "Fill a disk no more",
                "Fills nothing more on disk {disk}; what it has is served.",
            ),
            ("undrain", "Fill a disk again", "Fills disk {disk} again."),
            (
                "retire",
                "Take a disk out",
                "Takes disk {disk} out of use, so that it may be pulled.",
            ),
        )
    ),
    Action(
        name="media-verify",
        title="Check stored blocks",
        scope=WRITE,
        what="Reads a share of all stored blocks of this node and compares their sums; wrong ones are forgotten.",
        command="headrace media verify --share {share}",
        method="POST",
        path="/v1/media/verify",
        run=verify,
        body=lambda given: {"share": given["share"]},
        fields=(Field(name="share", label="Share", kind="decimal", default="0.01"),),
    ),
)
TRACE_ACTIONS: Final = (
    Action(
        name="media-trace",
        title="Trace requests",
        scope=WRITE,
        what="Lets every node log the requests that match, for a while; a line an answer, with the time of each stage.",
        command="headrace media trace on --tag {tag} --for {minutes}m",
        method="POST",
        path="/v1/media/traces",
        run=trace,
        body=trace_body,
        fields=(
            Field(
                name="tag",
                label="Tag",
                hint="user=42, request=r7, object=tracks/a.mp3 or trace=...",
            ),
            Field(name="minutes", label="Minutes", kind="number", default="10"),
        ),
    ),
    Action(
        name="media-trace-end",
        title="End a trace",
        scope=WRITE,
        what="Lets every node log the requests of {tag} no more.",
        command="headrace media trace off --tag {tag}",
        method="DELETE",
        path="/v1/media/traces?tag={tag}",
        run=end_trace,
        fields=(Field(name="tag", label="Tag"),),
    ),
)
ACTIONS: Final = (*OBJECT_ACTIONS, *NODE_ACTIONS, *DISK_ACTIONS, *TRACE_ACTIONS)
