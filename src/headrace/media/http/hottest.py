"""The route about what is asked for most of the node on the API's own machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

from litestar import get
from litestar.di import NamedDependency
from litestar.params import QueryParameter

from headrace.media.http.scopes import READ
from headrace.media.service import Media
from headrace.media.service.hottest import OBJECTS_MAX, HotObject


@get(
    "/v1/media/hottest",
    operation_id="listHottestMedia",
    summary="List the objects asked for most",
    opt=READ,
)
async def list_hottest(
    media: NamedDependency[Media],
    limit: Annotated[int, QueryParameter(ge=1, le=OBJECTS_MAX)] = 20,
) -> Sequence[HotObject]:
    """The objects that clients ask the node of the API's machine for most, by requests a second of the last minutes."""
    return await media.hottest(objects_max=limit)


ROUTES: Final[list[Any]] = [list_hottest]
