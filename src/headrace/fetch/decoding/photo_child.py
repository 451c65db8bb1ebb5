"""The child process that decodes photos, one request at a time over its socket.

It runs by path in an isolated interpreter and imports little besides the imaging library. Its
arguments are its limits. Plug-ins and codecs that load lazily are used once before opening files is
forbidden.

    request:  format (4 bytes), length (4 bytes), the photo
    response: a length as in `kernel.sandbox`, outcome (empty if it is sound), a tab, the reason
              or, of a sound photo, its perceptual hash as 16 hex digits (empty: none)

The hash is the one of the pHash library (Zauner, 2010): 64 low frequencies of the picture at 32 x
32, each above or below their median. It survives another size, format or quality, and is taken of
the first frame, upright as its EXIF orientation shows it. A picture without structure has none.

CPU time is limited by a timer whose signal is not handled, so a decoder that loops in C is killed.
"""

from __future__ import annotations

import io
import math
import os
import signal
import struct
import sys
import warnings
from operator import mul
from statistics import median, pstdev

from PIL import (
    AvifImagePlugin,
    Image,
    WebPImagePlugin,  # noqa: F401 - a missing plug-in makes the library import all, in 25 ms
)

from headrace.kernel.sandbox import drop_privileges, open_link, receive

FORMATS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP", "gif": "GIF", "avif": "AVIF"}
TEXT_BYTES_MAX = 300
SIDE = 32
PLAIN_MAX = 2.0
"""A picture whose levels of gray deviate less is plain: its hash would be that of its noise."""
ORIENTATION = 0x0112
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
WAVES = [
    [math.cos((2 * x + 1) * k * math.pi / (2 * SIDE)) for x in range(SIDE)] for k in range(1, 9)
]
"""The basis of the cosine transform for the frequencies 1 to 8."""


class _Refused(Exception):
    """The photo is refused without a decoder error; the arguments are outcome and text."""


def main(limits: list[str]) -> None:
    """Serve requests until the parent closes the socket."""
    memory_bytes_max, cpu_s, pixels_max, frames_max = (float(limit) for limit in limits)
    link = open_link()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    os.dup2(2, 1)
    Image.MAX_IMAGE_PIXELS = int(pixels_max)
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", Image.DecompressionBombWarning)
    warm_up(int(frames_max))
    drop_privileges(int(memory_bytes_max))
    link.sendall(encode_response("", "ready"))
    while request := receive(link, 8):
        kind, length = struct.unpack("!4sI", request)
        data = receive(link, length)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        response = decode_safely(data, kind.strip().decode(), int(frames_max))
        signal.setitimer(signal.ITIMER_PROF, 0)
        link.sendall(response)


def warm_up(frames_max: int) -> None:
    """Decode each format once, to load all plug-ins while files can still be opened."""
    picture = Image.new("RGB", (16, 16), (200, 10, 10))
    turned = Image.Exif()
    turned[ORIENTATION] = 6
    for kind, name in FORMATS.items():
        out = io.BytesIO()
        picture.save(out, name, exif=turned)
        decode(out.getvalue(), kind, frames_max)
        decode_safely(out.getvalue()[:40], kind, frames_max)


def encode_response(outcome: str, text: str) -> bytes:
    """A response as bytes of the protocol."""
    body = f"{outcome}\t{text}".encode(errors="replace")[:TEXT_BYTES_MAX]
    return struct.pack("<I", len(body)) + body


def decode_safely(data: bytes, kind: str, frames_max: int) -> bytes:
    """Decode a photo and return the response, whatever the decoder raises."""
    try:
        text = decode(data, kind, frames_max)
    except _Refused as refused:
        return encode_response(*refused.args)
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        return encode_response("refused:too_many_pixels", "a frame has too many pixels")
    except MemoryError:
        return encode_response("refused:undecodable", "decoding needs too much memory")
    except Exception as error:  # noqa: BLE001 - plug-ins raise any error, even SyntaxError
        return encode_response("refused:undecodable", f"{type(error).__name__}: {error}")
    return encode_response("", text)


def decode(data: bytes, kind: str, frames_max: int) -> str:
    """Decode every frame; return the hash of the first. Raises: _Refused, any library error."""
    with Image.open(io.BytesIO(data), formats=(FORMATS[kind],)) as image:
        if kind == "jpg":
            # Draft mode reads all data but builds an eighth of the pixels, in half the time.
            image.draft(None, (2 * SIDE, 2 * SIDE))
        found, frame = "", 0
        while True:
            image.load()
            frame += 1
            if frame == 1:
                found = hash_of(image)
            if kind == "jpg":
                return found
            if frame > frames_max:
                raise _Refused("refused:too_many_frames", f"more than {frames_max} frames")
            try:
                image.seek(frame)
            except EOFError:
                return found


def hash_of(image: Image.Image) -> str:
    """The perceptual hash as 16 hex digits; empty for a plain picture, or if it has no memory."""
    try:
        picture = image
        if image.mode not in ("L", "RGB"):
            # Transparent pixels have any color: a site shows them on white.
            has_alpha = "A" in image.mode or "transparency" in image.info
            picture = image.convert("RGBA" if has_alpha else "RGB")
        small = picture.resize((SIDE, SIDE), Image.Resampling.BOX)
        if small.mode == "RGBA":
            white = Image.new("RGBA", small.size, "white")
            small = Image.alpha_composite(white, small).convert("RGB")
        small = small.convert("L")
        turn = UPRIGHT.get(orientation_of(image))
        levels = (small if turn is None else small.transpose(turn)).tobytes()
    except Exception:  # noqa: BLE001 - without a hash a sound photo is still sound
        return ""
    return "" if pstdev(levels) < PLAIN_MAX else f"{cosine_hash(levels):016x}"


def orientation_of(image: Image.Image) -> int:
    """The EXIF orientation; 1 if it is missing or damaged, as browsers do."""
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # noqa: BLE001 - the library raises any error for damaged EXIF data
        return 1


def cosine_hash(levels: bytes) -> int:
    """64 bits of 32 x 32 levels: which of the frequencies 1 to 8 exceed their median."""
    rows = [levels[start : start + SIDE] for start in range(0, len(levels), SIDE)]
    across = [[sum(map(mul, row, wave)) for row in rows] for wave in WAVES]
    strengths = [sum(map(mul, column, wave)) for wave in WAVES for column in across]
    middle = median(strengths)
    return sum(1 << bit for bit, strength in enumerate(strengths) if strength > middle)


if __name__ == "__main__":
    main(sys.argv[1:])
