"""Files: catalogues of every format, photos and audio tags, damaged.

They are read in a process whose memory is limited (`reader_child`). Each ends in rows or in a
declared error, and needs no more memory than a sound file of this size.
"""

# ruff: noqa: RUF001 - Cyrillic is meant
from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys

import pytest
from hypothesis import strategies as st
from PIL import Image
from tests.fuzz.budget import fuzz
from tests.fuzz.mutations import damaged, damaged_archive
from tests.kit.processes import ROOT
from tests.kit.workbooks import ods, sheet_xml, xlsx

from headrace.media.id3 import Tags, tag_bytes

PEAK_GROWTH_BYTES_MAX = 96 * 2**20
"""A row has at most 1 MiB, and a file here less; gzip unpacks to at most 4 MiB."""
OFFER = (
    '<offer id="{n}"><name>Лампа {n}</name><price>5.50</price><picture>http://a/{n}.jpg</picture>'
)
CATALOGUES = {
    "csv": "id,name,price,photos\n"
    + "".join(f'{n},"Лампа, {n}",5.50,http://a/{n}.jpg\n' for n in range(9)),
    "tsv": "id\tname\tprice\tphotos\n"
    + "".join(f"{n}\tЛампа\t5\thttp://a/{n}.jpg\n" for n in range(9)),
    "json": json.dumps(
        [
            {"id": str(n), "name": "Лампа", "price": 5.5, "photos": ["http://a/1.jpg"]}
            for n in range(9)
        ]
    ),
    "items": json.dumps(
        {"n": [1], "items": [{"id": n, "a": [{"b": "http://a/1.jpg"}]} for n in range(9)]}
    ),
    "ndjson": "".join(
        json.dumps({"id": n, "name": "Лампа", "photos": "http://a/1.jpg"}) + "\n" for n in range(9)
    ),
    "yml": '<?xml version="1.0" encoding="UTF-8"?>\n<yml_catalog date="2026-01-01">'
    '<shop><categories><category id="7">Lamps</category></categories><offers>'
    + "".join(OFFER.format(n=n) + "</offer>" for n in range(9))
    + "</offers></shop></yml_catalog>",
    "avito": '<?xml version="1.0" encoding="UTF-8"?>\n<Ads formatVersion="3" target="Avito.ru">'
    "<Ad><Id>bike-1</Id><Title>City bike</Title><Price>120</Price>"
    "<Description><![CDATA[<p>Good</p>]]></Description>"
    '<Images><Image url="http://a/1.jpg"/><Image url="http://a/2.jpg"/></Images></Ad></Ads>',
    "rss": '<?xml version="1.0"?><rss version="2.0" xmlns:g="http://base.google.com/ns/1.0"><channel>'
    "<title>Shop</title><item><g:id>bike-1</g:id><g:title>City bike</g:title>"
    "<g:price>120.00 EUR</g:price><g:image_link>http://a/1.jpg</g:image_link></item></channel></rss>",
    "atom": '<feed xmlns="http://www.w3.org/2005/Atom" xmlns:c="http://base.google.com/ns/1.0"><id>tag:s</id>'
    '<entry><c:id>bike-1</c:id><title>City bike</title><link href="http://s/1"/></entry></feed>',
}
TEXTS = [text.encode() for text in CATALOGUES.values()]
TEXTS += [CATALOGUES["csv"].encode("windows-1251"), CATALOGUES["tsv"].encode("utf-16")]
ROWS = [["id", "name", "price"], *[[str(n), "Лампа", "5,5"] for n in range(9)]]
SHEETS = [xlsx({"Лист": sheet_xml(dict(enumerate(ROWS, 1)))}), ods(ROWS)]


def photos() -> list[bytes]:
    """One photo of each format, and an animation."""
    found = []
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "AVIF"):
        out = io.BytesIO()
        Image.linear_gradient("L").resize((40, 30)).convert("RGB").save(out, kind)
        found.append(out.getvalue())
    out = io.BytesIO()
    frames = [Image.new("RGB", (20, 10), (n, n, n)) for n in range(3)]
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:])
    return [*found, out.getvalue()]


def tags() -> list[bytes]:
    """Our own tags, and a foreign one in front of a track."""
    cover = photos()[0]
    ours = [Tags(title="Über den Wolken", artist="雨"), Tags(cover=cover, buyer="user:42")]
    foreign = b"ID3\x03\x00\x00\x00\x00\x01\x00" + bytes(128) + b"\xff\xfb\x90\x00" * 20
    return [*map(tag_bytes, ours), foreign]


class Reader:
    """The process that reads; it is replaced by none: a death is a fault."""

    def __init__(self, folder) -> None:
        self._file = folder / "file"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.reader_child"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._base_bytes = 0

    def read(self, kind: str, data: bytes) -> str:
        """The outcome of a file. Raises: AssertionError for a crash, a fault or much memory."""
        self._file.write_bytes(data)
        self._process.stdin.write(json.dumps([kind, str(self._file)]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the reader died with {self._process.wait(60)}"
        outcome, peak_bytes = json.loads(line)
        assert not outcome.startswith("fault"), outcome
        self._base_bytes = self._base_bytes or peak_bytes
        assert peak_bytes - self._base_bytes < PEAK_GROWTH_BYTES_MAX, "memory"
        return outcome

    def end(self) -> None:
        self._process.kill()
        self._process.wait(60)
        self._process.stdin.close()
        self._process.stdout.close()


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    reader = Reader(tmp_path_factory.mktemp("files"))
    yield reader
    reader.end()


def packed(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


@pytest.mark.slow
def test_damaged_catalogues_end_in_rows_or_a_declared_error(reader):
    for text in TEXTS:
        assert "rows" in reader.read("catalogue", text).split()
    zipped = [packed(text) for text in TEXTS]
    files = damaged(TEXTS) | damaged(TEXTS).map(packed) | damaged(zipped) | st.binary(max_size=400)
    fuzz(files, lambda data: reader.read("catalogue", data), examples=150, share=0.4)


@pytest.mark.slow
def test_damaged_sheets_end_in_rows_or_a_declared_error(reader):
    for data in SHEETS:
        assert "rows" in reader.read("catalogue", data).split()
    files = damaged_archive(SHEETS) | damaged(SHEETS)
    fuzz(files, lambda data: reader.read("catalogue", data), examples=10, share=0.4)


@pytest.mark.slow
def test_damaged_photos_and_tags_are_refused_or_read(reader):
    assert {reader.read("photo", data) for data in photos()} == {
        "jpg",
        "png",
        "webp",
        "gif",
        "avif",
    }
    assert [reader.read("tag", data) for data in tags()] == ["tag", "tag", "corrupt"]
    fuzz(damaged(photos()), lambda data: reader.read("photo", data), examples=200, share=0.1)
    fuzz(damaged(tags()), lambda data: reader.read("tag", data), examples=100, share=0.1)
