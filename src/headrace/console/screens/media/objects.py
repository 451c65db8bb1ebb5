"""Objects: what lies in a folder of the store, one of them with its picture or player, and which nodes own it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from headrace.console.seeing import Ask, Found, attempt
from headrace.media.model import MediaObject
from headrace.media.service.nodes import Ownership

OBJECTS_SHOWN: Final = 200
KEY_CHARACTERS_MAX: Final = 1_024
NOTHING: Final[Found[Any]] = Found()


@dataclass(frozen=True, slots=True)
class ObjectLine:
    """An object, and how a page can show it: image, audio, video, or not at all."""

    object: MediaObject
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectsView:
    """The objects of a folder."""

    prefix: str
    parents: Sequence[tuple[str, str]]
    """Name and prefix of each folder on the way down."""
    objects: Found[list[ObjectLine]]
    folders: Sequence[tuple[str, str]]
    """Name and prefix of each folder in this one that has some of the objects shown."""
    size_bytes: int
    is_cut: bool
    shown_max: int = OBJECTS_SHOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectView:
    """One object; without a key: where one is asked for."""

    key: str
    line: Found[ObjectLine] = NOTHING
    owners: Found[Ownership] = NOTHING
    is_alone: bool = True
    """No cluster: this node has all keys."""
    is_signed: bool = False


async def see_objects(ask: Ask) -> ObjectsView:
    """The objects in a folder."""
    prefix = ask.query.text("prefix", most=KEY_CHARACTERS_MAX).strip().strip("/")
    found = await attempt(ask.service("media").objects.ls(prefix, objects_max=OBJECTS_SHOWN + 1))
    lines, size_bytes = None, 0
    if found.value is not None:
        shown = sorted(found.value, key=lambda one: one.key)[:OBJECTS_SHOWN]
        lines = [ObjectLine(one, kind_of(one.content_type)) for one in shown]
        size_bytes = sum(one.size_bytes for one in shown)
    return ObjectsView(
        prefix=prefix,
        parents=parents_of(prefix),
        objects=Found(lines, found.error),
        folders=folders_of(prefix, [one.object.key for one in lines or ()]),
        size_bytes=size_bytes,
        is_cut=found.value is not None and len(found.value) > OBJECTS_SHOWN,
    )


async def see_object(ask: Ask) -> ObjectView:
    """One object."""
    media, key = ask.service("media"), ask.query.text("key", most=KEY_CHARACTERS_MAX).strip()
    if not key:
        return ObjectView(key=key)
    is_alone = media.config.node is None
    found, owners = await asyncio.gather(
        attempt(media.objects.info(key)),
        _nothing() if is_alone else attempt(media.partitions.show(key)),
    )
    seen = found.value
    line = None if seen is None else ObjectLine(seen, kind_of(seen.content_type))
    return ObjectView(
        key=key,
        line=Found(line, found.error),
        owners=owners,
        is_alone=is_alone,
        is_signed=media.config.signed == "required",
    )


def kind_of(content_type: str) -> str:
    """How a page shows a type: image, audio, video, or empty. SVG is a document that may carry scripts."""
    kind = content_type.partition("/")[0]
    return kind if kind in ("image", "audio", "video") and "svg" not in content_type else ""


def parents_of(prefix: str) -> list[tuple[str, str]]:
    """`a/b` -> (a, a), (b, a/b)."""
    parts = [part for part in prefix.split("/") if part]
    return [(part, "/".join(parts[: index + 1])) for index, part in enumerate(parts)]


def folders_of(prefix: str, keys: Sequence[str]) -> list[tuple[str, str]]:
    """`a`, `a/b/c` -> (b, a/b): the folders right below `prefix` that keys are in."""
    above = f"{prefix}/" if prefix else ""
    below = [key.removeprefix(above).partition("/") for key in keys if key.startswith(above)]
    return [(name, above + name) for name in sorted({name for name, slash, _ in below if slash})]


async def _nothing() -> Found[Any]:
    return NOTHING
