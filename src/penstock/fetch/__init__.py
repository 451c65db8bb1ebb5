"""Fetch: sellers' catalogues and their photos, brought in politely and safely.

    file --readers--> rows --intake--> staged --diff--> items, needs --jobs--> photos --> links
                                                              `--group done--> publish --> results --> on_item

**Promise.** Every row and every photo of a run ends in exactly one outcome and the counts add up. A run is
applied whole or not at all. No connection is ever opened to a forbidden address. A stored photo's row
always has its bytes; one content is stored once. The newest version of an item reaches each recorded
consumer at least once, never an older one after it. A photo without a good copy is asked again by every
run that has its link. A customer's rate and connections are the lane of its photo jobs.

**Everything is in PostgreSQL** (customers, runs, items, links, results), the bytes in the object store; the
photo queue is `fetch.30s`. **Limits**: `model.py`, section `fetch` of the configuration.

**Files**: hearts `guard.py` (which URLs and addresses may be asked), `readers/` and `intake.py` (files to
rows), `catalogues.py` (a run, its diff in `sql/runs.sql`), `download.py` with `transfers.py` and `names.py`
(one photo from a stranger), `images.py`, `photos.py` (the photo task), `publishing.py` (results and
their delivery), `consumers.py` (to whom), `outcomes.py` (in plain words); then `model`, `store` + `sql/`, `service`, `http`, `cli`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.fetch.model import (
    Consumer,
    Customer,
    FetchConfig,
    Item,
    ItemPhoto,
    Link,
    PhotoProblem,
    PhotoReport,
    Result,
    RowProblem,
    Run,
    RunState,
    StoredItem,
    UrlReport,
)

if TYPE_CHECKING:
    from penstock.fetch.service import Fetch as Fetch

__all__ = [
    "Consumer",
    "Customer",
    "Fetch",
    "FetchConfig",
    "Item",
    "ItemPhoto",
    "Link",
    "PhotoProblem",
    "PhotoReport",
    "Result",
    "RowProblem",
    "Run",
    "RunState",
    "StoredItem",
    "UrlReport",
]


def __getattr__(name: str) -> Any:
    """Import the service on first use: it needs the extra `penstock[fetch]`, the values do not."""
    if name == "Fetch":
        from penstock.fetch.service import Fetch

        return Fetch
    raise AttributeError(f"module 'penstock.fetch' has no attribute {name!r}")
