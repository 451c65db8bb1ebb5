"""Variants of images: the query of a URL, the negotiated format, and the key of the stored result.

    /m/photos/a.jpg?w=400&h=300&fit=cover&fm=webp

    w, h  the most pixels, 1 to 4096; one may be left out, except with `cover` and `contain`
    fit   inside (default): the whole image within w x h
          cover: w x h, the middle of the image     contain: w x h, the whole image on white
    fm    avif, webp, jpeg, png or auto (default): the best of avif, webp and jpeg in Accept

An image is never enlarged. `cover` of a small image keeps the proportion of w and h.

A variant is an object of the store. Its key names the original, its version and purge generation,
and what was made of it. So a new version or a purge of the original never leads to an old variant,
and no index of variants exists.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypedDict

from headrace.engines.blobs import Blobs
from headrace.media.errors import InvalidVariant, VariantNotAllowed
from headrace.media.model import SIDE_MAX, MediaConfig, Shape, VariantSize, content_type

FITS: Final = ("inside", "cover", "contain")
AUTO: Final = "auto"
NEGOTIATED: Final = ("avif", "webp", "jpeg")
"""The formats of `fm=auto`, the smallest files first. Every browser reads the last one."""
FORMATS: Final = (*NEGOTIATED, "png")
FOLDER: Final = "_headrace/variants"
KEY_CHARACTERS_MAX: Final = 400
"""The longest key of an original; the keys of its variants are longer."""
OUTDATED_S: Final = 3600.0
_RECIPE: Final = 1
"""Raise it when the same query gives other bytes."""
_NAMES: Final = ("w", "h", "fit", "fm")
_IS_VARIANT: Final = re.compile(r"(?:^|&)(?:w|h|fit|fm)=")
_SIDE: Final = re.compile(r"[1-9][0-9]{0,3}")
_VERSION: Final = re.compile(r"[0-9a-f]{24}")
_TYPES: Final = ("image/jpeg", "image/png", "image/webp", "image/gif", "image/avif")
_Q: Final = re.compile(r"q=0(?:\.0{0,3})?")


class VariantOptions(TypedDict, total=False):
    """A variant as an application names it; None is the same as leaving one out."""

    w: int | None
    """Width in pixels; without `h` the height follows."""
    h: int | None
    """Height in pixels; without `w` the width follows."""
    fit: str | None
    """`inside` (default), `cover` or `contain` the given sides."""
    fm: str | None
    """Format: `avif`, `webp`, `jpeg`, `png`, or `auto` by the client's Accept header."""


class Variant(NamedTuple):
    """What to make of an original. A side of 0 follows the other one."""

    width: int
    height: int
    fit: str = FITS[0]
    format: str = AUTO
    is_negotiated: bool = False
    """Whether `format` was chosen by the Accept field of the request."""
    version: str = ""
    """The version of the original that another node requests; empty: the current one."""

    @property
    def query(self) -> str:
        """The canonical query, without fields of default value."""
        fields = {"w": self.width, "h": self.height}
        parts = [f"{name}={side}" for name, side in fields.items() if side]
        parts += [f"fit={self.fit}"] * (self.fit != FITS[0])
        parts += [f"fm={self.format}"] * (self.format != AUTO)
        return "&".join(parts)

    @property
    def size(self) -> VariantSize:
        """Its sides."""
        return VariantSize(self.width, self.height)


def names_variant(query: str) -> bool:
    """Whether a query has a field of a variant. The native data plane uses the same rule."""
    return _IS_VARIANT.search(query) is not None


def parse_variant(query: str) -> Variant:
    """The variant of an unsigned or signed query's fields, in any order. Raises: InvalidVariant."""
    fields: dict[str, str] = {}
    for part in query.split("&"):
        name, _, value = part.partition("=")
        if name not in _NAMES or name in fields:
            raise InvalidVariant.of("a field is unknown or repeated")
        fields[name] = value
    return make_variant(**{name: fields.get(name) for name in _NAMES})


def make_variant(
    w: str | int | None = None,
    h: str | int | None = None,
    fit: str | None = None,
    fm: str | None = None,
) -> Variant:
    """The variant of these values. Raises: InvalidVariant."""
    for name, value in (("w", w), ("h", h)):
        if value is not None and not (_SIDE.fullmatch(str(value)) and 1 <= int(value) <= SIDE_MAX):
            raise InvalidVariant.of(
                f"{name}: expected a whole number of pixels from 1 to {SIDE_MAX} without leading"
                " zeros"
            )
    variant = Variant(int(w or 0), int(h or 0), fit or FITS[0], fm or AUTO)
    if variant.fit not in FITS:
        raise InvalidVariant.of("fit is unknown")
    if variant.format not in (AUTO, *FORMATS):
        raise InvalidVariant.of("fm is unknown")
    sides = (variant.width > 0) + (variant.height > 0)
    if sides < (1 if variant.fit == FITS[0] else 2):
        raise InvalidVariant.of(f"fit={variant.fit} without {'w or h' if not sides else 'w and h'}")
    return variant


