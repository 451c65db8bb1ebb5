"""Perceptual hashes: the same picture has a near one; moderators get pairs, nothing is merged."""

from __future__ import annotations

import io
import random
from dataclasses import replace
from itertools import combinations

import pytest
from origin import Answer
from PIL import Image, ImageDraw
from room import HEAD, LIMITS

from headrace.fetch import store
from headrace.fetch.decoding.client import Decoder
from headrace.fetch.decoding.photo_child import ORIENTATION
from headrace.fetch.duplicates import BITS_MAX, PAIRS_MAX
from headrace.fetch.errors import DuplicateUnknown
from headrace.fetch.store.outcomes import Decision, NewPhoto

pytestmark = pytest.mark.slow
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
"""How a camera turns the picture that a viewer shows upright."""


def picture(seed: int, size: tuple[int, int] = (640, 480)) -> Image.Image:
    """Random shapes, other ones for each seed."""
    rng = random.Random(seed)
    made = Image.new("RGB", (640, 480), tuple(rng.randrange(256) for _ in range(3)))
    draw = ImageDraw.Draw(made)
    for _ in range(14):
        x, y = rng.randrange(640), rng.randrange(480)
        box = (x, y, x + rng.randrange(40, 300), y + rng.randrange(40, 300))
        shape = draw.ellipse if rng.random() < 0.5 else draw.rectangle
        shape(box, fill=tuple(rng.randrange(256) for _ in range(3)))
    return made.resize(size)


def saved(made: Image.Image, kind: str = "JPEG", **options) -> bytes:
    out = io.BytesIO()
    made.save(out, kind, **options)
    return out.getvalue()


def bits(one: int, other: int) -> int:
    return ((one ^ other) & (2**64 - 1)).bit_count()


@pytest.fixture
async def decoder():
    made = Decoder(1.0)
    yield made
    await made.close()


async def test_a_hash_survives_size_format_quality_and_orientation(decoder):
    for seed in range(3):
        plain = await decoder.decode(saved(picture(seed)), "jpg")
        forms = [
            (saved(picture(seed, (320, 240)), quality=60), "jpg"),
            (saved(picture(seed), "PNG"), "png"),
            (saved(picture(seed).convert("P"), "PNG"), "png"),
            (saved(picture(seed), "WEBP", quality=50), "webp"),
            (saved(picture(seed), "AVIF", quality=50), "avif"),
        ]
        for turn, turned in TURNS.items():
            exif = Image.Exif()
            exif[ORIENTATION] = turn
            forms.append((saved(picture(seed).transpose(turned), exif=exif), "jpg"))
        for number, (data, kind) in enumerate(forms):
            assert bits(plain, await decoder.decode(data, kind)) <= BITS_MAX, (seed, number)
        turned = await decoder.decode(saved(picture(seed).transpose(TURNS[6])), "jpg")
        assert bits(plain, turned) > BITS_MAX, "without its EXIF data it is another picture"
    others = [await decoder.decode(saved(picture(seed)), "jpg") for seed in range(20)]
    assert min(bits(a, b) for a, b in combinations(others, 2)) > BITS_MAX


async def test_plain_transparent_and_damaged_pictures(decoder):
    assert await decoder.decode(saved(Image.new("RGB", (300, 200), "white")), "jpg") is None
    assert await decoder.decode(saved(Image.new("I;16", (30, 20), 65535), "PNG"), "png") is None
    shape = Image.new("RGBA", (640, 480), (0, 0, 0, 0))
    shape.paste(picture(1).crop((100, 100, 400, 400)), (100, 100))
    on_white = Image.new("RGB", (640, 480), "white")
    on_white.paste(picture(1).crop((100, 100, 400, 400)), (100, 100))
    clear = await decoder.decode(saved(shape, "PNG"), "png")
    assert bits(clear, await decoder.decode(saved(on_white), "jpg")) <= BITS_MAX
    good = await decoder.decode(saved(picture(2)), "jpg")
    for exif in (
        b"Exif\0\0MM\0*\0\0\0\x08\xff\xff",
        b"Exif\0\0" + bytes(60_000),
        b"Exif\0\0II*\0" * 9,
    ):
        assert await decoder.decode(saved(picture(2), exif=exif), "jpg") == good


async def test_only_sixteen_digits_are_a_hash(decoder, monkeypatch):
    """A child under an attacker's control may send any text."""
    for text in ("", "1 frames", "0x12345678901234", "\uff11" * 16, "f" * 17, "-" + "1" * 15):
        monkeypatch.setattr(decoder, "_decode", lambda *_, text=text: ("", text))
        assert await decoder.decode(b"", "jpg") is None
    monkeypatch.setattr(decoder, "_decode", lambda *_: ("", "f" * 16))
    assert await decoder.decode(b"", "jpg") == -1


