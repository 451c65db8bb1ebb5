"""Mappings: how they name fields in each format, and which ones are invalid."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from reading import read

from headrace.fetch.errors import CatalogueBroken, InvalidMapping, NotACatalogue, UnknownFormat
from headrace.fetch.mappings import parse_mapping

FOREIGN = """<shop><meta><name>x</name></meta><goods>
<good code="7" kind="b"><title lang="ru">Стол</title><pics><pic>http://a/1</pic><pic>http://a/2</pic></pics>
<main href="http://a/0"/><maker><name>Acme</name></maker><note> </note></good>
</goods></shop>"""


MAPPING = {
    "rows": "goods/good",
    "id": "@code",
    "name": ["caption", "Title"],
    "photos": ["main.@href", "pics.pic[]"],
    "fields": {"brand": "maker.name"},
}


@pytest.mark.parametrize("rows", ["goods/good", "shop.goods.good", "Shop/Goods/Good"])
def test_any_xml_reads_by_a_mapping(tmp_path, rows):
    kind, found = read(tmp_path, FOREIGN, mapping=parse_mapping(MAPPING | {"rows": rows}))
    assert (kind, len(found)) == ("xml", 1)
    assert found[0].photos == ["http://a/0", "http://a/1", "http://a/2"]
    assert found[0].values == {
        "id": "7",
        "name": "Стол",
        "brand": "Acme",
        "@kind": "b",
        "title.@lang": "ru",
    }


def test_a_mapping_may_drop_unnamed_values(tmp_path):
    _, found = read(tmp_path, FOREIGN, mapping=parse_mapping(MAPPING | {"others": "drop"}))
    assert found[0].values == {"id": "7", "name": "Стол", "brand": "Acme"}


def test_a_mapping_of_csv_and_json(tmp_path):
    mapping = parse_mapping(
        {
            "id": "Артикул",
            "name": "Название",
            "photos": ["Фото", "Фото 2"],
            "fields": {"size": "A.B"},
        }
    )
    table = (
        "Артикул;Название;Фото 2;Фото;Цвет;A.B\n1;Стол;http://a/2;http://a/1, http://a/0;red;5\n"
    )
    rows = '[{"артикул": 1, "НАЗВАНИЕ": "Стол", "a": {"b": 5}, "цвет": "red",'
    rows += ' "фото": ["http://a/1", "http://a/0"], "фото 2": "http://a/2"}]'
    expected = {"id": "1", "name": "Стол", "size": "5", "цвет": "red"}
    for document in (table, rows):
        _, found = read(tmp_path, document, mapping=mapping)
        assert found[0].values == expected
        assert found[0].photos == ["http://a/1", "http://a/0", "http://a/2"]


def test_rows_of_json_are_found_by_their_path(tmp_path):
    document = '{"a": [{"id": 0}], "b": {"x": 1, "Rows": [{"n": 1}, {"n": 2}], "y": [{}]}, "z": 1}'
    mapping = parse_mapping({"rows": "b.rows", "id": "n"})
    assert [r.item for r in read(tmp_path, document, mapping=mapping)[1]] == ["1", "2"]
    for path in ("b.none", "b.x", "a.b", "b"):
        with pytest.raises(CatalogueBroken) as refused:
            read(tmp_path, document, mapping=parse_mapping({"rows": path, "id": "n"}))
        assert refused.value.problems[0].code == "no_rows_at"


def test_a_mapping_sets_the_encoding_of_a_table(tmp_path):
    table = "код|имя\n1|Стол\n".encode("cp866")
    mapping = {"id": "код", "name": "имя", "encoding": "cp866", "delimiter": "|"}
    assert read(tmp_path, table, mapping=parse_mapping(mapping))[1][0].values["name"] == "Стол"
    with pytest.raises(NotACatalogue, match="line 1: the text is not valid UTF-8"):
        read(tmp_path, table, mapping=parse_mapping({"id": "код"}))
    with pytest.raises(NotACatalogue, match="id of the mapping"):
        read(tmp_path, "код|имя\n1|Стол\n".encode(), mapping=parse_mapping({"id": "code"}))


@pytest.mark.parametrize(
    ("data", "format_name", "mapping", "error"),
    [
        (FOREIGN, None, None, NotACatalogue),
        (FOREIGN, "xml", None, UnknownFormat),
        (FOREIGN, "excel", None, UnknownFormat),
        ("<Ads/>", "avito", {"id": "Id"}, UnknownFormat),
        ("<Ads/>", "xml", {"id": "Id"}, InvalidMapping),
        ("<Ads/>", "json", {"id": "Id"}, CatalogueBroken),
    ],
)
def test_a_mapping_and_a_format_must_fit(tmp_path, data, format_name, mapping, error):
    with pytest.raises(error):
        read(tmp_path, data, format_name=format_name, mapping=mapping and parse_mapping(mapping))


CASES = tomllib.loads(Path(__file__).with_name("readers.toml").read_text())
LONG_MAPPINGS = [[{"id": "x" * 300}, "/id"], [{"id": "a", "photos": ["b"] * 101}, "/photos"]]


@pytest.mark.parametrize(("mapping", "pointer"), CASES["bad_mappings"] + LONG_MAPPINGS)
def test_an_invalid_mapping_is_refused(mapping, pointer):
    with pytest.raises(InvalidMapping, match="mapping is not valid") as refused:
        parse_mapping(mapping)
    assert not pointer or pointer in [problem.pointer for problem in refused.value.problems]
