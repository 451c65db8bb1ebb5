"""The media room: this machine's node, objects, the cluster, traces."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client.utils import floatToGoString

from headrace.console.history import board_of
from headrace.console.model import ROWS_SHOWN
from headrace.console.screens.media_actions import ACTIONS
from headrace.console.stored import newest_minute, recent_marks
from headrace.console.views import (
    SPAN_S,
    PanelData,
    Rates,
    Room,
    Screen,
    ViewContext,
    attempt,
    no_data,
)
from headrace.kernel.metrics import FINE_BUCKETS_S
from headrace.media.model import SOURCES, STAGES, STATUSES, MediaConfig, MediaObject
from headrace.web.marks import Mark

NAMES_MAX: Final = 512
HOTTEST_MAX: Final = 10


async def view_node(context: ViewContext) -> dict[str, Any]:
    """Metrics, disks and hottest objects of this machine's node."""
    media = context.media
    history, figures, disks, hottest, marks = await asyncio.gather(
        board_of(context, "media"),
        read_figures(context.rates),
        attempt(media.disks.list) if media.config.disks else no_data(),
        attempt(media.hottest.list, objects_max=HOTTEST_MAX),
        attempt(recent_marks, context),
    )
    return {
        "history": history,
        "config": media.config,
        "figures": figures,
        "average_s": SPAN_S,
        "reasons": STATUSES,
        "cut_words": CUT_WORDS,
        "block_words": BLOCK_WORDS,
        "disks": disks,
        "hottest": hottest,
        "minute": await newest_minute(context),
        "ends": ends_of_media(marks),
    }


def ends_of_media(marks: PanelData[list[Mark]]) -> int | None:
    """Restarts of media nodes and deaths of their processes in the last hour; None: unknown."""
    if marks.value is None:
        return None
    # A mark of restarts may be of several roles, and of several restarts of each.
    restarts = (one.causes.get("media", 0) for one in marks.value if one.kind == "restart")
    deaths = (one.count for one in marks.value if one.kind == "deaths" and one.role == "media")
    return sum(restarts) + sum(deaths)


async def view_cluster(context: ViewContext) -> dict[str, Any]:
    """Nodes with their shares, and the load of each if some are lost."""
    media = context.media
    lost = context.query.text("lost", most=NAMES_MAX).strip()
    nodes = await attempt(context.rates.kept, "nodes", 0.0, media.nodes.list)
    names = [name for name in lost.replace(",", " ").split() if name]
    plan = await attempt(media.partitions.plan, lost=names) if names else None
    return {"nodes": nodes, "lost": lost, "plan": plan}


async def view_traces(context: ViewContext) -> dict[str, Any]:
    """Active traces."""
    watches, examples = await asyncio.gather(
        attempt(context.media.traces.list), object_examples(context)
    )
    return {"watches": watches, "examples": examples}


EXAMPLES_MAX: Final = 12
THUMBNAIL_BYTES_MAX: Final = 1024 * 1024
"""Larger pictures are not loaded into a list."""
KEY_CHARACTERS_MAX: Final = 1_024


@dataclass(frozen=True, slots=True)
class ObjectLine:
    """An object and its preview kind: image, audio, video or empty."""

    object: MediaObject
    kind: str

    @property
    def has_thumbnail(self) -> bool:
        """Whether a list shows the picture itself."""
        return self.kind == "image" and self.object.size_bytes <= THUMBNAIL_BYTES_MAX


async def view_objects(context: ViewContext) -> dict[str, Any]:
    """Subfolders and objects of a folder, by name."""
    prefix = context.query.text("prefix", most=KEY_CHARACTERS_MAX).strip().strip("/")
    after = context.query.text("after", most=KEY_CHARACTERS_MAX)
    found = await attempt(context.media.objects.folder, prefix, after=after, entries_max=ROWS_SHOWN)
    page = found.value
    following = page.next_after if page is not None else None
    return {
        "prefix": prefix,
        "parents": parents_of(prefix),
        "folders": [(one.rpartition("/")[2], one) for one in page.folders] if page else [],
        "objects": found.map(
            lambda page: [ObjectLine(one, kind_of(one.content_type)) for one in page.objects]
        ),
        "is_first": not after,
        "next_url": None if following is None else context.url(after=following),
    }


async def view_object(context: ViewContext) -> dict[str, Any]:
    """The page of an object."""
    media, key = context.media, context.query.text("key", most=KEY_CHARACTERS_MAX).strip()
    if not key:
        return {"key": key, "examples": await object_examples(context)}
    is_alone = media.config.node is None
    found, owners = await asyncio.gather(
        attempt(media.objects.info, key),
        no_data() if is_alone else attempt(media.partitions.show, key),
    )
    seen = found.value
    line = None if seen is None else ObjectLine(seen, kind_of(seen.content_type))
    return {
        "key": key,
        "line": PanelData(line, found.error),
        "owners": owners,
        "is_alone": is_alone,
        "served_from": served_from(media.config),
        "is_signed": media.config.signed == "required",
    }


def served_from(config: MediaConfig) -> str:
    """Where nodes with this configuration read the bytes of an object."""
    origin = "the upstream cluster" if config.upstream else "the object store"
    if not config.disks:
        return f"{origin}, without a cache: media.disks is not set"
    of = "the owner nodes below" if config.node is not None else "this node"
    return f"the cache disks of {of}; a block that they lack is read from {origin} and kept"


