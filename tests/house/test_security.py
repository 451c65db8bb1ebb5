"""Controls that hold for all code: data is never code, SQL has parameters, Lua is fixed.

`python -m tools.planted` switches off every control of the product and runs its tests.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tools.planted import patches

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "headrace"
SOURCES = sorted(SRC.rglob("*.py"))
UNSAFE_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "yaml"}
UNSAFE_CALLS = {"eval", "exec", "os.system", "os.popen", "__import__"}
RUN_SQL = {"execute", "executemany", "fetch", "fetchrow", "fetchval", "compile_query", "cursor"}
SCRIPTS = {"EVAL", "EVALSHA", "EVAL_RO", "EVALSHA_RO", "SCRIPT"}
PAGE = ROOT / "docs" / "reference" / "security-controls.md"


def faults_of(path: Path):
    """Code that treats data as code."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [one.name for one in node.names]
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
            for name in names:
                if name.partition(".")[0] in UNSAFE_MODULES:
                    yield f"line {node.lineno}: imports {name}: use msgspec"
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in UNSAFE_CALLS:
                yield f"line {node.lineno}: calls {called}"
            if any(word.arg == "shell" for word in node.keywords):
                yield f"line {node.lineno}: runs a shell: pass a list of arguments"
            if called.rpartition(".")[2] in RUN_SQL and node.args and is_built(node.args[0]):
                yield f"line {node.lineno}: {called} with a built text: pass parameters"
        elif isinstance(node, ast.Constant) and node.value in SCRIPTS:
            yield f"line {node.lineno}: {node.value}: put the code into a Lua library"


def is_built(node: ast.expr) -> bool:
    """Whether a text is put together from values at run time."""
    if isinstance(node, ast.JoinedStr):
        return any(isinstance(one, ast.FormattedValue) for one in node.values)
    if isinstance(node, ast.BinOp):
        return not all(isinstance(one, ast.Constant) for one in (node.left, node.right))
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".format")


def test_data_is_never_run_as_code():
    faults = [f"{path.relative_to(ROOT)}: {one}" for path in SOURCES for one in faults_of(path)]
    assert faults == [], "\n".join(faults)


def test_functions_of_valkey_run_no_built_code():
    """A library calls commands by fixed names, and loads no text."""
    libraries = sorted(SRC.rglob("*.lua"))
    assert libraries
    faults = []
    for path in libraries:
        text = re.sub(r"--[^\n]*", "", path.read_text())
        faults += [
            f"{path.name}: {one}" for one in re.findall(r"\b(?:loadstring|load|dofile)\(", text)
        ]
        calls = re.findall(r"(?:redis|server)\.p?call\(\s*([^,)]*)", text)
        # `call_many` passes its first argument on; its callers give it a fixed name.
        calls = [one for one in calls if one != "command"]
        calls += re.findall(r"(?<!function )\bcall_many\(\s*([^,)]*)", text)
        faults += [f"{path.name}: call({one}" for one in calls if not one.startswith(("'", '"'))]
    assert faults == []


def test_packages_are_installed_by_their_hashes():
    assert '"--require-hashes", "-r", lock' in (ROOT / "tools" / "set_up.py").read_text()
    for lock in sorted(ROOT.glob("requirements*.lock")):
        pins = re.split(r"^(?=\S+==)", lock.read_text(), flags=re.MULTILINE)
        pins = [pin for pin in pins if "==" in pin.partition("\n")[0]]
        assert pins
        assert [pin.partition(" ")[0] for pin in pins if "--hash=sha256:" not in pin] == []


def test_every_control_has_a_place_and_a_test_that_can_be_planted():
    """The page, the patches and the code agree; `make planted` runs them."""
    found = patches()
    rows = re.findall(r"^\| (\d+) \| `([a-z_]+)` \|", PAGE.read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, len(rows) + 1))
    assert list(dict.fromkeys(patch.control for patch in found)) == [name for _, name in rows]
    page = PAGE.read_text()
    for patch in found:
        assert patch.text() != (ROOT / patch.file).read_text()
        assert patch.file.removeprefix("src/headrace/") in page, patch.file
        for test in patch.tests:
            file, _, name = test.partition("::")
            assert file in page, test
            assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(), test
