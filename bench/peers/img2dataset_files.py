"""img2dataset writing files: 2 processes of 64 threads, no resizing or second encoding, SHA-256.

It never syncs. `python -m bench.peers.img2dataset_files URLS FOLDER`
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

from img2dataset import download

PHOTOS_OF_SHARD = 500


def main(urls: Path, folder: Path) -> None:
    """Bring all of them in and count what was stored."""
    download(
        url_list=str(urls),
        input_format="txt",
        output_folder=str(folder),
        output_format="files",
        processes_count=2,
        thread_count=64,
        resize_mode="no",
        disable_all_reencoding=True,
        number_sample_per_shard=PHOTOS_OF_SHARD,
        compute_hash="sha256",
        retries=0,
        enable_wandb=False,
    )
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    stored = sum(1 for path in folder.rglob("*.jpg"))
    cpu_s = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    print(json.dumps({"stored": stored, "cpu_s": cpu_s}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
