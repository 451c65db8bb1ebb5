"""A program that runs the engines of a folder until SIGTERM and prints their URLs as JSON."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from headrace.engines.embedded import EmbeddedEngines
from headrace.kernel.errors import HeadraceError


async def main(folder: Path, *, durable: bool) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    engines = EmbeddedEngines(folder, durable=durable)
    try:
        endpoints = await engines.start()
    except HeadraceError as error:
        print(json.dumps({"code": error.code, "text": error.text}), flush=True)
        return error.exit_code
    facts = {
        "uid": os.geteuid(),
        "postgres_url": endpoints.postgres_url,
        "valkey_url": endpoints.valkey_url,
        "postgres_pid": engines.postgres_pid,
        "valkey_pid": engines.valkey_pid,
    }
    print(json.dumps(facts), flush=True)
    await stop.wait()
    await engines.stop()
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(Path(sys.argv[1]), durable="--not-durable" not in sys.argv)))
