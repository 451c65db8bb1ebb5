"""The process that decodes: reads photos from its socket, says what it saw, and knows nothing else.

Run by path with an isolated interpreter, so it imports the imaging library alone; arguments are its
limits. Everything that is loaded late (plug-ins, codecs) is used once before files are forbidden.

    asked:    format (4 bytes), length (4 bytes), the photo
    answered: length of the text (2 bytes), `outcome` or nothing where the photo is sound, a tab, why

CPU time is taken by a timer whose signal nothing catches: a decoder that loops in C dies of it.
"""

from __future__ import annotations

import io
import os
import resource
import signal
import socket
import struct
import sys
import warnings

from PIL import AvifImagePlugin, Image

FORMATS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP", "gif": "GIF", "avif": "AVIF"}
TEXT_BYTES_MAX = 300
DESCRIPTORS_MAX = 3


class _Refused(Exception):
    """The photo is refused for a reason of its own; arguments are outcome and text."""


def main(limits: list[str]) -> None:
    """Answer until the other end closes."""
    memory_bytes_max, cpu_s, pixels_max, frames_max = (float(limit) for limit in limits)
    for number in (signal.SIGINT, signal.SIGTERM):
        # Sent to the whole group when its slot is to end: the slot says when it needs no photo any more.
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    os.chdir("/")
    os.dup2(2, 1)
    link = socket.socket(fileno=0)
    Image.MAX_IMAGE_PIXELS = int(pixels_max)
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", Image.DecompressionBombWarning)
    warm_up(int(frames_max))
    close_doors(int(memory_bytes_max))
    link.sendall(answer_of("", "ready"))
    while request := receive(link, 8):
        kind, length = struct.unpack("!4sI", request)
        data = receive(link, length)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        answer = judged(data, kind.strip().decode(), int(frames_max))
        signal.setitimer(signal.ITIMER_PROF, 0)
        link.sendall(answer)


def warm_up(frames_max: int) -> None:
    """Load whatever decoding loads, while files can still be opened."""
    picture = Image.new("RGB", (16, 16), (200, 10, 10))
    for kind, name in FORMATS.items():
        out = io.BytesIO()
        picture.save(out, name)
        decode(out.getvalue(), kind, frames_max)
        judged(out.getvalue()[:40], kind, frames_max)


def close_doors(memory_bytes_max: int) -> None:
    """From here on: so much memory, no further descriptor, process, file or core."""
    for what, most in (
        (resource.RLIMIT_AS, memory_bytes_max),
        (resource.RLIMIT_NOFILE, DESCRIPTORS_MAX),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))


def receive(link: socket.socket, length: int) -> bytes:
    """Exactly `length` bytes, or nothing where the other end closed."""
    data = bytearray(length)
    view, got = memoryview(data), 0
    while got < length:
        count = link.recv_into(view[got:])
        if not count:
            return b""
        got += count
    return bytes(data)


def answer_of(outcome: str, text: str) -> bytes:
    """An answer as it is sent."""
    said = f"{outcome}\t{text}".encode(errors="replace")[:TEXT_BYTES_MAX]
    return struct.pack("!H", len(said)) + said


def judged(data: bytes, kind: str, frames_max: int) -> bytes:
    """The answer about a photo, whatever its decoder raises."""
    try:
        frames = decode(data, kind, frames_max)
    except _Refused as refused:
        return answer_of(*refused.args)
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        return answer_of("refused:too_many_pixels", "a frame has more pixels than are taken")
    except MemoryError:
        return answer_of("refused:undecodable", "its decoding takes too much memory")
    except Exception as error:  # noqa: BLE001 - plug-ins raise anything, SyntaxError and struct.error included
        return answer_of("refused:undecodable", f"{type(error).__name__}: {error}")
    return answer_of("", f"{frames} frames")


def decode(data: bytes, kind: str, frames_max: int) -> int:
    """Decode every frame; how many there are. Raises: whatever the library does, and _Refused."""
    with Image.open(io.BytesIO(data), formats=(FORMATS[kind],)) as image:
        if kind == "jpg":
            # All of the data is read, an eighth of the pixels is made of it: half the time.
            image.draft(None, (1, 1))
            image.load()
            return 1
        frame = 0
        while True:
            image.load()
            frame += 1
            if frame > frames_max:
                raise _Refused("refused:too_many_frames", f"over {frames_max} frames")
            try:
                image.seek(frame)
            except EOFError:
                return frame


if __name__ == "__main__":
    main(sys.argv[1:])
