"""Variants of images: what is allowed, what is made, by which node, and what ends them."""

from __future__ import annotations

import asyncio
import io
import struct
import zlib
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from node_kinds import (
    BLOCKS,
    BYPASS,
    FILES,
    PYTHON_BLOCKS,
    PYTHON_FILES,
    disk_in,
    few_partitions,
    store_in,
)
from PIL import Image, ImageCms
from raw_clients import SECRET, serving
from tests.kit.waiting import wait_true

from headrace.engines.blobs import Blobs
from headrace.kernel import errors
from headrace.media import variants
from headrace.media.errors import InvalidVariant, VariantNotAllowed
from headrace.media.model import MediaConfig, Shape, parse_variants
from headrace.media.service import Media
from headrace.media.worker import variants as making

SIZES = parse_variants("40, 60x20, x16")
KEY = "photos/a.jpg"
FORMATS = {"avif": "image/avif", "webp": "image/webp", "jpeg": "image/jpeg", "png": "image/png"}


def picture(width: int = 200, height: int = 100, kind: str = "JPEG", **options) -> bytes:
    """An image whose left half is red and whose right half is blue."""
    image = Image.new("RGB", (width, height), (250, 10, 10))
    image.paste((10, 10, 250), (width // 2, 0, width, height))
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def seen(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


def colour(image: Image.Image, x: float, y: float) -> str:
    """The main colour at a relative place."""
    at = int(x * (image.width - 1)), int(y * (image.height - 1))
    red, green, blue = image.convert("RGB").getpixel(at)
    if min(red, green, blue) > 200:
        return "white"
    return "red" if red > blue else "blue"


def bomb(side: int) -> bytes:
    """A PNG of `side` squared pixels in a few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack("!I", len(data)) + kind + data + struct.pack("!I", zlib.crc32(kind + data))
        )

    rows = zlib.compress(bytes((side // 8 + 1) * side), 9)
    header = chunk(b"IHDR", struct.pack("!IIBBBBB", side, side, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


async def ask(node, key: str, *, method: str = "GET", **fields: str):
    client = await node.connect()
    answer = await client.ask(key, method=method, **fields)
    client.drop()
    return answer


async def stored(blobs: Blobs, key: str = KEY) -> list[str]:
    return sorted([info.key async for info in blobs.list(f"{variants.FOLDER}/{key}")])


@pytest.fixture(
    scope="module", params=[FILES, PYTHON_FILES, BLOCKS, PYTHON_BLOCKS, BYPASS], ids=str
)
async def node(request, tmp_path_factory):
    """A node of each kind that makes variants; its native data plane has the original."""
    folder = tmp_path_factory.mktemp(request.param.name.replace(" ", ""))
    async with request.param.start(folder, variants=SIZES) as served:
        await served.blobs.put(KEY, picture())
        for _ in range(2):
            assert (await ask(served, KEY)).status == 200
        yield served


@pytest.fixture(scope="module")
async def files(tmp_path_factory):
    """A node that sends files; its requests for variants time out fast."""
    folder = tmp_path_factory.mktemp("files")
    async with FILES.start(folder, variants=SIZES, origin_timeout_s=5.0) as served:
        yield served


# Serving


async def test_a_burst_makes_one_variant_and_all_get_it(node):
    made = node.series("media_variants_total", outcome="made")
    clients = await asyncio.gather(*(node.connect() for _ in range(100)))
    answers = await asyncio.gather(*(client.ask(f"{KEY}?w=40") for client in clients))
    for client in clients:
        client.drop()
    assert {answer.status for answer in answers} == {200}
    assert len({answer.body for answer in answers}) == 1
    assert node.series("media_variants_total", outcome="made") == made + 1
    assert seen(answers[0].body).size == (40, 20)
    assert len(await stored(node.blobs)) == 1


async def test_a_variant_has_ranges_conditions_and_heads(node):
    target = f"{KEY}?w=40"
    whole = await ask(node, target)
    part = await ask(node, target, Range="bytes=5-20")
    assert (part.status, part.body) == (206, whole.body[5:21])
    assert part.fields["content-range"] == f"bytes 5-20/{len(whole.body)}"
    head = await ask(node, target, method="HEAD")
    assert head.fields["content-length"] == str(len(whole.body))
    unchanged = await ask(node, target, If_None_Match=whole.fields["etag"])
    assert (unchanged.status, unchanged.fields["vary"]) == (304, "Accept")
    original = await ask(node, KEY)
    assert original.body == picture()
    assert original.fields["etag"] != whole.fields["etag"]


async def test_a_variant_that_was_just_made_is_no_hit(node):
    answer = await ask(node, variant_url(node, w=23))
    assert answer.fields["cache-status"].startswith("headrace; fwd="), answer.fields


async def test_the_format_is_negotiated(node):
    target = f"{KEY}?h=16"
    for accept, kind in (
        ("image/avif,image/webp,*/*", "avif"),
        ("image/webp,image/*;q=0.8", "webp"),
        ("image/AVIF;q=0, image/webp ; q=0.5", "webp"),
        ("*/*", "jpeg"),
        ("", "jpeg"),
    ):
        answer = await ask(node, target, Accept=accept)
        assert answer.fields["content-type"] == FORMATS[kind]
        assert (seen(answer.body).format, answer.fields["vary"]) == (kind.upper(), "Accept")
    for kind, content_type in FORMATS.items():
        answer = await ask(node, f"{target}&fm={kind}")
        assert (answer.fields["content-type"], answer.fields.get("vary")) == (content_type, None)


async def test_a_new_version_and_a_purge_end_old_variants(node):
    key = "photos/replaced.png"
    await node.media.objects.put(key, picture(kind="PNG"))
    assert seen((await ask(node, f"{key}?w=40")).body).size == (40, 20)
    await node.media.objects.put(key, picture(100, 100, kind="PNG"))
    await node.media.purges.purge([key])
    assert await stored(node.blobs, key) == []

    async def is_new() -> bool:
        return seen((await ask(node, f"{key}?w=40")).body).size == (40, 40)

    await wait_true(is_new)
    await node.media.purges.purge(prefix="photos/repl")
    assert await stored(node.blobs, key) == []
    await ask(node, f"{key}?w=40")
    await node.media.objects.rm(key)
    await node.media.purges.purge([key])
    assert await stored(node.blobs, key) == []

    async def is_missing() -> bool:
        return (await ask(node, f"{key}?w=40")).status == 404

    await wait_true(is_missing)


# Refusals


NOT_LISTED = ("w=41", "w=40&h=20")
NO_VARIANTS = (
    *("w=0", "w=4097", "w=040", "w=%34%30", "w=40&w=40", "w=40&utm=x", "x=1&w=40", "&w=40"),
    *("w=40&fit=cover", "w=40&fit=fill", "w=40&fm=gif", "fm=webp"),
    "w=40&v=0123456789abcdef01234567",
)


async def test_other_queries_are_refused_with_what_is_allowed(node):
    for query in NOT_LISTED + NO_VARIANTS:
        answer = await ask(node, f"{KEY}?{query}")
        is_size = query in NOT_LISTED
        code = "media.variant_not_allowed" if is_size else "media.invalid_variant"
        assert (answer.status, answer.code) == (403 if is_size else 400, code), query
        assert (b"40, 60x20, x16" if is_size else b"4096 pixels") in answer.body
        if query == "w=040":
            assert b"w: expected a whole number of pixels from 1 to 4096 without" in answer.body
    assert (await ask(node, f"{KEY}?other=1")).body == picture()


async def test_signed_urls_may_name_any_size(node):
    url = node.media.objects.url
    assert url(KEY, w=40).endswith(f"/m/{KEY}?w=40")
    signed = url(KEY, w=30, h=30, fit="cover", fm="png").partition("/m/")[2]
    assert "&w=30&h=30&fit=cover&fm=png&s=" in signed
    assert seen((await ask(node, signed)).body).size == (30, 30)
    changed = await ask(node, signed.replace("w=30", "w=90"))
    assert (changed.status, changed.code) == (403, "media.signature_invalid")
    with pytest.raises(InvalidVariant, match="fit=cover"):
        url(KEY, w=30, fit="cover")
    with pytest.raises(InvalidVariant, match="image"):
        url("tracks/a.mp3", w=30)


async def test_variants_are_off_by_default(blobs):
    async with serving(blobs) as served:
        await blobs.put(KEY, picture())
        answer = await ask(served, f"{KEY}?w=40")
        assert (answer.status, answer.code) == (403, "media.variant_not_allowed")
        with pytest.raises(VariantNotAllowed, match="makes no variants"):
            served.media.objects.url(KEY, w=40)


async def test_a_node_without_the_library_does_not_start(blobs, monkeypatch):
    monkeypatch.setattr(errors, "find_spec", lambda _name: None)
    with pytest.raises(errors.ExtraMissing, match=r"\[variants\]"):
        async with serving(blobs, variants=SIZES):
            pass


# What is made


async def make(node, data: bytes, key: str, **options):
    await node.blobs.put(key, data)
    answer = await ask(node, node.media.objects.url(key, **options).partition("/m/")[2])
    assert answer.status == 200, answer.body
    return seen(answer.body)


async def test_fits_and_sizes(files):
    data, key = picture(200, 100), "fits.jpg"
    inside = await make(files, data, key, w=50, h=50)
    assert inside.size == (50, 25)
    cover = await make(files, data, key, w=50, h=50, fit="cover")
    assert (cover.size, colour(cover, 0.1, 0.5), colour(cover, 0.9, 0.5)) == (
        (50, 50),
        "red",
        "blue",
    )
    contain = await make(files, data, key, w=50, h=50, fit="contain", fm="png")
    assert (contain.size, colour(contain, 0.1, 0.5)) == ((50, 50), "red")
    assert colour(contain, 0.5, 0.0) == "white"


async def test_images_are_never_enlarged(files):
    data, key = picture(20, 10), "small.jpg"
    assert (await make(files, data, key, w=400)).size == (20, 10)
    assert (await make(files, data, key, w=400, h=400)).size == (20, 10)
    assert (await make(files, data, key, w=400, h=400, fit="cover")).size == (10, 10)
    assert (await make(files, data, key, w=40, h=40, fit="contain")).size == (40, 40)


async def test_turned_and_private_images_come_upright_and_bare(files):
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "A camera with a serial number"
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    data = picture(200, 100, exif=exif, icc_profile=profile)
    for kind in FORMATS:
        image = await make(files, data, "turned.jpg", w=50, fm=kind)
        assert image.size == (50, 100)
        assert (colour(image, 0.5, 0.1), colour(image, 0.5, 0.9)) == ("red", "blue")
        assert not image.getexif()
        assert "icc_profile" not in image.info
    cover = await make(files, data, "turned.jpg", w=50, h=100, fit="cover")
    assert cover.size == (50, 100)


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1", "I;16"])
async def test_every_mode_of_pixels_becomes_every_format(files, mode):
    kind = "JPEG" if mode == "CMYK" else "PNG"
    out = io.BytesIO()
    Image.new(mode, (64, 64)).save(out, kind)
    for fm in FORMATS:
        image = await make(
            files, out.getvalue(), f"mode.{kind.lower()}", w=16, h=9, fit="contain", fm=fm
        )
        assert (image.size, image.format) == ((16, 9), fm.upper())


# Hostile originals


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>",
        b"%PDF-1.4\n",
        picture()[:400],
        picture(kind="TIFF"),
        bomb(20_000),
    ],
    ids=["empty", "svg", "pdf", "truncated", "tiff", "bomb"],
)
async def test_a_hostile_original_is_refused_once_and_ends_nothing(files, data):
    key, refused = "hostile.jpg", files.series("media_variants_total", outcome="refused")
    await files.blobs.put(key, data)
    for _ in range(3):
        answer = await ask(files, f"{key}?w=40")
        assert (answer.status, answer.code) == (422, "media.variant_refused")
    assert files.series("media_variants_total", outcome="refused") == refused + 1
    assert await stored(files.blobs, key) == []
    assert (await make(files, picture(), "good.jpg", w=40)).size == (40, 20)


async def test_a_refusal_that_ended_is_remembered_again(files, monkeypatch):
    refused = files.series("media_variants_total", outcome="refused")
    await files.blobs.put("again.jpg", b"no image")
    for remembered_s in (0.0, 60.0, 60.0):
        monkeypatch.setattr(making, "REFUSED_S", remembered_s)
        assert (await ask(files, "again.jpg?w=40")).status == 422
    assert files.series("media_variants_total", outcome="refused") == refused + 2


def noise(kind: str) -> bytes:
    """An image whose rows differ, so a cut leaves some of them out."""
    image, out = Image.effect_noise((400, 300), 80), io.BytesIO()
    image.save(out, kind)
    return out.getvalue()


@pytest.mark.parametrize(
    ("kind", "kept"),
    [("JPEG", 0.25), ("JPEG", 0.5), ("JPEG", 0.9), ("PNG", 0.5), ("GIF", 0.5), ("WEBP", 0.5)],
)
async def test_a_cut_original_is_refused_and_nothing_is_stored(files, kind, kept):
    data, key = noise(kind), f"cut-{int(kept * 100)}.{kind.lower().replace('jpeg', 'jpg')}"
    assert (await make(files, data, f"whole-{key}", w=40)).size == (40, 30)
    for count in (int(len(data) * kept), 200):
        await files.blobs.put(f"{count}-{key}", data[:count])
        answer = await ask(files, f"{count}-{key}?w=40")
        assert (answer.status, answer.code) == (422, "media.variant_refused"), answer.body
        assert b"damaged, cut off or no image" in answer.body
        assert not any(name in answer.body.lower() for name in (b"vips", b"load", b"libpng"))
        assert await stored(files.blobs, f"{count}-{key}") == []


def variant_url(node, **options) -> str:
    return node.media.objects.url(KEY, **options).partition("/m/")[2]


# A cluster


@asynccontextmanager
async def two_nodes(folder: Path):
    with few_partitions():
        async with store_in(folder) as blobs:
            own = {"variants": SIZES, "replicas": 1}
            first = {"node": "a", "disks": disk_in(folder / "disk-a"), "run": folder / "run-a"}
            second = {"node": "b", "disks": disk_in(folder / "disk-b"), "run": folder / "run-b"}
            async with serving(blobs, **first, **own) as a, serving(blobs, **second, **own) as b:
                yield a, b


async def test_two_nodes_make_a_variant_once_and_survive_each_other(tmp_path):
    async with two_nodes(tmp_path) as (a, b):
        count = 6
        for number in range(count):
            await a.blobs.put(f"c/{number}.jpg", picture())

        async def is_member(node) -> bool:
            answers = [await ask(node, f"c/{n}.jpg", method="HEAD") for n in range(count)]
            return any("detail=peer" in one.fields["cache-status"] for one in answers)

        await wait_true(partial(is_member, a))
        await wait_true(partial(is_member, b))
        made = a.series("media_variants_total", outcome="made")
        for number in range(count):
            answers = await asyncio.gather(
                *(ask(node, f"c/{number}.jpg?w=40") for node in (a, b) for _ in range(10))
            )
            assert {one.status for one in answers} == {200}
            assert len({one.body for one in answers}) == 1
        # Nodes that disagree for a moment about who is usable may both make one.
        assert count <= a.series("media_variants_total", outcome="made") - made <= 2 * count
        b.stop.set()
        await b.task
        for number in range(count):
            assert (await ask(a, f"c/{number}.jpg?w=40")).body
            answer = await ask(a, f"c/{number}.jpg?w=60&h=20")
            assert seen(answer.body).size == (40, 20)


# Decisions


def test_settings_are_sizes_or_signed():
    assert parse_variants("") is None
    assert parse_variants("signed") == ()
    assert parse_variants("320, x200,640x480") == ((320, 0), (0, 200), (640, 480))
    assert ", ".join(map(str, SIZES)) == "40, 60x20, x16"
    for text in ("0", "x", "320x", "5000", "w320", "320;640", "signed, 320"):
        with pytest.raises(ValueError):
            parse_variants(text)


def test_keys_of_variants_differ_by_all_that_changes_their_bytes():
    shape = Shape(10, "e", 0, False)
    names = {
        variants.version_name(one, generation)
        for one in (shape, Shape(11, "e", 0, False), Shape(10, "f", 0, False))
        for generation in (0, 1)
    }
    assert len(names) == 6
    queries = [
        f"{size}&fit={fit}&fm={fm}"
        for size in ("w=4&h=5", "w=5&h=4")
        for fit in variants.FITS
        for fm in variants.FORMATS
    ]
    keys = {variants.variant_key(KEY, "v", variants.parse_variant(query)) for query in queries}
    assert len(keys) == len(queries)
    assert {variants.original_of(key) for key in keys} == {KEY}
    for query in queries:
        variant = variants.parse_variant(query)
        assert variants.parse_variant(variant.query) == variant


async def test_prewarming_makes_all_negotiated_formats(tmp_path):
    async with FILES.start(tmp_path, variants=SIZES) as served:
        await served.blobs.put(KEY, picture())
        config = MediaConfig(variants=SIZES, listen=("127.0.0.1", served.port))
        media = Media(served.blobs, config, secret=lambda: SECRET)
        done = await media.warming.warm([KEY], w=40)
        assert [row.failed for row in done.nodes] == [0]
        assert {key.rpartition(".")[2] for key in await stored(served.blobs)} == {
            "avif",
            "webp",
            "jpg",
        }
