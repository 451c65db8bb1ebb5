"""A worker that stays in an epoch: `python epoch_holder.py RUN_FOLDER WORKER`.

It prints `inside` and waits for a line.
"""

from __future__ import annotations

import sys
from pathlib import Path

from headrace.media.cache.epochs import WorkerEpochs

if __name__ == "__main__":
    turns = WorkerEpochs(Path(sys.argv[1]), int(sys.argv[2]))
    turns.enter()
    print("inside", flush=True)
    sys.stdin.readline()
    turns.leave()
    print("left", flush=True)
    sys.stdin.readline()
