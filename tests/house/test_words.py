"""Texts use the field's words (`tools/words.py`), and subjects of commits are short."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tools.words import findings, texts_below

ROOT = Path(__file__).parents[2]
FOLDERS = ["src", "docs", "tools", "deploy", "tests", "bench", "examples"]
PLACES = [*FOLDERS, *(path.name for path in ROOT.glob("*.md"))]
RENAMED = "all: rename the product to Headrace"
SUBJECT_CHARACTERS_MAX = 65


@pytest.mark.parametrize("place", PLACES)
def test_texts_use_plain_words(place):
    found = [line for path in texts_below(ROOT / place) for line in findings(path)]
    assert found == [], "\n".join(found)


def test_a_riddle_and_a_long_summary_are_found(tmp_path):
    page, module = tmp_path / "page.md", tmp_path / "module.py"
    page.write_text("Whoever asks\nis told `who asks`.\n")
    assert [line.split(":")[1] for line in findings(page)] == ["1", "1", "2"]
    module.write_text(f'"""{"word " * 21}"""\nNAME = "nobody asked"  # it came to nothing\n')
    assert [line.split(":")[1] for line in findings(module)] == ["2", "2", "1"]


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
