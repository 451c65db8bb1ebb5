"""Routes about the disks of the node that runs on the API's own machine and data folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from litestar import get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody

from headrace.media.http.scopes import READ, WRITE
from headrace.media.service import Media
from headrace.media.service.disks import Disk, Verified


class DiskToAdd(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A folder or block device, and how much of it."""

    path: str
    size_bytes: Annotated[int, msgspec.Meta(gt=0)]


class ToVerify(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many of all blocks, picked evenly."""

    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0


@get("/v1/media/disks", operation_id="listMediaDisks", summary="List a node's disks", opt=READ)
async def list_disks(media: NamedDependency[Media]) -> Sequence[Disk]:
    """Every disk of the node on the API's machine, by path."""
    return await media.disks.list()


@post(
    "/v1/media/disks",
    operation_id="addMediaDisk",
    summary="Take a disk into use",
    opt=WRITE,
    status_code=200,
)
async def add_disk(media: NamedDependency[Media], data: JSONBody[DiskToAdd]) -> Disk:
    """Take a disk into use while the node runs; it remembers it for its next starts."""
    return await media.disks.add(data.path, data.size_bytes)


@post(
    "/v1/media/disks/{disk:str}/drain",
    operation_id="drainMediaDisk",
    summary="Fill nothing more on a disk",
    opt=WRITE,
    status_code=200,
)
async def drain_disk(media: NamedDependency[Media], disk: FromPath[str]) -> Disk:
    """Fill nothing more on the disk of that id; what it has is served still. May be repeated."""
    return await media.disks.drain(disk)


@post(
    "/v1/media/disks/{disk:str}/undrain",
    operation_id="undrainMediaDisk",
    summary="Fill a disk again",
    opt=WRITE,
    status_code=200,
)
async def undrain_disk(media: NamedDependency[Media], disk: FromPath[str]) -> Disk:
    """Fill the disk of that id again. May be repeated."""
    return await media.disks.undrain(disk)


@post(
    "/v1/media/disks/{disk:str}/retire",
    operation_id="retireMediaDisk",
    summary="Take a disk out of use",
    opt=WRITE,
    status_code=200,
)
async def retire_disk(media: NamedDependency[Media], disk: FromPath[str]) -> Disk:
    """Take the disk of that id out of use, so that it may be pulled; its blocks are misses from then on."""
    return await media.disks.retire(disk)


@post(
    "/v1/media/verify",
    operation_id="verifyMedia",
    summary="Read stored blocks and compare their sums",
    opt=WRITE,
    status_code=200,
)
async def verify(media: NamedDependency[Media], data: JSONBody[ToVerify]) -> Verified:
    """Read a share of the node's blocks and compare their sums; wrong ones are forgotten. Answered when done."""
    return await media.disks.verify(data.share)


ROUTES: Final[list[Any]] = [
    list_disks,
    add_disk,
    drain_disk,
    undrain_disk,
    retire_disk,
    verify,
]
