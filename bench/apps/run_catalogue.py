"""`python -m bench.apps.run_catalogue FILE CUSTOMER`: run one catalogue by the verb and report what
it took.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import time
from pathlib import Path

from bench.apps.photos import app
from headrace.engines.endpoints import Endpoints


async def main(path: Path, customer: str) -> None:
    """Run it and print JSON."""
    blobs = path.parent.as_uri()
    url = os.environ["HEADRACE_POSTGRES_URL"]
    app.use_endpoints(Endpoints(url, "unix:///nowhere", blobs))
    began_s = time.perf_counter()
    run = await app.fetch.run_catalogue(path, customer)
    seconds = time.perf_counter() - began_s
    rss_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    counts = {"new": run.new, "changed": run.changed, "gone": run.gone, "state": run.state}
    print(json.dumps({**counts, "seconds": seconds, "rss_mib": rss_mib}))
    await app.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
