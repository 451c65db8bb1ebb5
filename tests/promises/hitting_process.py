"""A process that counts and writes down what it asked and what was answered, until it is killed.

python hitting_process.py POSTGRES_URL VALKEY_URL PREFIX FILE SEED
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path

from counted_views import CountedViews


async def count(words: list[str]) -> None:
    """Hit for ever; each line is written in one write before it is true for anybody."""
    postgres_url, valkey_url, prefix, file, seed = words
    counted = CountedViews(postgres_url, valkey_url, Path(file).parent, prefix=prefix)
    chance = random.Random(int(seed))
    out = os.open(file, os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    async def hit_on() -> None:
        while True:
            ids = chance.choices(counted.entities, k=chance.randint(1, 6))
            os.write(out, f"asked {' '.join(ids)}\n".encode())
            await counted.views.hits(ids)
            os.write(out, f"acked {' '.join(ids)}\n".encode())

    await asyncio.gather(*[hit_on() for _ in range(4)])


if __name__ == "__main__":
    asyncio.run(count(sys.argv[1:]))
