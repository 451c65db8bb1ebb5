"""HTTPS as operators and clients expect it: tickets, ALPN, new certificates, stalled handshakes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from node_kinds import PYTHON_TLS, TLS, TLS_BLOCKS
from raw_clients import head_of, wait_until
from structlog.testing import capture_logs
from tests.kit.certificates import EXPIRED, client_context, self_signed_files
from tests.kit.waiting import wait_true

from headrace.cli import doctor_media
from headrace.media import MediaConfig
from headrace.media.native import kernel_tls_missing, native_tls_missing
from headrace.media.worker import node as worker_node
from headrace.media.worker import tls_io

KEY, GOOD = "good.jpg", b"good" * 1000
both = pytest.mark.parametrize("kind", [TLS, PYTHON_TLS], ids=str)


@dataclass
class Visit:
    """What a client has seen of one connection."""

    version: str | None
    protocol: str | None
    is_resumed: bool
    session: ssl.SSLSession | None


def visit_now(port: int, context: ssl.SSLContext, session: ssl.SSLSession | None) -> Visit:
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname="media.test", session=session) as client,
    ):
        client.sendall(head_of(KEY))
        answer = b""
        while not answer.endswith(GOOD):
            piece = client.recv(65_536)
            assert piece, f"the connection ended after {answer!r}"
            answer += piece
        protocol, is_resumed = client.selected_alpn_protocol(), client.session_reused
        return Visit(client.version(), protocol, bool(is_resumed), client.session)


async def visit(node, context: ssl.SSLContext, session: ssl.SSLSession | None = None) -> Visit:
    """Connect, read the object, and leave."""
    return await asyncio.to_thread(visit_now, node.port, context, session)


@both
async def test_a_client_comes_back_without_a_full_handshake(kind, tmp_path):
    async with kind.start(tmp_path) as node:
        await node.blobs.put(KEY, GOOD)
        for version in (ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2):
            context = client_context(f"{tmp_path}/cert.pem")
            context.maximum_version = version
            first = await visit(node, context)
            second = await visit(node, context, first.session)
            assert (first.is_resumed, second.is_resumed) == (False, True), version
            assert second.version == version.name.replace("v1_", "v1.")


@both
async def test_http_1_1_is_chosen_then_1_0_and_nothing_else(kind, tmp_path):
    async with kind.start(tmp_path) as node:
        await node.blobs.put(KEY, GOOD)
        for offered, chosen in (
            (["h2", "http/1.0", "http/1.1"], "http/1.1"),
            (["http/1.0"], "http/1.0"),
            ([], None),
        ):
            context = client_context(f"{tmp_path}/cert.pem")
            context.set_alpn_protocols(offered)
            assert (await visit(node, context)).protocol == chosen
        if kind is TLS:  # Python's module cannot refuse the others
            context.set_alpn_protocols(["h2"])
            with pytest.raises(ssl.SSLError, match="no application protocol"):
                await visit(node, context)


@both
async def test_a_new_certificate_is_used_and_ends_no_connection(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(tls_io, "CERTIFICATE_LOOK_S", 0.01)
    async with kind.start(tmp_path) as node:
        await node.blobs.put(KEY, GOOD)
        client, old = await node.connect(), node.tls
        assert (await client.ask(KEY)).body == GOOD
        before = await visit(node, old)
        with capture_logs() as events:
            monkeypatch.setattr(tls_io, "often", tls_io.log)
            (tmp_path / "cert.pem").write_text("no certificate")
            await wait_until(lambda: "certificate_refused" in [e["event"] for e in events])
        assert not (await visit(node, old)).is_resumed
        new = client_context(self_signed_files(tmp_path)[0])

        async def is_new() -> bool:
            try:
                return bool(await visit(node, new))
            except ssl.SSLCertVerificationError:
                return False

        await wait_true(is_new, what="the new certificate")
        assert (await client.ask(KEY)).body == GOOD
        if kind is TLS:  # its ticket keys outlive a certificate
            assert (await visit(node, old, before.session)).is_resumed


@both
async def test_stalled_handshakes_and_other_protocols_are_closed_in_time(kind, tmp_path):
    """Also many at once: a healthy client is answered among them."""
    async with kind.start(tmp_path, header_timeout_s=1.0) as node:
        await node.blobs.put(KEY, GOOD)
        hello = hello_of(client_context(f"{tmp_path}/cert.pem"))
        firsts = [head_of(KEY), hello[:50], hello[:3], b"", b"SSH-2.0-x\r\n", b"\x16\x03\x01\xff"]
        streams = [await asyncio.open_connection("127.0.0.1", node.port) for _ in range(90)]
        for number, (_, writer) in enumerate(streams):
            writer.write(firsts[number % len(firsts)])
        assert (await (await node.connect()).ask(KEY)).body == GOOD
        async with asyncio.timeout(60):
            for reader, writer in streams:
                with contextlib.suppress(ConnectionResetError):
                    assert b"good" not in await reader.read()
                writer.close()


def hello_of(context: ssl.SSLContext) -> bytes:
    """The first bytes of a client."""
    sent = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname="media.test")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return sent.read()


async def test_without_openssl_python_encrypts_and_doctor_warns(tmp_path, monkeypatch):
    """Plain HTTP stays with the native data plane."""
    for module in (worker_node, doctor_media):
        monkeypatch.setattr(module, "native_tls_missing", lambda: "libssl.so.3 is not installed")
    async with TLS_BLOCKS.start(tmp_path) as node:
        await node.blobs.put(KEY, GOOD)
        for _ in range(3):
            assert (await visit(node, node.tls)).version == "TLSv1.3"
    config = MediaConfig(listen_tls=("127.0.0.1", 0))
    app = SimpleNamespace(config=SimpleNamespace(sections={"media": config}))
    [finding] = await doctor_media.check_data_plane(app)
    assert (finding.state, "libssl.so.3 is not installed" in finding.text) == ("warn", True)


@pytest.mark.skipif(bool(native_tls_missing()), reason=native_tls_missing())
@pytest.mark.skipif(bool(kernel_tls_missing()), reason=kernel_tls_missing())
async def test_the_kernel_encrypts_where_it_can(tmp_path):
    def sent() -> int:
        rows = Path("/proc/net/tls_stat").read_text().split("\n")
        return sum(int(row.split()[1]) for row in rows if row.startswith("TlsTx"))

    async with TLS.start(tmp_path) as node:
        await node.blobs.put(KEY, GOOD)
        before = sent()
        await visit(node, node.tls)
        assert sent() > before


def test_a_worker_that_replaces_a_dead_one_accepts_an_expired_certificate(tmp_path):
    """Otherwise the node would lose its plain HTTP too; a node does not start with it."""
    cert, key = self_signed_files(tmp_path, valid_days=EXPIRED)
    config = MediaConfig(listen_tls=("127.0.0.1", 0), tls_cert=cert, tls_key=key)
    tls_io.ServerTls(config, None)
    with pytest.raises(OSError, match="expired"):
        tls_io.require_current(cert, key)
