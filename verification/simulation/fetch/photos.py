"""The contracts of photos: what a run requests, their outcomes, links, and statistics of hosts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from headrace.fetch.sql import SQL
from verification.simulation.fetch.tables import (
    Change,
    FetchTables,
    Host,
    Link,
    Photo,
    Run,
    Staged,
    statement,
)
from verification.simulation.jobs.tables import ALWAYS, seconds

RECHECK_S = 23.5 * 3600
COPIED_BEFORE_S = 300.0

# What a run requests


@statement(SQL.note_round)
def note_round(
    t: FetchTables, *, run_id: int, customer: str, is_round: bool, wait_s: float | None
) -> int:
    earlier = [
        run for key, run in t.run.of(customer) if key != run_id and run.state in ("applied", "done")
    ]
    rounds = [run.started_at for run in earlier if run.is_round]
    t.put_run(
        t.get_run(run_id),
        round=max((run.round for run in earlier), default=0) + is_round,
        is_round=is_round,
        prior_at=max(rounds, default=None),
        asks_before=ALWAYS if wait_s is None else t.now() - seconds(wait_s),
    )
    return 1


def refused_links(t: FetchTables, run_id: int) -> list[tuple[str, str]]:
    """URL and code of the refused links of a run's items."""
    return [
        refused
        for key, change in t.change.of(run_id)
        if change.kind != "gone" and (row := t.staged.get(key)) is not None
        for refused in row.refused.items()
    ]


@statement(SQL.count_refused)
def count_refused(t: FetchTables, *, run_id: int) -> int:
    codes = Counter(code for _, code in refused_links(t, run_id))
    for code, count in codes.items():
        t.count.put((run_id, f"refused:{code}"), count)
    return len(codes)


@statement(SQL.refuse_links)
def refuse_links(t: FetchTables, *, run_id: int, customer: str) -> int:
    links = dict(refused_links(t, run_id))
    for url, code in sorted(links.items()):
        t.link.lock((customer, url))
        known = t.link.get((customer, url))
        link = Link(
            customer=customer,
            url=url,
            outcome=f"refused:{code}",
            checked_at=t.now(),
            run_id=run_id,
            failures=1,
        )
        if known is not None:
            changes = {"due_round": 0, "recheck_at": None, "failures": known.failures + 1}
            own = {"outcome": link.outcome, "run_id": run_id, "checked_at": t.now()}
            link = replace(known, **changes, **own)  # type: ignore[arg-type]
        t.link.put((customer, url), link)
    return len(links)


@statement(SQL.note_needs)
def note_needs(t: FetchTables, *, run_id: int, customer: str, recheck_s: float) -> int:
    run, waiting = t.get_run(run_id), 0
    for key, change in t.change.of(run_id):
        row = t.staged.get(key)
        if change.kind == "gone" or row is None:
            continue
        for url in row.photos:
            if url in row.refused:
                continue
            link = t.link.get((customer, url))
            is_asked = link is None or (
                change.has_other_photos
                and (
                    not link.is_good
                    or (link.etag or link.last_modified) is not None
                    or link.checked_at < t.now() - seconds(recheck_s)
                )
            )
            if is_asked:
                t.add_need(run_id, change.item, url)
            elif link is not None and not link.is_good:
                if link.is_due(run, t.now()):
                    t.add_need(run_id, change.item, url)
                else:
                    waiting += 1
    if waiting:
        t.count.put((run_id, "waiting"), waiting)
    return 1


@statement(SQL.count_known)
def count_known(t: FetchTables, *, run_id: int) -> int:
    photos = sum(
        len(row.photos)
        for key, change in t.change.of(run_id)
        if change.kind != "gone" and (row := t.staged.get(key)) is not None
    )
    known = photos - len(t.need.of(run_id)) - sum(t.counts_of(run_id).values())
    if known > 0:
        t.count.put((run_id, "known"), known)
    return 1


