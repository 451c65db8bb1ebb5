"""A model of the SQL of the feed: what each statement of `headrace.feed` reads and changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from headrace.feed.model import KIND_MARK, TICKS, ChangeKind, entry_of
from headrace.feed.store import SQL
from verification.simulation.postgres import PostgresModel, Row

FOLLOWS, POSTS = int(ChangeKind.FOLLOWS), int(ChangeKind.POSTS)
VISIBLE, WAITING = 0, 1


@dataclass(frozen=True, slots=True)
class PostRow:
    """A row of feed_post."""

    author: int
    score: int
    state: int
    visible_at: datetime
    ref: str | None
    kind: str | None


@dataclass(frozen=True, slots=True)
class OutboxRow:
    """A row of feed_outbox."""

    kind: int
    entity: int
    version: int
    items: list[str]
    scores: list[int]
    made_at: datetime
    is_swept: bool = False


class FeedTables:
    """The tables, and the statements registered on a model."""

    def __init__(self, model: PostgresModel) -> None:
        self._model = model
        self.index, self.posts = model.table(), model.table()
        self.follows, self.mutes_blocks = model.table(), model.table()
        self.versions, self.outbox = model.table(), model.table()
        self._tick = 0
        self._epoch = (0, 0)
        """Crashes of the server, and the epoch that began after the last one."""
        for query, statement in (
            (SQL.ensure_shards, self._ensure_shards),
            (SQL.post, self._post),
            (SQL.publish, self._publish),
            (SQL.delete_posts, self._delete_posts),
            (SQL.find_posts, self._find_posts),
            (SQL.page, self._page),
            (SQL.follow, self._follow),
            (SQL.unfollow, self._unfollow),
            (SQL.unfollow_all, self._unfollow_all),
            (SQL.mute_block, self._mute_block),
            (SQL.unswept, self._unswept),
            (SQL.unswept_of, self._unswept_of),
            (SQL.unswept_of_posts, self._unswept_of_posts),
            (SQL.mark_swept, self._mark_swept),
            (SQL.mark_unswept, self._mark_unswept),
            (SQL.purge_swept, self._purge_swept),
            (SQL.last_purged, self._last_purged),
            (SQL.changes_after, self._changes_after),
            (SQL.epoch, lambda is_new: [{"feed_epoch_v1": self._base(is_new=is_new)}]),
            (SQL.find_epoch, lambda: [{"base": self._base()}]),
            (SQL.versions_of, self._versions_of),
            (SQL.raise_version, self._raise_version),
            (SQL.oldest_unswept, self._oldest_unswept),
            (SQL.entities_after, self._entities_after),
            (SQL.count_entities, lambda: [{"count": len(self.versions)}]),
            (SQL.has_entities, lambda rows: [{"has": len(self.versions) > rows}]),
            (SQL.snapshot_posts, self._snapshot_posts),
            (SQL.snapshot_follows, self._snapshot_follows),
            (SQL.now_ms, lambda: [{"ms": self._now_ms()}]),
        ):
            model.on(query)(statement)

    def is_shown(self, viewer: int, author: int) -> bool:
        """Whether neither a mute nor a block hides an author from a follower."""
        table = self.mutes_blocks
        hiding = ((viewer, author, "mute"), (viewer, author, "block"), (author, viewer, "block"))
        return not any(key in table for key in hiding)

    def page_of(self, viewer: int) -> list[tuple[int, str]]:
        """All committed posts of a viewer, newest first: what every reader must see."""
        shown = {key[1] for key, row in self.follows.items() if key[0] == viewer and row}
        found = [
            (row.score, post)
            for post, row in self.posts.items()
            if row.state == VISIBLE and row.author in shown
        ]
        return sorted(found, reverse=True)

    def _now_ms(self) -> int:
        return int(self._model.now().timestamp() * 1000)

    def _next_tick(self) -> int:
        self._tick = (self._tick + 1) % TICKS
        return self._tick

    # Index

    def _ensure_shards(self, shards: int) -> list[Row]:
        if self.index.get("row") is None:
            self.index.put("row", (shards, 0))
        found: Any = self.index.get("row")
        return [{"shards": found[0]}]

    def _last_purged(self) -> list[Row]:
        row = self.index.get("row")
        return [] if row is None else [{"purged": row[1]}]

    def _base(self, *, is_new: bool = False) -> int:
        """The epoch; a crash loses it, and the next use begins another."""
        if is_new or self._epoch[0] != self._model.epoch:
            now_us = int(self._model.now().timestamp() * 1_000_000)
            self._epoch = (self._model.epoch, max(now_us, self._epoch[1] + 1))
        return self._epoch[1]

    def _versions_of(self, kind: int, entities: Sequence[int]) -> list[Row]:
        return [
            {"entity": entity, "version": version}
            for entity in entities
            if (version := self.versions.get((kind, entity))) is not None
        ]

    def _raise_version(self, kind: int, entity: int, version: int) -> int:
        self.versions.lock((kind, entity))
        self.versions.put((kind, entity), max(version, self.versions.get((kind, entity)) or 0))
        return 1

    def _log(self, kind: int, entity: int, items: list[str], scores: list[int]) -> int:
        self.versions.lock((kind, entity))
        version: int = max((self.versions.get((kind, entity)) or 0) + 1, self._base())
        self.versions.put((kind, entity), version)
        row = OutboxRow(kind, entity, version, items, scores, self._model.now())
        self.outbox.put(self._model.next_id("feed_outbox"), row)
        return version

    # Posts

    def _post(
        self,
        ids: Sequence[str],
        authors: Sequence[int],
        ats: Sequence[datetime | None],
        refs: Sequence[str | None],
        kinds: Sequence[str | None],
    ) -> list[Row]:
        now, new = self._model.now(), []
        for post, author, at, ref, kind in zip(ids, authors, ats, refs, kinds, strict=True):
            self.posts.lock(post)
            if post not in self.posts:
                tick = self._next_tick() if at is None else 0
                moment = now if at is None else at
                score = int(moment.timestamp() * 1000) * TICKS + tick
                state = WAITING if moment > now else VISIBLE
                self.posts.put(post, PostRow(author, score, state, moment, ref, kind))
                new.append(post)
        versions = self._log_shown(new)
        rows = []
        for post in dict.fromkeys(ids):
            row: Any = self.posts.get(post)
            is_new = post in new
            version = versions.get(row.author) if is_new and row.state == VISIBLE else None
            rows.append(_fields(post, row) | {"is_new": is_new, "version": version})
        return rows

    def _log_shown(self, posts: Sequence[str]) -> dict[int, int]:
        """Store a change of each author for visible posts; their versions."""
        items: dict[int, list[str]] = {}
        scores: dict[int, list[int]] = {}
        for post in posts:
            row: Any = self.posts.get(post)
            if row.state == VISIBLE:
                items.setdefault(row.author, []).append(entry_of(post, row.kind))
                scores.setdefault(row.author, []).append(row.score)
        return {
            author: self._log(POSTS, author, items[author], scores[author])
            for author in sorted(items)
        }

    def _publish(self, ids: Sequence[str]) -> list[Row]:
        now, due = self._model.now(), []
        for post in sorted(ids):
            row = self.posts.get(post)
            if row is not None and row.state == WAITING and row.visible_at <= now:
                score = int(now.timestamp() * 1000) * TICKS + self._next_tick()
                self.posts.put(post, replace(row, state=VISIBLE, score=score))
                due.append(post)
        versions = self._log_shown(due)
        return [self._change(POSTS, author, version) for author, version in versions.items()]

    def _change(self, kind: int, entity: int, version: int) -> Row:
        """The stored change with this version."""
        return next(
            {"entity": entity, "version": version, "items": row.items, "scores": row.scores}
            for _, row in reversed(list(self.outbox.items()))
            if (row.kind, row.entity, row.version) == (kind, entity, version)
        )

    def _delete_posts(self, ids: Sequence[str]) -> list[Row]:
        gone: dict[str, PostRow] = {}
        for post in sorted(set(ids)):
            self.posts.lock(post)
            row = self.posts.pop(post)
            if row is not None:
                gone[post] = row
        items: dict[int, list[str]] = {}
        for post, row in gone.items():
            if row.state == VISIBLE:
                items.setdefault(row.author, []).append(entry_of(post, row.kind))
        versions = {
            author: self._log(POSTS, author, items[author], [-1] * len(items[author]))
            for author in sorted(items)
        }
        return [
            _fields(post, row)
            | {"version": versions.get(row.author) if row.state == VISIBLE else None}
            for post, row in gone.items()
        ]

    def _find_posts(self, ids: Sequence[str]) -> list[Row]:
        return [_fields(post, row) for post in ids if (row := self.posts.get(post)) is not None]

    def _page(  # noqa: PLR0917 - of the query
        self,
        viewer: int,
        score: int,
        id: str,  # noqa: A002 - of the query
        end_score: int,
        end_id: str,
        kinds: Sequence[str] | None,
        rows_max: int,
    ) -> list[Row]:
        found = []
        for position in self.page_of(viewer):
            row: Any = self.posts.get(position[1])
            is_between = (end_score, end_id) < position < (score, id)
            if is_between and (kinds is None or row.kind in kinds):
                found.append(_fields(position[1], row))
        return found[:rows_max]

    # Follows, mutes, blocks

    def _lock_viewers(self, viewers: Sequence[int]) -> None:
        for viewer in sorted(set(viewers)):
            self.versions.lock((FOLLOWS, viewer))
            if (FOLLOWS, viewer) not in self.versions:
                self.versions.put((FOLLOWS, viewer), 0)

    def _changed(self, viewer: int, changed: int, items: list[str], score: int) -> list[Row]:
        version = self._log(FOLLOWS, viewer, items, [score] * len(items)) if items else None
        row = {"changed": changed, "entity": viewer, "version": version}
        return [row | {"items": items, "scores": [score] * len(items)}]

    def _follow(
        self, viewer: int, authors: Sequence[int], ats: Sequence[Any], follows_max: int
    ) -> list[Row]:
        self._lock_viewers([viewer])
        before = sum(1 for key, _ in self.follows.items() if key[0] == viewer)
        new = [author for author in sorted(set(authors)) if not self._is_followed(viewer, author)]
        if new and before + len(new) > follows_max:
            return self._changed(viewer, -1, [], 0)
        shown = []
        for author in new:
            is_shown = self.is_shown(viewer, author)
            # False is a row, so that the table keeps it.
            self.follows.put((viewer, author), is_shown)
            if is_shown:
                shown.append(str(author))
        return self._changed(viewer, len(new), shown, 0)

    def _is_followed(self, viewer: int, author: int) -> bool:
        return self.follows.get((viewer, author)) is not None

    def _unfollow(self, viewer: int, authors: Sequence[int]) -> list[Row]:
        self._lock_viewers([viewer])
        gone, shown = 0, []
        for author in dict.fromkeys(authors):
            if self._is_followed(viewer, author):
                gone += 1
                if self.follows.pop((viewer, author)):
                    shown.append(str(author))
        return self._changed(viewer, gone, shown, -1)

    def _unfollow_all(self, viewer: int) -> list[Row]:
        self._lock_viewers([viewer])
        own = [(key, row) for key, row in self.follows.items() if key[0] == viewer]
        for key, _ in own:
            self.follows.pop(key)
        version = self._log(FOLLOWS, viewer, [], []) if any(row for _, row in own) else None
        row = {"changed": len(own), "entity": viewer, "version": version}
        return [row | {"items": [], "scores": []}]

    def _mute_block(
        self, viewer: int, authors: Sequence[int], kind: str, *, is_set: bool, rows_max: int
    ) -> list[Row]:
        self._lock_viewers([viewer, *authors] if kind == "block" else [viewer])
        table, changed = self.mutes_blocks, 0
        keys = [(viewer, author, kind) for author in sorted(set(authors))]
        own = sum(1 for key, _ in table.items() if key[0] == viewer and key[2] == kind)
        new = [key for key in keys if key not in table]
        first = {"entity": viewer, "version": None, "items": None, "scores": None}
        if is_set and new and own + len(new) > rows_max:
            return [{"changed": -1} | first]
        for key in keys:
            if is_set and key not in table:
                table.put(key, self._model.now())
                changed += 1
            elif not is_set and key in table:
                table.pop(key)
                changed += 1
        rows = [{"changed": changed} | first]
        moved: dict[int, list[tuple[int, bool]]] = {}
        pairs = [(viewer, author) for author in authors]
        if kind == "block":
            pairs += [(author, viewer) for author in authors]
        for who, whom in sorted(set(pairs)):
            before = self.follows.get((who, whom))
            if before is not None and before != self.is_shown(who, whom):
                self.follows.put((who, whom), not before)
                moved.setdefault(who, []).append((whom, not before))
        for who in sorted(moved):
            items = [str(whom) for whom, _ in moved[who]]
            scores = [0 if is_shown else -1 for _, is_shown in moved[who]]
            version = self._log(FOLLOWS, who, items, scores)
            rows.append(
                {
                    "changed": changed,
                    "entity": who,
                    "version": version,
                    "items": items,
                    "scores": scores,
                }
            )
        return rows

    # Outbox

    def _unswept(self, older_s: float, rows_max: int) -> list[Row]:
        now = self._model.now()
        before = now - timedelta(seconds=older_s)
        rows = [
            _change_fields(number, row)
            for number, row in sorted(self.outbox.items())
            if not row.is_swept and (row.made_at < before or row.made_at > now)
        ]
        return rows[:rows_max]

    def _unswept_of(self, kind: int, entities: Sequence[int]) -> list[Row]:
        wanted = set(entities)
        return [
            _change_fields(number, row)
            for number, row in sorted(self.outbox.items())
            if row.kind == kind and row.entity in wanted and not row.is_swept
        ]

    def _unswept_of_posts(self, ids: Sequence[str]) -> list[Row]:
        wanted = set(ids)
        return [
            _change_fields(number, row)
            for number, row in sorted(self.outbox.items())
            if row.kind == POSTS
            and not row.is_swept
            and any(item.partition(KIND_MARK)[0] in wanted for item in row.items)
        ]

    def _mark_swept(self, ids: Sequence[int]) -> int:
        return self._mark(ids, is_swept=True)

    def _mark(self, ids: Sequence[int], *, is_swept: bool) -> int:
        count = 0
        for number in ids:
            row = self.outbox.get(number)
            if row is not None:
                self.outbox.put(number, replace(row, is_swept=is_swept))
                count += 1
        return count

    def _mark_unswept(self, swept: int, late_s: float) -> int:
        known = self.outbox.get(swept)
        since = known.made_at - timedelta(seconds=late_s) if known is not None else None
        ids = [
            number
            for number, row in self.outbox.items()
            if row.is_swept and (number > swept or since is None or row.made_at >= since)
        ]
        return self._mark(ids, is_swept=False)

    def _purge_swept(self, older_s: float, rows_max: int) -> list[Row]:
        before = self._model.now() - timedelta(seconds=older_s)
        rows = sorted(self.outbox.items())
        old = [number for number, row in rows if row.is_swept and row.made_at < before][:rows_max]
        for number in old:
            self.outbox.pop(number)
        found = self.index.get("row")
        if old and found is not None:
            self.index.put("row", (found[0], max(found[1], *old)))
        return [{"count": len(old)}]

    def _changes_after(self, kind: int, entity: int, version: int) -> list[Row]:
        rows = [
            (row.version, _change_fields(number, row))
            for number, row in self.outbox.items()
            if row.kind == kind and row.entity == entity and row.version > version
        ]
        return [fields for _, fields in sorted(rows, key=lambda pair: pair[0])]

    def _oldest_unswept(self) -> list[Row]:
        made = [row.made_at for row in self.outbox.values() if not row.is_swept]
        age = (self._model.now() - min(made)).total_seconds() if made else None
        return [{"age": age}]

    # Snapshots

    def _entities_after(self, kind: int, after: int, rows_max: int) -> list[Row]:
        found = sorted(key[1] for key, _ in self.versions.items() if key[0] == kind)
        return [{"entity": entity} for entity in found if entity > after][:rows_max]

    def _snapshot_posts(self, entities: Sequence[int], floor: int) -> list[Row]:
        rows = []
        for entity in entities:
            version = self.versions.get((POSTS, entity))
            if version is None:
                continue
            own = [
                (row.score, entry_of(post, row.kind))
                for post, row in self.posts.items()
                if row.author == entity and row.state == VISIBLE
            ]
            low = max((score for score, _ in own if score < floor), default=floor)
            rows.append(_snapshot(entity, version, [pair for pair in own if pair[0] >= low]))
        return rows

    def _snapshot_follows(self, entities: Sequence[int]) -> list[Row]:
        rows = []
        for entity in entities:
            version = self.versions.get((FOLLOWS, entity))
            if version is not None:
                own = [
                    (0, str(key[1]))
                    for key, is_shown in self.follows.items()
                    if key[0] == entity and is_shown
                ]
                rows.append(_snapshot(entity, version, own))
        return rows


def _snapshot(entity: int, version: int, pairs: list[tuple[int, str]]) -> Row:
    items, scores = [item for _, item in pairs], [score for score, _ in pairs]
    return {"entity": entity, "version": version, "items": items, "scores": scores}


def _change_fields(number: int, row: OutboxRow) -> Row:
    return {
        "id": number,
        "kind": row.kind,
        "entity": row.entity,
        "version": row.version,
        "items": row.items,
        "scores": row.scores,
    }


def _fields(post: str, row: PostRow) -> Row:
    return {
        "id": post,
        "author": row.author,
        "score": row.score,
        "is_waiting": row.state == WAITING,
        "visible_at": row.visible_at,
        "ref": row.ref,
        "kind": row.kind,
    }
