"""The child process that makes variants of images, one request at a time over its socket.

It runs by path in an isolated interpreter (`kernel.sandbox`). Its arguments are its limits: bytes
of memory, seconds of CPU time, pixels of an original. Every format is read and written once before
opening files is forbidden, because libraries load parts of themselves on first use.

    request:  w, h (4 bytes each), fit, format (8 bytes each), length (4 bytes), the original
    answer:   a length as in `kernel.sandbox`, then `+` and the variant, or `-` and the reason

The loaders of libvips that are not used here are blocked. CPU time is limited by a timer whose
signal is not handled, so a decoder that loops in C is killed.
"""

from __future__ import annotations

import os
import signal
import struct
import sys
from typing import Any, NamedTuple

from headrace.kernel.sandbox import drop_privileges, open_link, receive

# Read when the library is loaded. Its threads are started before processes are forbidden.
os.environ |= {"VIPS_CONCURRENCY": "1", "VIPS_MAX_THREADS": "4", "VIPS_WARNING": "0"}

import pyvips

HEAD = struct.Struct("!II8s8sI")
LOADERS = ("Jpeg", "Png", "Webp", "Nsgif", "Heif")
REASON_BYTES_MAX = 300
SIDE_ANY = 10_000_000
WHITE = [255, 255, 255]
SAVERS: dict[str, tuple[str, dict[str, Any]]] = {
    "jpeg": (".jpg", {"Q": 80, "optimize_coding": True}),
    "webp": (".webp", {"Q": 78, "effort": 4}),
    # Effort 2 takes a quarter of the default's time for 3 % more bytes.
    "avif": (".avif", {"Q": 52, "effort": 2}),
    "png": (".png", {"compression": 6}),
}


class Wanted(NamedTuple):
    """What to make; a side of 0 follows the other one."""

    width: int
    height: int
    fit: str
    kind: str


class Refused(Exception):
    """The original is not made into a variant; the text is for the client."""


def main(limits: list[str]) -> None:
    """Serve requests until the parent closes the socket."""
    memory_bytes_max, cpu_s, pixels_max = map(float, limits)
    link = open_link()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    pyvips.cache_set_max(0)
    block_loaders()
    warm_up()
    drop_privileges(int(memory_bytes_max))
    link.sendall(encode_answer(b"+"))
    while head := receive(link, HEAD.size):
        width, height, fit, kind, length = HEAD.unpack(head)
        data = receive(link, length)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        wanted = Wanted(width, height, fit.rstrip(b"\0").decode(), kind.rstrip(b"\0").decode())
        answer = make_safely(data, wanted, int(pixels_max))
        signal.setitimer(signal.ITIMER_PROF, 0)
        link.sendall(encode_answer(answer))


def block_loaders() -> None:
    """Allow the loaders of LOADERS only."""
    pyvips.operation_block_set("VipsForeignLoad", True)
    for name in LOADERS:
        pyvips.operation_block_set(f"VipsForeignLoad{name}", False)


def warm_up() -> None:
    """Read and write each format once."""
    picture = pyvips.Image.black(64, 64, bands=3).copy(interpretation="srgb")
    for suffix, options in SAVERS.values():
        data = picture.write_to_buffer(suffix, **options)
        for kind in SAVERS:
            make(data, Wanted(16, 16, "cover", kind), 4096)
    make_safely(b"no image", Wanted(16, 16, "inside", "jpeg"), 4096)


def encode_answer(answer: bytes) -> bytes:
    """An answer as bytes of the protocol."""
    return struct.pack("<I", len(answer)) + answer


def make_safely(data: bytes, wanted: Wanted, pixels_max: int) -> bytes:
    """The answer to a request, whatever the library raises."""
    try:
        return b"+" + make(data, wanted, pixels_max)
    except Refused as refused:
        reason = str(refused)
    except MemoryError:
        reason = "making it needs too much memory"
    except pyvips.Error:
        # The library's text names its own functions, which clients do not know.
        reason = "it is damaged, cut off or no image (JPEG, PNG, WebP, GIF, AVIF)"
    return b"-" + reason.encode(errors="replace")[:REASON_BYTES_MAX]


def make(data: bytes, wanted: Wanted, pixels_max: int) -> bytes:
    """The variant of an original. Raises: Refused, MemoryError, pyvips.Error."""
    original = pyvips.Image.new_from_buffer(data, "", access="sequential")
    if original.width * original.height > pixels_max:
        raise Refused(
            f"{original.width} x {original.height} pixels are over the limit of {pixels_max}"
        )
    image = shrink(data, original, wanted)
    if wanted.kind == "jpeg" and image.hasalpha():
        image = image.flatten(background=WHITE)
    if wanted.fit == "contain":
        background = [*WHITE, 255] if image.hasalpha() else WHITE
        size = wanted.width, wanted.height
        image = image.gravity("centre", *size, extend="background", background=background)
    suffix, options = SAVERS[wanted.kind]
    found: bytes = image.write_to_buffer(suffix, keep="none", **options)
    return found


def shrink(data: bytes, original: Any, wanted: Wanted) -> Any:
    """The image in its final size before padding: turned by EXIF, in 8-bit sRGB."""
    # The argument `fail_on` of thumbnails is ignored; the loader reads the one in the string.
    options: dict[str, Any] = {
        "size": "down",
        "option_string": "fail_on=truncated",
        "output_profile": "srgb",
    }
    width, height = wanted.width or SIDE_ANY, wanted.height or SIDE_ANY
    if wanted.fit == "cover":
        sides = original.width, original.height
        if original.get_typeof("orientation") and original.get("orientation") >= 5:
            sides = sides[1], sides[0]
        scale = min(1, sides[0] / width, sides[1] / height)
        width, height = max(1, round(width * scale)), max(1, round(height * scale))
        options |= {"size": "both", "crop": "centre"}
    image = pyvips.Image.thumbnail_buffer(data, width, height=height, **options)
    if image.interpretation not in ("srgb", "b-w") or image.format != "uchar":
        image = image.colourspace("srgb").cast("uchar")
    # A grey image with alpha is no input of every saver.
    return image.colourspace("srgb") if image.interpretation == "b-w" else image


if __name__ == "__main__":
    main(sys.argv[1:])
