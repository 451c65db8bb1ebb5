"""The header reader agrees with a real decoder on every format and refuses what is no photo."""

from __future__ import annotations

import io
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from origin import photo
from PIL import Image

from headrace.fetch.images import (
    PIXELS_MAX,
    ImageInfo,
    NotAPhoto,
    inspect_image,
    is_suspicious,
)

KINDS = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp", "GIF": "gif", "AVIF": "avif"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(1, 1), (64, 48), (319, 201), (700, 3)])
def test_format_and_size_are_those_of_a_decoder(kind, size):
    found = inspect_image(photo("x", kind=kind, size=size) if min(size) > 20 else plain(kind, size))
    assert (found.format, found.width, found.height) == (KINDS[kind], *size)


def plain(kind: str, size, **options) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, (200, 10, 10)).save(out, kind, **options)
    return out.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        plain("JPEG", (90, 60), progressive=True),
        plain("JPEG", (90, 60), exif=b"Exif\x00\x00" + b"\xff\xd9" * 900),
        plain("WEBP", (90, 60), lossless=True),
        plain("WEBP", (90, 60), exif=b"Exif\x00\x00MM"),
        plain("JPEG", (90, 60)) + b"\x00" * 5000,
    ],
)
def test_variants_of_formats(data):
    found = inspect_image(data)
    assert (found.width, found.height) == (90, 60)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "AVIF"])
def test_animations_are_detected(kind):
    frames = [Image.new("RGB", (30, 20), (n * 60, 0, 0)) for n in range(4)]
    out = io.BytesIO()
    frames[0].save(out, kind, save_all=True, append_images=frames[1:])
    assert inspect_image(out.getvalue()).is_animated
    assert not inspect_image(plain(kind, (30, 20))).is_animated


def gif_of(*frames: bytes, end: bytes = b";") -> bytes:
    return (
        b"GIF89a" + struct.pack("<HHBBB", 3, 2, 0x80, 0, 0) + b"\x00" * 6 + b"".join(frames) + end
    )


FRAME = b"," + struct.pack("<HHHHB", 0, 0, 3, 2, 0) + b"\x02\x02\x4c\x01\x00"
COMMENT = b"!\xfe\x05,,!;\xf9\x00"


@pytest.mark.parametrize(
    ("data", "is_animated"),
    [
        (gif_of(FRAME), False),
        (gif_of(FRAME, FRAME), True),
        (gif_of(FRAME, FRAME, end=b""), True),
        (gif_of(COMMENT, FRAME, COMMENT), False),
        (gif_of(b"!\xff\x0bNETSCAPE2.0\x03\x01\x00\x00\x00", FRAME, COMMENT, FRAME), True),
        (gif_of(b"!\xf9\x04\x00\x00\x00\x00\x00" * 3, FRAME), False),
        (gif_of(COMMENT, b"\x00\x00", FRAME), True),
        (gif_of(b"!\xfe\x00" * 120_000, FRAME), True),
        (gif_of(FRAME[:-2] + b"\x01\x4c" * 200_000 + b"\x00"), True),
    ],
)
def test_frames_of_a_gif_are_counted_without_control_extensions(data, is_animated):
    image = inspect_image(data)
    assert (image.format, image.width, image.height) == ("gif", 3, 2)
    assert image.is_animated == is_animated
    assert is_suspicious(image, 10) == is_animated


@pytest.mark.parametrize("cut", [3, 8, 20])
def test_a_gif_cut_inside_its_picture_is_truncated(cut):
    with pytest.raises(NotAPhoto) as refused:
        inspect_image(gif_of(COMMENT, FRAME)[:-cut])
    assert refused.value.outcome == "failed:truncated"


def test_a_gif_without_a_picture_is_no_image():
    with pytest.raises(NotAPhoto) as refused:
        inspect_image(gif_of(COMMENT))
    assert refused.value.outcome == "refused:not_an_image"


@pytest.mark.parametrize(
    ("image", "size_bytes", "is_odd"),
    [
        (ImageInfo("jpg", 1024, 768), 150_000, False),
        (ImageInfo("png", 1000, 1000), 4_000, False),
        (ImageInfo("jpg", 4000, 3000), 400_000, False),
        (ImageInfo("jpg", 60, 40), 30_000, False),
        (ImageInfo("gif", 100, 100, is_animated=True), 30_000, True),
        (ImageInfo("png", 30_000, 20), 30_000, True),
        (ImageInfo("png", 7000, 7000), 143_000, True),
        (ImageInfo("jpg", 60, 40), 2_000_000, True),
    ],
)
def test_odd_headers(image, size_bytes, is_odd):
    assert is_suspicious(image, size_bytes) == is_odd


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "AVIF"])
def test_half_a_photo_is_truncated(kind):
    data = photo("half", kind=kind)
    with pytest.raises(NotAPhoto) as refused:
        inspect_image(data[: len(data) // 2])
    assert refused.value.outcome == "failed:truncated"


@pytest.mark.parametrize(
    "data",
    [
        b"<html><body>404</body></html>",
        b'<svg xmlns="http://www.w3.org/2000/svg"/>',
        b"%PDF-1.7\n",
        b"%!PS-Adobe-3.0 EPSF-3.0",
        b"8BPS\x00\x01" + b"\x00" * 100,
        b"SIMPLE  =                    T",
        b"II*\x00" + b"\x00" * 100,
        b"BM" + b"\x00" * 100,
        b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00mif1heic",
        b"RIFF\x10\x00\x00\x00WAVEfmt " + b"\x00" * 100,
        b"GIF89a\x00\x00\x00\x00\x00\x00",
        b"\xff\xd8\xff\xd9",
        b"\x89PNG\r\n\x1a\n\x00\x00\x00\x0dIDAT" + b"\x00" * 100,
    ],
)
def test_other_files_are_refused(data):
    with pytest.raises(NotAPhoto) as refused:
        inspect_image(data)
    assert refused.value.outcome == "refused:not_an_image"


def test_an_empty_body_and_a_bomb_are_refused():
    with pytest.raises(NotAPhoto) as refused:
        inspect_image(b"")
    assert refused.value.outcome == "refused:empty"
    side = int(PIXELS_MAX**0.5) + 1
    header = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header
    bomb += struct.pack(">I", zlib.crc32(header)) + b"\x00\x00\x00\x00IEND\xaeB`\x82"
    with pytest.raises(NotAPhoto) as refused:
        inspect_image(bomb)
    assert refused.value.outcome == "refused:too_many_pixels"


@given(st.sampled_from(sorted(KINDS)), st.data())
def test_any_damage_ends_in_an_answer(kind, data):
    photo_bytes = bytearray(photo("damage", kind=kind))
    for _ in range(data.draw(st.integers(1, 5))):
        photo_bytes[data.draw(st.integers(0, len(photo_bytes) - 1))] = data.draw(
            st.integers(0, 255)
        )
    cut = data.draw(st.integers(0, len(photo_bytes)))
    try:
        found = inspect_image(bytes(photo_bytes[:cut]))
    except NotAPhoto:
        return
    assert 1 <= found.width * found.height <= PIXELS_MAX
