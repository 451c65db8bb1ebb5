"""The receiver code of docs/fetch.md verifies what we send, and nothing else."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from headrace.fetch.webhook_delivery import headers_of, new_secret

GUIDE = Path(__file__).parents[2] / "docs" / "fetch.md"
BODY = b'{"type":"fetch.results","results":[]}'


@pytest.fixture
def is_ours():
    """The function of the guide, as it is printed there."""
    (snippet,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    names: dict = {}
    exec(compile(snippet, "docs/fetch.md", "exec"), names)
    return names["is_ours"]


def sent(*secrets: str, at_s: float | None = None) -> dict[str, str]:
    lines = headers_of("results_1_2", BODY, secrets, int(time.time() if at_s is None else at_s))
    return dict(line.split(": ", 1) for line in lines)


def test_the_guide_verifies_what_we_sign(is_ours):
    old, new = new_secret(), new_secret()
    assert is_ours(new, sent(new), BODY)
    assert is_ours(old, sent(new, old), BODY)
    assert is_ours(new, sent(new, old), BODY)


def test_the_guide_refuses_what_we_did_not_sign(is_ours):
    secret = new_secret()
    assert not is_ours(new_secret(), sent(secret), BODY)
    assert not is_ours(secret, sent(secret), BODY + b" ")
    assert not is_ours(secret, sent(secret) | {"webhook-id": "results_1_3"}, BODY)
    assert not is_ours(secret, sent(secret, at_s=time.time() - 3600), BODY)
