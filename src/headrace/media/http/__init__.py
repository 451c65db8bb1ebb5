"""The HTTP API of media under `/v1/media`. Each route parses, calls one service method and answers.

The media role serves the objects themselves, at `/m/`.
"""

from __future__ import annotations

from typing import Any, Final

from headrace.kernel.routes import routes_in
from headrace.media.http import cluster, objects, uploads

ROUTES: Final[list[Any]] = routes_in(vars(objects), vars(uploads), vars(cluster))
