"""img2dataset: 2 processes of 64 threads, no resizing or second encoding, SHA-256; never syncs.

With the format `files` each photo is a file, with `webdataset` a member of a tar file of 500.
`python -m bench.peers.img2dataset_run files URLS FOLDER`
"""

from __future__ import annotations

import json
import resource
import sys
import tarfile
from pathlib import Path

from img2dataset import download

PHOTOS_OF_SHARD = 500


def main(output_format: str, urls: Path, folder: Path) -> None:
    """Bring all of them in and count what was stored."""
    download(
        url_list=str(urls),
        input_format="txt",
        output_folder=str(folder),
        output_format=output_format,
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
    cpu_s = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    print(json.dumps({"stored": _stored(folder), "cpu_s": cpu_s}))


def _stored(folder: Path) -> int:
    names = [path.name for path in folder.rglob("*.jpg")]
    for path in folder.rglob("*.tar"):
        with tarfile.open(path) as shard:
            names += shard.getnames()
    return sum(name.endswith(".jpg") for name in names)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
