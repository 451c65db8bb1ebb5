"""The HTTP door: requests made from our own OpenAPI document, valid and broken, and raw bytes.

No answer has a 5xx status, each conforms to the document, and each error is a problem document
with a code of the error table. Valid and invalid requests come from schemathesis.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import requests
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.fuzz.budget import fuzz

CHECKS = [
    not_a_server_error,
    response_schema_conformance,
    content_type_conformance,
    status_code_conformance,
]
RSS_GROWTH_BYTES_MAX = 200 * 2**20
"""A request body has at most 16 MiB, and few are open at once."""


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmRSS" in x)
    return int(line.split()[1]) * 1024


@pytest.fixture(scope="module")
def session(api):
    """A client with the root token."""
    with requests.Session() as session:
        session.trust_env = False
        session.headers["Authorization"] = f"Bearer {api.token}"
        yield session


@pytest.fixture(scope="module")
def schema(api, session):
    """The document that the process serves."""
    document = session.get(f"{api.url}/openapi.json", timeout=60).json()
    return schemathesis.openapi.from_dict(document, config=SchemathesisConfig())


@pytest.fixture(scope="module")
def codes(api, session):
    """Codes of the error table."""
    return {row["code"] for row in session.get(f"{api.url}/problems", timeout=60).json()}


@pytest.mark.slow
def test_requests_of_the_document_get_documented_answers(api, session, schema, codes):
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 100
    before = rss_bytes(api.process.pid)

    def check(case) -> None:
        answer = case.call(base_url=api.url, session=session, timeout=60, headers=session.headers)
        case.validate_response(answer, checks=CHECKS)
        if answer.status_code >= 400:
            problem = answer.json()
            assert problem["status"] == answer.status_code
            assert problem["code"] in codes, problem
            assert "Traceback" not in problem["detail"]

    for operation in operations:
        for mode in GenerationMode:
            fuzz(
                operation.as_strategy(generation_mode=mode),
                check,
                examples=1,
                share=0.8 / len(operations) / 2,
            )
    assert rss_bytes(api.process.pid) - before < RSS_GROWTH_BYTES_MAX
