"""Media on the console: the node of this machine, objects, the cluster, what is traced."""

from __future__ import annotations

from typing import Final

from headrace.console.screens.media.actions import ACTIONS
from headrace.console.screens.media.nodes import see_cluster, see_node, see_traces
from headrace.console.screens.media.objects import see_object, see_objects
from headrace.console.seeing import Room, Screen

READ: Final = "media:read"

ROOM: Final = Room(
    name="media",
    title="Media",
    key="m",
    service="media",
    screens=(
        Screen(path="/media", title="Node", tab="Node", template="media/node.html", scope=READ, view=see_node),
        Screen(
            path="/media/objects", title="Objects", tab="Objects",
            template="media/objects.html", scope=READ, view=see_objects, live=False,
        ),
        Screen(
            path="/media/object", title="Object", template="media/object.html",
            scope=READ, view=see_object, live=False,
        ),
        Screen(
            path="/media/cluster", title="Cluster", tab="Cluster",
            template="media/cluster.html", scope=READ, view=see_cluster,
        ),
        Screen(
            path="/media/traces", title="Traces", tab="Traces",
            template="media/traces.html", scope=READ, view=see_traces,
        ),
    ),
    actions=ACTIONS,
)  # fmt: skip
