"""Scrapy's images pipeline: 200 requests at once, no delay, no retries, one process, uvloop.

It decodes each picture and encodes it again, and never syncs. `python -m bench.peers.scrapy_images
URLS FOLDER`
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from scrapy import Spider
from scrapy.crawler import CrawlerProcess

SETTINGS = {
    "ITEM_PIPELINES": {"scrapy.pipelines.images.ImagesPipeline": 1},
    "CONCURRENT_REQUESTS": 200,
    "CONCURRENT_REQUESTS_PER_DOMAIN": 200,
    "CONCURRENT_ITEMS": 200,
    "DOWNLOAD_DELAY": 0,
    "RETRY_ENABLED": False,
    "ROBOTSTXT_OBEY": False,
    "COOKIES_ENABLED": False,
    "TELNETCONSOLE_ENABLED": False,
    "LOG_LEVEL": "ERROR",
    "TWISTED_REACTOR": "twisted.internet.asyncioreactor.AsyncioSelectorReactor",
    "ASYNCIO_EVENT_LOOP": "uvloop.Loop",
}


class Photos(Spider):
    """An item a photo."""

    name = "photos"

    async def start(self) -> AsyncIterator[Any]:
        """The items; the pipeline does the rest."""
        for url in self.urls:
            yield {"image_urls": [url], "images": []}


def main(urls: list[str], folder: Path) -> None:
    """Bring all of them in and count what was stored."""
    process = CrawlerProcess({**SETTINGS, "IMAGES_STORE": str(folder)})
    process.crawl(Photos, urls=urls)
    process.start()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    stored = sum(1 for path in folder.rglob("*.jpg"))
    print(json.dumps({"stored": stored, "cpu_s": usage.ru_utime + usage.ru_stime}))


if __name__ == "__main__":
    main(Path(sys.argv[1]).read_text().split(), Path(sys.argv[2]))
