"""The decoding child: sound photos pass, hostile ones are refused, a dead child is replaced."""

from __future__ import annotations

import asyncio
import io
import os
import random
import signal
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from origin import Answer, photo
from PIL import Image
from tests.kit.waiting import wait_true

from headrace.fetch.decoding.client import DecodeLimits, Decoder, DecoderDown
from headrace.fetch.images import NotAPhoto, inspect_image

KINDS = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp", "GIF": "gif", "AVIF": "avif"}
LIMITS = DecodeLimits()
pytestmark = pytest.mark.slow


@pytest.fixture
async def decoding():
    """A decoder that takes every photo."""
    made = Decoder(1.0)
    yield made
    await made.close()


def png(width: int, height: int, rows: bytes, *, kind: int = 2) -> bytes:
    """A PNG of this size whose packed data is `rows`."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows, 9))
        + chunk(b"IEND", b"")
    )


def animation(kind: str, frames: int, size: tuple[int, int] = (40, 30)) -> bytes:
    out = io.BytesIO()
    pictures = [Image.new("RGB", size, (n % 256, n // 256, 7)) for n in range(frames)]
    pictures[0].save(out, kind, save_all=True, append_images=pictures[1:])
    return out.getvalue()


def damaged(data: bytes, seed: int) -> bytes:
    """`data` with 3 KB of noise in its middle; header and end stay."""
    rng = random.Random(seed)
    at = len(data) // 2
    return data[:at] + rng.randbytes(3000) + data[at + 3000 :]


async def refusal_reason(decoding: Decoder, data: bytes, kind: str) -> str:
    with pytest.raises(NotAPhoto) as refused:
        await decoding.decode(data, kind)
    return refused.value.outcome


@pytest.mark.parametrize("kind", KINDS)
async def test_sound_photos_pass(decoding, kind):
    await decoding.decode(photo("sound", kind=kind, size=(320, 200)), KINDS[kind])
    if kind in ("GIF", "PNG", "WEBP", "AVIF"):
        await decoding.decode(animation(kind, 5), KINDS[kind])


async def test_one_child_serves_many_photos(decoding):
    await asyncio.gather(*[decoding.decode(photo(f"many {n}"), "jpg") for n in range(30)])
    pid = decoding.child_pid
    await decoding.decode(photo("one more"), "jpg")
    assert decoding.child_pid == pid
    limits = Path(f"/proc/{pid}/limits").read_text()
    assert limits.count(str(LIMITS.memory_bytes_max)) == 2
    assert len(list(Path(f"/proc/{pid}/fd").iterdir())) == 3
    environment = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"HEADRACE" not in environment
    assert b"HOME" not in environment


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
async def test_damage_behind_a_good_header_is_found(decoding, kind):
    """The other formats have no checksums: a damaged file decodes to another picture."""
    data = damaged(photo("damage", kind=kind, size=(900, 700)), 3)
    inspect_image(data)
    assert await refusal_reason(decoding, data, KINDS[kind]) == "refused:undecodable"
    await decoding.decode(photo("after it"), "jpg")


async def test_a_png_that_lies_about_its_rows_is_refused(decoding):
    assert (
        await refusal_reason(decoding, png(2000, 2000, b"\0" * 600), "png") == "refused:undecodable"
    )


async def test_bombs_are_refused_and_leave_the_child_usable(decoding):
    bomb = png(30_000, 30_000, b"\0" * 1000)
    assert await refusal_reason(decoding, bomb, "png") == "refused:too_many_pixels"
    wide = png(7000, 7000, b"\0" * (7000 * 21_001))
    await decoding.decode(wide, "png")
    many = animation("GIF", LIMITS.frames_max + 20, (8, 8))
    assert await refusal_reason(decoding, many, "gif") == "refused:too_many_frames"
    pid = decoding.child_pid
    await decoding.decode(photo("still there"), "jpg")
    assert decoding.child_pid == pid


async def test_out_of_memory_is_that_photo_s_fault_alone():
    small = Decoder(1.0, DecodeLimits(memory_bytes_max=150 * 2**20))
    wide = png(7000, 7000, b"\0" * (7000 * 21_001))
    assert await refusal_reason(small, wide, "png") == "refused:undecodable"
    await small.decode(photo("after it"), "jpg")
    await small.close()


async def test_a_photo_that_takes_too_long_ends_its_child_and_is_refused():
    impatient = Decoder(1.0, DecodeLimits(cpu_s_max=0.05))
    wide = png(7000, 7000, b"\0" * (7000 * 21_001))
    await impatient.decode(photo("first"), "jpg")
    pid = impatient.child_pid
    assert await refusal_reason(impatient, wide, "png") == "refused:undecodable"
    await impatient.decode(photo("after it"), "jpg")
    assert impatient.child_pid != pid
    await impatient.close()


async def test_a_killed_child_is_replaced_and_its_photo_decoded(decoding):
    await decoding.decode(photo("before"), "jpg")
    pid = decoding.child_pid
    os.kill(pid, signal.SIGKILL)
    await decoding.decode(photo("while"), "jpg")
    assert decoding.child_pid != pid


async def test_a_child_ignores_the_signals_that_end_its_slot(decoding):
    await decoding.decode(photo("before"), "jpg")
    pid = decoding.child_pid
    os.kill(pid, signal.SIGTERM)
    os.kill(pid, signal.SIGINT)
    await decoding.decode(photo("after"), "jpg")
    assert decoding.child_pid == pid


async def test_a_child_ends_with_its_slot_s_end_of_the_socket(decoding):
    await decoding.decode(photo("before"), "jpg")
    pid = decoding.child_pid
    child = decoding._child
    child._link.close()
    assert await asyncio.to_thread(child._process.wait, 5) == 0
    decoding._child = None
    await wait_true(lambda: not Path(f"/proc/{pid}").exists(), what="the child ended")


@pytest.mark.parametrize("python", ["/nowhere/python", "/bin/false"])
async def test_where_no_child_can_be_started_the_photo_waits(python):
    decoding = Decoder(1.0, python=python)
    with pytest.raises(DecoderDown, match="memory"):
        await decoding.decode(photo("waits"), "jpg")
    await decoding.close()


async def test_a_share_is_decoded_and_every_animation():
    none = Decoder(0.0)
    plain = photo("plain", size=(640, 480))
    await none.check(plain, inspect_image(plain))
    assert none.child_pid is None, "no photo is drawn"
    moving = animation("GIF", 3)
    await none.check(moving, inspect_image(moving))
    assert none.child_pid is not None, "an animation is always decoded"
    await none.close()


@pytest.mark.parametrize("seed", range(4))
async def test_any_bytes_end_in_an_answer(decoding, seed):
    rng = random.Random(seed)
    for kind, name in KINDS.items():
        data = bytearray(photo("noise", kind=kind, size=(120, 90)))
        for _ in range(rng.randrange(1, 60)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            await decoding.decode(bytes(data[: rng.randrange(1, len(data) + 1)]), name)
        except NotAPhoto as refused:
            assert refused.outcome in (  # noqa: PT017 - either way is right
                "refused:undecodable",
                "refused:too_many_pixels",
                "refused:too_many_frames",
            )


async def test_a_run_reports_which_photos_cannot_be_decoded(shop, process, config):
    bad = damaged(photo("damage", size=(900, 700)), 3)
    shop.origin.answers["/bad.jpg"] = [Answer(200, bad)]
    rows = f"a,A,5,{shop.origin.url('/bad.jpg')}|{shop.origin.url('/photo/1')}\n"
    async with process(config=replace(config, decode_share=1.0)):
        run = await shop.run_to_end("id,name,price,photos\n" + rows)
    assert run.photos_by_outcome == {"refused:undecodable": 1, "stored": 1}
    (problem,) = await shop.fetch.reports.photo_problems(run.run)
    assert "damaged" in problem[1].text
