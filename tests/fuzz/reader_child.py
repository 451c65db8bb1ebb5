"""Reads hostile files in a process of limited memory, for `test_fuzz_files`.

Each line of standard input is a JSON list: a kind and the path of a file. The answer is a line: the
outcome, and the peak memory in bytes. Any exception that a reader does not declare is the outcome
`fault` with its traceback; so is a MemoryError.
"""

from __future__ import annotations

import json
import resource
import sys
import traceback
from pathlib import Path
from typing import Final

import msgspec

from headrace.fetch.images import NotAPhoto, inspect_image
from headrace.fetch.mappings import parse_mapping
from headrace.fetch.readers import FORMAT_NAMES, open_catalogue
from headrace.fetch.validation import Policy, Rules, read_chunk
from headrace.kernel.errors import InvalidInput, TooLarge
from headrace.media.id3 import TagCorrupt, own_tag_bytes, read_tags

ADDRESS_SPACE_BYTES: Final = 2 * 2**30
UNPACKED_BYTES_MAX: Final = 4 * 2**20
RULES: Final = Rules(Policy())
MAPPING: Final = parse_mapping({"id": "id", "rows": "items", "photos": ["photos", "a.@b"]})


def read_as_catalogue(path: Path, **options: object) -> str:
    """Read all rows of a catalogue as a run does; return `rows`, or the code of the refusal."""
    try:
        rows = open_catalogue(path, bytes_max=UNPACKED_BYTES_MAX, **options).rows
        is_last = False
        while not is_last:
            chunk = read_chunk(rows, RULES)
            is_last = chunk.is_last
            for problem in chunk.problems:
                msgspec.json.encode(problem)
    except (InvalidInput, TooLarge) as error:
        return error.code if error.text else "fault: an error without a text"
    return "rows"


def read_all_ways(path: Path) -> str:
    """Read a file as it is detected, with a mapping, and as every format."""
    outcomes = {read_as_catalogue(path), read_as_catalogue(path, mapping=MAPPING)}
    if path.read_bytes()[:2] not in (b"PK", b"\xd0\xcf"):
        for name in FORMAT_NAMES:
            mapping = MAPPING if name == "xml" else None
            outcomes.add(read_as_catalogue(path, format_name=name, mapping=mapping))
    return " ".join(sorted(outcomes))


def read_as_photo(path: Path) -> str:
    """The format of a photo, or the outcome of its refusal."""
    try:
        return inspect_image(path.read_bytes()).format
    except NotAPhoto as refused:
        return refused.outcome


def read_as_tag(path: Path) -> str:
    """Whether a tag is ours; the length of a foreign tag is within the file."""
    data = path.read_bytes()
    assert 0 <= own_tag_bytes(data, len(data)) <= len(data)
    try:
        read_tags(data)
    except TagCorrupt:
        return "corrupt"
    return "tag"


READERS: Final = {"catalogue": read_all_ways, "photo": read_as_photo, "tag": read_as_tag}


def main() -> None:
    """Answer one line per file."""
    # The soft limit alone: the decoder of sheets sets its own.
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, most))
    for line in sys.stdin:
        kind, path = json.loads(line)
        try:
            outcome = READERS[kind](Path(path))
        except Exception:  # noqa: BLE001 - what this process is for
            outcome = f"fault {traceback.format_exc()}"
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps([outcome, peak_bytes]), flush=True)


if __name__ == "__main__":
    main()
