"""A spool before the API: item files, durable in a folder, sent in order and applied once."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from pathlib import Path

API = os.environ.get("HEADRACE_API", "http://127.0.0.1:8080")
TOKEN = os.environ.get("HEADRACE_TOKEN", "")
SPOOL = Path(os.environ.get("SPOOL", "spool"))
PACKS_MAX = 10_000


def put(items: list[dict]) -> Path:
    """Write a pack durably, to be sent later. Only one program may write to a spool."""
    SPOOL.mkdir(exist_ok=True)
    if len(list(SPOOL.glob("*.json"))) >= PACKS_MAX:
        raise RuntimeError(f"{SPOOL} has {PACKS_MAX} packs: is its sender running?")
    path = SPOOL / f"{time.time_ns():020}.json"
    with path.with_suffix(".part").open("w") as file:
        json.dump(items, file)
        file.flush()
        os.fsync(file.fileno())
    path.with_suffix(".part").rename(path)
    folder = os.open(SPOOL, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
    return path


def send(path: Path) -> None:
    """Send a pack until it is applied or refused. Its name is the idempotency key."""
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    headers["Idempotency-Key"] = f"{SPOOL.resolve().name}-{path.stem}"
    while True:
        request = urllib.request.Request(f"{API}/v1/fetch/items", path.read_bytes(), headers)
        wait_s = 1.0
        try:
            with urllib.request.urlopen(request, timeout=60):
                path.unlink()
                return
        except urllib.error.HTTPError as error:
            if error.code not in (409, 429) and error.code < 500:
                path.rename(path.with_suffix(".refused"))
                print(f"{path.name}: {error.code} {error.read().decode()}", flush=True)
                return
            wait_s = float(error.headers.get("Retry-After", wait_s))
        except OSError:
            pass  # No response: send it again with the same key. It is applied only once.
        time.sleep(wait_s)


def main() -> None:
    """Send the packs of the folder, oldest first, until stopped."""
    while True:
        for path in sorted(SPOOL.glob("*.json")):
            send(path)
        time.sleep(0.5)


if __name__ == "__main__":
    main()
