"""Texts use the field's words.

No phrase of the list in `tools/words.py`, and short subjects of commits.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tools.words import findings, texts_below

ROOT = Path(__file__).parents[2]
PLACES = ["src", "docs", "tools", "deploy", *(path.name for path in ROOT.glob("*.md"))]
RENAMED = "all: rename the product to Headrace"
SUBJECT_CHARACTERS_MAX = 65


@pytest.mark.parametrize("place", PLACES)
def test_texts_use_plain_words(place):
    found = [line for path in texts_below(ROOT / place) for line in findings(path)]
    assert found == [], "\n".join(found)


def test_subjects_of_commits_are_short_and_name_their_room():
    """Commits since the product has its name; a copy without history has nothing to check."""
    command = ["git", "log", "--no-merges", "--format=%s", "-n", "2000"]
    log = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    subjects = log.stdout.splitlines()
    if log.returncode or RENAMED not in subjects:
        pytest.skip("no history here")
    wrong = [
        subject
        for subject in subjects[: subjects.index(RENAMED)]
        if len(subject) > SUBJECT_CHARACTERS_MAX or ": " not in subject
    ]
    assert wrong == []
