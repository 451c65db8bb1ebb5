"""The examples of the Python reference run, and those that need more call what exists."""

from __future__ import annotations

import ast
import importlib
import inspect
import pydoc
import sys
from pathlib import Path

import pytest

from headrace import Headrace
from headrace.engines.endpoints import Endpoints

FOLDER = Path(__file__).parents[2] / "examples" / "reference"
NAMES = sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))
NOWHERE = Endpoints("postgresql://x@/none?host=/nowhere", "unix:///nowhere", "file:///nowhere")


@pytest.mark.slow
@pytest.mark.usefixtures("surroundings")
@pytest.mark.parametrize("name", NAMES)
async def test_the_examples_run(name):
    sys.modules.pop(f"examples.reference.{name}", None)
    await importlib.import_module(f"examples.reference.{name}").main()


def calls(tree):
    """Each call of a method of `app`, with its dotted name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            path = ast.unparse(node.func)
            if path.startswith("app."):
                yield path, node


@pytest.mark.parametrize("name", NAMES)
def test_the_calls_of_examples_fit_their_signatures(name, tmp_path):
    app = Headrace(flags={"data.folder": str(tmp_path)})
    app.use_endpoints(NOWHERE)
    found = list(calls(ast.parse((FOLDER / f"{name}.py").read_text())))
    for path, call in found:
        method = app
        for step in path.split(".")[1:]:
            method = getattr(method, step)
        names = {keyword.arg: None for keyword in call.keywords}
        inspect.signature(method).bind(*call.args, **names)
    assert found or name == "testing"


def test_help_shows_a_map():
    text = pydoc.plaintext.document(Headrace)
    head = text[: text.index("Methods defined here")]
    for word in (
        "task",
        "on_item",
        "jobs",
        "views",
        "feed",
        "media.objects",
        "sync",
        "headrace up",
    ):
        assert word in head