def links_to_retry(
    t: FetchTables, run: Run, refresh_s: float
) -> dict[str, list[tuple[int, bool, bool]]]:
    """By URL: the run of the link, whether it has another copy, whether it is due."""
    now, links = t.now(), defaultdict(list)
    for _, link in t.link.of(run.customer):
        own = links[link.url]
        if not link.is_good:
            own.append((link.run_id, False, link.is_due(run, now)))
            continue
        if refresh_s > 0 and link.checked_at < now - seconds(refresh_s):
            own.append((link.run_id, False, True))
        since = None if run.prior_at is None else run.prior_at - seconds(COPIED_BEFORE_S)
        if link.copied_at is not None and since is not None and link.copied_at > since:
            own.append((link.run_id, True, False))
    return links


@statement(SQL.note_retries)
def note_retries(t: FetchTables, *, run_id: int, customer: str, refresh_s: float) -> int:
    links = links_to_retry(t, t.get_run(run_id), refresh_s)
    taken = items_under_way(t, customer, but_all_of=run_id)
    waiting, retried = 0, {}
    for _, row in t.staged.of(run_id):
        item = t.item.get((customer, row.item))
        if row.hash is None or item is None or item.is_gone or row.item in taken:
            continue
        for url in item.photos:
            for link_run, has_copy, is_due in links.get(url, ()):
                if url in row.refused or (has_copy and item.run_id >= link_run):
                    continue
                if is_due:
                    t.add_need(run_id, row.item, url)
                if is_due or has_copy:
                    retried[row.item] = item.version
                else:
                    waiting += 1
    if waiting:
        t.add_count(run_id, "waiting", waiting)
    for name, version in retried.items():
        change = Change(run_id=run_id, item=name, kind="retry", version=version)
        t.change.put((run_id, name), change)
    return len(retried)


def items_under_way(t: FetchTables, customer: str, *, but_all_of: int | None = None) -> set[str]:
    """Items with an open change of an applied run, or any change of the named one."""
    return {
        change.item
        for run_id, run in t.run.of(customer)
        for _, change in t.change.of(run_id)
        if run_id == but_all_of or (run.state == "applied" and change.published_at is None)
    }


@statement(SQL.note_photos)
def note_photos(t: FetchTables, *, run_id: int) -> int:
    photos = len(t.need.of(run_id)) + sum(t.counts_of(run_id).values())
    t.put_run(t.get_run(run_id), photos=photos)
    return 1


@statement(SQL.customers_to_recheck)
def customers_to_recheck(t: FetchTables, *, refresh_s: float) -> list[Any]:
    found = {
        link.customer
        for link in t.link.values()
        if link.recheck_at is not None and link.recheck_at <= t.now()
    }
    for row in t.customer.values():
        if (refresh_s if row.refresh_s is None else row.refresh_s) > 0:
            found.add(row.customer)
    return [{"customer": customer} for customer in sorted(found)]


@statement(SQL.stage_due)
def stage_due(
    t: FetchTables, *, run_id: int, customer: str, refresh_s: float, links_max: int
) -> list[Any]:
    now, links = t.now(), {}
    for _, link in t.link.of(customer):
        is_due = link.recheck_at is not None and link.recheck_at <= now
        is_old = refresh_s > 0 and link.is_good and link.checked_at < now - seconds(refresh_s)
        if is_due or is_old:
            links[link.url] = link
    uses = [
        (link.is_good, item.item, url)
        for _, item in t.item.of(customer)
        if not item.is_gone
        for url in item.photos
        if (link := links.get(url)) is not None
    ]
    used = {url for _, _, url in uses}
    for url, link in links.items():
        if url not in used and link.recheck_at is not None and link.recheck_at <= now:
            t.link.put((customer, url), replace(link, recheck_at=None))
    taken = items_under_way(t, customer)
    due = sorted(use for use in uses if use[1] not in taken)[:links_max]
    names = sorted({name for _, name, _ in due})
    for name in names:
        item = t.item.get((customer, name))
        assert item is not None, "it was just read"
        t.staged.put((run_id, name), Staged(run_id=run_id, item=name, hash=item.hash))
    return [{"count": len(names)}]


# Photos of jobs


