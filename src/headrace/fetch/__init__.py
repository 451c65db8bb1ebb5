"""Fetch: import sellers' catalogues and download their photos, politely and safely.

    file --readers--> rows --validation--> staged --diff--> items, required photos
    required photos --jobs--> photos --> links
    items --group done--> results --> consumers

**Promise.** Every row and every photo of a run ends in exactly one outcome, and the counts add up.
A run is applied completely or not at all. No connection is opened to a forbidden address. A stored
photo's row always has its bytes, and one content is stored once. Each recorded consumer receives
the newest version of an item at least once, and never an older one after it. A webhook receives
every result in the order of commits. A customer's rate limit holds in every window of its hosts'
own logs. A slow host delays no other. A broken link skips some runs and is requested again within
a day.

**State.** PostgreSQL stores customers, runs, items, links, statistics and results; the object
store stores the bytes. The photo queues are the timeout classes `fetch.1s`, `fetch.5s` and
`fetch.30s` under the limiter `fetch`, whose lanes are the customers. **Limits**: `model.py`;
section `fetch` of the configuration.

**Critical rules.** `guard.py`: which URLs and addresses are allowed. `host_stats.py`: the timeout
class in which a photo starts. `service/`: deadlines of items and the backoff of failed links.
`webhook_delivery.py`: results to foreign systems.

A photo's life, from its row in a catalogue to the published item:

| step | file |
| --- | --- |
| 1. the run enqueues a job per photo | `applying.py`, `store/runs.py`, `sql/photos.sql` |
| 2. the host's statistics select the queue | `host_stats.py` |
| 3. the job checks limits and fetches | `photo_fetch.py`, `limits.py`, `robots.py` |
| 4. the download | `download.py`, `guard.py`, `dns.py`, `curl.py` |
| 5. the bytes are checked and stored | `photo_fetch.py`, `images.py`, `decoding/` |
| 6. the item is checked | `publish_check.py` |
| 7. it is published and delivered | `publishing.py`, `consumers.py`, `webhook_delivery.py` |

Photos that look alike: `duplicates.py`.

Catalogues: `readers/`, `validation.py`, `schemas.py`, `catalogues.py`, `applying.py`,
`supplements.py`, `sources.py`. For sellers: `reports.py`, `seller_page.py`, `i18n/`. Download
times: `study.py`. Then `model.py`, `outcomes.py`,
`settings.py`, `errors.py`, and by topic `store/` with `sql/`, `service/`, `http/`, `cli/`.
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
    SellerLink,
    SentItem,
    Source,
    StoredItem,
    UrlReport,
    Webhook,
)
from headrace.fetch.settings import FetchConfig

if TYPE_CHECKING:
    from headrace.fetch.mappings import Mapping as Mapping
    from headrace.fetch.publish_check import Hold as Hold
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
    "Hold",
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
    "SellerLink",
    "SentItem",
    "Source",
    "StoredItem",
    "UrlReport",
    "Webhook",
]


_LAZY: Final = {
    "Fetch": "headrace.fetch.service",
    "Hold": "headrace.fetch.publish_check",
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
