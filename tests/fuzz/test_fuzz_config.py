"""Configuration: any TOML file and any variables.

Loading ends in settings or in one InvalidConfig that lists every fault; the command exits with 2.
"""

from __future__ import annotations

import json

from hypothesis import strategies as st
from tests.fuzz.budget import fuzz
from tests.fuzz.mutations import damaged

from headrace.__main__ import main
from headrace.app import sections
from headrace.kernel.config import InvalidConfig, Loaded, load_config, setting_rows

SECTIONS = sections()
ROWS = setting_rows(SECTIONS)
NAMES = [f"{row.section}.{row.name}" for row in ROWS]
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40)
ODD = (
    *(
        "",
        " ",
        "-1",
        "0",
        "1e3",
        "٣",
        "9" * 5000,
        "9" * 400 + "s",
        "9" * 4400 + "MiB",
        "NaN",
        "inf",
    ),
    *("true", "null", "[]", "{}", "a:b:c", "[::1", "[::1]:80", ":99999", "0.0.0.0/33", "80-79"),
    *("http://", "http://[", "s3://", "postgresql://a:b@[::1", "valkey://a:b@c:99999999999999"),
    *("file:///a\nb", "https://a b", "\x7f", "\u202e", "{[(", "a,b,c", "1,,2", "5/0s", "5/9999d"),
    *("999999999/0.000000001ms", "*", "//", "../..", "x" * 3000, "w=1&w=2", "1x1,0x0", "=", "a=b"),
)
VALUES = (
    st.sampled_from(ODD)
    | TEXTS
    | st.from_regex(r"[0-9]{1,20}(ms|s|m|h|d|KiB|TiB)?", fullmatch=True)
)
GOOD = (
    '[web]\nlisten = "127.0.0.1:0"\nbody_max = "1MiB"\n[jobs]\nlease = "30s"\n[media]\ndisks = []\n'
)


def toml_of(settings: dict[str, str]) -> str:
    """A TOML file of these settings."""
    sections: dict[str, list[str]] = {}
    for name, value in settings.items():
        section, _, key = name.partition(".")
        text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        sections.setdefault(section, []).append(f"{key} = {text}")
    return "".join(f"[{name}]\n" + "\n".join(lines) + "\n" for name, lines in sections.items())


def problems_of(env: dict[str, str], file) -> dict[str, str] | None:
    """The faults by pointer; None: all settings are valid."""
    try:
        loaded = load_config(SECTIONS, env=env, file=file)
    except InvalidConfig as raised:
        error = raised
    else:
        assert isinstance(loaded, Loaded)
        return None
    assert error.problems
    for problem in error.problems:
        assert problem.text in error.text
        assert "integer string" not in problem.text, f"a text of Python: {problem}"
        assert "IPv6 URL" not in problem.text, f"a text of Python: {problem}"
    return {problem.pointer: problem.text for problem in error.problems}


def test_every_fault_of_variables_is_reported_at_once(tmp_path):
    alone: dict[tuple[str, str], bool] = {}

    def is_bad(name: str, value: str) -> bool:
        if (name, value) not in alone:
            alone[name, value] = problems_of({name: value}, None) is not None
        return alone[name, value]

    def check(env: dict[str, str]) -> None:
        found = problems_of(env, None) or {}
        assert found.keys() == {name for name, value in env.items() if is_bad(name, value)}

    names = st.sampled_from([row.env for row in ROWS])
    fuzz(st.dictionaries(names, VALUES, min_size=1, max_size=6), check, examples=250, share=0.4)


def test_every_fault_of_a_file_is_reported_at_once(tmp_path):
    file = tmp_path / "headrace.toml"

    def check(settings: dict[str, str]) -> None:
        file.write_text(toml_of(settings))
        found = problems_of({}, file) or {}
        by_name = {f"{row.section}.{row.name}": row.env for row in ROWS}
        for name, value in settings.items():
            section, _, key = name.partition(".")
            is_bad = problems_of({by_name[name]: value}, None) is not None
            assert (f"{file}: [{section}] {key}" in found) == is_bad, (name, value, found)

    names = st.sampled_from(NAMES)
    fuzz(st.dictionaries(names, VALUES, min_size=1, max_size=5), check, examples=150, share=0.3)


def test_any_bytes_of_a_file_are_settings_or_a_fault(tmp_path):
    file = tmp_path / "headrace.toml"
    deep = [b"a = " + b"[" * 5000, b"[a" + b".b" * 5000 + b"]", b"a = " + b"{a=" * 2000]

    def check(data: bytes) -> None:
        file.write_bytes(data)
        problems_of({}, file)

    files = damaged([GOOD.encode()]) | st.binary(max_size=200) | st.sampled_from(deep)
    fuzz(files, check, examples=150, share=0.2)


def test_the_command_exits_with_2_and_no_traceback(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)

    def check(settings: dict[str, str]) -> None:
        text = toml_of(settings)
        (tmp_path / "headrace.toml").write_text(text)
        expected = 0 if problems_of({}, tmp_path / "headrace.toml") is None else 2
        assert main(["config", "show", "--json"]) == expected, text
        reported = capfd.readouterr().err
        assert "Traceback" not in reported, reported
        if expected:
            error = json.loads(reported.splitlines()[-1])["error"]
            assert (error["code"], error["exit_code"]) == ("invalid_config", 2)
            assert error["problems"]

    for row in ROWS:
        monkeypatch.delenv(row.env, raising=False)
    names = st.sampled_from([*NAMES, "web.lisen", "wep.listen"])
    fuzz(st.dictionaries(names, VALUES, max_size=4), check, examples=40, share=0.1)
