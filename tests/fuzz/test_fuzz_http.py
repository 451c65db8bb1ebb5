"""HTTP: requests made from our own OpenAPI document, valid and broken, and raw bytes.

No answer has a 5xx status, each conforms to the document, and each error is a problem document
with a code of the error table. Valid and invalid requests come from schemathesis.
"""

from __future__ import annotations

import re
import socket
from contextlib import suppress
from pathlib import Path

import pytest
import requests
import schemathesis
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.fuzz.budget import FUZZ_S, fuzz
from tests.fuzz.mutations import damaged

CHECKS = [
    not_a_server_error,
    response_schema_conformance,
    content_type_conformance,
    status_code_conformance,
]
SAMPLED_EVERY = 3
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
    # Requests without a token are the subject of `test_fuzz_tokens`.
    del document["components"]["securitySchemes"]
    for operations in document["paths"].values():
        for operation in operations.values():
            operation.pop("security", None)
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
    statuses: list[int] = []

    def check(case) -> None:
        answer = case.call(
            base_url=api.url, session=session, timeout=60, headers=dict(session.headers)
        )
        statuses.append(answer.status_code)
        case.validate_response(answer, checks=CHECKS)
        if answer.status_code >= 400:
            problem = answer.json()
            assert problem["status"] == answer.status_code
            assert problem["code"] in codes, problem
            assert "Traceback" not in problem["detail"]

    made = [(mode, operation) for operation in operations for mode in GenerationMode]
    # A sample of the operations; `make fuzz` tries each of them.
    chosen = made if FUZZ_S else made[::SAMPLED_EVERY]
    for mode, operation in chosen:
        requests_made = operation.as_strategy(generation_mode=mode)
        # An operation whose parameters accept any text cannot be broken.
        with suppress(*[Unsatisfiable] if mode is GenerationMode.NEGATIVE else []):
            fuzz(requests_made, check, examples=1, share=0.8 / len(chosen))
    assert len(statuses) > len(chosen) / 2
    assert {200, 404, 422} <= set(statuses)
    assert rss_bytes(api.process.pid) - before < RSS_GROWTH_BYTES_MAX
    assert "Traceback" not in api.process.err


def exchange(port: int, data: bytes) -> bytes:
    """Send bytes, end the stream, and return all that the server sends."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as link:
        try:
            link.sendall(data)
            link.shutdown(socket.SHUT_WR)
            while block := link.recv(1 << 16):
                received += block
        except ConnectionError:
            pass
    return received


@pytest.mark.slow
def test_damaged_requests_get_an_answer_below_500_or_none(api):
    tail = f"Host: 127.0.0.1:{api.port}\r\nAuthorization: Bearer {api.token}\r\n"
    body = b'{"queue": "mail", "payload": {"to": "ann"}}'
    seeds = [
        f"GET /v1/queues HTTP/1.1\r\n{tail}\r\n".encode() * 2,
        f"POST /v1/jobs HTTP/1.1\r\n{tail}Content-Type: application/json\r\n"
        f"Idempotency-Key: k\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body,
        f"POST /v1/jobs HTTP/1.1\r\n{tail}Content-Type: application/json\r\n"
        f"Transfer-Encoding: chunked\r\n\r\n{len(body):x}\r\n".encode()
        + body
        + b"\r\n0\r\n\r\n",
        f"POST /v1/views/hits?k=hrk_x HTTP/1.1\r\n{tail}Origin: https://a\r\n\r\n".encode(),
        f"GET /console HTTP/1.1\r\n{tail}Cookie: headrace_session=a\r\n\r\n".encode(),
        f"GET /v1/fetch/sellers/a?utm=1 HTTP/1.0\r\n{tail}\r\n".encode(),
    ]

    def check(data: bytes) -> None:
        for status in re.findall(rb"^HTTP/1\.1 (\d{3}) ", exchange(api.port, data)):
            assert int(status) < 500, status

    fuzz(damaged(seeds) | st.binary(max_size=200), check, examples=150, share=0.2)
    assert exchange(api.port, seeds[0]).count(b"HTTP/1.1 200 ") == 2
    assert "Traceback" not in api.process.err
