"""While processes die and objects are evicted and replaced, no client gets a wrong byte.

Every byte is a function of object, version and offset. The disks hold a fifth of the requested
objects, so blocks are evicted all the time, also under readers that stall with whole blocks in
their sockets.
"""

from __future__ import annotations

import asyncio
import random
import time

import pytest
from tests.kit.waiting import wait_true
from tests.kit.whole_nodes import DEADLINE_S, Reader, WholeNode, content, pause, whole_node

from headrace.engines.blobs import Blobs

OBJECTS = 48
SIZE_BYTES = 1_500_000
CLIENTS = 12
SLOW_SHARE = 0.1
SERIES = 'media_blocks_total{outcome="%s"}'


class Shop:
    """Objects, their versions, and what clients received of them."""

    def __init__(self, folder) -> None:
        self.blobs = Blobs((folder / "store").as_uri())
        self.versions = dict.fromkeys((f"tracks/{n}.mp3" for n in range(OBJECTS)), 0)
        self.etags: dict[tuple[str, str], int] = {}
        self.right = self.cut = self.refused = 0
        self.wrong: list[str] = []

    async def fill(self) -> None:
        puts = (self.blobs.put(key, content(key, 0, SIZE_BYTES)) for key in self.versions)
        await asyncio.gather(*puts)

    async def replace(self, key: str) -> None:
        """The next version of an object."""
        version = self.versions[key] + 1
        data = content(key, version, SIZE_BYTES)
        # Counted before it can be seen: a client may get it before the put returns.
        self.versions[key] = version
        await self.blobs.put(key, data)

    def judge(self, key: str, first: int, last: int, found) -> None:
        """What a client got.

        The bytes must be those of one version, and an ETag names one version.
        """
        if found is None:
            self.cut += 1
        elif found[0] == 503:
            self.refused += 1
        else:
            status, etag, body = found
            seen = [v for v in range(self.versions[key] + 1) if _is_of(key, v, first, last, body)]
            known = self.etags.setdefault((key, etag), seen[0]) if seen else None
            if status == 206 and seen and known in seen:
                self.right += 1
            else:
                self.wrong.append(
                    f"{key} {first}-{last} {etag}: {status}, like {seen}, not {known}"
                )


def _is_of(key: str, version: int, first: int, last: int, body: bytes) -> bool:
    return content(key, version, SIZE_BYTES)[first : last + 1] == body


async def listen(shop: Shop, node: WholeNode, chance: random.Random, ends_s: float) -> None:
    """One client after another, each for a while, some of them slow."""
    while time.monotonic() < ends_s:
        # A small window keeps an answer waiting in the node's socket, where its block may be
        # evicted.
        is_slow = chance.random() < SLOW_SHARE
        reader = Reader(node.port, limit=2048 if is_slow else 65_536)
        for _ in range(chance.randint(1, 30)):
            key = chance.choice(list(shop.versions))
            first = chance.randrange(SIZE_BYTES)
            last = min(SIZE_BYTES - 1, first + chance.randrange(700_000))
            pause_s = chance.random() * 0.3 if is_slow else 0.0
            shop.judge(key, first, last, await reader.ask(key, first, last, pause_s=pause_s))
        reader.drop()


async def disturb(shop: Shop, node: WholeNode, chance: random.Random, ends_s: float) -> None:
    """Kill and replace, again and again."""
    while time.monotonic() < ends_s:
        await pause(chance.random() * 0.8)
        deed = chance.choice(["worker", "filler", "replace", "replace"])
        if deed == "replace":
            await shop.replace(chance.choice(list(shop.versions)))
        else:
            victim = await asyncio.to_thread(node.kill, deed, index=chance.randrange(2))
            # The next deed meets a whole node again, however slow the machine is.
            running = 2 if deed == "worker" else 1
            await wait_true(
                lambda deed=deed, victim=victim, running=running: (
                    len(pids := node.pids(deed)) == running and victim not in pids
                ),
                what=f"the successor of a {deed}",
                deadline_s=DEADLINE_S,
            )


async def storm(tmp_path, *, seconds: float, seed: int) -> Shop:
    print(f"seed {seed}")
    shop, chance = Shop(tmp_path), random.Random(seed)
    await shop.fill()
    settings = {
        "blobs_url": shop.blobs.folder.as_uri(),
        "media_workers": "2",
        "media_disks": f"{tmp_path}/a:16MiB, {tmp_path}/b:16MiB",
    }
    async with whole_node(tmp_path / "node", **settings) as node:
        ends_s = time.monotonic() + seconds
        clients = [listen(shop, node, random.Random(f"{seed}/{n}"), ends_s) for n in range(CLIENTS)]
        await asyncio.gather(disturb(shop, node, chance, ends_s), *clients)
        await wait_true(lambda: node.series(SERIES % "miss") > 0, what="metrics")
        hits, log = node.series(SERIES % "hit"), node.process.err
    await shop.blobs.close()
    print(f"{shop.right} right, {shop.cut} cut, {shop.refused} refused, {hits} hits")
    assert shop.wrong == []
    assert hits > 0
    assert not any(word in log for word in ("connection_failed", "request_failed", "disk_refused"))
    return shop


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "least"), [(4, 20), pytest.param(150, 1000, marks=pytest.mark.soak)]
)
async def test_no_wrong_byte_while_processes_die_and_blocks_are_evicted(tmp_path, seconds, least):
    shop = await storm(tmp_path, seconds=seconds, seed=random.randrange(2**32))
    assert shop.right > least
