"""The site's pages as a server runs them.

`uvicorn examples.bazaar.site:web`, beside `headrace up`.
"""

from __future__ import annotations

from typing import Final

from examples.bazaar.app import adverts, app, records
from examples.bazaar.shop import make_web

web: Final = make_web(app, adverts, records)
