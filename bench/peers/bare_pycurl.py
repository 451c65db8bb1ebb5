"""What any fetcher on this machine is bounded by: pycurl's multi loop, 100 at once, SHA-256, and a
durable write of each photo (file, rename, folder) in 16 threads. No queue, no checks, no database.

`python -m bench.peers.bare_pycurl URLS FOLDER`
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from io import BytesIO
from pathlib import Path

import pycurl

AT_ONCE = 100
THREADS = 16
UNWRITTEN_MAX = 400


def main(urls: list[str], folder: Path) -> None:
    """Fetch all of them and print how long it took."""
    folder.mkdir()
    for number in range(256):
        (folder / f"{number:02x}").mkdir()
    began_s = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as threads:
        writes = _download(deque(urls), folder, threads)
        stored = sum(write.result() for write in writes)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    seconds = time.perf_counter() - began_s
    cpu_s = usage.ru_utime + usage.ru_stime
    print(json.dumps({"stored": stored, "seconds": seconds, "cpu_s": cpu_s}))


def _download(urls: deque[str], folder: Path, threads: ThreadPoolExecutor) -> list[Future[int]]:
    multi, idle, busy = pycurl.CurlMulti(), [pycurl.Curl() for _ in range(AT_ONCE)], 0
    multi.setopt(pycurl.M_MAXCONNECTS, 256)
    writes: list[Future[int]] = []
    unwritten: set[Future[int]] = set()
    while urls or busy:
        while urls and idle:
            handle = idle.pop()
            handle.body = BytesIO()
            handle.setopt(pycurl.URL, urls.popleft())
            handle.setopt(pycurl.FAILONERROR, 1)
            handle.setopt(pycurl.WRITEDATA, handle.body)
            multi.add_handle(handle)
            busy += 1
        multi.select(0.05)
        multi.perform()
        _left, done, failed = multi.info_read()
        assert not failed, failed[0][1:]
        for handle in done:
            multi.remove_handle(handle)
            busy -= 1
            idle.append(handle)
            body = handle.body.getvalue()
            unwritten.add(threads.submit(_store, folder, body, hashlib.sha256(body).hexdigest()))
        if len(unwritten) > UNWRITTEN_MAX:
            written, unwritten = wait(unwritten, return_when="FIRST_COMPLETED")
            writes += written
    return [*writes, *unwritten]


def _store(folder: Path, body: bytes, name: str) -> int:
    place = folder / name[:2]
    draft = place / f"{name}.draft"
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        os.write(file, body)
        os.fsync(file)
    finally:
        os.close(file)
    draft.rename(place / name)
    directory = os.open(place, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return 1


if __name__ == "__main__":
    main(Path(sys.argv[1]).read_text().split(), Path(sys.argv[2]))
