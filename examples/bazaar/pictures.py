"""Photos of what the sellers sell, and covers of albums: drawn on the first request, then kept.

    python -m examples.bazaar.pictures FOLDER    # draw all of them, in 10 s

A photo's name begins with its category and look, such as `bikes-07-ada-0003-a.jpg`, so a host needs
no table. There are 24 looks a category, each whole (`-a`) and from nearby. A picture is drawn once,
in 50 ms, and kept in the demo's folder. A photo is such a picture with its own name written into a
comment segment (JPEG) or text chunk (PNG): a whole valid image with bytes, and so a content hash,
of its own. Photos with one name have the same bytes on every host, as a maker's stock photo has.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import os
import random
import re
import sys
import zlib
from pathlib import Path
from typing import Final

from examples.bazaar.drawing import PAINTS, Board, Color, shade
from examples.bazaar.scenes import CATEGORIES, LOOKS, draw
from PIL import Image, ImageDraw

_NAMED: Final = re.compile(r"([a-z]+)-([0-9]{2})-.*")
_STOCK_SIZE: Final = (480, 360)
_STOCK: Final = 6
_COVER: Final = 640


class Album:
    """Every photo that the hosts have, by name. Pictures are kept in `folder`, if it is given."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._held: dict[tuple[str, int, bool], bytes] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def photo(self, name: str) -> bytes:
        """The bytes of the photo `name`, the same on each call; a PNG if the name ends so."""
        mark = name.encode("ascii", "replace")[:200]
        if name.endswith(".png"):
            return _mark_png(self._stock(zlib.crc32(mark) % _STOCK), mark)
        found = _NAMED.fullmatch(name)
        look = zlib.crc32(mark) % LOOKS
        category = CATEGORIES[look % len(CATEGORIES)]
        if found and found[1] in CATEGORIES:
            category, look = found[1], int(found[2]) % LOOKS
        return _mark_jpeg(self._picture(category, look, is_near=not name.endswith("-a.jpg")), mark)

    def draw_all(self) -> None:
        """Draw what is not kept yet."""
        for category in CATEGORIES:
            for look in range(LOOKS):
                if not self._file(category, look, is_near=True).exists():
                    self._draw(category, look)

    def _picture(self, category: str, look: int, *, is_near: bool) -> bytes:
        name = (category, look, is_near)
        if name not in self._held:
            with contextlib.suppress(FileNotFoundError):
                self._held[name] = self._file(category, look, is_near=is_near).read_bytes()
                return self._held[name]
            self._draw(category, look)
        return self._held[name]

    def _draw(self, category: str, look: int) -> None:
        board = draw(category, look)
        for is_near in (False, True):
            data = self._held[category, look, is_near] = _jpeg(board.view(is_near=is_near))
            if self._folder is not None:
                file = self._file(category, look, is_near=is_near)
                draft = file.with_suffix(".new")
                draft.write_bytes(data)
                draft.replace(file)

    def _file(self, category: str, look: int, *, is_near: bool) -> Path:
        folder = self._folder or Path("/nonexistent")
        return folder / f"{category}-{look:02}-{'near' if is_near else 'all'}"

    @functools.lru_cache(maxsize=_STOCK)  # noqa: B019 - as above
    def _stock(self, number: int) -> bytes:
        # A maker's card: flat colors, which PNG is for.
        color = PAINTS[number].color
        picture = Image.new("RGB", _STOCK_SIZE, shade(color, 0.9))
        pen = ImageDraw.Draw(picture)
        pen.rectangle((24, 24, 456, 336), outline=shade(color, 1.5), width=4)
        for ring in range(4):
            radius = 96 - ring * 24
            box = (240 - radius, 150 - radius, 240 + radius, 150 + radius)
            pen.ellipse(box, fill=shade(color, 0.7 + 0.3 * (ring % 2)))
        for line, wide in enumerate((150, 100)):
            top = 272 + 24 * line
            pen.rounded_rectangle((240 - wide, top, 240 + wide, top + 10), 5, shade(color, 1.5))
        out = io.BytesIO()
        picture.save(out, "PNG", compress_level=6)
        return out.getvalue()


def cover(name: str) -> bytes:
    """The cover of the album or track `name`, a square JPEG: a sun over bands, rings or hills."""
    dice = random.Random(name)
    first, second, third = dice.sample([paint.color for paint in PAINTS], 3)
    board = Board(shade(first, 1.25), shade(second, 0.8))
    pattern = zlib.crc32(name.encode()) % 3
    if pattern == 0:
        _draw_sun(board, third)
    elif pattern == 1:
        for ring in range(9):
            radius = 270 - ring * 30
            board.ring(400, 300, radius, shade((first, second, third)[ring % 3], 1.1), 16)
    else:
        for level in range(5):
            shift = dice.uniform(0, math.tau)
            edge = [(x, 250 + level * 70 + 46 * math.sin(x / 95 + shift)) for x in range(0, 801, 8)]
            tone = shade(third, 1.3 - level * 0.18)
            board.poly([*edge, (800, 600), (0, 600)], tone)
        board.dot(520, 140, 58, (255, 240, 206))
    image = board.image.crop((200, 0, 1400, 1200)).resize((_COVER, _COVER))
    return _jpeg(image)


def _draw_sun(board: Board, color: Color) -> None:
    board.dot(400, 270, 190, shade(color, 1.2))
    for band in range(7):
        y = 250 + band * 32
        board.rect((180, y, 620, y + 5 + band * 2.6), shade(color, 0.45))
    board.rect((0, 470, 800, 600), shade(color, 0.42))


def _jpeg(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "JPEG", quality=84)
    return out.getvalue()


def _mark_jpeg(base: bytes, mark: bytes) -> bytes:
    # Behind the first segment (JFIF must be first): FF FE, length with itself, text.
    end = 4 + int.from_bytes(base[4:6], "big")
    return base[:end] + b"\xff\xfe" + (len(mark) + 2).to_bytes(2, "big") + mark + base[end:]


def _mark_png(base: bytes, mark: bytes) -> bytes:
    # Behind IHDR, which always ends at byte 33: length, type, keyword NUL text, checksum.
    chunk = b"tEXt" + b"Title\x00" + mark
    length, check = (len(chunk) - 4).to_bytes(4, "big"), zlib.crc32(chunk).to_bytes(4, "big")
    return base[:33] + length + chunk + check + base[33:]


if __name__ == "__main__":
    os.nice(10)
    Album(Path(sys.argv[1])).draw_all()
