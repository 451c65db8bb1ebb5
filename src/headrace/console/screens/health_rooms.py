"""Health issues of fetch, views, feed and media. Pure functions, as in `health.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from headrace.console.format import format_duration
from headrace.console.model import PREFIX
from headrace.console.screens.health import CAUSES_SHOWN, Issue, Remedy
from headrace.console.views import RECENT_S, PanelData, Rates
from headrace.kernel.terminal import pluralize
from headrace.media.service.nodes import is_denied

VIEWS_LAG_S: Final = 30.0
FEED_LAG_S: Final = 60.0
NODES_AGE_S: Final = 30.0
MISSING_SHARE: Final = 0.001
MISSING_MIN: Final = 10
"""From this share and number of 404 answers on, objects of media are reported as missing."""
OUTCOMES_SHOWN: Final = 3
"""Causes of photos that one line names."""
BAD_RUNS: Final = ("refused", "abandoned")
_TROUBLES: Final[Mapping[str, tuple[str, str, str, str]]] = {
    "held_item": (
        "held item",
        "/fetch/review",
        "wait for a decision before they are published",
        "Publish each that is right; the seller's next version is checked again.",
    ),
    "source": (
        "source",
        "/fetch/sources",
        "of catalogues could not be imported",
        "Read the error, correct the URL or the file, then import it now.",
    ),
    "webhook": (
        "webhook",
        "/fetch/deliveries",
        "not accepted by the receiver, or disabled",
        "Results wait and are sent when the receiver answers. Test it after the repair.",
    ),
}
"""Kind of a trouble: noun, page, text and fix."""


def run_issues(
    runs: PanelData[Sequence[Any]] | None,
    faulty: PanelData[Sequence[Any]] | None,
    held: int | None,
    outcome_text: Any,
) -> Iterator[Issue]:
    """Runs that wait or were refused, and customers whose newest run lacks photos.

    `faulty` are the newest runs of customers that were refused or lack photos. `held` counts all
    held runs, also older ones than in `runs`. `outcome_text` returns the sentence of a photo's
    outcome.
    """
    found = list((runs.value if runs is not None else None) or ())
    waiting = [run for run in found if str(run.state) == "held"]
    for run in waiting[:CAUSES_SHOWN]:
        yield Issue(
            tone="warn",
            subject=f"catalogue of {run.customer} is held",
            href=f"{PREFIX}/fetch/runs/{run.run}",
            text="no items were changed",
            cause=run.reason or "it needs a check",
            since_at=run.started_at,
            fix="Review its changes, then apply or discard it.",
            remedies=[
                Remedy("fetch-confirm", {"run": run.run}, "Apply"),
                Remedy("fetch-discard", {"run": run.run}, "Discard"),
            ],
        )
    others = (held or 0) - len(waiting[:CAUSES_SHOWN])
    if others > 0:
        yield Issue(
            tone="warn",
            subject=pluralize(others, "other held catalogue"),
            href=f"{PREFIX}/fetch?show=held",
            text="no items were changed",
            fix="Review their changes, then apply or discard each.",
        )
    newest = list((faulty.value if faulty is not None else None) or ())
    yield from _refused_issues(newest)
    yield from _photo_issues(newest, outcome_text)


def _refused_issues(newest: Iterable[Any]) -> Iterator[Issue]:
    refused = [run for run in newest if str(run.state) in BAD_RUNS]
    for run in refused[:CAUSES_SHOWN]:
        yield Issue(
            tone="warn",
            subject=f"catalogue of {run.customer} was {run.state}",
            href=f"{PREFIX}/fetch/runs/{run.run}",
            text="no items were changed",
            cause=run.reason or "",
            since_at=run.started_at,
            fix="The seller's next catalogue is read as usual.",
        )


def _photo_issues(newest: Iterable[Any], outcome_text: Any) -> Iterator[Issue]:
    lacking = []
    for run in newest:
        bad = {
            outcome: photos
            for outcome, photos in run.photos_by_outcome.items()
            if outcome.startswith(("failed:", "refused:"))
        }
        if bad:
            lacking.append((sum(bad.values()), bad, run))
    lacking.sort(key=lambda one: -one[0])
    for photos, bad, run in lacking[:CAUSES_SHOWN]:
        yield Issue(
            tone="warn",
            subject=f"photos of {run.customer}",
            href=f"{PREFIX}/fetch/runs/{run.run}?list=photos#lists",
            text=f"{pluralize(photos, 'photo')} of {run.photos:,} in the newest run not stored",
            cause=_causes_of(bad, outcome_text),
            since_at=run.started_at,
            fix="Their items are published without them. Broken links are requested again with"
            " later imports.",
        )
    others = lacking[CAUSES_SHOWN:]
    if others:
        photos = pluralize(sum(count for count, _, _ in others), "photo")
        yield Issue(
            tone="warn",
            subject=f"photos of {pluralize(len(others), 'other customer')}",
            href=f"{PREFIX}/fetch/photos?show=broken",
            text=f"{photos} not stored",
            fix="",
        )


def _causes_of(bad: Mapping[str, int], outcome_text: Any) -> str:
    """The commonest outcomes, each with its count if there are several."""
    ordered = sorted(bad.items(), key=lambda one: (-one[1], one[0]))
    if len(ordered) == 1:
        return str(outcome_text(ordered[0][0]))
    texts = [
        f"{pluralize(photos, 'photo')}: {outcome_text(outcome)}" for outcome, photos in ordered
    ]
    others = sum(photos for _, photos in ordered[OUTCOMES_SHOWN:])
    return "; ".join(
        [
            *texts[:OUTCOMES_SHOWN],
            *([f"{pluralize(others, 'photo')}: other causes"] if others else []),
        ]
    )


def trouble_issues(troubles: PanelData[Sequence[Any]] | None) -> Iterator[Issue]:
    """Held items, failing sources and failing webhooks; held runs are in `run_issues`."""
    for one in (troubles.value if troubles is not None else None) or ():
        if one.kind not in _TROUBLES:
            continue
        noun, place, text, fix = _TROUBLES[one.kind]
        remedies = []
        if one.things == 1 and one.kind == "source":
            remedies = [Remedy("fetch-bring", {"customer": one.customer}, "Import now")]
        if one.things == 1 and one.kind == "webhook":
            remedies = [Remedy("fetch-webhook-test", {"customer": one.customer}, "Test")]
        yield Issue(
            tone="warn" if one.kind == "held_item" else "bad",
            subject=pluralize(one.things, noun),
            href=PREFIX + place,
            text=text,
            cause=one.cause or "",
            since_at=one.since_at,
            fix=fix,
            remedies=remedies,
        )


def views_issues(lag: PanelData[Sequence[Any]]) -> Iterator[Issue]:
    """Late flushes of views, and shards without a flusher."""
    shards = lag.value or ()
    alone = sum(shard.flusher is None for shard in shards)
    oldest_s = max((shard.oldest_s for shard in shards), default=0.0)
    if alone:
        yield Issue(
            tone="warn",
            subject="views: no flusher",
            href=f"{PREFIX}/views/lag",
            text=f"{pluralize(alone, 'shard')} of {len(shards):,} without one",
            fix="Start `headrace flusher`, or `headrace up`, which includes it. Hits wait in"
            " Valkey; totals include them already.",
            may_follow_outage=True,
        )
    if oldest_s > VIEWS_LAG_S:
        yield Issue(
            tone="warn",
            subject="views: flush is late",
            href=f"{PREFIX}/views/lag",
            text=f"the oldest hit has waited {format_duration(oldest_s)}",
            fix="Check that a flusher runs: `headrace flusher`. Live totals include these hits"
            " already.",
        )


def feed_issues(backlog: PanelData[Any], shards: PanelData[Sequence[Any]]) -> Iterator[Issue]:
    """Posts that are late, unconfirmed changes, and shards of the index that are not ready."""
    found = backlog.value
    if found is not None and found.overdue:
        yield Issue(
            tone="bad",
            subject="feed: scheduled posts are late",
            href=f"{PREFIX}/jobs/queues/feed.publish",
            text=f"{pluralize(found.overdue, 'post')} not visible a minute after the time",
            since_at=found.overdue_since_at,
            fix="Jobs of the queue `feed.publish` make them visible: check that it is not paused"
            " and has no failed jobs.",
            remedies=[
                Remedy(
                    "jobs.bulk_retry", {"queue": "feed.publish", "state": "failed"}, "Retry failed"
                )
            ],
        )
    if found is not None and found.unswept_s > FEED_LAG_S:
        yield Issue(
            tone="warn",
            subject="feed: changes are confirmed late",
            href=f"{PREFIX}/feed/index",
            text="the flusher has not yet confirmed that Valkey has all changes: the oldest is"
            f" {format_duration(found.unswept_s)} old",
            fix="Check that a flusher runs: `headrace flusher`.",
        )
    ahead = [shard for shard in shards.value or () if shard.state == "ahead"]
    if ahead:
        yield Issue(
            tone="warn",
            subject="feed: index may have lost posts",
            href=f"{PREFIX}/feed/index",
            text="PostgreSQL crashed or failed over after the index was built; pages may show posts"
            " that it lost",
            fix="A flusher rebuilds the index. If it stays so, run `headrace feed rebuild`.",
            remedies=[Remedy("feed-rebuild", {}, "Rebuild")],
        )
    waiting = [shard for shard in shards.value or () if shard.state not in ("ready", "ahead")]
    if waiting:
        yield Issue(
            tone="warn",
            subject="feed: index is not ready",
            href=f"{PREFIX}/feed/index",
            text=f"{pluralize(len(waiting), 'shard')} {waiting[0].state}; pages are read from"
            " PostgreSQL, more slowly",
            fix="It is built automatically. If it stays so, rebuild it.",
            remedies=[Remedy("feed-rebuild", {}, "Rebuild")],
        )


def media_issues(
    rates: Rates, disks: PanelData[Any], nodes: PanelData[Any], of_node: str
) -> Iterator[Issue]:
    """Nodes that do not answer, disks that failed, corrupt blocks, and answers without bytes."""
    for node in nodes.value or ():
        if not node.is_alive:
            yield Issue(
                tone="bad",
                subject=f"media node {node.name}",
                href=f"{PREFIX}/media/cluster",
                text="does not answer; other nodes serve its keys",
                fix="Check that machine. If it stays away, drain the node.",
                remedies=[Remedy("media-drain", {"node": node.name}, "Drain")],
            )
    for disk in disks.value or ():
        yield from _disk_issues(disk)
    recent = f"in the last {format_duration(RECENT_S)}"
    broken = round(
        rates.grown("media_requests_total", of_node, 'status="503"')
        + rates.grown("media_requests_total", of_node, 'status="500"')
        + rates.grown("media_cuts_total", of_node, 'reason="source"')
    )
    if broken:
        yield Issue(
            tone="bad",
            subject="media: objects could not be read",
            href=f"{PREFIX}/media",
            text=f"{pluralize(broken, 'answer')} failed or broke off {recent}, because the object"
            " store or a disk did not deliver",
            fix="Check the object store and disks with `headrace doctor`.",
        )
    every = rates.grown("media_requests_total", of_node)
    missing = round(rates.grown("media_requests_total", of_node, 'status="404"'))
    if missing >= MISSING_MIN and missing > MISSING_SHARE * every:
        yield Issue(
            tone="warn",
            subject="media: objects are missing",
            href=f"{PREFIX}/media",
            text=f"{pluralize(missing, 'request')} of {round(every):,} {recent} named an object"
            " that is not stored",
            fix="Trace one of them under Traces, or compare the object store with its backup.",
        )


def stale_issues(age_s: float) -> Iterator[Issue]:
    """The list of media nodes, if its newest answer is old."""
    if age_s > NODES_AGE_S:
        yield Issue(
            tone="warn",
            subject="media nodes",
            href=f"{PREFIX}/media/cluster",
            text=f"they were checked {format_duration(age_s)} ago; the next check has not ended",
            fix="It continues. This host or the object store may be busy or down.",
        )


def _disk_issues(disk: Any) -> Iterator[Issue]:
    fault = "" if disk.fault in ("drained", "retired") else disk.fault
    if fault:
        yield Issue(
            tone="bad",
            subject=f"disk {disk.path}",
            href=f"{PREFIX}/media",
            text=disk.state,
            cause=fault,
            fix="Run `chown -R USER PATH` as root, with the node's user, then restart the node."
            if is_denied(fault)
            else "Its blocks are read from the origin again. Replace it, then retire its id.",
            remedies=[Remedy("media-disk-retire", {"disk": disk.id}, "Retire")] if disk.id else [],
        )
    if disk.rotten:
        yield Issue(
            tone="warn",
            subject=f"disk {disk.path}",
            href=f"{PREFIX}/media",
            text=f"{pluralize(disk.rotten, 'block')} changed on the disk and will be read from the"
            " origin again",
            fix="Verify all blocks. A disk that corrupts more of them should be replaced.",
            remedies=[Remedy("media-verify", {"share": "1"}, "Verify all")],
        )
