"""Routes about what all nodes trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from litestar import delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromQuery, JSONBody

from headrace.media.http.scopes import READ, WRITE
from headrace.media.service import Media
from headrace.media.tracing import Watch


class TraceToStart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which requests: `user=42`, `request=r7`, `object=tracks/a.mp3` or `trace=<32 hex digits>`; and for how long."""

    tag: str
    for_s: float = 600.0


@get(
    "/v1/media/traces",
    operation_id="listMediaTraces",
    summary="List what is traced",
    opt=READ,
)
async def list_traces(media: NamedDependency[Media]) -> Sequence[Watch]:
    """Say which requests all nodes log now, and until when."""
    return await media.traces.list()


@post(
    "/v1/media/traces",
    operation_id="startMediaTrace",
    summary="Log certain requests for a while",
    opt=WRITE,
    status_code=200,
)
async def start_trace(media: NamedDependency[Media], data: JSONBody[TraceToStart]) -> Watch:
    """Let every node log the requests with this tag, a line an answer; one that is traced already gets the new end."""
    return await media.traces.start(data.tag, for_s=data.for_s)


@delete(
    "/v1/media/traces",
    operation_id="stopMediaTraces",
    summary="Log them no more",
    opt=WRITE,
    status_code=200,
)
async def stop_traces(
    media: NamedDependency[Media], tag: FromQuery[str | None] = None
) -> Sequence[Watch]:
    """End the watch on `tag`, or all where it is left out; the answer is those that were ended."""
    return await media.traces.stop(tag)


ROUTES: Final[list[Any]] = [list_traces, start_trace, stop_traces]
