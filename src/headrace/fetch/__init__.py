"""Fetch: sellers' catalogues and their photos, brought in politely and safely.

    file --readers--> rows --intake--> staged --diff--> items, needs --jobs--> photos --> links
                                                              `--group done--> publish --> results --> consumers

**Promise.** Every row and every photo of a run ends in exactly one outcome and the counts add up. A run is
applied whole or not at all. No connection is ever opened to a forbidden address. A stored photo's row
always has its bytes; one content is stored once. The newest version of an item reaches each recorded
consumer at least once, never an older one after it; a webhook is told every result, in the order of commits.
A customer's rate holds in every window of its hosts' own logs; a slow host delays nobody beside it. A broken
link sits out some runs and is asked again within a day.

**Everything is in PostgreSQL** (customers, runs, items, links, speeds, results), the bytes in the object store.
The photo queues are the timeout classes, `fetch.1s`, `fetch.5s`, `fetch.30s`, under the one limiter `fetch` whose
lanes are the customers. **Limits**: `model.py`, section `fetch` of the configuration.

**Hearts.** `guard.py`: which URLs and addresses may be asked. `routing.py`: in which class a photo starts.
`upkeep.py`: deadlines of items, and when a failed link is asked again. `webhooks.py`: results to somebody else's system.

| what | files |
| --- | --- |
| a file becomes rows | `readers/`, `mappings.py` (what foreign names mean), `sources.py` (files at a URL) |
| a row is judged | `item_ids.py`, `intake.py`, `schemas.py` with `kinds.py` and `schema_rules.py`, `door.py` (its links) |
| a run | `catalogues.py`, `staging.py`, `applying.py` (the diff is in `sql/runs.sql`), `sampling.py` (dry runs), `sent.py` (items without a file) |
| a photo's job | `photos.py`, `asking.py` (one host for one photo), `ledger.py` with `gathering.py` (rows of many at a time) |
| politeness | `starts.py`, `lanes.py`, `places.py`, `share.py`, `robots.py`, `speeds.py` (what was measured) |
| a body from a stranger | `download.py`, `hop.py`, `body.py`, `names.py`, `transfers.py` |
| a body becomes a photo | `keeping.py`, `images.py` (headers), `decoding/` (whole, in a guarded child), `outages.py` |
| results | `publishing.py`, `consumers.py` (to whom), `webhooks.py` with `posting.py` |
| in plain words | `texts/`, `outcomes.py`, `reports.py` |

Then `model.py`, `settings.py`, `errors.py`, and by topic `store/` + `sql/`, `service/`, `http/`, `cli/`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from headrace.fetch.model import (
    Change,
    Consumer,
    Customer,
    CustomerSet,
    Item,
    ItemPhoto,
    Link,
    PhotoProblem,
    PhotoReport,
    Result,
    RowProblem,
    Run,
    RunState,
    Sample,
    SentItem,
    Source,
    StoredItem,
    UrlReport,
    Webhook,
)
from headrace.fetch.settings import FetchConfig

if TYPE_CHECKING:
    from headrace.fetch.mappings import Mapping as Mapping
    from headrace.fetch.schemas import FieldRule as FieldRule
    from headrace.fetch.schemas import Schema as Schema
    from headrace.fetch.service import Fetch as Fetch

__all__ = [
    "Change",
    "Consumer",
    "Customer",
    "CustomerSet",
    "Fetch",
    "FetchConfig",
    "FieldRule",
    "Item",
    "ItemPhoto",
    "Link",
    "Mapping",
    "PhotoProblem",
    "PhotoReport",
    "Result",
    "RowProblem",
    "Run",
    "RunState",
    "Sample",
    "Schema",
    "SentItem",
    "Source",
    "StoredItem",
    "UrlReport",
    "Webhook",
]


_LAZY: Final = {
    "Fetch": "headrace.fetch.service",
    "FieldRule": "headrace.fetch.schemas",
    "Mapping": "headrace.fetch.mappings",
    "Schema": "headrace.fetch.schemas",
}


def __getattr__(name: str) -> Any:
    """Import what needs the extra `fetch` on first use; the values above do not."""
    module = _LAZY.get(name)
    if module is not None:
        return getattr(import_module(module), name)
    raise AttributeError(f"module 'headrace.fetch' has no attribute {name!r}")
