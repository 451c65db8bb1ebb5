"""Actions on objects, nodes, disks and traces."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from headrace.console.actions import Action, Field
from headrace.console.views import ViewContext
from headrace.kernel.terminal import pluralize
from headrace.media.service.nodes import Disk, Disks

KEY: Final = Field("key", "Object")
NODE: Final = Field("node", "Node")


async def purge(context: ViewContext, given: dict[str, Any]) -> str:
    """Purge an object or a prefix from the caches of all nodes."""
    found = await context.media.purges.purge(**purge_body(given))
    what = given["prefix"] or given["key"]
    return f"all nodes purge {what} within seconds (generation {found.generation})"


async def preview_remove(context: ViewContext, given: dict[str, Any]) -> str:
    """The object that would be deleted."""
    found = await context.media.objects.info(given["key"])
    return f"{found.key}: {found.size_bytes:,} bytes of {found.content_type} would be deleted."


async def warm(context: ViewContext, given: dict[str, Any]) -> str:
    """Preload an object on its owner nodes."""
    found = await context.media.warming.warm([given["key"]])
    text = ", ".join(
        f"{one.node}: {pluralize(one.blocks, 'block')}"
        + (f", {one.failed} failed" if one.failed else "")
        for one in found.nodes
    )
    return f"{given['key']}: {text or 'no node'}"


async def end_trace(context: ViewContext, given: dict[str, Any]) -> str:
    """End a trace."""
    ended = await context.media.traces.stop(given["tag"])
    return f"{pluralize(len(ended), 'trace is', 'traces are')} ended"


def trace_body(given: dict[str, Any]) -> Any:
    """The body of the call."""
    return {"tag": given["tag"], "for_s": 60.0 * given["minutes"]}


def purge_body(given: dict[str, Any]) -> Any:
    """The body of the call."""
    if given["prefix"]:
        return {"prefix": given["prefix"]}
    return {"keys": [given["key"]] if given["key"] else []}


DISK: Final = Field("disk", "Disk", hint="Id or path.")


def _disk_action(
    verb: str, title: str, what: str, run: Callable[[Disks, str], Awaitable[Disk]]
) -> Action:
    return Action(
        name=f"media-disk-{verb}",
        title=title,
        what=what,
        command=f"headrace media disks {verb} {{disk}}",
        http=f"POST /v1/media/disks/{{disk}}/{verb}",
        run=lambda context, given: run(context.media.disks, given["disk"]),
        done="{found.path} is {found.state}",
        fields=(DISK,),
        is_danger=verb == "retire",
    )


async def verify(context: ViewContext, given: dict[str, Any]) -> str:
    """Verify a share of the stored blocks."""
    found = await context.media.disks.verify(given["share"])
    return (
        f"{pluralize(found.blocks, 'block was', 'blocks were')} read: {found.wrong} wrong,"
        f" {found.unread} could not be read"
    )


OBJECT_ACTIONS: Final = (
    Action(
        name="media-purge",
        title="Purge caches",
        what="Purges an object, or all objects with a key prefix, from the caches of all nodes."
        " The object store keeps them.",
        command="headrace media purge [{key}] [--prefix {prefix}]",
        http="POST /v1/media/purge",
        run=purge,
        body=purge_body,
        fields=(
            Field("key", "Object", required=False),
            Field("prefix", "Or key prefix", required=False),
        ),
    ),
    Action(
        name="media-warm",
        title="Preload",
        what="Loads the whole object {key} into the caches of its owner nodes.",
        command="headrace media warm {key}",
        http="POST /v1/media/warm",
        run=warm,
        body=lambda given: {"keys": [given["key"]]},
        fields=(KEY,),
    ),
    Action(
        name="media-remove",
        title="Delete object",
        what="Deletes {key} from the object store. This cannot be undone.",
        command="headrace media rm {key}",
        http="DELETE /v1/media/objects/{key}",
        run=lambda context, given: context.media.objects.rm(given["key"]),
        done="{key} is deleted; caches may serve it for up to a minute, unless purged",
        fields=(KEY,),
        is_danger=True,
        preview=preview_remove,
    ),
)
NODE_ACTIONS: Final = (
    Action(
        name="media-drain",
        title="Drain node",
        what="Moves all partitions away from {node}. It serves requests that still arrive.",
        command="headrace media drain {node}",
        http="POST /v1/media/nodes/{node}/drain",
        run=lambda context, given: context.media.nodes.drain(given["node"]),
        done="{found.name} is {found.state}",
        fields=(NODE,),
    ),
    Action(
        name="media-undrain",
        title="Use node again",
        what="Assigns partitions to {node} again.",
        command="headrace media undrain {node}",
        http="POST /v1/media/nodes/{node}/undrain",
        run=lambda context, given: context.media.nodes.undrain(given["node"]),
        done="{found.name} is {found.state}",
        fields=(NODE,),
    ),
    Action(
        name="media-weight",
        title="Set node weight",
        what="Sets the share of partitions of {node} relative to a node of weight 1.",
        command="headrace media weight {node} {weight}",
        http="PUT /v1/media/nodes/{node}/weight",
        run=lambda context, given: context.media.nodes.set_weight(given["node"], given["weight"]),
        done="{found.name} has weight {found.weight:g}",
        body=lambda given: {"weight": given["weight"]},
        fields=(NODE, Field("weight", "Weight", kind="decimal", default="1")),
    ),
)
DISK_ACTIONS: Final = (
    _disk_action(
        "drain",
        "Drain disk",
        "Stops writing to disk {disk}. Its blocks are still served.",
        Disks.drain,
    ),
    _disk_action("undrain", "Use disk again", "Writes to disk {disk} again.", Disks.undrain),
    _disk_action(
        "retire",
        "Retire disk",
        "Takes disk {disk} out of use, so it can be removed.",
        Disks.retire,
    ),
    Action(
        name="media-verify",
        title="Verify blocks",
        what="Reads a share of this node's blocks and compares checksums. Corrupt blocks are"
        " dropped.",
        command="headrace media verify --share {share}",
        http="POST /v1/media/verify",
        run=verify,
        body=lambda given: {"share": given["share"]},
        fields=(Field("share", "Share", kind="decimal", default="0.01"),),
    ),
)
TRACE_ACTIONS: Final = (
    Action(
        name="media-trace",
        title="Trace requests",
        what="Logs matching requests on every node for a while: one line per response, with the"
        " time of each stage.",
        command="headrace media trace on --tag {tag} --for {minutes}m",
        http="POST /v1/media/traces",
        run=lambda context, given: context.media.traces.start(
            given["tag"], for_s=60.0 * given["minutes"]
        ),
        done="{found.name}={found.value} is traced until {found.ends_at:%H:%M:%S} UTC",
        body=trace_body,
        fields=(
            Field("tag", "Tag", hint="user=42, request=r7, object=tracks/a.mp3 or trace=ID."),
            Field("minutes", "Minutes", kind="number", default="10"),
        ),
    ),
    Action(
        name="media-trace-end",
        title="End trace",
        what="Stops logging the requests of {tag}.",
        command="headrace media trace off --tag {tag}",
        http="DELETE /v1/media/traces?tag={tag}",
        run=end_trace,
        fields=(Field("tag", "Tag"),),
    ),
)
ACTIONS: Final = (*OBJECT_ACTIONS, *NODE_ACTIONS, *DISK_ACTIONS, *TRACE_ACTIONS)
