"""The route about one link: may it be asked, what came of it, when is it asked next."""

from __future__ import annotations

from typing import Annotated, Any, Final

from litestar import get
from litestar.di import NamedDependency
from litestar.params import QueryParameter

from headrace.fetch.http.scopes import READ
from headrace.fetch.model import UrlReport
from headrace.fetch.service import Fetch


@get(
    "/v1/fetch/why",
    operation_id="getFetchWhy",
    summary="Say why a photo is there or not",
    opt=READ,
)
async def get_why(
    fetch: NamedDependency[Fetch], url: Annotated[str, QueryParameter(max_length=8192)]
) -> UrlReport:
    """Whether the URL may be asked, what every customer's last run made of it, and when it is asked next."""
    return await fetch.why(url)


ROUTES: Final[list[Any]] = [get_why]
