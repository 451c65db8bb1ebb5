"""Image headers: format and size of JPEG, PNG, WebP, GIF and AVIF files, without decoding.

A PNG of 30,000 x 30,000 pixels has 109 KB, so decoding every body is unsafe and slow. The end of a
file is checked too: half a JPEG has a valid header and displays grey. A decoder in a guarded
process (`decoding`) checks a share of the photos, and all with a suspicious header.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

PIXELS_MAX: Final = 50_000_000
SIDES_RATIO_MAX: Final = 20
LARGE_PIXELS: Final = 4_000_000
BITS_OF_PIXEL_MIN: Final = 0.1
BITS_OF_PIXEL_MAX: Final = 64
"""Size of an uncompressed pixel of four channels of 16 bits."""
SMALL_BYTES: Final = 64 * 1024
"""A smaller photo may be mostly metadata."""
GIF_BLOCKS_MAX: Final = 110_000
"""More than the data blocks of the largest photo; a GIF with more blocks is decoded completely."""
_SIZES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_WITHOUT_LENGTH: Final = frozenset({0x01, *range(0xD0, 0xD9)})


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """Contents of an image header; `format` is also the extension: jpg png webp gif avif."""

    format: str
    width: int
    height: int
    is_animated: bool = False


class NotAPhoto(Exception):
    """The bytes are refused with `outcome`."""

    def __init__(self, outcome: str, text: str) -> None:
        super().__init__(text)
        self.outcome = outcome
        self.text = text


def inspect_image(data: bytes) -> ImageInfo:
    """Format and size of a complete image file. Raises: NotAPhoto."""
    if not data:
        raise NotAPhoto("refused:empty", "the body is empty")
    try:
        info = _parse(data)
    except (struct.error, IndexError):
        raise NotAPhoto(
            "failed:truncated", f"the image ends after {len(data)} bytes, in its header"
        ) from None
    if info is None or info.width < 1 or info.height < 1:
        raise NotAPhoto(
            "refused:not_an_image", "the body is not a JPEG, PNG, WebP, GIF or AVIF image"
        )
    if info.width * info.height > PIXELS_MAX:
        raise NotAPhoto(
            "refused:too_many_pixels",
            f"the image has {info.width} x {info.height} pixels, the limit is {PIXELS_MAX:,}",
        )
    return info


def is_suspicious(image: ImageInfo, size_bytes: int) -> bool:
    """Whether the header is unusual, so the photo must be decoded completely before it is stored.

    Several frames, a strip, many pixels in few bytes, or more bytes than the pixels can need.
    """
    sides = sorted((image.width, image.height))
    pixels = image.width * image.height
    bits_of_pixel = size_bytes * 8 / pixels
    return (
        image.is_animated
        or sides[1] > sides[0] * SIDES_RATIO_MAX
        or (pixels > LARGE_PIXELS and bits_of_pixel < BITS_OF_PIXEL_MIN)
        or (size_bytes > SMALL_BYTES and bits_of_pixel > BITS_OF_PIXEL_MAX)
    )


def _parse(data: bytes) -> ImageInfo | None:
    if data.startswith(b"\xff\xd8\xff"):
        return _parse_jpeg(data)
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return _parse_png(data)
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return _parse_webp(data)
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return _parse_gif(data)
    if data[4:8] == b"ftyp" and {b"avif", b"avis"} & _brands(data):
        return _parse_avif(data)
    return None


def _truncated(text: str) -> NotAPhoto:
    return NotAPhoto("failed:truncated", text)


def _parse_jpeg(data: bytes) -> ImageInfo | None:
    position, found = 2, None
    while True:
        if data[position] != 0xFF:
            return None
        marker = data[position + 1]
        if marker == 0xFF:
            position += 1
            continue
        if marker in _WITHOUT_LENGTH:
            position += 2
            continue
        if marker == 0xD9:
            return None
        (length,) = struct.unpack_from(">H", data, position + 2)
        if marker in _SIZES:
            height, width = struct.unpack_from(">HH", data, position + 5)
            found = ImageInfo("jpg", width, height)
        if marker == 0xDA:
            # Scan data escapes 0xFF, so an end marker found behind here is real.
            if data.rfind(b"\xff\xd9") < position:
                raise _truncated("the JPEG has no end marker")
            return found
        if length < 2:
            return None
        position += 2 + length


def _parse_png(data: bytes) -> ImageInfo | None:
    if data[12:16] != b"IHDR":
        return None
    width, height = struct.unpack_from(">II", data, 16)
    if data.rfind(b"IEND\xaeB`\x82") < 0:
        raise _truncated("the PNG has no end")
    is_animated = data.find(b"acTL", 8, data.find(b"IDAT")) > 0
    return ImageInfo("png", width, height, is_animated)


def _parse_webp(data: bytes) -> ImageInfo | None:
    (riff_bytes,) = struct.unpack_from("<I", data, 4)
    kind = data[12:16]
    if kind == b"VP8X":
        width = int.from_bytes(data[24:27], "little") + 1
        height = int.from_bytes(data[27:30], "little") + 1
    elif kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif kind == b"VP8 ":
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, 26))
    else:
        return None
    if len(data) < riff_bytes + 8:
        raise _truncated(f"the WebP declares {riff_bytes + 8} bytes and has {len(data)}")
    return ImageInfo("webp", width, height, kind == b"VP8X" and bool(data[20] & 2))


def _parse_gif(data: bytes) -> ImageInfo | None:
    width, height = struct.unpack_from("<HH", data, 6)
    frames = _gif_frames(data) if width and height else 0
    return ImageInfo("gif", width, height, frames > 1) if frames else None


def _gif_frames(data: bytes) -> int:
    """Number of frames up to 2; a GIF of unusual structure has 2. Raises: IndexError."""
    frames, blocks = 0, 0
    position = 13 + _color_table_bytes(data[10])
    while position < len(data):
        mark = data[position]
        if mark == 0x3B:
            break
        if mark == 0x2C:
            frames += 1
            if frames > 1:
                break
            # A descriptor of 10 bytes, a color table, the code size; then data blocks.
            position += 11 + _color_table_bytes(data[position + 9])
        elif mark == 0x21:
            position += 2
        else:
            # Decoders skip bytes between blocks.
            return 2
        while (length := data[position]) and blocks < GIF_BLOCKS_MAX:
            position += length + 1
            blocks += 1
        position += 1
        blocks += 1
        if blocks > GIF_BLOCKS_MAX:
            return 2
    return frames


def _color_table_bytes(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _brands(data: bytes) -> set[bytes]:
    (length,) = struct.unpack_from(">I", data, 0)
    brands = data[8 : min(length, 256)]
    return {brands[i : i + 4] for i in range(0, len(brands), 4)}


def _boxes(data: bytes, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """(type, start, end) of the contents of each ISO box between `start` and `end`."""
    while start + 8 <= end:
        length, header = int.from_bytes(data[start : start + 4], "big"), 8
        if length == 1:
            length, header = int.from_bytes(data[start + 8 : start + 16], "big"), 16
        stop = end if length == 0 else start + length
        if stop < start + header:
            return
        yield data[start + 4 : start + 8], start + header, min(stop, end)
        if stop > len(data):
            raise _truncated(f"the AVIF ends after {len(data)} of {stop} bytes")
        start = stop


def _find(data: bytes, start: int, end: int, path: tuple[bytes, ...]) -> Iterator[int]:
    """Start of the contents of each box of `path`."""
    for kind, box_start, box_end in _boxes(data, start, end):
        if kind != path[0]:
            continue
        if len(path) == 1:
            yield box_start
        else:
            # `meta` alone has four bytes of version and flags before its boxes.
            skipped = 4 if kind == b"meta" else 0
            yield from _find(data, box_start + skipped, box_end, path[1:])


def _parse_avif(data: bytes) -> ImageInfo | None:
    """Size by the largest `ispe` box: the tiles of a grid have smaller ones."""
    starts = _find(data, 0, len(data), (b"meta", b"iprp", b"ipco", b"ispe"))
    sizes = [struct.unpack_from(">II", data, at + 4) for at in starts]
    if not sizes:
        return None
    width, height = max(sizes, key=lambda size: size[0] * size[1])
    return ImageInfo("avif", width, height, b"avis" in _brands(data))
