"""Small real tracks and covers for the tests of tags."""

from __future__ import annotations

import base64
import subprocess
from pathlib import Path

from headrace.media.id3 import START_BYTES, own_tag_bytes

JPEG = base64.b64decode(
    "/9j/4AAQSkZJRgABAQEASABIAAD/2wBDAP//////////////////////////////////////////////////////////////"
    "////////////////////////////////////////////////////////wgALCAABAAEBAREA/8QAFBABAAAAAAAAAAAAAAAA"
    "AAAAAP/aAAgBAQABPxA="
)
"""A gray picture of one pixel."""
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)


def own_tag(size_bytes: int) -> bytes:
    """An ID3v2.3 tag of this size, as encoders write it: a header and padding."""
    body_bytes = size_bytes - 10
    size = bytes((body_bytes >> shift) & 0x7F for shift in (21, 14, 7, 0))
    return b"ID3\x03\x00\x00" + size + bytes(body_bytes)


def make_mp3(path: Path, *, seconds: int, times: int = 1, title: str | None = None) -> bytes:
    """A real MP3 of a rising tone, repeated `times`; with a `title` it begins with an ID3v2 tag.

    Its bit rate is constant and it has no frame with its length, so that repetitions are valid.
    """
    wave = f"aevalsrc=0.2*sin(220*2*PI*t*(1+t/{seconds})):s=44100:d={seconds}"
    named = ["-metadata", f"title={title}"] if title else ["-id3v2_version", "0"]
    command = ["ffmpeg", "-v", "error", "-y", "-f", "lavfi", "-i", wave, "-b:a", "128k"]
    subprocess.run([*command, "-write_xing", "0", *named, str(path)], check=True, timeout=60)
    data = path.read_bytes()
    start = own_tag_bytes(data[:START_BYTES], len(data))
    return data[:start] + data[start:] * times
