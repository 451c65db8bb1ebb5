"""Purge: a key's generation is part of its block keys, and a purge raises it on every node.

Nothing is searched or deleted. Blocks of an older generation are no longer found, and are evicted
later. The purges are one document of the cluster. A purge's generation is its version of the
document, so generations only rise.

The list is bounded. When it is full, the older half is folded: keys and prefixes are replaced by
their folder, then by its parent, until few are left. A folded entry covers more than was purged, so
folding causes cache misses and never shows old bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from headrace.engines.blobs import KEY_CHARACTERS_MAX, Blobs, require_key
from headrace.kernel.errors import InvalidInput
from headrace.media.cluster.cluster_config import Document, DocumentType, FollowedDocument
from headrace.media.errors import InvalidPurge

ENTRIES_MAX: Final = 2000
ENTRIES_KEPT: Final = 1000
"""Newest entries that a fold keeps unchanged."""
FOLDED_MAX: Final = 200


class Purge(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A purged key, or all keys with a prefix; `generation` is the version that purged it."""

    name: Annotated[str, Meta(max_length=KEY_CHARACTERS_MAX)]
    is_prefix: bool = False
    generation: Annotated[int, Meta(ge=1)]


class PurgeList(msgspec.Struct, frozen=True, kw_only=True):
    """All purges in effect, oldest first; `upstream`: the included version of the home's list."""

    version: Annotated[int, Meta(ge=0)] = 0
    upstream: Annotated[int, Meta(ge=0)] = 0
    purges: tuple[Purge, ...] = ()


PURGES: Final[DocumentType[PurgeList]] = DocumentType("purges", PurgeList, PurgeList())


class Generations(FollowedDocument[PurgeList]):
    """The generation of every key in this process. Pass it to a `DocumentPoller`."""

    def __init__(self) -> None:
        super().__init__(PURGES)
        self._keys: dict[str, int] = {}
        self._prefixes: dict[int, dict[str, int]] = {}

    def generation(self, key: str) -> int:
        """The version of the newest purge of `key`, or 0. It never decreases."""
        found = self._keys.get(key, 0)
        for length, prefixes in self._prefixes.items():
            found = max(found, prefixes.get(key[:length], 0))
        return found

    def changed(self, value: PurgeList) -> None:
        """Index the list by exact key, and prefixes by their length."""
        keys: dict[str, int] = {}
        prefixes: dict[int, dict[str, int]] = {}
        for purge in value.purges:
            into = prefixes.setdefault(len(purge.name), {}) if purge.is_prefix else keys
            into[purge.name] = max(purge.generation, into.get(purge.name, 0))
        self._keys, self._prefixes = keys, prefixes


class Purges(Document[PurgeList]):
    """The purge list. Needs the object store only, so any machine can purge."""

    def __init__(self, blobs: Blobs) -> None:
        super().__init__(blobs, PURGES)

    async def purge(self, *keys: str) -> int:
        """Purge `keys` on all nodes within 2.5 s. Return their new generation.

        Raises: InvalidBlobKey, DocumentDamaged, DocumentContended, BlobsDown.
        """
        for key in keys:
            require_key(key)
        return await self._add(keys, is_prefix=False)

    async def purge_prefix(self, prefix: str) -> int:
        """Purge all keys that begin with `prefix`, such as `photos/ab/`. Return their generation.

        Raises: InvalidPurge, DocumentDamaged, DocumentContended, BlobsDown.
        """
        if prefix and (prefix.startswith("/") or not _may_begin_key(prefix)):
            raise InvalidPurge(
                f"prefix {prefix[:60]!r} begins no key: use the start of a key, such as photos/ab/"
            )
        return await self._add([prefix], is_prefix=True)

    async def add_upstream(self, home: PurgeList) -> None:
        """Add what the upstream cluster purged since the last call.

        A list of a lower version is another cluster's or a restored one: all of it is added.
        Raises: DocumentDamaged, DocumentContended, BlobsDown.
        """

        def add(old: PurgeList) -> PurgeList:
            if home.version == old.upstream:
                return old
            since = old.upstream if home.version > old.upstream else 0
            generation = old.version + 1
            new = [
                msgspec.structs.replace(purge, generation=generation)
                for purge in home.purges
                if purge.generation > since
            ]
            again = {(purge.name, purge.is_prefix) for purge in new}
            kept = [one for one in old.purges if (one.name, one.is_prefix) not in again]
            purges = tuple(folded([*kept, *new]))
            return msgspec.structs.replace(old, purges=purges, upstream=home.version)

        await self.change(add)

    async def _add(self, names: Sequence[str], *, is_prefix: bool) -> int:
        def add(old: PurgeList) -> PurgeList:
            generation = old.version + 1
            new = [Purge(name=n, is_prefix=is_prefix, generation=generation) for n in names]
            kept = [
                purge
                for purge in old.purges
                if not _is_repeated(purge, set(names), is_prefix=is_prefix)
            ]
            return msgspec.structs.replace(old, purges=tuple(folded([*kept, *new])))

        return (await self.change(add)).version


def folded(purges: list[Purge]) -> list[Purge]:
    """At most ENTRIES_MAX purges that give no key a lower generation than `purges`."""
    if len(purges) <= ENTRIES_MAX:
        return purges
    old, kept = purges[:-ENTRIES_KEPT], purges[-ENTRIES_KEPT:]
    while len(old) > FOLDED_MAX:
        newest: dict[str, int] = {}
        for purge in old:
            folder = _above(purge.name)
            newest[folder] = max(purge.generation, newest.get(folder, 0))
        old = [Purge(name=n, is_prefix=True, generation=g) for n, g in newest.items()]
    return sorted([*old, *kept], key=lambda purge: purge.generation)


def _above(name: str) -> str:
    """The parent folder of `name` as a prefix: `a/b/` of `a/b/c.jpg`, `a/` of `a/b/`."""
    folder, slash, _ = name.rstrip("/").rpartition("/")
    return folder + slash


def _is_repeated(old: Purge, names: set[str], *, is_prefix: bool) -> bool:
    """Whether a purge of `names` covers everything that `old` does."""
    if is_prefix:
        return any(old.name.startswith(name) for name in names)
    return not old.is_prefix and old.name in names


def _may_begin_key(prefix: str) -> bool:
    """Whether some valid key begins with `prefix`."""
    try:
        require_key(f"{prefix}x" if prefix.endswith("/") else prefix)
    except InvalidInput:
        return False
    return True
