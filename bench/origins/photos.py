"""Real JPEG files of about 150 KB, each with content of its own: a few pictures of noise, and a
comment segment that makes every copy another one, so that nothing is stored once for many.
"""

from __future__ import annotations

import io
import random
from functools import cache
from pathlib import Path

from PIL import Image

PICTURES = 8
QUALITY = 85
SIDE = {150_000: (640, 440), 4_000: (96, 72)}
"""Required bytes -> a size in pixels whose noise packs to about that."""
SOI_BYTES = 2


@cache
def _picture(number: int, size: tuple[int, int]) -> bytes:
    out = io.BytesIO()
    chance = random.Random(number)
    noise = Image.frombytes("RGB", (size[0] // 2, size[1] // 2), chance.randbytes(_bytes_of(size)))
    noise.resize(size, Image.Resampling.BILINEAR).save(out, "JPEG", quality=QUALITY)
    return out.getvalue()


def _bytes_of(size: tuple[int, int]) -> int:
    return 3 * (size[0] // 2) * (size[1] // 2)


def jpeg(name: str, number: int, size_bytes: int) -> bytes:
    """A JPEG of about `size_bytes` that no other name has."""
    picture = _picture(number % PICTURES, SIDE[size_bytes])
    note = name.encode()
    segment = b"\xff\xfe" + (len(note) + 2).to_bytes(2, "big") + note
    return picture[:SOI_BYTES] + segment + picture[SOI_BYTES:]


def make_photos(folder: Path, count: int, *, size_bytes: int = 150_000) -> None:
    """Have the files 0.jpg to `count` - 1 in `folder`; those that are there stay."""
    folder.mkdir(exist_ok=True)
    for number in range(count):
        path = folder / f"{number}.jpg"
        if not path.exists():
            path.write_bytes(jpeg(f"photo {number}", number, size_bytes))
