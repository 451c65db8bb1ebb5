"""Values of fetch as lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from headrace.fetch.catalogues import OUTDATED
from headrace.fetch.model import (
    Change,
    Customer,
    Host,
    Link,
    PhotoReport,
    PhotoStep,
    Run,
    RunState,
    Source,
    StoredItem,
    UrlReport,
    Webhook,
)
from headrace.fetch.outcomes import count_bad
from headrace.fetch.study import DOWNLOADS_MIN, ClassPlan, Study
from headrace.jobs.model import Lane
from headrace.kernel.terminal import Cell, Lines, pluralize, table, visible

_NOT_APPLIED: Final = (RunState.DRY, RunState.HELD, RunState.SUPERSEDED)
"""Runs whose counts are what they would change."""


def progress_line(run: Run) -> str:
    """Progress of a run in one line."""
    decided = run.photos - run.photos_pending
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in run.photos_by_outcome.items())
    waiting = f"items waiting {run.items_pending}"
    if run.state is RunState.READING:
        return f"run {run.run}: {pluralize(run.rows, 'row')} read"
    if run.state is RunState.BRINGING:
        return f"run {run.run}: the file is being fetched" + (
            f" ({run.reason})" if run.reason else ""
        )
    line = f"run {run.run}: photos {decided}/{run.photos}, {waiting}"
    return f"{line}; {outcomes}{_pace(run)}" if outcomes else line + _pace(run)


def progress_share(run: Run) -> tuple[int, int | None]:
    """How many photos of how many are decided; items if there are none; no total before that."""
    if run.state in (RunState.READING, RunState.BRINGING):
        return 0, None
    if run.photos:
        return run.photos - run.photos_pending, run.photos
    return run.rows - run.items_pending, run.rows or None


def _pace(run: Run) -> str:
    """Rate and remaining time of a run; empty if unknown."""
    if run.photos_per_s is None:
        return ""
    ahead = f", done in {duration(run.eta_s)}" if run.eta_s is not None else ""
    return f"; {run.photos_per_s:g} photos/s{ahead}"


def duration(seconds: float) -> str:
    """A duration for people: `40 s`, `12 min`, `3.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def runs_table(runs: Sequence[Run]) -> str:
    """Runs as a table."""
    rows = [
        (
            run.run,
            run.customer,
            run.state.value,
            f"{run.started_at:%Y-%m-%d %H:%M:%S}",
            run.rows,
            run.undone_by or "-",
            run.file_name,
        )
        for run in runs
    ]
    head = ("run", "customer", "state", "started (UTC)", "rows", "undone by", "file")
    return table(head, rows)


def _moment(at: datetime | None, missing: str = "-") -> str:
    """A time; a shorter one for people, as the tables that have it are wide."""
    return missing if at is None else Cell(f"{at:%Y-%m-%d %H:%M:%S}", f"{at:%m-%d %H:%M}")


def describe_change(change: Change) -> str:
    """A change of an item in one line."""
    texts = [
        f"{name} {' -> '.join(repr(visible(one)) for one in pair if one is not None)}"
        for name, pair in change.values.items()
    ] or change.fields
    return f"  {change.kind:<8} {change.item}" + (f": {', '.join(texts)}" if texts else "")


def sources_table(sources: Sequence[Source]) -> str:
    """Sources as a table."""
    rows = [
        (
            one.customer,
            f"{one.cron} {one.tz}",
            _moment(one.next_at, "paused"),
            _moment(one.tried_at, "never"),
            one.outcome or "-",
            one.run or "-",
            one.failures,
            one.url,
            one.text or "",
        )
        for one in sources
    ]
    last = ("last (UTC)", "outcome", "run", "failures")
    return table(("customer", "cron", "next (UTC)", *last, "url", "fault"), rows)


def describe_source(found: Source) -> str:
    """A source with its schedule and last result."""
    ahead = f"{found.next_at:%Y-%m-%d %H:%M} UTC" if found.next_at else "never: its cron is paused"
    lines = [f"{found.customer}: {found.url} at '{found.cron}' {found.tz}, next {ahead}"]
    if found.tried_at is not None:
        why = f": {found.text}" if found.text else ""
        failed = f", {pluralize(found.failures, 'failure')} in a row" if found.failures else ""
        run = f", run {found.run}" if found.run else ""
        lines.append(f"  last {found.tried_at:%Y-%m-%d %H:%M:%S} {found.outcome}{why}{run}{failed}")
    return "\n".join(lines)


def _sample_lines(run: Run) -> list[str]:
    """Sampled photos of a dry run."""
    if run.sample is None:
        return []
    lines = [f"  sample of {pluralize(len(run.sample.photos), 'photo')}:"]
    lines += [
        f"    {photo.outcome:<24} {photo.took_s:>7.3f} s  {photo.url}"
        for photo in run.sample.photos
    ]
    return [*lines, f"  expected time of the real run: about {duration(run.sample.expected_s)}"]


def _review_lines(run: Run) -> list[str]:
    """What to do with an upload for review."""
    if run.state is not RunState.HELD or run.review_until is None:
        return []
    if run.reason == OUTDATED:
        return ["  it can no longer be confirmed: upload the catalogue again"]
    line = (
        f"  `headrace fetch catalogue diff {run.run}` lists the changes;"
        f" `headrace fetch catalogue confirm {run.run}` applies them until"
        f" {run.review_until:%Y-%m-%d %H:%M} UTC"
    )
    return [line]


def describe_run(run: Run) -> str:
    """The counts of a run as a few lines of text."""
    counts = (
        f"{run.new} new, {run.changed} changed, {run.unchanged} unchanged, {run.invalid} invalid"
    )
    state = "dry run, nothing is changed" if run.state is RunState.DRY else run.state.value
    head = f"run {run.run} of {run.customer}: {state}" + (f" ({run.reason})" if run.reason else "")
    if not run.format:
        return f"{head}\n  no file fetched" + (" yet" if run.state is RunState.BRINGING else "")
    lines = [
        head,
        f"  {pluralize(run.rows, 'row')} of {run.format}: {counts}; {run.gone} gone"
        + (", if it is confirmed" if run.state is RunState.HELD else ""),
        f"  {pluralize(run.photos, 'photo')}, {run.photos_pending} "
        + ("would be requested" if run.state in _NOT_APPLIED else "waiting")
        + _pace(run),
        *_sample_lines(run),
    ]
    lines += [f"    {count:>8} {outcome}" for outcome, count in run.photos_by_outcome.items()]
    lines += _review_lines(run)
    if run.undone_by is not None:
        lines.append(f"  undone by run {run.undone_by}")
    if run.items_late:
        lines.append(
            f"  {pluralize(run.items_late, 'item was', 'items were')} published at their deadline,"
            " without all photos"
        )
    return "\n".join([*lines, *_problem_lines(run)])


def _problem_lines(run: Run) -> list[str]:
    """The problems of rows and photos; a link refused in its row is one of both."""
    parts = []
    if run.problems:
        rows = "rows" if run.invalid else "valid rows"
        parts.append(f"{pluralize(run.problems, 'problem')} in {rows}")
    if bad := count_bad(run.photos_by_outcome):
        parts.append(f"{pluralize(bad, 'photo')} failed or refused")
    if not parts:
        return []
    is_in_both = len(parts) == 2 and any(o.startswith("refused:") for o in run.photos_by_outcome)
    both = " (a link refused in its row is counted in both)" if is_in_both else ""
    return [f"  {', '.join(parts)}{both}: `headrace fetch catalogue errors {run.run}`"]


def describe_customer(found: Customer) -> str:
    """A customer's limits in one line."""
    line = (
        f"{found.customer}: {pluralize(found.starts_max, 'request')} in {found.window_s:g} s,"
        f" {pluralize(found.connections, 'connection')}"
    )
    if found.hold_share is not None:
        line += f", confirmation if a share of over {found.hold_share:g} is removed"
    if found.hold_items is not None:
        line += f", confirmation if over {pluralize(found.hold_items, 'item')} are removed"
    if found.refresh_s is not None:
        line += f", photos refreshed {_period(found.refresh_s)}"
    return line


def customers_table(customers: Sequence[Customer]) -> str:
    """Customers as a table."""
    rows = [
        (
            one.customer,
            f"{one.starts_max} in {one.window_s:g} s",
            one.connections,
            "default" if one.hold_share is None else f"{one.hold_share:g}",
            "default" if one.hold_items is None else one.hold_items,
            "default" if one.refresh_s is None else _period(one.refresh_s),
        )
        for one in customers
    ]
    head = ("customer", "rate", "connections", "hold share", "hold items", "refresh")
    return table(head, rows)


def _period(seconds: float) -> str:
    return f"every {seconds / 3600:g} h" if seconds else "never"


def describe_item(found: StoredItem) -> str:
    """Current state of an item with the outcome of each photo."""
    state = "gone" if found.is_gone else f"version {found.version}"
    lines = [f"{found.id} of {found.customer}: {state}, run {found.run}"]
    lines += [
        f"  {name}: {value}" + (" (supplemental feed)" if name in found.supplemental else "")
        for name, value in found.fields.items()
    ]
    lines += [
        f"  photo {photo.url}: {photo.outcome}" + (f", stored as {photo.key}" if photo.key else "")
        for photo in found.photos
    ]
    return "\n".join(lines)


def describe_webhook(found: Webhook) -> str:
    """URL, progress and last error of a webhook."""
    line = f"{found.customer}: {found.url}, sent up to {found.taken_seq}, {found.waiting} waiting"
    if found.disabled_at is not None:
        line += (
            f"; disabled at {found.disabled_at:%Y-%m-%d %H:%M:%S} ({found.last_error}):"
            f" set it again with `headrace fetch customer set {found.customer} --webhook URL`"
        )
    elif found.failing_since is not None:
        line += (
            f"; failing since {found.failing_since:%Y-%m-%d %H:%M:%S},"
            f" {pluralize(found.failures, 'time')} ({found.last_error})"
        )
        line += f", next at {found.next_at:%H:%M:%S}" if found.next_at else ""
    return line


def webhooks_table(webhooks: Sequence[Webhook]) -> str:
    """Webhooks as a table."""
    rows = [
        (
            one.customer,
            "disabled" if one.disabled_at else "failing" if one.failing_since else "ok",
            _moment(one.disabled_at or one.failing_since),
            one.failures,
            _moment(one.next_at),
            one.taken_seq,
            one.waiting,
            one.url,
            one.last_error or "",
        )
        for one in webhooks
    ]
    state = ("state", "since (UTC)", "failures", "next (UTC)")
    return table(("customer", *state, "sent up to", "waiting", "url", "error"), rows)


def describe_photo(found: PhotoReport) -> str:
    """Outcome of a test download with its redirects."""
    lines = [f"{found.outcome}: {found.text}", f"  took {found.took_s:.3f} s"]
    lines += [f"  requested {hop}" for hop in found.hops]
    lines += [f"  sha256 {found.sha256}"] if found.sha256 else []
    return "\n".join(lines)


def step_line(step: PhotoStep) -> str:
    """One request of a download in one line."""
    parts = [f"status {step.status}" if step.status else "no response"]
    if step.connect_s:
        parts.append(f"connected in {step.connect_s:.3f} s")
    else:
        parts.append("kept connection" if step.is_sent else "no connection")
    if step.is_sent:
        is_answered = step.status > 0
        parts.append(
            f"first byte after {step.first_byte_s:.3f} s" if is_answered else "no byte received"
        )
    else:
        parts.append("no request was sent")
    parts.append(f"{step.took_s:.3f} s in all")
    return f"  {step.url} at {step.address}: {', '.join(parts)}"


def describe_url(found: UrlReport) -> str:
    """Whether a link is allowed, its last outcome per customer, and its next request."""
    links = {link.customer: link for link in found.links}
    lines = [found.judgement]
    for one in found.customers:
        link = links.get(one.customer)
        last = "not requested yet" if link is None else _link_line(link)
        lines += [f"  {one.customer}: {last}", f"    {one.ahead}"]
        if one.host is not None:
            lines.append(f"    {host_line(one.host)}")
        if one.lane is not None:
            lines.append(f"    {_lane_line(one.lane)}")
    return "\n".join(lines if found.customers else [*lines, "  no run has requested it"])


def _link_line(link: Link) -> str:
    """Last outcome of a customer's link."""
    return (
        f"{link.outcome} ({link.text}), run {link.run} at {link.checked_at:%Y-%m-%d %H:%M:%S},"
        f" {pluralize(link.failures, 'failure')} in a row"
    )


def _lane_line(lane: Lane) -> str:
    """Current use of a customer's limits."""
    rate = f"{lane.starts_live} of {lane.starts_max} requests in {lane.window_s:g} s"
    line = f"lane: {rate}, {lane.inflight} of {lane.concurrency} running, {lane.waiting} waiting"
    return f"{line}; paused" if lane.paused else line


def host_line(host: Host) -> str:
    """A host in one line."""
    mean = "not measured" if host.mean_s is None else f"mean {host.mean_s:.2f} s"
    return (
        f"{host.host} ({host.customer}): starts in {host.starts_in}, {mean},"
        f" {pluralize(host.requests, 'request')},"
        f" {count_bad(host.photos_by_outcome)} failed or refused,"
        f" last {host.last_seen_at:%Y-%m-%d %H:%M:%S}"
    )


def hosts_table(hosts: Sequence[Host]) -> str:
    """Hosts as a table."""
    rows = [
        (
            one.host,
            one.customer,
            one.starts_in,
            "-" if one.mean_s is None else f"{one.mean_s:.2f} s",
            one.requests,
            count_bad(one.photos_by_outcome),
            f"{one.last_seen_at:%Y-%m-%d %H:%M:%S}",
        )
        for one in hosts
    ]
    head = ("host", "customer", "timeout class", "mean", "requests", "failed", "last (UTC)")
    return table(head, rows)


def describe_study(study: Study) -> str:
    """Distribution of download times, errors per class and week, and plans of classes."""
    if not study.weeks:
        return "no photo was requested in these weeks"
    quantiles = ", ".join(f"{name} {time_s:g} s" for name, time_s in study.quantiles.items())
    rows = [
        (
            *(one.week, one.time_class, one.attempts, f"{one.errors / one.attempts:.1%}"),
            ", ".join(f"{count} {outcome}" for outcome, count in one.by_outcome.items()),
        )
        for one in study.weeks
    ]
    head = f"{pluralize(study.downloads, 'download')}: {quantiles or 'none ended'}"
    lines: list[str] = [
        f"{head}; {study.unfinished} failed with a timeout in the last class",
        table(("week from", "class", "attempts", "errors", "outcomes"), rows),
        _plan_line("now", study.current),
        *(_plan_line(f"best {len(plan.classes)}", plan) for plan in study.options),
    ]
    if study.proposed is None:
        return Lines(*lines, f"no proposal: it needs at least {DOWNLOADS_MIN:,} downloads")
    return Lines(*lines, f'proposed: classes = "{", ".join(study.proposed.classes)}"')


def _plan_line(name: str, plan: ClassPlan) -> str:
    """Classes with the share of photos that end in each, and their expected effect."""
    pairs = zip(plan.classes, plan.shares, strict=True)
    shares = ", ".join(f"{limit} {share:.1%}" for limit, share in pairs)
    cut = f"; {plan.cut:.2%} of the downloads would time out" if plan.cut else ""
    return f"{name}: {shares}; {plan.reserved_s:.2f} s reserved per photo{cut}"


def describe_host(host: Host) -> str:
    """A host in a few lines."""
    lines = [host_line(host)]
    lines += [f"  {share:>6.1%} needed {name}" for name, share in host.needs.items()]
    lines += [f"  {count:>8} {outcome}" for outcome, count in host.photos_by_outcome.items()]
    if host.paused_until is not None:
        lines.append(f"  paused until {host.paused_until:%Y-%m-%d %H:%M:%S} (Retry-After)")
    if host.crawl_delay_s:
        lines.append(f"  robots.txt requires {host.crawl_delay_s:g} s between requests")
    return "\n".join(lines)
