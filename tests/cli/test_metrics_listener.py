"""The listener of a role for probes and Prometheus."""

from __future__ import annotations

import socket

import httpx
import pytest
from tests.kit.processes import HeadraceProcess, free_ports, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def start(tmp_path):
    """Start media nodes of one data folder; stop those that a test left."""
    started = []

    def begin(metrics_port):
        settings = {
            "HEADRACE_MEDIA_LISTEN": "127.0.0.1:0",
            "HEADRACE_MEDIA_WORKERS": "1",
            "HEADRACE_DATA_METRICS_LISTEN": f"127.0.0.1:{metrics_port}",
        }
        process = HeadraceProcess(["media", "serve"], folder=tmp_path, env=settings)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.end()


def answer(port, path):
    """The status and text of a request on a connection of its own; 0 if nothing listens."""
    try:
        response = httpx.get(f"http://127.0.0.1:{port}{path}", timeout=10)
    except httpx.TransportError:
        return 0, ""
    return response.status_code, response.text


def test_roles_of_a_machine_share_the_port_and_serve_the_series_of_all(start):
    [port] = free_ports(1)
    roles = [start(port), start(port)]
    for role in roles:
        wait_until(lambda r=role: r.events("media_serves"), what="it serves")
    assert answer(port, "/healthz") == (200, "ok\n")
    assert answer(port, "/v1/jobs")[0] == 404
    wait_until(lambda: 'role="media"' in answer(port, "/metrics")[1], what="series are served")
    with socket.create_connection(("127.0.0.1", port), 5) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nX: " + b"x" * 20_000)
        client.settimeout(15)
        assert client.recv(100) == b""
    roles.pop().end()
    assert {answer(port, "/healthz")[0] for _ in range(10)} == {200}
    roles.pop().end()
    assert answer(port, "/healthz")[0] == 0


def test_a_port_of_another_program_is_refused_at_the_start(start):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        role = start(taken.getsockname()[1])
        assert role.wait_exit() == 5
    assert "set data.metrics_listen (HEADRACE_DATA_METRICS_LISTEN)" in role.err
