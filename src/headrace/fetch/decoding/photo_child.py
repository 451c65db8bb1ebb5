"""The child process that decodes photos, one request at a time over its socket.

It runs by path in an isolated interpreter and imports little besides the imaging library. Its
arguments are its limits. Plug-ins and codecs that load lazily are used once before opening files is
forbidden.

    request:  format (4 bytes), length (4 bytes), the photo
    response: a length as in `kernel.sandbox`, outcome (empty if it is sound), a tab, the reason

CPU time is limited by a timer whose signal is not handled, so a decoder that loops in C is killed.
"""

from __future__ import annotations

import io
import os
import signal
import struct
import sys
import warnings

from PIL import (
    AvifImagePlugin,
    Image,
    WebPImagePlugin,  # noqa: F401 - a missing plug-in makes the library import all, in 25 ms
)

from headrace.kernel.sandbox import drop_privileges, open_link, receive

FORMATS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP", "gif": "GIF", "avif": "AVIF"}
TEXT_BYTES_MAX = 300


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
    for kind, name in FORMATS.items():
        out = io.BytesIO()
        picture.save(out, name)
        decode(out.getvalue(), kind, frames_max)
        decode_safely(out.getvalue()[:40], kind, frames_max)


def encode_response(outcome: str, text: str) -> bytes:
    """A response as bytes of the protocol."""
    body = f"{outcome}\t{text}".encode(errors="replace")[:TEXT_BYTES_MAX]
    return struct.pack("<I", len(body)) + body


def decode_safely(data: bytes, kind: str, frames_max: int) -> bytes:
    """Decode a photo and return the response, whatever the decoder raises."""
    try:
        frames = decode(data, kind, frames_max)
    except _Refused as refused:
        return encode_response(*refused.args)
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        return encode_response("refused:too_many_pixels", "a frame has too many pixels")
    except MemoryError:
        return encode_response("refused:undecodable", "decoding needs too much memory")
    except Exception as error:  # noqa: BLE001 - plug-ins raise any error, even SyntaxError
        return encode_response("refused:undecodable", f"{type(error).__name__}: {error}")
    return encode_response("", f"{frames} frames")


def decode(data: bytes, kind: str, frames_max: int) -> int:
    """Decode every frame and return their number. Raises: _Refused, and any library error."""
    with Image.open(io.BytesIO(data), formats=(FORMATS[kind],)) as image:
        if kind == "jpg":
            # Draft mode reads all data but builds an eighth of the pixels, in half the time.
            image.draft(None, (1, 1))
            image.load()
            return 1
        frame = 0
        while True:
            image.load()
            frame += 1
            if frame > frames_max:
                raise _Refused("refused:too_many_frames", f"more than {frames_max} frames")
            try:
                image.seek(frame)
            except EOFError:
                return frame


if __name__ == "__main__":
    main(sys.argv[1:])