@statement(SQL.photo_states)
def photo_states(
    t: FetchTables,
    *,
    runs: Sequence[int],
    customers: Sequence[str],
    items: Sequence[str],
    urls: Sequence[str],
) -> list[Any]:
    found = []
    for n, run_id in enumerate(runs):
        need = t.need.get((run_id, items[n], urls[n]))
        link = t.link.get((customers[n], urls[n]))
        names = ("outcome", "sha256", "etag", "last_modified", "failures")
        row = {name: None if link is None else getattr(link, name) for name in names}
        row |= {
            "position": n + 1,
            "decided": None if need is None else need.outcome,
            "is_needed": need is not None,
            "link_run_id": None if link is None else link.run_id,
        }
        found.append(row)
    return found


@statement(SQL.known_photos)
def known_photos(t: FetchTables, *, hashes: Sequence[str]) -> list[Any]:
    return [{"sha256": one} for one in hashes if one in t.photo]


@statement(SQL.decide)
def decide(t: FetchTables, *, runs: Sequence[int], **given: Sequence[Any]) -> list[Any]:
    """fetch_decide_v1; perceptual hashes are left out, since no photo is decoded."""
    photos = list(zip(runs, given["items"], given["urls"], strict=True))
    t.on_decide(photos, given["outcomes"])
    count = len(runs)
    for n in sorted(range(count), key=lambda n: given["hashes"][n] or ""):
        sha256 = given["hashes"][n]
        if sha256 is None:
            continue
        t.photo.lock(sha256)
        if sha256 not in t.photo:
            photo = Photo(
                sha256=sha256,
                key=given["keys"][n],
                format=given["formats"][n],
                size_bytes=given["sizes_bytes"][n],
                width=given["widths"][n],
                height=given["heights"][n],
            )
            t.photo.put(sha256, photo)
    touched: dict[tuple[str, str], int] = {}
    for n in range(count):
        if given["touch_links"][n]:
            touched.setdefault((given["customers"][n], given["urls"][n]), n)
    for place, n in sorted(touched.items()):
        t.link.lock(place)
        t.link.put(place, decided_link(t, place, runs[n], n, given))
    decide_needs(t, runs, given)
    return [{}]


def decided_link(
    t: FetchTables, place: tuple[str, str], run_id: int, n: int, given: dict[str, Sequence[Any]]
) -> Link:
    """The link after an outcome: a failure keeps the last good copy and its validators."""
    outcome, sha256 = given["outcomes"][n], given["hashes"][n]
    etag, modified = given["etags"][n], given["last_modifieds"][n]
    is_lost = outcome == "failed:lost"
    failed = outcome not in ("stored", "unchanged", "failed:lost")
    run, known, now = t.run.get(run_id), t.link.get(place), t.now()
    failures = failed + (known.failures if known is not None else 0)
    rounds = 0 if run is None else run.round
    link = Link(
        customer=place[0],
        url=place[1],
        outcome=outcome,
        checked_at=now,
        run_id=run_id,
        sha256=sha256,
        etag=etag,
        last_modified=modified,
        failures=failures if failed or (is_lost and known is not None) else 0,
        due_round=rounds + failures + 1 if failed else 0,
        recheck_at=now + seconds(RECHECK_S) if failed else now if is_lost else None,
    )
    if known is None:
        return link
    if outcome == "unchanged":
        etag, modified = etag or known.etag, modified or known.last_modified
    elif outcome != "stored":
        etag, modified = known.etag, known.last_modified
    is_other = sha256 is not None and sha256 != (known.sha256 or "")
    return replace(
        link,
        sha256=sha256 or known.sha256,
        etag=etag,
        last_modified=modified,
        copied_at=now if is_other else known.copied_at,
    )


