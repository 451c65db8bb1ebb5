"""Photos decoded whole, in a process that may break: `Decoder` asks, `child` decodes.

A header says what a file claims. That its picture can be shown is known only once it was decoded, and
decoders are what hostile files are made for: so none runs in the process that holds leases, connections
and keys. A child decodes for a slot, one photo at a time, within 1 GiB, 10 s of CPU, no further file or
socket; what it dies of is that photo's fault alone. Decoding costs 1 to 8 ms a photo against 1 us for its
header, so a share is drawn (`fetch.decode_share`), and every photo whose header is odd is taken.
"""

from __future__ import annotations

from headrace.fetch.decoding.client import (
    DecodeLimits,
    Decoder,
    DecoderDown,
    SheetName,
    SheetRow,
    SheetUnreadable,
    sheet_rows,
)

__all__ = [
    "DecodeLimits",
    "Decoder",
    "DecoderDown",
    "SheetName",
    "SheetRow",
    "SheetUnreadable",
    "sheet_rows",
]