async def test_pairs_are_listed_within_and_across_customers_and_nothing_is_merged(
    shop, process, config
):
    await shop.fetch.customers.set("other", **LIMITS)
    bodies = {
        "/a": saved(picture(1)),
        "/a-small": saved(picture(1, (320, 240))),
        "/a-again": saved(picture(1), "PNG"),
        "/b": saved(picture(2)),
        "/c": saved(Image.new("RGB", (300, 200), "white")),
    }
    for path, body in bodies.items():
        shop.origin.answers[path] = [Answer(body=body)] * 9
    cells = {"i1": ["/a", "/a-small"], "i2": ["/b"], "i3": ["/a-again"], "i4": ["/c"]}
    rows = [f"{item},Item,5,{shop.urls(*paths)}\n" for item, paths in cells.items()]
    async with process(config=replace(config, decode_share=1.0)):
        await shop.run_to_end(HEAD + "".join(rows))
        await shop.run_to_end(f"{HEAD}x,X,5,{shop.urls('/b')}\n", customer="other")
    duplicates = shop.fetch.duplicates
    assert await duplicates.list() == []
    for _ in range(2):
        await duplicates.compare()
    found = await duplicates.list()
    pairs = {frozenset((p.customer, p.item, p.url[-8:]) for p in pair.photos) for pair in found}
    again = ("shop", "i3", shop.origin.url("/a-again")[-8:])
    first = [("shop", "i1", shop.origin.url(path)[-8:]) for path in ("/a", "/a-small")]
    b, x = ("shop", "i2"), ("other", "x")
    of_b = (shop.origin.url("/b")[-8:],)
    assert pairs == {
        *(frozenset({one, again}) for one in first),
        frozenset({(*b, *of_b), (*x, *of_b)}),
    }, "photos of one item are no pair"
    [across] = await duplicates.list(across=True)
    assert (across.distance, across.photos[0].sha256) == (0, across.photos[1].sha256)
    assert [p.customer for p in across.photos] == ["shop", "other"], "the older one first"
    assert len(await duplicates.list("shop", across=False)) == 2
    assert await duplicates.list("other") == [across]
    assert await duplicates.list(cursor=across.id) == [p for p in found if p.id < across.id]
    for _ in range(2):
        await duplicates.review(across.id)
    assert [p.id for p in await duplicates.list(reviewed=True)] == [across.id]
    assert len(await duplicates.list()) == 2
    for unknown in (0, -1, 10**6, 2**80):
        with pytest.raises(DuplicateUnknown):
            await duplicates.review(unknown)
    near = await duplicates.near(across.photos[0].sha256)
    assert near == [], "the same content is no other photo"
    [item] = [p.photos[0] for p in found if p.photos[0].url.endswith("/a")]
    assert {one.item for one in await duplicates.near(item.sha256)} == {"i1", "i3"}
    assert await shop.count("fetch_photo") == len(bodies)
    photos = (await shop.fetch.items.get("shop", "i3")).photos
    assert photos[0].url == shop.origin.url("/a-again")


async def test_every_hash_within_seven_bits_is_found_and_a_flood_is_bounded(shop):
    rng = random.Random(5)
    base = rng.getrandbits(64)
    flood = rng.getrandbits(64)
    counts = (0, 1, 4, 7, 8, 20)
    hashes = [base ^ sum(1 << bit for bit in rng.sample(range(64), count)) for count in counts]
    hashes += [flood] * 60 + [rng.getrandbits(64) for _ in range(200)]
    decisions = []
    for number, value in enumerate(hashes):
        signed = value - 2**64 if value >= 2**63 else value
        photo = NewPhoto(f"{number:064}", f"photos/{number}.jpg", "jpg", 9, 9, 9, signed)
        url = f"http://a.example/{number}"
        decisions.append(Decision(1, "shop", f"i{number}", url, "stored", photo))
    await store.outcomes.decide(shop.postgres, decisions)
    await shop.fetch.duplicates.compare()
    near = {one.item: one.distance for one in await shop.fetch.duplicates.near(f"{0:064}")}
    assert near == {"i1": 1, "i2": 4, "i3": 7}
    pairs = await shop.fetch.duplicates.list()
    of_base = [pair for pair in pairs if {p.item for p in pair.photos} & {"i0", "i1", "i2", "i3"}]
    assert {frozenset(p.item for p in pair.photos) for pair in of_base} >= {
        frozenset({"i0", item}) for item in ("i1", "i2", "i3")
    }
    assert len(pairs) - len(of_base) <= 60 * PAIRS_MAX