def decide_needs(t: FetchTables, runs: Sequence[int], given: dict[str, Sequence[Any]]) -> None:
    """Set the outcomes of needs that have none, and count them."""
    decided: Counter[tuple[int, str]] = Counter()
    for n, run_id in enumerate(runs):
        key = run_id, given["items"][n], given["urls"][n]
        if t.need.get(key) is None:
            continue
        t.need.lock(key)
        need = t.need.get(key)
        if need is not None and need.outcome is None:
            outcome = given["outcomes"][n]
            t.need.put(key, replace(need, outcome=outcome))
            decided[run_id, outcome] += 1
    minute = t.now().replace(second=0, microsecond=0)
    paced: Counter[int] = Counter()
    for (run_id, _), photos in decided.items():
        paced[run_id] += photos
    for run_id, photos in sorted(paced.items()):
        t.pace.lock((run_id, minute))
        t.pace.put((run_id, minute), (t.pace.get((run_id, minute)) or 0) + photos)
    for (run_id, outcome), photos in sorted(decided.items()):
        t.add_count(run_id, outcome, photos)


# Hosts


@statement(SQL.host_states)
def host_states(t: FetchTables, *, customers: Sequence[str], hosts: Sequence[str]) -> list[Any]:
    found, now = [], t.now()
    for n, place in enumerate(zip(customers, hosts, strict=True), 1):
        row = t.host.get(place)
        if row is None:
            continue
        paused_s = None if row.paused_until is None else (row.paused_until - now).total_seconds()
        weights = dict(sorted(row.weights.items()))
        found.append(
            {
                "position": n,
                "age_s": (now - row.last_seen_at).total_seconds(),
                "paused_s": paused_s,
                "classes_s": list(weights),
                "weights": list(weights.values()),
            }
        )
    return found


@statement(SQL.note_hosts)
def note_hosts(
    t: FetchTables,
    *,
    customers: Sequence[str],
    hosts: Sequence[str],
    half_life_s: float,
    recent: float,
    **given: Sequence[Any],
) -> list[Any]:
    now = t.now()
    for n, place in sorted(enumerate(zip(customers, hosts, strict=True)), key=lambda one: one[1]):
        t.host.lock(place)
        row = t.host.get(place)
        pause_s, photos = given["pauses_s"][n], given["photos"][n]
        left = 1.0
        if row is None:
            row = Host(last_seen_at=now)
        else:
            age_s = (now - row.last_seen_at).total_seconds()
            left = float(0.5 ** (age_s / half_life_s)) * max(0.0, 1 - photos / recent)
        until = [row.paused_until] if row.paused_until is not None else []
        if pause_s > 0:
            until.append(now + seconds(pause_s))
        changed = replace(
            row,
            requests=row.requests + given["requests"][n],
            left_share=left,
            photos=photos + row.photos * left,
            seconds=given["seconds"][n] + row.seconds * left,
            paused_until=max(until, default=None),
            last_seen_at=now,
            weights={class_s: weight * left for class_s, weight in row.weights.items()},
        )
        t.host.put(place, changed)
    speeds = zip(given["speed_customers"], given["speed_hosts"], strict=True)
    for n, place in enumerate(speeds):
        row = t.host.get(place)
        assert row is not None, "its measurements came with it"
        class_s = given["speed_classes_s"][n]
        weight = row.weights.get(class_s, 0.0) + given["speed_photos"][n]
        t.host.put(place, replace(row, weights={**row.weights, class_s: weight}))
    outcomes = zip(
        given["outcome_customers"], given["outcome_hosts"], given["outcomes"], strict=True
    )
    add_all(t.host_outcome, dict(zip(outcomes, given["outcome_photos"], strict=True)))
    attempts = zip(
        [now.date()] * len(given["attempts"]),
        given["attempt_classes_s"],
        given["attempt_outcomes"],
        given["attempt_buckets"],
        strict=True,
    )
    add_all(t.attempt, dict(zip(attempts, given["attempts"], strict=True)))
    return [{}]


def add_all(table: Any, counts: dict[Any, int]) -> None:
    """Add to the counts of a table, in the order of their keys."""
    for key, count in sorted(counts.items()):
        table.lock(key)
        table.put(key, (table.get(key) or 0) + count)


statement(SQL.forget_hosts)(lambda _t, kept_s, rows_max: [])
statement(SQL.forget_attempts)(lambda _t, days_kept: 0)
