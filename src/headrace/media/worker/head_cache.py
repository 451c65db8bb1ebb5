"""The meaning of a known request head, and an answer in progress."""

from __future__ import annotations

from typing import Final, NamedTuple

from headrace.media import answers
from headrace.media.model import Shape
from headrace.media.signing import UrlRights
from headrace.media.worker.bodies import BlockBody

NOTHING: Final = memoryview(b"")
_SPAN: Final = b"Content-Length: %d\r\nContent-Range: bytes %d-%d/%d\r\n"
_WHOLE: Final = b"Content-Length: %d\r\n"


class CachedHead:
    """The meaning of one head without its Range, and answer lines that are valid for a second.

    For the head of a hop, `target` and `if_match` are covered by its signature.
    """

    __slots__ = (
        "_cors",
        "_made_s",
        "_rights",
        "_starts",
        "expires_at",
        "if_match",
        "is_remote",
        "key",
        "placement",
        "shape",
        "target",
    )

    def __init__(
        self,
        key: str,
        rights: UrlRights,
        placement: object,
        *,
        target: str = "",
        if_match: str = "",
        is_remote: bool = False,
        cors: str = "",
    ) -> None:
        self.key = key
        self.target = target
        self.if_match = if_match
        self.is_remote = is_remote
        """Whether only other nodes keep the key."""
        self.expires_at = rights.expires_at
        self.placement = placement
        self.shape: Shape | None = None
        self._rights = rights
        self._cors = cors
        self._made_s = 0
        self._starts: dict[bool, bytes] = {}

    def render_head(
        self, shape: Shape, start: int, end: int, now_s: int, *, is_part: bool
    ) -> bytes:
        """The head of an answer with bytes `start` up to `end`, without its empty line."""
        if self._made_s != now_s or self.shape is not shape:
            self._made_s, self.shape = now_s, shape
            self._starts.clear()
        begin = self._starts.get(is_part) or self._make_start(shape, now_s, is_part=is_part)
        if is_part:
            return begin + _SPAN % (end - start, start, end - 1, shape.size_bytes)
        return begin + _WHOLE % shape.size_bytes

    def _make_start(self, shape: Shape, now_s: int, *, is_part: bool) -> bytes:
        """The lines before those of the span."""
        lines = answers.steady_lines(
            206 if is_part else 200,
            shape,
            key=self.key,
            rights=self._rights,
            cache_status=answers.PEER if self.is_remote else answers.HIT,
            cors=self._cors,
            now_s=now_s,
        )
        start = self._starts[is_part] = lines.encode("latin-1")
        return start


class StartedAnswer(NamedTuple):
    """An answer in progress. The socket has not taken `out` and `body` yet."""

    moved_bytes: int
    out: memoryview
    body: BlockBody | None
