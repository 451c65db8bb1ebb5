"""One admitted request on its way to an answer: shapes first, then which bytes, then the first of them ready.

`now` answers in the turn that read the request, where everything needed is known: a file, or a shape this
worker has seen and a block on our disks. Else `later` is awaited, without a turn. An object that turns out
to be another version before the head went out is looked at once anew; after that it is the store's fault.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headrace.kernel.logs import onward
from headrace.media.answers import HIT, MISS
from headrace.media.id3 import START_BYTES, Piece, Tagged, tag_key
from headrace.media.model import ObjectUnknown, Shape, SourceCut
from headrace.media.ranges import Decision, decide
from headrace.media.requests import Request
from headrace.media.sources import Source, Span, StoreSource, open_object, store_down
from headrace.media.worker.bodies import BlockBody, Body, FileBody
from headrace.media.worker.plane import Admitted, Plane

_OWN: Final = {
    "hit": HIT,
    "miss": "headrace; fwd=miss; stored",
    "pass": MISS,
}
PEER: Final = "headrace; fwd=miss; detail=peer"
"""The Cache-Status of bytes that another node gave."""
_OTHERS: Final = {"peer": PEER, "origin": "headrace; fwd=bypass"}


@dataclass(slots=True)
class Answer:
    """What a request gets: `bodies` are sent in order, each a span of an object."""

    shape: Shape
    decision: Decision
    bodies: list[Body]
    cache_status: str
    begins: tuple[str, Shape]
    """Key and shape of the object that its first byte is of."""

    def close(self) -> None:
        """Give back what was opened for it."""
        for body in self.bodies:
            body.close()


class Opening:
    """Finds the answer to one request; nothing is left open when it raises or is closed."""

    __slots__ = ("_admitted", "_answer", "_plane", "_request", "_source", "_told", "_wake")

    def __init__(
        self, plane: Plane, request: Request, admitted: Admitted, *, wake: Callable[[], None]
    ) -> None:
        self._plane = plane
        self._request = request
        self._admitted = admitted
        self._wake = wake
        self._told = plane.told(admitted)
        self._source: Source | None = None
        self._answer: Answer | None = None

    def now(self) -> Answer | None:
        """The answer, if it can begin in this turn. Raises: as `later`."""
        if self._plane.folder is not None:
            try:
                return self._open_files(self._plane.folder)
            except ObjectUnknown:
                self._plane.require_store()
                raise
        source = self._source = self._plane.source(self._admitted.key, self._admitted)
        shape = source.shape_now(self._admitted.key)
        if shape is None or self._admitted.grant.tag is not None:
            return None
        answer = self._plan(shape)
        if self._is_doubted(answer):
            return None
        self._answer = answer
        return answer if self._is_ready(answer) else None

    async def later(self) -> Answer:
        """The answer, its first bytes ready. Raises: ObjectUnknown, StoreUnavailable."""
        # In the request's own task: what is asked of the object store from here on says for whom.
        onward.set(self._told)
        try:
            try:
                return await self._wait()
            except SourceCut:
                # Another version than the shape we knew: one look at what is there now.
                self.close()
                return await self._wait(is_fresh=True)
        except SourceCut as error:
            self.close()
            raise store_down(error) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give back what was opened and not handed out."""
        if self._answer is not None:
            self._answer.close()
            self._answer = None

    async def _wait(self, *, is_fresh: bool = False) -> Answer:
        source, tag = self._source, self._admitted.grant.tag
        assert source is not None, "now comes first"
        if self._answer is None:
            key = self._admitted.key
            coming = self._plane.fresh_shape(source, key) if is_fresh else source.shape(key)
            shape = await coming
            if tag is None:
                self._answer = self._plan(shape)
            else:
                self._answer = self._plan_tagged(await self._tagged(source, shape, tag))
            if not is_fresh and self._is_doubted(self._answer):
                raise SourceCut("a node of the cluster knows another version of the object")
            with self._plane.turn():
                is_ready = self._is_ready(self._answer)
            if is_ready:
                return self._hand_out()
        first = self._answer.bodies[0]
        assert isinstance(first, BlockBody)
        await first.wait_ready()
        self._answer.cache_status = self._cache_status(first)
        return self._hand_out()

    def _hand_out(self) -> Answer:
        answer, self._answer = self._answer, None
        assert answer is not None
        return answer

    def _is_ready(self, answer: Answer) -> bool:
        """Whether it can begin in this turn; what is missing is asked for by that."""
        if not answer.bodies:
            answer.cache_status = self._bodiless_status(answer)
            return True
        first = answer.bodies[0]
        assert isinstance(first, BlockBody)
        is_ready = first.is_ready()
        if is_ready:
            answer.cache_status = self._cache_status(first)
        return is_ready

    def _is_doubted(self, answer: Answer) -> bool:
        """Whether a peer names another version than we know: either may be the newer one, so look first."""
        return self._admitted.hop is not None and answer.decision.status == 412

    def _cache_status(self, first: BlockBody) -> str:
        assert self._source is not None
        return _OTHERS.get(self._source.name) or _OWN[first.outcome]

    def _bodiless_status(self, answer: Answer) -> str:
        """The Cache-Status of an answer without a body: that of a GET, by whether the object's first block is stored. In a turn."""
        source = self._source
        assert source is not None
        key, shape = answer.begins
        if not isinstance(source, StoreSource) or not shape.size_bytes:
            return answer.cache_status
        stored = source.store.stored_frame(source.store.key(key, shape, 0))
        return HIT if stored is not None else MISS

    # What is sent

    def _plan(self, shape: Shape) -> Answer:
        decision = self._decide(shape)
        answer = self._of_blocks(shape, decision, (), begins=(self._admitted.key, shape))
        if self._has_body(decision):
            assert self._source is not None
            body = BlockBody(
                self._source, self._admitted.key, shape,
                start=decision.start, length_bytes=decision.length_bytes, wake=self._wake,
                told=self._told,
            )  # fmt: skip
            answer.bodies.append(body)
        return answer

    def _plan_tagged(self, tagged: Tagged) -> Answer:
        shape = tagged.shape
        decision = self._decide(shape)
        begins = (tag_key(tagged.tag_id), tagged.tag)
        return self._of_blocks(shape, decision, tagged.pieces(decision), begins=begins)

    def _decide(self, shape: Shape) -> Decision:
        return decide(self._request.method, self._request.fields, shape)

    def _has_body(self, decision: Decision) -> bool:
        return decision.length_bytes > 0 and self._request.method != "HEAD"

    def _of_blocks(
        self,
        shape: Shape,
        decision: Decision,
        pieces: Sequence[Piece],
        *,
        begins: tuple[str, Shape],
    ) -> Answer:
        assert self._source is not None
        bodies: list[Body] = []
        for piece in pieces if self._has_body(decision) else ():
            body = BlockBody(
                self._source_of(piece.key),
                piece.key, piece.shape,
                start=piece.start, length_bytes=piece.length_bytes, wake=self._wake,
                told=self._told,
            )  # fmt: skip
            bodies.append(body)
        return Answer(shape, decision, bodies, _OTHERS.get(self._source.name, HIT), begins)

    def _source_of(self, key: str) -> Source:
        """A tag may be kept by other nodes than its track."""
        assert self._source is not None
        is_track = key == self._admitted.key
        return self._source if is_track else self._plane.source(key, self._admitted)

    async def _tagged(self, source: Source, shape: Shape, tag: str) -> Tagged:
        plane, key = self._plane, self._admitted.key
        tag_shape = await plane.source(tag_key(tag), self._admitted).shape(tag_key(tag))
        skipped = plane.own_tags.find(key, shape)
        if skipped is None:
            span = Span(0, min(START_BYTES, shape.size_bytes))
            start = await source.block(key, shape, 0, span) if span.end else b""
            skipped = plane.own_tags.keep(key, shape, start)
        return Tagged(tag_id=tag, tag=tag_shape, key=key, track=shape, skipped_bytes=skipped)

    # Files of a local store

    def _open_files(self, folder: Path) -> Answer:
        key, tag = self._admitted.key, self._admitted.grant.tag
        opened: dict[str, int] = {}
        try:
            shape = _open_into(opened, folder, key)
            if tag is None:
                decision = self._decide(shape)
                pieces: tuple[Piece, ...] = (
                    Piece(key, shape, decision.start, decision.length_bytes),
                )
            else:
                tagged = self._tagged_file(opened, folder, shape, tag)
                shape = tagged.shape
                decision = self._decide(shape)
                pieces = tagged.pieces(decision)
            wanted = pieces if self._has_body(decision) else ()
            bodies: list[Body] = [
                FileBody(
                    opened.pop(piece.key), piece.start, piece.length_bytes,
                    readers=self._plane.readers, wake=self._wake,
                )
                for piece in wanted
            ]  # fmt: skip
        finally:
            for descriptor in opened.values():
                os.close(descriptor)
        return Answer(shape, decision, bodies, HIT, (key, shape))

    def _tagged_file(self, opened: dict[str, int], folder: Path, shape: Shape, tag: str) -> Tagged:
        key = self._admitted.key
        tag_shape = _open_into(opened, folder, tag_key(tag))
        skipped = self._plane.own_tags.find(key, shape)
        if skipped is None:
            start = os.pread(opened[key], START_BYTES, 0)
            skipped = self._plane.own_tags.keep(key, shape, start)
        return Tagged(tag_id=tag, tag=tag_shape, key=key, track=shape, skipped_bytes=skipped)


def _open_into(opened: dict[str, int], folder: Path, key: str) -> Shape:
    opened[key], shape = open_object(folder, key)
    return shape
