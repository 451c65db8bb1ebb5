"""What clients of the feed changed, and which pages are right at a moment.

A fact is true or false, such as "7 follows 9" or "item:3 is visible". Changes of one fact follow
each other. A change without an answer may have happened. A change that its process could not send
to Valkey is deferred: other processes may show the former state until a sweep.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from tests.kit.checkers import Finding

DEFERRED_S: Final = 30.0
"""Without faults a sweep applies deferred changes within this time."""


@dataclass(slots=True)
class Change:
    """One change of a fact."""

    value: bool
    began_s: float
    by: Hashable
    """The process, which must see it at once."""
    acknowledged_s: float | None = None
    is_deferred: bool = False


@dataclass(slots=True)
class Fact:
    """The changes of a fact, oldest first."""

    changes: list[Change] = field(default_factory=list)
    is_busy: bool = False
    """A client is changing it."""


@dataclass(frozen=True, slots=True)
class Read:
    """When and by which process pages were read, and how long there was no fault before."""

    began_s: float
    ended_s: float
    by: Hashable
    calm_s: float

    def possible(self, fact: Fact | None) -> set[bool]:
        """The values that this read may see."""
        found: set[bool] = set()
        for change in reversed(fact.changes if fact is not None else []):
            if change.began_s <= self.ended_s:
                found.add(change.value)
                if self._must_see(change):
                    return found
        return found | {False}

    def _must_see(self, change: Change) -> bool:
        at_s = change.acknowledged_s
        if at_s is None or at_s > self.began_s:
            return False
        is_late = min(self.began_s - at_s, self.calm_s) >= DEFERRED_S
        return not change.is_deferred or change.by == self.by or is_late


@dataclass(slots=True)
class Post:
    """A post of a client."""

    author: int
    kind: str | None
    is_visible: Fact = field(default_factory=Fact)
    position: tuple[int, str] | None = None


class FeedLedger:
    """All facts of a run."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.posts: dict[str, Post] = {}
        self.follows: dict[tuple[int, int], Fact] = {}
        self.hidden: dict[tuple[int, int, str], Fact] = {}
        """Mutes and blocks."""

    def follow(self, viewer: int, author: int) -> Fact:
        """The fact that a viewer follows an author."""
        return self.follows.setdefault((viewer, author), Fact())

    def hiding(self, viewer: int, author: int, kind: str) -> Fact:
        """The fact of a mute or block."""
        return self.hidden.setdefault((viewer, author, kind), Fact())

    def check_pages(
        self,
        viewer: int,
        read: Read,
        found: Sequence[str],
        *,
        is_end: bool,
        kinds: frozenset[str] | None = None,
    ) -> None:
        """Compare consecutive pages, from the newest post on, with what may be on them."""
        self._check_order(viewer, read, found)
        shown, last = set(found), None
        if not is_end:
            last = self.posts[found[-1]].position if found and found[-1] in self.posts else None
            if last is None:
                return
        for name, may, must in self._states(viewer, read):
            post = self.posts[name]
            if kinds is not None and post.kind not in kinds:
                may = must = False  # noqa: PLW2901 - the filter
            if name in shown and not may:
                self._note("shown", viewer, read, f"{name} of {post.author} must not be shown")
            is_within = last is None or (post.position is not None and post.position > last)
            if must and name not in shown and is_within and post.position is not None:
                self._note("missing", viewer, read, f"{name} of {post.author} is not in {found}")
        for name in shown - self.posts.keys():
            self._note("unknown", viewer, read, f"{name} was never posted")

    def _check_order(self, viewer: int, read: Read, found: Sequence[str]) -> None:
        if len(set(found)) < len(found):
            self._note("twice", viewer, read, f"a post is twice in {found}")
        places = [self.posts[post].position for post in found if post in self.posts]
        known = [place for place in places if place is not None]
        if known != sorted(known, reverse=True):
            self._note("order", viewer, read, f"the posts are not in order: {found}")

    def _states(self, viewer: int, read: Read) -> Iterator[tuple[str, bool, bool]]:
        """Each post, and whether the viewer may see it and must see it."""
        authors: dict[int, tuple[bool, bool]] = {}
        for name, post in self.posts.items():
            state = authors.get(post.author)
            if state is None:
                state = authors[post.author] = self._state_of(viewer, post.author, read)
            visible = read.possible(post.is_visible) if state[0] else {False}
            yield name, state[0] and True in visible, state[1] and visible == {True}

    def _state_of(self, viewer: int, author: int, read: Read) -> tuple[bool, bool]:
        followed = read.possible(self.follows.get((viewer, author)))
        hiding = [
            read.possible(self.hidden.get(key))
            for key in (
                (viewer, author, "mute"),
                (viewer, author, "block"),
                (author, viewer, "block"),
            )
        ]
        may = True in followed and all(False in each for each in hiding)
        must = followed == {True} and all(each == {False} for each in hiding)
        return may, must

    def _note(self, fault: str, viewer: int, read: Read, text: str) -> None:
        where = f"read by {read.by} from {read.began_s:.3f} to {read.ended_s:.3f} s"
        self.findings.append(Finding(fault, viewer, f"{text}; {where}"))
