"""The how-to pages.

Their starters are those of `headrace init`, and their code runs as it stands.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from datetime import UTC, datetime
from pathlib import Path

import pytest

from headrace.app import sections
from headrace.cli.setup import starter
from headrace.fetch.webhook_delivery import headers_of, new_secret
from headrace.kernel.config import load_config

DOCS = Path(__file__).parents[2] / "docs"
VERIFY = """
import { isOurs, take } from "./consumer.mjs";
const { secret, headers, body, wrong } = JSON.parse(process.env.GIVEN);
const late = { ...headers, "webhook-timestamp": "1" };
console.log(isOurs(secret, headers, Buffer.from(body)), isOurs(wrong, headers, Buffer.from(body)),
  isOurs(secret, headers, Buffer.from(body + " ")), isOurs(secret, late, Buffer.from(body)),
  isOurs(secret, {}, Buffer.from(body)));
for (const result of JSON.parse(body).results) take(result);
"""


def blocks(page, language):
    """The page's blocks of a language, those of lists without their indent."""
    text = (DOCS / page).read_text()
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    return [re.sub(f"^{indent}", "", code, flags=re.MULTILINE) for indent, code in found]


@pytest.mark.parametrize("kind", ["fastapi", "django"])
def test_a_page_shows_the_files_that_init_writes(kind):
    texts = starter(kind)
    shown = dict(
        re.findall(r"^# (\w+\.py)\n(.*)", block, re.DOTALL)[0]
        for block in blocks(f"{kind}.md", "python")
    )
    assert shown == {name: texts[name] for name in shown}
    assert shown.keys() == texts.keys() - {"manage.py"}


def test_the_timeout_classes_shown_are_valid(tmp_path):
    for number, text in enumerate(blocks("timeout-class.md", "toml")):
        assert tomllib.loads(text)
        file = tmp_path / f"{number}.toml"
        file.write_text(text)
        load_config(sections(), env={}, file=file)


@pytest.mark.slow
@pytest.mark.usefixtures("surroundings")
async def test_old_totals_are_added():
    names = {}
    for block in blocks("from-counters.md", "python"):
        exec(compile(block, "from-counters.md", "exec"), names)
    async with names["app"] as app:
        await app.views.hit("item:7", n=3)
        assert await names["shown"]({"item:7": 100, "item:8": 5}) == {"item:7": 103, "item:8": 5}


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.slow
def test_the_consumer_in_node_takes_what_is_signed_and_nothing_else(tmp_path):
    [source] = blocks("consumers.md", "javascript")
    (tmp_path / "consumer.mjs").write_text(source)
    (tmp_path / "verify.mjs").write_text(VERIFY)
    secret, wrong = new_secret(), new_secret()
    body = json.dumps({"results": [result(1), result(3), result(2), result(3)]})
    given = {"secret": secret, "wrong": wrong, "body": body, "headers": signed(secret, body)}
    ran = subprocess.run(
        ["node", "verify.mjs"],
        cwd=tmp_path,
        env={"GIVEN": json.dumps(given), "PATH": "/usr/bin:/usr/local/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ran.stdout.splitlines() == [
        "true false false false false",
        "edit bike 1",
        "edit bike 3",
    ], ran.stderr


def result(version):
    return {"id": "bike", "version": version, "action": "edit", "fields": {"name": version}}


def signed(secret, body):
    """The headers of a message as a receiver in Node sees them."""
    at = int(datetime.now(UTC).timestamp())
    lines = headers_of("msg_1", body.encode(), [new_secret(), secret], at)
    return {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
