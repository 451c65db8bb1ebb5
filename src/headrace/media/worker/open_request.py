"""From an admitted request to its answer: shapes, the decision, the first bytes.

A request for a variant of an image becomes one for the object that holds it, once the version of
the original is known. If no such object exists, it is made first (`worker.variants`).

`now` answers within the epoch that read the request, if all is available: a file, or a cached shape
and a block on the node's disks. Otherwise `later` is awaited, without an epoch. If the object turns
out to be another version before the head is sent, it is read again once; after that it is an error
of the store.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from headrace.kernel.logs import onward
from headrace.media import answers
from headrace.media.answers import HIT, MISS, PEER
from headrace.media.errors import ObjectUnknown, SourceCut
from headrace.media.header_rules import rule_for
from headrace.media.id3 import START_BYTES, Piece, TaggedTrack, tag_key
from headrace.media.model import Shape, content_address
from headrace.media.ranges import Decision, decide
from headrace.media.requests import Request
from headrace.media.sources import CacheSource, Source, Span, open_object, store_down
from headrace.media.variants import Variant, variant_key
from headrace.media.worker.bodies import BlockBody, Body, FileBody
from headrace.media.worker.request_context import Admitted, RequestContext

_OWN: Final = {
    "hit": HIT,
    "miss": "headrace; fwd=miss; stored",
    "pass": MISS,
}
_OTHERS: Final = {"peer": PEER, "origin": "headrace; fwd=bypass"}


@dataclass(slots=True)
class Answer:
    """The answer to a request. `bodies` are sent in order, each a span of an object."""

    shape: Shape
    decision: Decision
    bodies: list[Body]
    cache_status: str
    begins: tuple[str, Shape]
    """Key and shape of the object of the first byte."""
    key: str
    """Gives the content type."""

    def close(self) -> None:
        """Release what was opened for the answer."""
        for body in self.bodies:
            body.close()


def render_head(
    context: RequestContext,
    request: Request,
    admitted: Admitted,
    answer: Answer,
    *,
    keeps_alive: bool,
) -> bytes:
    """The head of an answer with an object."""
    decision, shape = answer.decision, answer.shape
    cors = context.cors.lines(request.fields)
    if admitted.variant is not None:
        # Made once of an original that its key names by content.
        shape = replace(shape, is_immutable=content_address(admitted.key) is not None)
        if admitted.variant.is_negotiated:
            cors = vary_by_accept(cors)
    return answers.object_head(
        request,
        decision,
        shape,
        key=answer.key,
        rights=admitted.rights,
        cache_status=answer.cache_status,
        keeps_alive=keeps_alive,
        cors=cors,
        rule=rule_for(context.config.headers, admitted.key),
        extra=context.proof(admitted.hop, shape.etag, decision.start, decision.length_bytes),
    )


def vary_by_accept(lines: str) -> str:
    """Lines of a head with `Vary: Accept`; a field comes once."""
    if "Vary: Origin\r\n" in lines:
        return lines.replace("Vary: Origin\r\n", "Vary: Origin, Accept\r\n")
    return f"Vary: Accept\r\n{lines}"


def render_plain(
    context: RequestContext, request: Request, *, is_stopping: bool
) -> tuple[int, bytes]:
    """Status and answer to OPTIONS and health checks."""
    keeps_alive = request.keeps_alive and not is_stopping
    if request.method == "OPTIONS":
        cors = context.cors.preflight_lines(request.fields)
        return 204, answers.options(request, cors=cors, keeps_alive=keeps_alive)
    status = 503 if is_stopping else 200
    return status, answers.health(status, request, keeps_alive=keeps_alive)


class OpenRequest:
    """Finds the answer to one request. Nothing stays open when it raises or is closed."""

    __slots__ = (
        "_admitted",
        "_answer",
        "_context",
        "_is_made",
        "_key",
        "_request",
        "_source",
        "_trace_fields",
        "_wake",
    )

    def __init__(
        self,
        context: RequestContext,
        request: Request,
        admitted: Admitted,
        *,
        wake: Callable[[], None],
    ) -> None:
        self._context = context
        self._request = request
        self._admitted = admitted
        self._key = admitted.key
        """The key of the object to send: the variant's, once it is known."""
        self._wake = wake
        self._trace_fields = context.trace_fields(admitted)
        self._source: Source | None = None
        self._answer: Answer | None = None
        self._is_made = False
        """Whether the variant was made for this request."""

    def now(self) -> Answer | None:
        """The answer if it can start in this epoch. Raises: as `later`."""
        admitted = self._admitted
        if self._context.folder is not None:
            return self._files_now(self._context.folder)
        source = self._source = self._context.source(self._key, admitted)
        shape = source.shape_now(self._key)
        if shape is None or admitted.rights.tag is not None:
            return None
        if admitted.variant is not None:
            if not self._use_variant(shape, admitted.variant):
                return None
            shape = self._source.shape_now(self._key)
            if shape is None:
                return None
        answer = self._plan(shape)
        if self._is_doubted(answer):
            return None
        self._answer = answer
        return answer if self._is_ready(answer) else None

    async def later(self) -> Answer:
        """The answer with its first bytes ready. Raises: ObjectUnknown, StoreUnavailable."""
        # In the request's own task: reads of the object store carry its trace fields.
        onward.set(self._trace_fields)
        try:
            try:
                answer = await self._wait()
            except SourceCut:
                # The cached shape is outdated: read it again once.
                self.close()
                answer = await self._wait(is_fresh=True)
        except SourceCut as error:
            self.close()
            raise store_down(error) from error
        except BaseException:
            self.close()
            raise
        if self._is_made and answer.cache_status == HIT:
            answer.cache_status = _OWN["miss"]
        return answer

    def close(self) -> None:
        """Release what was opened and not handed out."""
        if self._answer is not None:
            self._answer.close()
            self._answer = None

    async def _wait(self, *, is_fresh: bool = False) -> Answer:
        tag = self._admitted.rights.tag
        if self._answer is None:
            shape = await self._shape(is_fresh=is_fresh)
            if self._context.folder is not None:
                return self._open_files(self._context.folder)
            source = self._source
            assert source is not None, "the shape has one"
            tagged = await self._tagged(source, shape, tag) if tag is not None else None
            self._answer = self._plan(shape, tagged)
            if not is_fresh and self._is_doubted(self._answer):
                raise SourceCut("a node of the cluster has another version of the object")
            with self._context.epoch:
                is_ready = self._is_ready(self._answer)
            if is_ready:
                return self._hand_out()
        first = self._answer.bodies[0]
        assert isinstance(first, BlockBody)
        await first.wait_ready()
        self._answer.cache_status = self._cache_status(first)
        return self._hand_out()

    async def _shape(self, *, is_fresh: bool) -> Shape:
        """The shape of the object to send; a missing variant is made."""
        context, admitted = self._context, self._admitted
        self._key = admitted.key
        source = self._source = context.source(self._key, admitted)
        shape = await context.shape(source, self._key, is_fresh=is_fresh)
        if admitted.variant is None:
            return shape
        if not self._use_variant(shape, admitted.variant):
            shape = await context.shape(source, admitted.key, is_fresh=True)
            if not self._use_variant(shape, admitted.variant):
                raise ObjectUnknown("this node has another version of the original")
        try:
            return await context.shape(self._source, self._key, is_fresh=is_fresh)
        except ObjectUnknown:
            maker, is_hop = context.variants, admitted.hop is not None
            await maker.make(admitted.key, shape, admitted.variant, is_hop=is_hop)
            self._is_made = True
        return await context.shape(self._source, self._key, is_fresh=True)

    def _use_variant(self, original: Shape, variant: Variant) -> bool:
        """Continue with the variant of `original`; False: another version of it is requested."""
        context, key = self._context, self._admitted.key
        version = context.variants.version(key, original)
        if variant.version not in ("", version):
            return False
        self._key = variant_key(key, version, variant)
        self._source = context.source(self._key, self._admitted)
        return True

    def _hand_out(self) -> Answer:
        answer, self._answer = self._answer, None
        assert answer is not None
        return answer

    def _is_ready(self, answer: Answer) -> bool:
        """Whether the answer can start in this epoch; if not, what is missing is requested."""
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
        """Whether a peer names another version. Either may be newer, so read the shape first."""
        return self._admitted.hop is not None and answer.decision.status == 412

    def _cache_status(self, first: BlockBody) -> str:
        assert self._source is not None
        return _OTHERS.get(self._source.name) or _OWN[first.outcome]

    def _bodiless_status(self, answer: Answer) -> str:
        """The Cache-Status of an answer without a body, as for a GET. Call it within an epoch."""
        source = self._source
        assert source is not None
        key, shape = answer.begins
        if not isinstance(source, CacheSource) or not shape.size_bytes:
            return answer.cache_status
        stored = source.store.stored_frame(source.store.key(key, shape, 0))
        return HIT if stored is not None else MISS

    # What is sent

    def _pieces(
        self, shape: Shape, tagged: TaggedTrack | None
    ) -> tuple[Shape, Decision, Sequence[Piece]]:
        """The shape of the whole, and what to send of it, in order."""
        whole = shape if tagged is None else tagged.shape
        decision = decide(self._request.method, self._request.fields, whole)
        if not decision.length_bytes or self._request.method == "HEAD":
            return whole, decision, ()
        if tagged is not None:
            return whole, decision, tagged.pieces(decision)
        return whole, decision, (Piece(self._key, shape, decision.start, decision.length_bytes),)

    def _plan(self, shape: Shape, tagged: TaggedTrack | None = None) -> Answer:
        """The answer by blocks."""
        assert self._source is not None
        whole, decision, pieces = self._pieces(shape, tagged)
        bodies: list[Body] = [
            BlockBody(
                self._source_of(piece.key),
                piece.key,
                piece.shape,
                start=piece.start,
                length_bytes=piece.length_bytes,
                wake=self._wake,
                trace_fields=self._trace_fields,
            )
            for piece in pieces
        ]
        status = _OTHERS.get(self._source.name, HIT)
        begins = (self._key, shape) if tagged is None else (tag_key(tagged.tag_id), tagged.tag)
        return Answer(whole, decision, bodies, status, begins, self._key)

    def _source_of(self, key: str) -> Source:
        """Other nodes may keep the tag than keep its track."""
        assert self._source is not None
        return self._source if key == self._key else self._context.source(key, self._admitted)

    async def _tagged(self, source: Source, shape: Shape, tag: str) -> TaggedTrack:
        context, key = self._context, self._admitted.key
        tag_shape = await context.source(tag_key(tag), self._admitted).shape(tag_key(tag))
        skipped = context.own_tags.find(key, shape)
        if skipped is None:
            span = Span(0, min(START_BYTES, shape.size_bytes))
            start = await source.block(key, shape, 0, span) if span.end else b""
            skipped = context.own_tags.keep(key, shape, start)
        return TaggedTrack(tag_id=tag, tag=tag_shape, key=key, track=shape, skipped_bytes=skipped)

    # Files of a local store

    def _files_now(self, folder: Path) -> Answer | None:
        variant = self._admitted.variant
        try:
            if variant is None:
                return self._open_files(folder)
            descriptor, shape = open_object(folder, self._key)
            os.close(descriptor)
        except ObjectUnknown:
            self._context.require_store()
            raise
        self._use_variant(shape, variant)
        try:
            return self._open_files(folder)
        except ObjectUnknown:
            return None

    def _open_files(self, folder: Path) -> Answer:
        key, tag = self._key, self._admitted.rights.tag
        opened: dict[str, int] = {}
        try:
            shape = _open_into(opened, folder, key)
            tagged = self._tagged_file(opened, folder, shape, tag) if tag is not None else None
            whole, decision, pieces = self._pieces(shape, tagged)
            bodies: list[Body] = [
                FileBody(
                    opened.pop(piece.key),
                    piece.start,
                    piece.length_bytes,
                    readers=self._context.readers,
                    wake=self._wake,
                )
                for piece in pieces
            ]
        finally:
            for descriptor in opened.values():
                os.close(descriptor)
        return Answer(whole, decision, bodies, HIT, (key, whole), key)

    def _tagged_file(
        self, opened: dict[str, int], folder: Path, shape: Shape, tag: str
    ) -> TaggedTrack:
        key = self._admitted.key
        tag_shape = _open_into(opened, folder, tag_key(tag))
        skipped = self._context.own_tags.find(key, shape)
        if skipped is None:
            start = os.pread(opened[key], START_BYTES, 0)
            skipped = self._context.own_tags.keep(key, shape, start)
        return TaggedTrack(tag_id=tag, tag=tag_shape, key=key, track=shape, skipped_bytes=skipped)


def _open_into(opened: dict[str, int], folder: Path, key: str) -> Shape:
    opened[key], shape = open_object(folder, key)
    return shape
