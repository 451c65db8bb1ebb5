"""The node of this machine and the cluster around it: figures, disks, shares, what a loss would do, what is traced."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from headrace.console.screens.media.figures import NodeFigures, read_figures
from headrace.console.seeing import Ask, Found, attempt
from headrace.media.service.local_node import Disk, HotObject
from headrace.media.service.nodes import NodeInfo, Plan
from headrace.media.tracing import Watch

NOTHING: Final[Found[Any]] = Found()
NAMES_MAX: Final = 512
HOTTEST_MAX: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """How media is set up here."""

    is_cache: bool
    """It has disks; else objects of a folder are sent as they lie."""
    node: str
    """Its name in the cluster; empty: it stands alone."""
    signed: str
    origin: str
    """Where browsers reach it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """The node of this machine."""

    mode: Mode
    figures: NodeFigures | None
    disks: Found[Sequence[Disk]]
    hottest: Found[Sequence[HotObject]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """Every node, and what would become of their load."""

    mode: Mode
    nodes: Found[Sequence[NodeInfo]]
    lost: str
    plan: Found[Plan] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TracesView:
    """What is traced now."""

    watches: Found[Sequence[Watch]]


async def see_node(ask: Ask) -> NodeView:
    """The node of this machine: what it counts, its disks, and what clients ask it for most."""
    media = ask.service("media")
    mode = mode_of(ask)
    figures, disks, hottest = await asyncio.gather(
        read_figures(ask.rates),
        attempt(media.disks.list()) if mode.is_cache else _nothing(),
        attempt(media.hottest.list(objects_max=HOTTEST_MAX)),
    )
    return NodeView(mode=mode, figures=figures, disks=disks, hottest=hottest)


async def see_cluster(ask: Ask) -> ClusterView:
    """Every node with its share, and if asked for, each node's load without some of them."""
    media, mode = ask.service("media"), mode_of(ask)
    lost = ask.query.text("lost", most=NAMES_MAX).strip()
    nodes = await attempt(media.nodes.list())
    names = [name for name in lost.replace(",", " ").split() if name]
    plan = await attempt(media.partitions.plan(lost=names)) if names else None
    return ClusterView(mode=mode, nodes=nodes, lost=lost, plan=plan)


async def see_traces(ask: Ask) -> TracesView:
    """What every node logs the requests of."""
    return TracesView(watches=await attempt(ask.service("media").traces.list()))


def mode_of(ask: Ask) -> Mode:
    """How media is set up here."""
    config = ask.service("media").config
    return Mode(
        is_cache=bool(config.disks),
        node=config.node or "",
        signed=config.signed,
        origin=ask.media_origin,
    )


async def _nothing() -> Found[Any]:
    return NOTHING
