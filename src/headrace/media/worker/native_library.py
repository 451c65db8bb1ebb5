"""The library of the native data plane as ctypes sees it: structures and functions of plane.h."""

from __future__ import annotations

import ctypes
from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_int,
    c_int32,
    c_int64,
    c_uint8,
    c_uint64,
    c_void_p,
)
from functools import cache
from typing import ClassVar, Final

from headrace.kernel.metrics import FINE_BUCKETS_S
from headrace.media.native import library_path

BUCKETS: Final = len(FINE_BUCKETS_S)


class PlaneConfig(Structure):
    """`plane_config` of plane.h."""

    _fields_: ClassVar = [
        ("header_timeout_ms", c_int32),
        ("idle_timeout_ms", c_int32),
        ("send_timeout_ms", c_int32),
        ("connections_max", c_int32),
        ("send_progress_bytes", c_int64),
        ("is_signature_required", c_int32),
        ("is_origin_relevant", c_int32),
        ("ticket_seed", c_char_p),
        ("folder", c_char_p),
        ("log", c_void_p),
        ("board", c_void_p),
        ("epoch", c_void_p),
    ]


class PlaneDisk(Structure):
    """`plane_disk` of plane.h."""

    _fields_: ClassVar = [
        ("index", c_void_p),
        ("visited", c_void_p),
        ("verified", c_void_p),
        ("sets", c_uint64),
        ("data_at", c_int64),
        ("reader", c_int32),
    ]


class PlaneObject(Structure):
    """`plane_object` of plane.h."""

    _fields_: ClassVar = [
        ("key", c_char_p),
        ("version", c_char_p),
        ("lines", c_char_p),
        ("tail", c_char_p),
        ("size_bytes", c_int64),
        ("expires_ms", c_int64),
        ("fresh_s", c_int32),
        ("is_immutable", c_int32),
        ("peer", c_int32),
        ("is_for_peers", c_int32),
        ("cache_control", c_char_p),
    ]


class PlaneEvent(Structure):
    """`plane_event` of plane.h: a connection that the plane passes on, and received bytes.

    For BODY: the object, its version and the bytes to send; `file` is its open file, or -1, and
    `peer` is not 0 if a peer keeps it. For SWAPPED `start` is the revision, for SLOW the peer.
    `tls` is the state of an encrypted connection, or None; `entry` is for the access log, or None.
    """

    _fields_: ClassVar = [
        ("kind", c_int32),
        ("fd", c_int32),
        ("file", c_int32),
        ("data_bytes", c_int32),
        ("peer", c_int32),
        ("data", POINTER(c_uint8)),
        ("key", c_char_p),
        ("version", c_char_p),
        ("start", c_int64),
        ("left", c_int64),
        ("rate", c_int64),
        ("sent_bytes", c_int64),
        ("tls", c_void_p),
        ("entry", c_void_p),
    ]

    @property
    def received(self) -> bytes:
        """A copy of the received bytes."""
        return ctypes.string_at(self.data, self.data_bytes)


class PlaneCounters(Structure):
    """`plane_counters` of plane.h."""

    _fields_: ClassVar = [
        ("answers_200", c_uint64),
        ("answers_206", c_uint64),
        ("hits", c_uint64),
        ("sent_bytes", c_uint64),
        ("handed_over", c_uint64),
        ("connections", c_uint64),
        ("clients", c_uint64),
        ("is_stopped", c_uint64),
        ("cuts_client", c_uint64),
        ("cuts_stalled", c_uint64),
        ("first_bytes", c_uint64 * (BUCKETS + 1)),
        ("first_bytes_ns", c_uint64),
        ("passed", c_uint64),
        ("peer_bytes", c_uint64),
        ("hop_faults", c_uint64),
        ("hops", c_uint64 * (BUCKETS + 1)),
        ("hops_ns", c_uint64),
    ]


@cache
def plane_library() -> ctypes.CDLL:
    """The loaded library, compiled now if necessary. Raises: NativePlaneMissing, OSError."""
    loaded = ctypes.CDLL(str(library_path()))
    loaded.plane_start.restype = loaded.access_log_open.restype = c_void_p
    loaded.access_log_take.restype = c_void_p
    loaded.plane_next_event.restype = POINTER(PlaneEvent)
    loaded.plane_counters.restype = POINTER(PlaneCounters)
    loaded.plane_tls_receive.restype = loaded.plane_tls_send.restype = c_int64
    arguments = {
        "access_log_open": [c_int],
        "access_log_close": [c_void_p],
        "access_log_end": [c_void_p, c_void_p, c_int64],
        "access_log_take": [c_void_p, POINTER(c_int64), POINTER(c_int64)],
        "plane_start": [POINTER(PlaneConfig)],
        "plane_close": [c_void_p],
        "plane_event_fd": [c_void_p],
        "plane_next_event": [c_void_p],
        "plane_event_done": [POINTER(PlaneEvent)],
        "plane_counters": [c_void_p],
        "plane_take_samples": [c_void_p, c_char_p, c_int],
        "plane_listen": [c_void_p, c_int, c_int],
        "plane_stop_listening": [c_void_p],
        "plane_adopt": [c_void_p, c_int, c_void_p, c_int64],
        "plane_set_certificate": [c_void_p, c_char_p, c_char_p, c_char_p, c_int],
        "plane_tls_receive": [c_void_p, c_char_p, c_int64],
        "plane_tls_send": [c_void_p, c_char_p, c_int64],
        "tls_end": [c_void_p],
        "tls_free": [c_void_p],
        "plane_released": [c_void_p],
        "plane_put_object": [c_void_p, POINTER(PlaneObject)],
        "plane_forget_object": [c_void_p, c_char_p],
        "plane_forget_objects": [c_void_p],
        "plane_set_keys": [c_void_p, c_char_p, c_char_p, c_int],
        "plane_set_hop_keys": [c_void_p, c_char_p, c_char_p, c_char_p, c_int],
        "plane_put_peer": [c_void_p, c_int32, c_char_p, c_char_p, c_char_p, c_int, c_int],
        "plane_drop_peer": [c_void_p, c_int32],
        "plane_hop_advance": [c_void_p, c_uint64, c_uint64],
        "plane_set_disks": [
            *(c_void_p, c_uint64, POINTER(PlaneDisk), c_int),
            *(c_char_p, c_char_p, c_char_p, c_int),
        ],
    }
    for name, types in arguments.items():
        getattr(loaded, name).argtypes = types
    return loaded
