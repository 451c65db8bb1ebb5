"""Report words and phrases that a new reader would not understand, each with a plain replacement.

Checked are comments, docstrings and other strings of Python, and all text of other files except
code in Markdown. `tests/house/test_words.py` runs this over the repository.

    python -m tools.words PATH...

"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final

DOCSTRING_WORDS_MAX: Final = 20
SUFFIXES: Final = {".py", ".md", ".html", ".sql", ".lua", ".js", ".toml"}
WITHOUT: Final = {"words.py", "test_words.py"}
"""This list itself, and its test."""
OTHERS: Final = {"__pycache__", "vendor"}
PHRASES: Final = {
    r"he|his|him|himself|whoever|whomever|whom": "name the role: the user, the caller, the host",
    r"says|said|saying|say|tells|told|telling|tell": "return, report, state, log, record",
    r"asks|asked|asking": "request, call, query, check",
    r"hears|heard|hear": "receive",
    r"wants|wanted": "need, request",
    r"knows|knew": "store, have",
    r"anew": "again, from scratch",
    r"in hand": "in progress, held, open",
    r"goes on|go on|going on|went on": "continue, run, happen",
    r"is gone|are gone|was gone|be gone|were gone": "does not exist, was removed, expired",
    r"what came|that came|which came|has come|have come|had come": "received, arrived",
    r"the short way|the long way|the way down|one way down": "name the path: fast path, full query",
    r"of (?:its|their) own accord|a thing of its own": "separate",
    r"none to|nothing that could": "No ... / no data yet",
    r"changes nothing": "has no effect, No changes",
    r"mend|mends|mended|mending": "fix, repair",
    r"at the door|the door": "on input, before anything is stored",
    r"the house|house-wide": "the product, the project",
    r"patience|patient|patiently": "timeout, wait limit",
    r"stands? for|stands? in|stands? still|stands? at": "is, means, is stored in, is stopped",
    r"has no say|have no say": "is ignored",
    r"lent|lends|lend|borrowed|borrows": "the caller's connection",
    r"comes to nothing|come to nothing|came to nothing": "fails, has no effect",
    r"speaks? nonsense|nonsense": "malformed, invalid",
    r"from now on|henceforth|thereof|therein|thereby|hereby|wherein|whereof": "plain word order",
    r"newcomer|stranger": "new user, other client",
    r"be it|were it|had it|should it|lest|save for|but for|save that": "except, if, unless",
    r"nought|naught|aught": "zero, nothing",
    r"perchance|upon": "perhaps, on",
}
CODE: Final = re.compile(r"```.*?```|`[^`\n]*`|https?://\S+", re.DOTALL)
WORDS: Final = re.compile(
    "|".join(rf"(?P<p{i}>\b(?:{p})\b)" for i, p in enumerate(PHRASES)), re.IGNORECASE
)
ADVICE: Final = list(PHRASES.values())


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line number and text of each piece of prose in a file."""
    source = path.read_text()
    if path.suffix in {".sql", ".lua"}:
        for number, line in enumerate(source.splitlines(), 1):
            yield number, line.partition("--")[2]
        return
    if path.suffix != ".py":
        yield 1, CODE.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), source)
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
        elif token.type == tokenize.STRING and " " in token.string:
            yield token.start[0], CODE.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), token.string)


def long_summaries(path: Path) -> Iterator[tuple[int, int]]:
    """Line and word count of docstrings whose first sentence is too long."""
    if path.suffix != ".py":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                count = len(text.splitlines()[0].split())
                if count > DOCSTRING_WORDS_MAX:
                    yield getattr(node, "lineno", 1), count


def findings(path: Path) -> Iterator[str]:
    """One line for each fault of a file's prose."""
    for first, text in texts_of(path):
        for match in WORDS.finditer(text):
            line = first + text.count("\n", 0, match.start())
            index = next(i for i in range(len(ADVICE)) if match[f"p{i}"])
            yield f"{path}:{line}: {match[0]!r}: write {ADVICE[index]}"
    for line, count in long_summaries(path):
        yield f"{path}:{line}: the first line has {count} words, at most {DOCSTRING_WORDS_MAX}"


def texts_below(place: Path) -> list[Path]:
    """The files at or below `place` that hold text for people."""
    files = [place] if place.is_file() else sorted(place.rglob("*"))
    return [
        file
        for file in files
        if file.suffix in SUFFIXES and file.name not in WITHOUT and not OTHERS & set(file.parts)
    ]


def main(names: list[str]) -> int:
    """Print all findings. Return 1 if there are any."""
    found = [line for name in names for file in texts_below(Path(name)) for line in findings(file)]
    print("\n".join(found))
    print(len(found), "findings", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
