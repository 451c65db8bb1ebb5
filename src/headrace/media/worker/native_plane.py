"""The control side of the native data plane (`media/native/plane.h`), by ctypes.

The plane accepts the clients. It answers requests for objects that `describe` was called for, and
passes every other one with its socket to `on_event`. `adopt` gives an idle connection back.
Requests for objects of a peer are sent to it by the plane, until the peer fails or is replaced.

Objects are described after an answer of this process and stay valid as long as their shape is
cached. They are forgotten when purges, the placement of keys or the traces change.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable, Mapping
from ctypes import c_uint8
from pathlib import Path
from typing import Any, Final

from headrace.kernel.metrics import bound, observe_many
from headrace.kernel.signing import Key
from headrace.media.answers import HIT as HIT_STATUS
from headrace.media.answers import PEER as PEER_STATUS
from headrace.media.answers import content_lines, version_lines
from headrace.media.cache.block_cache import PlaneDisks
from headrace.media.cache.disk_files import ReadDisk
from headrace.media.cache.epochs import WorkerEpochs
from headrace.media.cluster.hop import HopGuard
from headrace.media.cluster.peers import Peer
from headrace.media.cluster.routing import note_native_hops
from headrace.media.header_rules import HeaderRule
from headrace.media.hottest import HOTTEST
from headrace.media.model import BLOCKS, CONNECTIONS, CUTS, TTFB, MediaConfig, Shape
from headrace.media.signing import A_MINUTE_S, A_YEAR_S
from headrace.media.worker.access_log import AccessLog
from headrace.media.worker.native_library import (
    BUCKETS,
    PlaneConfig,
    PlaneCounters,
    PlaneDisk,
    PlaneEvent,
    PlaneObject,
    plane_library,
)
from headrace.media.worker.socket_io import Channel
from headrace.media.worker.timing import ANSWERED, SENT
from headrace.media.worker.tls_io import NativeTlsChannel

REQUEST, BODY, REFUSED, LATE, SWAPPED, SLOW = range(1, 7)
_DESCRIBED_MAX: Final = 65_536
_SAMPLES_BYTES: Final = 64 * 1024
_WHY_BYTES: Final = 500
_BLOCKS: Final = {o: bound(BLOCKS, "media_blocks_total", outcome=o) for o in ("hit", "pass")}
_CUT: Final = {r: bound(CUTS, "media_cuts_total", reason=r) for r in ("client", "stalled")}


class PlanePeers:
    """The peers from which one plane requests blocks, and how they are numbered.

    A peer is given to the plane with the address of a connection that succeeded here. So names are
    resolved in Python only, and a node that nobody has reached yet is not requested natively. A
    number is used once: descriptions with the number of a dropped peer lead to Python.
    """

    def __init__(self, library: Any, plane: Any) -> None:
        self._library = library
        self._plane = plane
        self._peers: dict[int, tuple[Peer, tuple[str, int]]] = {}
        self._count = 0

    def number(self, peer: Peer) -> int:
        """The number of a peer for descriptions; 0: it has not been connected to yet."""
        endpoint = peer.endpoint
        if endpoint is None:
            return 0
        for number, known in self._peers.items():
            if known == (peer, endpoint):
                return number
        self._count += 1
        self._peers[self._count] = peer, endpoint
        self._put(self._count, peer, endpoint)
        return self._count

    def drop_unused(self, is_used: Callable[[Peer], bool]) -> bool:
        """Request nothing more from peers that are not used any more, or have moved.

        Return whether there was one.
        """
        gone = [
            number
            for number, (peer, endpoint) in self._peers.items()
            if not is_used(peer) or peer.endpoint != endpoint
        ]
        for number in gone:
            del self._peers[number]
            self._library.plane_drop_peer(self._plane, number)
        return bool(gone)

    def report_slow(self, number: int) -> None:
        """Record that a request waits for long; a dropped peer is ignored."""
        if number in self._peers:
            self._peers[number][0].report_slow()

    def _put(self, number: int, peer: Peer, endpoint: tuple[str, int]) -> None:
        timeout_ms = _timeout_ms(peer.timeout_s)
        name, address, ip = (
            text.encode("ascii") for text in (peer.name, peer.address, endpoint[0])
        )
        self._library.plane_put_peer(
            self._plane, number, name, address, ip, endpoint[1], timeout_ms
        )


class NativePlane:
    """The native data plane of one worker."""

    def __init__(
        self,
        config: MediaConfig,
        *,
        epochs: WorkerEpochs | None = None,
        folder: Path | None = None,
        access_log: AccessLog | None = None,
        ticket_seed: bytes | None = None,
        connections_max: int,
        on_event: Callable[[PlaneEvent], None],
    ) -> None:
        """Serve blocks of disks within `epochs`, or files of `folder`.

        `ticket_seed` has 32 bytes, the same in all workers of a node; None: no HTTPS.

        Raises: NativePlaneMissing, OSError.
        """
        self._library = plane_library()
        self._epochs = epochs
        board, epoch = epochs.addresses() if epochs is not None else (None, None)
        settings = PlaneConfig(
            header_timeout_ms=_timeout_ms(config.header_timeout_s),
            idle_timeout_ms=_timeout_ms(config.idle_timeout_s),
            send_timeout_ms=_timeout_ms(config.send_timeout_s),
            connections_max=connections_max,
            send_progress_bytes=config.send_progress_bytes,
            is_signature_required=config.signed == "required",
            ticket_seed=ticket_seed,
            folder=os.fsencode(folder) if folder is not None else None,
            log=access_log.open_native(self._library) if access_log is not None else None,
            is_origin_relevant=bool(config.cors_origins) and config.cors_origins != ("*",),
            board=board,
            epoch=epoch,
        )
        self._plane = self._library.plane_start(ctypes.byref(settings))
        if not self._plane:
            raise OSError("the native data plane did not start: memory or descriptors are missing")
        self._on_event = on_event
        self._described: dict[str, float] = {}
        self._held: dict[int, list[tuple[ReadDisk, list[Any]]]] = {}
        """Disks in use by revision of the manifest, with the views that keep their memory."""
        self._seen = PlaneCounters()
        self._samples = ctypes.create_string_buffer(_SAMPLES_BYTES)
        self._keys: Mapping[str, Key] | None = None
        self.peers = PlanePeers(self._library, self._plane)
        self.revision = -1
        """The revision of the disks that were set last."""
        self.connections_count = 0

    @property
    def event_fd(self) -> int:
        """The descriptor that is readable while events wait."""
        return int(self._library.plane_event_fd(self._plane))

    def listen(self, listener: socket.socket, *, is_tls: bool) -> None:
        """Accept clients of `listener`, which stays the caller's."""
        self._library.plane_listen(self._plane, os.dup(listener.fileno()), is_tls)

    def set_certificate(self, cert: str, key: str) -> None:
        """Use these files for later handshakes.

        Raises: OSError if they do not match; the last ones stay in use.
        """
        why = ctypes.create_string_buffer(_WHY_BYTES)
        files = os.fsencode(cert), os.fsencode(key)
        if self._library.plane_set_certificate(self._plane, *files, why, _WHY_BYTES) != 0:
            raise OSError(why.value.decode(errors="replace"))

    def stop_listening(self) -> None:
        """Accept no clients and close idle ones; answers in progress continue."""
        self._library.plane_stop_listening(self._plane)

    def channel(self, event: PlaneEvent) -> Channel:
        """The connection of an event. Raises: OSError."""
        client = socket.socket(fileno=event.fd)
        return NativeTlsChannel(client, self._library, event.tls) if event.tls else Channel(client)

    def adopt(self, fd: int, tls: int, sent_bytes: int) -> None:
        """Give back a connection that waits for its next request. The plane owns both now."""
        self._library.plane_adopt(self._plane, fd, tls, sent_bytes)

    def note_closed(self) -> None:
        """Record that a connection of an event was closed here."""
        self._library.plane_released(self._plane)

    def handle_events(self) -> None:
        """Call `on_event` for all waiting events. Each is valid until it returns."""
        while found := self._library.plane_next_event(self._plane):
            event = found.contents
            try:
                if event.kind == SWAPPED:
                    self._release_before(event.start)
                elif event.kind == SLOW:
                    self.peers.report_slow(event.start)
                else:
                    self._on_event(event)
            finally:
                self._library.plane_event_done(found)

    def is_described(self, key: str, now_s: float) -> bool:
        """Whether the plane has a current description of the object."""
        return self._described.get(key, 0.0) > now_s

    def describe(
        self,
        key: str,
        shape: Shape,
        version: str,
        expires_s: float,
        *,
        cors: str,
        rule: HeaderRule | None,
        peer: int = 0,
        is_for_peers: bool = False,
    ) -> None:
        """Let the plane answer requests for an object in the words of `answers.object_head`.

        `peer` is the number of the node that keeps it, from `peers.number`; 0: this one.
        """
        if len(self._described) >= _DESCRIBED_MAX:
            self._described.clear()
        self._described[key] = expires_s
        status = PEER_STATUS if peer else HIT_STATUS
        tail = content_lines(key, cache_status=status, cors=cors, rule=rule)
        own_control = rule.cache_control if rule is not None else None
        self._library.plane_put_object(
            self._plane,
            ctypes.byref(
                PlaneObject(
                    key=key.encode(),
                    version=version.encode(),
                    lines=version_lines(shape.etag, shape.modified_s).encode("latin-1"),
                    tail=tail.encode("latin-1"),
                    size_bytes=shape.size_bytes,
                    expires_ms=int(expires_s * 1000),
                    fresh_s=A_YEAR_S if shape.is_immutable else A_MINUTE_S,
                    is_immutable=shape.is_immutable,
                    peer=peer,
                    is_for_peers=is_for_peers,
                    cache_control=(own_control or "").encode(),
                )
            ),
        )

    def forget_object(self, key: str) -> None:
        """Drop the description of an object, which may have been replaced."""
        self._described.pop(key, None)
        self._library.plane_forget_object(self._plane, key.encode())

    def forget_objects(self) -> None:
        """Drop all descriptions."""
        if self._described:
            self._described.clear()
            self._library.plane_forget_objects(self._plane)

    def set_keys(self, keys: Mapping[str, Key]) -> None:
        """Set the keys whose signatures are valid."""
        if keys is self._keys:
            return
        self._keys = keys
        ids = "".join(keys).encode("ascii")
        secrets = b"".join(key.secret for key in keys.values())
        self._library.plane_set_keys(self._plane, ids, secrets, len(keys))

    def set_hop_keys(self, guard: HopGuard) -> None:
        """Answer requests of other nodes that `guard` accepts, and share its counters."""
        ids = "".join(guard.keys).encode("ascii")
        secrets = b"".join(key.secret for key in guard.keys.values())
        self._library.plane_set_hop_keys(
            self._plane, guard.name.encode("ascii"), ids, secrets, len(guard.keys)
        )
        guard.share_counters(self._advance_hop)

    def _advance_hop(self, connection: int, counter: int) -> bool:
        return bool(self._library.plane_hop_advance(self._plane, connection, counter))

    def set_disks(self, found: PlaneDisks) -> None:
        """Use the disks of a manifest."""
        revision, disks = found.revision, found.disks
        rows = (PlaneDisk * max(1, len(disks)))()
        held = []
        for row, disk in zip(rows, disks, strict=False):
            if disk is None or disk.is_copied:
                continue  # without sets: its blocks are sent by Python
            disk.hold()
            views = [
                (c_uint8 * 1).from_buffer(view)
                for view in (disk.table.index, disk.table.visited, disk.table.verified)
            ]
            held.append((disk, views))
            row.index, row.visited, row.verified = map(ctypes.addressof, views)
            row.sets, row.data_at = disk.table.sets, disk.source.data_at
            row.reader = disk.reader
        self._held[revision] = held
        self.revision = revision
        self._library.plane_set_disks(
            self._plane,
            revision,
            rows,
            len(disks),
            found.owners,
            found.owners_before,
            found.hash_key,
            len(found.hash_key),
        )

    def flush_counters(self) -> None:
        """Add what was counted since the last call to the metrics."""
        # A copy: the plane counts on meanwhile, and each count is added once.
        now = PlaneCounters.from_buffer_copy(self._library.plane_counters(self._plane).contents)
        seen, self._seen = self._seen, now
        ANSWERED[200].inc(now.answers_200 - seen.answers_200)
        ANSWERED[206].inc(now.answers_206 - seen.answers_206)
        _BLOCKS["hit"].inc(now.hits - seen.hits)
        SENT["memory"].inc(now.sent_bytes - seen.sent_bytes)
        _BLOCKS["pass"].inc(now.passed - seen.passed)
        SENT["peer"].inc(now.peer_bytes - seen.peer_bytes)
        hops = [now.hops[i] - seen.hops[i] for i in range(BUCKETS + 1)]
        hops_s = (now.hops_ns - seen.hops_ns) / 1e9
        note_native_hops(hops, hops_s, faults_count=now.hop_faults - seen.hop_faults)
        for reason in ("client", "stalled"):
            name = f"cuts_{reason}"
            _CUT[reason].inc(getattr(now, name) - getattr(seen, name))
        firsts = [now.first_bytes[i] - seen.first_bytes[i] for i in range(BUCKETS + 1)]
        observe_many(TTFB, firsts, (now.first_bytes_ns - seen.first_bytes_ns) / 1e9)
        self.connections_count = now.connections
        CONNECTIONS.inc(float(now.connections) - float(seen.connections))
        count = self._library.plane_take_samples(self._plane, self._samples, _SAMPLES_BYTES)
        for key in self._samples.raw[:count].decode().split():
            HOTTEST.count(key)

    def is_idle(self) -> bool:
        """Whether listening stopped and no connection is left here or at the control plane."""
        now = self._library.plane_counters(self._plane).contents
        return bool(now.is_stopped) and not now.clients

    def close(self) -> None:
        """End the thread; clients that are left are reset."""
        self._library.plane_close(self._plane)
        self._release_before(2**63)
        if self._epochs is not None:
            self._epochs.close()

    def _release_before(self, revision: int) -> None:
        for old in [number for number in self._held if number < revision]:
            for disk, views in self._held.pop(old):
                views.clear()
                disk.release()


def _timeout_ms(seconds: float) -> int:
    return min(2**31 - 1, int(seconds * 1000))
