"""Valkey Cluster's map: which primary has which of the 16,384 hash slots, and in which slot a key is.

The map is the reply of `CLUSTER SLOTS`, which a server outside a cluster refuses, so that one question tells both.
Nodes disagree for moments, and one that was cut off does so for longer: of several maps the one of the highest
epoch counts (`cluster_current_epoch` of `CLUSTER INFO`, which every failover raises).
"""

from __future__ import annotations

from binascii import crc_hqx
from dataclasses import dataclass
from typing import Any, Final

SLOTS: Final = 16_384
NOBODY: Final = ""
"""The owner of a hash slot that no primary has."""
_NO_HOST: Final = ("", "?")


@dataclass(frozen=True, slots=True)
class SlotMap:
    """The owner of each hash slot as `host:port`. Entries are set as `MOVED` tells of them."""

    owners: list[str]
    epoch: int = 0

    @property
    def primaries(self) -> list[str]:
        """All that have a slot, by their first one."""
        return [owner for owner in dict.fromkeys(self.owners) if owner != NOBODY]


def slot_of(key: str | bytes | float) -> int:
    """The hash slot of a key: CRC-16 of its hash tag, or of all of it where it has none."""
    data = key if isinstance(key, bytes) else str(key).encode()
    start = data.find(b"{") + 1
    if start:
        end = data.find(b"}", start)
        if end > start:
            data = data[start:end]
    return crc_hqx(data, 0) % SLOTS


def read_map(slots: Any, info: Any, *, host: str) -> SlotMap:
    """The map out of the replies to CLUSTER SLOTS and CLUSTER INFO; a node without a name of its own is at `host`."""
    owners = [NOBODY] * SLOTS
    for first, last, primary, *_ in slots:
        address = f"{_host_of(primary[0], host)}:{int(primary[1])}"
        owners[first : last + 1] = [address] * (last + 1 - first)
    found = _text(info).partition("cluster_current_epoch:")[2].split("\r\n", 1)[0]
    return SlotMap(owners, int(found or 0))


def place_of(address: str, *, host: str) -> tuple[str, int]:
    """Host and port of `host:port` as a node tells it, which leaves its host out where it does not know it."""
    name, _, port = address.rpartition(":")
    return _host_of(name, host), int(port)


def _host_of(told: Any, host: str) -> str:
    name = _text(told or "")
    return host if name in _NO_HOST else name


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