async def object_examples(context: ViewContext) -> list[str]:
    """Keys to start from: the hottest objects, then photos of the newest results."""
    hottest, results = await asyncio.gather(
        attempt(context.media.hottest.list, objects_max=EXAMPLES_MAX), newest_results(context)
    )
    keys = [one.key for one in hottest.value or ()]
    keys += [photo.key for result in results for photo in result.photos if photo.key]
    return list(dict.fromkeys(keys))[:EXAMPLES_MAX]


async def newest_results(context: ViewContext) -> list[Any]:
    """The newest results of fetch, if the caller may see them."""
    if context.installed_fetch is None or not context.may("fetch:read"):
        return []
    found = await attempt(context.fetch.items.newest_results, results_max=EXAMPLES_MAX)
    return found.value or []


def kind_of(content_type: str) -> str:
    """Preview kind of a content type; empty for SVG, which may contain scripts."""
    kind = content_type.partition("/")[0]
    return kind if kind in ("image", "audio", "video") and "svg" not in content_type else ""


def parents_of(prefix: str) -> list[tuple[str, str]]:
    """`a/b` -> (a, a), (b, a/b)."""
    parts = [part for part in prefix.split("/") if part]
    return [(part, "/".join(parts[: index + 1])) for index, part in enumerate(parts)]


OF_NODE: Final = 'role="media"'
"""Selects the media role; the API process declares the same series at 0."""
QUANTILES: Final = {"p50": 0.5, "p75": 0.75, "p99": 0.99}
CUTS: Final = ("client", "source", "stalled", "stop")
OUTCOMES: Final = ("hit", "miss", "pass")
CUT_WORDS: Final = {
    "client": "the client left",
    "source": "the object store or a disk failed",
    "stalled": "the client received nothing for too long",
    "stop": "the node was stopped",
}
BLOCK_WORDS: Final = {
    "hit": "hit: from the cache",
    "miss": "miss: read from the origin, then cached",
    "pass": "pass: sent without being cached",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFigures:
    """Metrics of the node; None is unknown, for rates also while `is_measuring`."""

    is_measuring: bool
    connections: float | None
    requests_per_s: float | None
    bytes_per_s: Mapping[str, float | None]
    """By source."""
    bytes_by_source: Mapping[str, float]
    blocks: Mapping[str, float]
    hit_ratio: float | None
    statuses: Mapping[str, float]
    ttfb_s: Mapping[str, float | None]
    stages_s: Mapping[str, float | None]
    """p99 of each stage, as a bucket bound."""
    cuts: Mapping[str, float]
    stalls: float | None


async def read_figures(rates: Rates) -> NodeFigures | None:
    """Current metrics; None if no media node on this machine wrote any recently."""
    await rates.read()
    if rates.total("media_requests_total", OF_NODE) is None:
        return None
    blocks = _by(rates, "media_blocks_total", "outcome", OUTCOMES)
    begun = sum(blocks.values())
    return NodeFigures(
        is_measuring=rates.is_measuring,
        connections=rates.total("media_connections", OF_NODE),
        requests_per_s=rates.rate_per_s("media_requests_total", OF_NODE),
        bytes_per_s={
            source: rates.rate_per_s("media_bytes_total", OF_NODE, f'source="{source}"')
            for source in SOURCES
        },
        bytes_by_source=_by(rates, "media_bytes_total", "source", SOURCES),
        blocks=blocks,
        hit_ratio=blocks.get("hit", 0.0) / begun if begun else None,
        statuses=_by(rates, "media_requests_total", "status", map(str, STATUSES)),
        ttfb_s={
            name: bound_s(rates, "media_ttfb_seconds", share) for name, share in QUANTILES.items()
        },
        stages_s={
            stage: bound_s(rates, "media_stage_seconds", 0.99, f'stage="{stage}"')
            for stage in STAGES
        },
        cuts=_by(rates, "media_cuts_total", "reason", CUTS),
        stalls=rates.total("media_demand_stalls_total", OF_NODE),
    )


def bound_s(rates: Rates, name: str, share: float, *labels: str) -> float | None:
    """Smallest bucket bound that covers `share` of a histogram; None if there is none."""
    count = rates.total(f"{name}_count", OF_NODE, *labels)
    if not count:
        return None
    for bound in FINE_BUCKETS_S:
        least = floatToGoString(bound)  # type: ignore[no-untyped-call]
        within = rates.total(f"{name}_bucket", OF_NODE, f'le="{least}"', *labels)
        if within is not None and within >= share * count:
            return bound
    return None


def _by(rates: Rates, name: str, label: str, values: Iterable[str]) -> dict[str, float]:
    """A series by the values of a label, without zeros."""
    found = {value: rates.total(name, OF_NODE, f'{label}="{value}"') for value in values}
    return {value: total for value, total in found.items() if total}


READ: Final = "media:read"

ROOM: Final = Room(
    name="media",
    title="Media",
    key="m",
    scope=READ,
    screens=(
        Screen("/media", "Node", "media/node.html", view_node, tab="Node"),
        Screen(
            "/media/objects",
            "Objects",
            "media/objects.html",
            view_objects,
            tab="Objects",
            live=False,
        ),
        Screen("/media/object", "Object", "media/object.html", view_object, live=False),
        Screen("/media/cluster", "Cluster", "media/cluster.html", view_cluster, tab="Cluster"),
        Screen("/media/traces", "Traces", "media/traces.html", view_traces, tab="Traces"),
    ),
    actions=ACTIONS,
)
