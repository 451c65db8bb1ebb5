"""Check and convert all stored objects, at a limited rate, and continue after every restart.

One workflow per folder reads its keys in order, in pages. A page is a job that begins after the
last key of the page before, so a killed walk continues there. Every object takes a rate token.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from heapq import nsmallest

from headrace import Headrace
from headrace.jobs import WorkflowContext, current_job
from headrace.media.errors import ObjectUnknown

app = Headrace()
FOLDERS = [f"photos/{n:02x}" for n in range(256)]
PAGE = 500
app.limiter("store", rate="50/s", concurrency=4)


@app.workflow("convert")
async def convert_folder(ctx: WorkflowContext, folder: str) -> None:
    """Convert a folder page by page. The recorded steps are the position."""
    after: str | None = ""
    while after is not None:
        page = convert_page.job(folder=folder, after=after, lane="store")
        after = await ctx.run(f"after {after}", page)


@app.task("convert.page", limiter="store", keep_result=True, retries=20, timeout="1h")
async def convert_page(folder: str, after: str) -> str | None:
    """Convert the objects of a page. Return its last key; None: the folder has no more."""
    keys = [info.key async for info in app.engines.blobs.list(folder) if info.key > after]
    page = nsmallest(PAGE, keys)
    for key in page:
        await convert(key)
    return page[-1] if len(keys) > PAGE else None


async def convert(key: str) -> None:
    """Convert one object. An object that is already converted is skipped and takes no token."""
    target = f"converted/{key}.gz"
    if await is_stored(target):
        return
    await current_job().lane.spend(1)
    data = await app.engines.blobs.get(key)
    if hashlib.sha256(data).hexdigest() not in key:
        print(f"damaged: {key}", flush=True)  # here: fetch it again, or copy it from a backup
        return
    await app.media.objects.put(target, gzip.compress(data, mtime=0))
    print(f"converted: {key}", flush=True)


async def is_stored(key: str) -> bool:
    """Whether the object exists."""
    try:
        await app.media.objects.info(key)
    except ObjectUnknown:
        return False
    return True


async def main() -> None:
    """Start a workflow for each folder that has no unfinished one."""
    for folder in FOLDERS:
        await convert_folder.enqueue(folder=folder, unique=folder)
    await app.close()


if __name__ == "__main__":
    asyncio.run(main())
