"""A relay in front of PostgreSQL's socket that counts the bytes of both directions.

    async with relayed(run.engines, folder) as relay:
        ...  # every connection of the block passes the relay
        relay.bytes_so_far()

It is a process of its own, so that its CPU is nobody's cost. A relay adds latency, so only bytes
are counted in a run with it.
"""

from __future__ import annotations

import asyncio
import mmap
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.children import Child, wait_for
from bench.engines import BenchEngines
from bench.harness import READY_S
from bench.machine import ROOT

SOCKET = ".s.PGSQL.5432"
CHUNK_BYTES = 256 * 1024
COUNT = struct.Struct("<Q")


@dataclass(frozen=True)
class Relay:
    """A running relay."""

    count_file: Path

    def bytes_so_far(self) -> int:
        """Bytes of both directions."""
        [found] = COUNT.unpack(self.count_file.read_bytes())
        return int(found)


@asynccontextmanager
async def relayed(engines: BenchEngines, folder: Path) -> AsyncIterator[Relay]:
    """Have all connections of the block pass a relay."""
    count_file, listen = _files_in(folder), folder / SOCKET
    upstream = Path(engines.socket_folder) / SOCKET
    words = [sys.executable, "-m", "bench.relay", str(upstream), str(listen), str(count_file)]
    child = Child(words, folder=folder, env={"PYTHONPATH": str(ROOT)}, name="relay")
    try:
        await wait_for(listen.exists, "the relay", READY_S, child)
        with engines.reached_at(str(folder)):
            yield Relay(count_file)
    finally:
        await child.end()


def _files_in(folder: Path) -> Path:
    folder.mkdir()
    count_file = folder / "count"
    count_file.write_bytes(COUNT.pack(0))
    return count_file


class _Counter:
    """The bytes so far, where another process reads them."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), COUNT.size)
        self._bytes = 0

    def add(self, size_bytes: int) -> None:
        """Count."""
        self._bytes += size_bytes
        COUNT.pack_into(self._shared, 0, self._bytes)


async def _serve(upstream: str, listen: str, counter: _Counter) -> None:
    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while chunk := await reader.read(CHUNK_BYTES):
                counter.add(len(chunk))
                writer.write(chunk)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_unix_connection(upstream)
        await asyncio.gather(copy(reader, server_writer), copy(server_reader, writer))

    server = await asyncio.start_unix_server(accept, listen)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], sys.argv[2], _Counter(Path(sys.argv[3]))))
