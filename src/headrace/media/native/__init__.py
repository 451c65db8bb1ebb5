"""The native data plane: a C library that answers the common requests of a worker.

`plane.h` explains its design. `library` loads it; `NativePlane` in `worker.native_plane` uses it.
"""

from headrace.media.native.build import (
    FLAGS,
    FOLDER,
    WARNINGS,
    NativePlaneMissing,
    build_library,
    built_library,
    kernel_tls_missing,
    library_path,
    native_tls_missing,
)

__all__ = [
    "FLAGS",
    "FOLDER",
    "WARNINGS",
    "NativePlaneMissing",
    "build_library",
    "built_library",
    "kernel_tls_missing",
    "library_path",
    "native_tls_missing",
]
