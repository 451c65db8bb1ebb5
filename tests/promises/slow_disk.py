"""A library that makes the syncs of a process slow, as a slow disk does.

Its writes stay as they are.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CODE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
static void wait_ms(void) {
  struct timespec t = {%(ms)d / 1000, %(ms)d %% 1000 * 1000000L};
  nanosleep(&t, 0);
}
int fdatasync(int fd) {
  int (*next)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
  wait_ms();
  return next(fd);
}
int fsync(int fd) {
  int (*next)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
  wait_ms();
  return next(fd);
}
"""


def slow_syncs(folder: Path, *, sync_ms: int) -> dict[str, str]:
    """Variables of a process whose every sync takes `sync_ms` longer.

    The test is skipped where there is no C compiler.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) is installed: syncs cannot be made slow")
    source, library = folder / "slow.c", folder / "slow.so"
    source.write_text(CODE % {"ms": sync_ms})
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True
    )
    return {"LD_PRELOAD": str(library)}
