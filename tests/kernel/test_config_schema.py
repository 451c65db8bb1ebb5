"""The schema of headrace.toml: what is documented is valid, and typos are refused."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from headrace.__main__ import main
from headrace.app import sections
from headrace.cli.setup import commented_config
from headrace.kernel.config import InvalidConfig, load_config
from headrace.kernel.config_schema import config_schema

ROOT = Path(__file__).parents[2]
SCHEMA = config_schema(sections())
VALIDATOR = Draft202012Validator(SCHEMA)
DOCUMENTED = [
    (f"{path.name}:{text.count(chr(10), 0, match.start()) + 1}", match[1])
    for path in sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md", *ROOT.glob("deploy/**/*")])
    if path.suffix in {".md", ".yml", ".yaml"}
    for text in [path.read_text()]
    for match in re.finditer(r"^ *```toml\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
]


def loaded(document, tmp_path):
    """Whether the application accepts the file."""
    file = tmp_path / "headrace.toml"
    file.write_text(document)
    try:
        load_config(sections(), env={}, file=file)
    except InvalidConfig:
        return False
    return True


def test_it_is_a_schema_and_the_command_prints_it(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Draft202012Validator.check_schema(SCHEMA)
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA


@pytest.mark.parametrize(("place", "text"), DOCUMENTED, ids=[place for place, _ in DOCUMENTED])
def test_a_documented_example_is_valid(place, text, tmp_path):
    text = re.sub(r"(?m)^ {1,3}(?=\S)", "", text).replace('"..."', f'"{"x" * 40}"')
    errors = [error.message for error in VALIDATOR.iter_errors(tomllib.loads(text))]
    assert errors == [], place
    assert loaded(text, tmp_path)


def test_the_file_of_init_is_valid_with_every_default_uncommented(tmp_path):
    commented = commented_config(sections())
    text = re.sub(r'(?m)^# (?=[a-z_]+ = (?!"\.\.\."))', "", commented)
    document = tomllib.loads(text)
    assert document.keys() == SCHEMA["properties"].keys()
    filled = {
        section: {name: value for name, value in table.items() if value}
        for section, table in document.items()
    }
    assert sum(map(len, filled.values())) > 100
    assert list(VALIDATOR.iter_errors(filled)) == []


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        ("[jobs]\nlease = '30s'", True),
        ("[jobs]\nlease = 30", False),
        ("[jobs]\nlease = '30 sec'", False),
        ("[jobs]\nleese = '30s'", False),
        ("[job]\nlease = '30s'", False),
        ("lease = '30s'", False),
        ("[media]\nsigned = 'required'", True),
        ("[media]\nsigned = 'yes'", False),
        ("[web]\nlisten = '127.0.0.1:8080'", True),
        ("[web]\nlisten = 8080", False),
        ("[postgres]\nconnections_max = 20", True),
        ("[postgres]\nconnections_max = '20'", True),
        ("[postgres]\nconnections_max = -1", False),
        ("[postgres]\nurl = 'postgresql://db/shop'", True),
        ("[postgres]\nurl = 'mysql://db/shop'", False),
        ("[postgres]\nbin = '/usr/lib/postgresql/15/bin'", True),
        ("[fetch]\nallow_ports = [80, 443]", True),
        ("[fetch]\nallow_ports = {a = 1}", False),
    ],
)
def test_schema_and_application_agree(text, is_valid, tmp_path):
    assert VALIDATOR.is_valid(tomllib.loads(text)) is is_valid
    assert loaded(text, tmp_path) is is_valid
