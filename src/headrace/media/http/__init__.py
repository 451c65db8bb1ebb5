"""The HTTP API of media, under `/v1/media`: each route parses, calls one verb and answers.

The bytes themselves are served by the media role at `/m/`.
"""

from __future__ import annotations

from typing import Any, Final

from headrace.media.http import (
    disks,
    hottest,
    nodes,
    objects,
    partitions,
    purging,
    signing,
    tracing,
)

ROUTES: Final[list[Any]] = [
    *objects.ROUTES,
    *purging.ROUTES,
    *signing.ROUTES,
    *tracing.ROUTES,
    *nodes.ROUTES,
    *partitions.ROUTES,
    *disks.ROUTES,
    *hottest.ROUTES,
]
