"""What the caches of all nodes must forget: by key, by prefix, everywhere within a poll."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.engines.blobs import Blobs, require_key
from headrace.media.cluster.purge import Purges
from headrace.media.errors import InvalidPurge


@dataclass(frozen=True, slots=True)
class Purged:
    """What was purged, and the generation that every node must reach; 0: nothing was changed."""

    keys: tuple[str, ...]
    prefix: str | None
    generation: int


class Purging:
    """Purges of the whole cluster."""

    def __init__(self, blobs: Blobs) -> None:
        self._purges = Purges(blobs)

    async def purge(
        self, keys: Sequence[str] = (), *, prefix: str | None = None, is_dry_run: bool = False
    ) -> Purged:
        """Let every node forget `keys`, or everything whose key begins with `prefix`.

        Nodes look every 2 s; one that cannot reach the object store does it when it can. Nothing is
        deleted from disks: what is asked for again is read anew under the next generation.
        Raises: InvalidPurge, InvalidBlobKey, BlobsDown.
        """
        if bool(keys) == (prefix is not None):
            raise InvalidPurge("nothing or both to purge: expected keys, or one prefix")
        for key in keys:
            require_key(key)
        if is_dry_run:
            generation = 0
        elif prefix is not None:
            generation = await self._purges.purge_prefix(prefix)
        else:
            generation = max([await self._purges.purge(key) for key in keys])
        return Purged(tuple(keys), prefix, generation)