def formats_to_make(fm: str | None) -> Sequence[str]:
    """The formats of a variant that is made in advance."""
    return [fm] if fm not in (None, AUTO) else NEGOTIATED


def parse_hop_variant(query: str) -> Variant:
    """The variant that another node requests, for one version. Raises: InvalidVariant."""
    fields, _, version = query.rpartition("&v=")
    variant = parse_variant(fields)
    if _VERSION.fullmatch(version) is None or variant.format == AUTO:
        raise InvalidVariant.of("another node requests a variant of an unknown version")
    return variant._replace(version=version)


def require_allowed(variant: Variant, key: str, config: MediaConfig, *, is_signed: bool) -> None:
    """Check that this node makes `variant` of `key`. Raises: VariantNotAllowed, InvalidVariant."""
    if config.upstream:
        raise VariantNotAllowed(
            "`media.upstream` is set here, so variants are made in the upstream cluster:"
            " request them there"
        )
    if config.variants is None:
        raise VariantNotAllowed("this node makes no variants, because `media.variants` is not set")
    if not is_signed and variant.size not in config.variants:
        listed = ", ".join(map(str, config.variants)) or "none"
        raise VariantNotAllowed(
            f"the size {variant.size} is not allowed without a signature: use a signed URL, or a"
            f" size of `media.variants` ({listed})"
        )
    require_image(key)


def require_image(key: str) -> None:
    """Check that variants of `key` can be made. Raises: InvalidVariant."""
    if content_type(key) not in _TYPES or len(key) > KEY_CHARACTERS_MAX:
        raise InvalidVariant.of(
            f"the key is none of an image (.jpg, .png, .webp, .gif, .avif), or has over"
            f" {KEY_CHARACTERS_MAX} characters"
        )


def negotiate(variant: Variant, fields: Mapping[str, str]) -> Variant:
    """The variant with the format that the client of a request accepts."""
    if variant.format != AUTO:
        return variant
    accepted = {
        name.strip().lower()
        for name, _, options in (
            part.partition(";") for part in fields.get("accept", "").split(",")
        )
        if not any(_Q.fullmatch(option.strip()) for option in options.split(";"))
    }
    # Only by name: clients that send */* may read neither AVIF nor WebP.
    found = [one for one in NEGOTIATED if f"image/{one}" in accepted]
    return variant._replace(format=[*found, NEGOTIATED[-1]][0], is_negotiated=True)


def version_name(shape: Shape, generation: int) -> str:
    """The part of a variant's key that depends on the original's version and purges."""
    text = f"{_RECIPE}:{generation}:{shape.size_bytes}:{shape.etag}"
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def variant_key(key: str, version: str, variant: Variant) -> str:
    """The key of a variant of `key`. Its extension gives the content type."""
    extension = "jpg" if variant.format == "jpeg" else variant.format
    return f"{FOLDER}/{key}/{version}-{variant.size}-{variant.fit}.{extension}"


def hop_target(key: str, version: str, variant: Variant) -> str:
    """The target by which a node requests that another one makes a variant."""
    return f"/m/{key}?{variant.query}&v={version}"


async def outdated(blobs: Blobs, key: str, version: str) -> list[str]:
    """The keys of variants of `key` in other versions. Raises: BlobsDown.

    Younger ones are left out, since nodes that have not read the newest purge may still send them.
    """
    at_least_s = time.time() - OUTDATED_S
    return [
        info.key
        async for info in blobs.list(f"{FOLDER}/{key}")
        if original_of(info.key) == key
        and not info.key.rpartition("/")[2].startswith(version)
        and info.modified_at.timestamp() < at_least_s
    ]


async def remove_variants(blobs: Blobs, names: Sequence[str], *, is_prefix: bool = False) -> None:
    """Remove the variants of these keys, or of all keys with one prefix. Raises: BlobsDown."""
    for name in names:
        # A prefix may end within a segment, a folder may not.
        folder = f"{FOLDER}/{name}".rpartition("/")[0] if is_prefix else f"{FOLDER}/{name}"
        async for info in blobs.list(folder):
            original = original_of(info.key)
            if original.startswith(name) if is_prefix else original == name:
                await blobs.delete(info.key)


def original_of(key: str) -> str:
    """The key of the original of a stored variant."""
    return key.removeprefix(f"{FOLDER}/").rpartition("/")[0]
