"""The glossary defines each term once and names every class that a room exports."""

from __future__ import annotations

import importlib
import inspect
import re
from collections import Counter
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "glossary.md").read_text()
ROOMS = ["jobs", "fetch", "views", "feed", "media"]


def test_no_term_is_defined_twice():
    terms = Counter(term.lower() for term in re.findall(r"\*\*([^*]+)\*\*", PAGE))
    assert [term for term, count in terms.items() if count > 1] == []


@pytest.mark.parametrize("room", ROOMS)
def test_every_exported_class_is_in_it(room):
    package = importlib.import_module(f"headrace.{room}")
    classes = {
        name
        for name in package.__all__
        if inspect.isclass(value := getattr(package, name)) and not issubclass(value, Exception)
    }
    assert classes - set(re.findall(r"`(\w+)`", PAGE)) == set()


def test_every_class_in_it_exists():
    exported = {
        name for room in ROOMS for name in importlib.import_module(f"headrace.{room}").__all__
    }
    assert set(re.findall(r"`([A-Z]\w+)`", PAGE)) - exported == set()
