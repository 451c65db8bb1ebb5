"""Any bytes produce rows or a typed error, and a cut file never reads as complete."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.fetch.guard import Policy
from headrace.fetch.mappings import parse_mapping
from headrace.fetch.readers import FORMAT_NAMES, Truncated, open_catalogue
from headrace.fetch.validation import Rules, read_chunk
from headrace.kernel.errors import InvalidInput, TooLarge

RULES = Rules(Policy())
MAPPING = parse_mapping({"id": "id", "rows": "items", "photos": ["photos", "a.@b"]})
SIGNS = (
    "id name photos items 1 A é &amp; &a; ]]> \" ' \\ \\u0000 \\ud800"
    " { } [ ] : , ; | < > / NaN 1e999"
)
TAGS = "<Ads> <Ad> </Ad> <Id>1</Id> <rss> <channel> <item> <g:id> <feed> <entry> <yml_catalog> <!--"
PIECES = [
    *(
        *SIGNS.split(),
        *TAGS.split(),
        "<offers>",
        "<![CDATA[",
        "<?xml",
        "-",
        "null",
        "<offer id='1'>",
    ),
    *("\ud800", "\x00", "\ufeff", "\t", "\n", "\r\n", "id,name\n", "1,A\n", "sep=;\n"),
    *('{"id": 1, "name": "A"}', '{"items": ['),
]
DOCUMENTS = st.one_of(
    st.binary(max_size=300),
    st.lists(st.sampled_from(PIECES), max_size=40).map(
        lambda pieces: "".join(pieces).encode("utf-8", "surrogatepass")
    ),
    st.lists(st.sampled_from(PIECES), max_size=20).map(
        lambda pieces: "".join(pieces).encode("utf-16", "surrogatepass")
    ),
)
QUICK = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def outcome(path, **options) -> str:
    """`rows`, or the code of the error that says why there are none."""
    try:
        rows = open_catalogue(path, bytes_max=10**6, **options).rows
        is_last = False
        while not is_last:
            chunk = read_chunk(rows, RULES)
            is_last = chunk.is_last
            for problem in chunk.problems:
                msgspec.json.encode(problem)
                assert problem.field.isprintable()
    except (InvalidInput, TooLarge) as error:
        return error.code if error.text else "no words"
    return "rows"


def is_told(found: str) -> bool:
    return found == "rows" or found.startswith("fetch.")


@pytest.mark.parametrize(
    "text", ["артикул;название\n1;Лампа\n", "id;name;цвет\n1;A;белый\n", "id;name\n1;Лампа\n"]
)
def test_a_table_in_another_encoding_is_told_so_with_its_line(tmp_path, text):
    path = tmp_path / "shop.csv"
    path.write_bytes(text.encode("cp866"))
    line = 1 if "цвет" in text or "артикул" in text else 2
    for options in ({}, {"format_name": "csv"}):
        with pytest.raises(
            InvalidInput, match=f"line {line}: the text is not valid UTF-8"
        ) as refused:
            list(open_catalogue(path, bytes_max=10**6, **options).rows)
        assert "mapping" in refused.value.text
        assert "\N{REPLACEMENT CHARACTER}" not in refused.value.text
    mapping = parse_mapping({"id": ["id", "артикул"], "encoding": "cp866"})
    (row,) = open_catalogue(path, bytes_max=10**6, mapping=mapping).rows
    assert (row.item, row.fault) == ("1", None)


@pytest.mark.slow
@QUICK
@given(data=DOCUMENTS)
def test_any_bytes_end_in_rows_or_a_typed_error(tmp_path, data):
    path = tmp_path / "any"
    path.write_bytes(data)
    assert is_told(outcome(path))
    assert is_told(outcome(path, mapping=MAPPING))


@pytest.mark.slow
@QUICK
@given(data=DOCUMENTS, name=st.sampled_from(FORMAT_NAMES))
def test_any_bytes_read_as_any_format_end_so_too(tmp_path, data, name):
    path = tmp_path / "any"
    path.write_bytes(data)
    mapping = MAPPING if name == "xml" else None
    assert is_told(outcome(path, format_name=name, mapping=mapping))


TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
ROWS = st.lists(st.dictionaries(TEXTS, VALUES, min_size=1, max_size=4), min_size=1, max_size=5)


@pytest.mark.slow
@QUICK
@given(rows=ROWS, indent=st.sampled_from([None, 2]), is_wrapped=st.booleans(), data=st.data())
def test_json_gives_every_row_and_no_cut_goes_unnoticed(
    tmp_path, *, rows, indent, is_wrapped, data
):
    path = tmp_path / "rows.json"
    document = json.dumps({"n": [1], "items": rows} if is_wrapped else rows, indent=indent)
    path.write_text(document)
    found = list(open_catalogue(path, bytes_max=10**6, format_name="json").rows)
    assert len(found) == len(rows)
    assert all(row.fault is None for row in found)
    path.write_text(document[: data.draw(st.integers(1, len(document) - 1))])
    with pytest.raises(Truncated):
        list(open_catalogue(path, bytes_max=10**6, format_name="json").rows)
