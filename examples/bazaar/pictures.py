"""Photos that differ: real JPEG and PNG files, made in a moment and never kept.

Two dozen pictures are drawn and encoded once at start; a photo is one of them with its own name
written into a comment segment (JPEG) or text chunk (PNG). Each photo is a whole valid image with
bytes, and so a content hash, of its own. Drawing 24 takes 0.25 s; drawing all 1,250 would take 13
s of the first minute. Photos with one name have the same bytes on every host, as a maker's stock
photo has.
"""

from __future__ import annotations

import io
import zlib
from typing import Final

from PIL import Image, ImageDraw

_BASES_JPEG: Final = 18
_BASES_PNG: Final = 6
_SIZE_JPEG: Final = (800, 600)
_SIZE_PNG: Final = (240, 180)


class Album:
    """Every photo that the hosts have, by name."""

    def __init__(self) -> None:
        """Draw the pictures."""
        self._jpegs = [_encode(index, _SIZE_JPEG, "JPEG") for index in range(_BASES_JPEG)]
        self._pngs = [_encode(index, _SIZE_PNG, "PNG") for index in range(_BASES_PNG)]

    def photo(self, name: str) -> bytes:
        """The bytes of the photo `name`, the same on each call; a PNG if the name ends so."""
        mark = name.encode("ascii", "replace")[:200]
        pick = zlib.crc32(mark)
        if name.endswith(".png"):
            return _mark_png(self._pngs[pick % _BASES_PNG], mark)
        return _mark_jpeg(self._jpegs[pick % _BASES_JPEG], mark)


def _encode(index: int, size: tuple[int, int], kind: str) -> bytes:
    # Smooth shapes with fine grain over them: the sizes of ordinary photos, 20 to 150 KB.
    width, height = size
    sky, ground = (40 + 11 * index % 160, 90, 200 - 7 * index), (30, 110 + 8 * index % 120, 60)
    picture = Image.new("RGB", size, sky)
    draw = ImageDraw.Draw(picture)
    draw.rectangle((0, height * 2 // 3, width, height), fill=ground)
    left = width // 10 + index * width // 40
    draw.ellipse(
        (left, height // 5, left + width // 4, height // 5 + width // 4), fill=(250, 210, 80)
    )
    draw.rectangle((width // 2, height // 3, width * 4 // 5, height * 3 // 4), fill=(150, 60, 50))
    grain = _grain(size, index)
    blended = Image.blend(picture, grain, 0.08 + 0.005 * (index % 12))
    out = io.BytesIO()
    blended.save(out, kind, **({"quality": 82} if kind == "JPEG" else {"compress_level": 1}))
    return out.getvalue()


def _grain(size: tuple[int, int], seed: int) -> Image.Image:
    # A fixed generator, not Pillow's noise: the photos of two runs must be the same bytes.
    state, width, height = seed * 2654435761 + 1, *size
    row = bytearray()
    for _ in range(4096):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        row += (state >> 16).to_bytes(6, "little")
    needed = width * height * 3
    return Image.frombytes(
        "RGB", size, bytes(row) * (needed // len(row)) + bytes(row[: needed % len(row)])
    )


def _mark_jpeg(base: bytes, mark: bytes) -> bytes:
    # Behind the first segment (JFIF must be first): FF FE, length with itself, text.
    end = 4 + int.from_bytes(base[4:6], "big")
    return base[:end] + b"\xff\xfe" + (len(mark) + 2).to_bytes(2, "big") + mark + base[end:]


def _mark_png(base: bytes, mark: bytes) -> bytes:
    # Behind IHDR, which always ends at byte 33: length, type, keyword NUL text, checksum.
    chunk = b"tEXt" + b"Title\x00" + mark
    length, check = (len(chunk) - 4).to_bytes(4, "big"), zlib.crc32(chunk).to_bytes(4, "big")
    return base[:33] + length + chunk + check + base[33:]
