"""The same bytes over HTTPS: ranges, order, slow and broken clients, cuts, a new certificate."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl

import pytest
from raw_clients import Client, pattern, serving, wait_until
from tls_files import client_context, make_certificate

from headrace.kernel.metrics import REGISTRY
from headrace.media.worker.socket_io import Certificate


@contextlib.asynccontextmanager
async def serving_tls(blobs, folder, **settings):
    """A node with both listeners; `connect` uses TLS."""
    cert, key = make_certificate(folder)
    port = free_port()
    async with serving(
        blobs, listen_tls=("127.0.0.1", port), tls_cert=cert, tls_key=key, **settings
    ) as node:
        context = client_context(cert)

        async def connect(**options) -> Client:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=context, **options
            )
            return Client(reader, writer)

        node.connect_tls, node.tls_port, node.tls_cert = connect, port, cert
        yield node


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


async def test_answers_are_the_same_as_without_tls(blobs, tmp_path):
    data = pattern(3_000_000)
    async with serving_tls(blobs, tmp_path) as node:
        key = await node.put(data)
        plain, secret = await node.connect(), await node.connect_tls()
        asked = [
            {},
            {"Range": "bytes=10-19"},
            {"Range": "bytes=262100-1000000"},
            {"Range": "bytes=-7"},
            {"Range": "bytes=9999999-"},
            {"If_None_Match": "*"},
        ]
        for fields in asked:
            for method in ("GET", "HEAD"):
                one = await plain.ask(key, method=method, **fields)
                other = await secret.ask(key, method=method, **fields)
                one.fields.pop("date"), other.fields.pop("date")
                assert one == other, (fields, method)
        secret.drop()


async def test_pipelined_requests_over_tls_are_answered_in_order(blobs, tmp_path):
    async with serving_tls(blobs, tmp_path) as node:
        keys = [await node.put(pattern(100_000 + n)) for n in range(4)]
        client = await node.connect_tls()
        for key in keys * 5:
            client.send(f"GET /m/{key} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        for n in [*range(4)] * 5:
            assert (await client.answer()).body == pattern(100_000 + n)
        client.drop()


async def test_a_slow_client_over_tls_gets_every_byte(blobs, tmp_path):
    data = pattern(6_000_000)
    async with serving_tls(blobs, tmp_path) as node:
        key = await node.put(data)
        # Small buffers: most pieces must be offered to OpenSSL again.
        client = await node.connect_tls(limit=4096)
        client.send(f"GET /m/{key} HTTP/1.0\r\n\r\n".encode())
        assert (await client.answer()).body == data
        assert await client.wait_closed() == b""


async def test_a_cut_body_over_tls_is_no_clean_end(blobs, tmp_path):
    def cuts() -> float:
        return REGISTRY.get_sample_value("media_cuts_total", {"reason": "source"}) or 0.0

    async with serving_tls(blobs, tmp_path) as node:
        await node.blobs.put("track.mp3", pattern(30_000_000))
        before = cuts()
        client = await node.connect_tls(limit=1024)
        client.send(b"GET /m/track.mp3 HTTP/1.1\r\nHost: a\r\n\r\n")
        await wait_until(lambda: len(client.reader._buffer) > 1024)
        os.truncate(node.blobs.folder / "track.mp3", 100)
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await client.answer()
        assert cuts() == before + 1
        client.drop()


async def test_who_speaks_no_tls_or_never_ends_the_handshake_is_closed(blobs, tmp_path):
    async with serving_tls(blobs, tmp_path, header_timeout_s=0.5) as node:
        await node.blobs.put("good.jpg", b"good")
        for first in (b"GET /m/good.jpg HTTP/1.1\r\nHost: a\r\n\r\n", b"\x16\x03\x01\x02", b""):
            reader, writer = await asyncio.open_connection("127.0.0.1", node.tls_port)
            writer.write(first)
            with contextlib.suppress(ConnectionResetError):
                async with asyncio.timeout(60):
                    assert b"good" not in await reader.read()
            writer.close()
        client = await node.connect_tls()
        assert (await client.ask("good.jpg")).body == b"good"
        client.drop()


async def test_a_refused_client_over_tls_is_told_so(blobs, tmp_path):
    async with serving_tls(blobs, tmp_path, connections_max=1) as node:
        held = await node.connect_tls()
        extra = await node.connect_tls()
        answer = await extra.answer()
        assert (answer.status, answer.fields["retry-after"]) == (503, "1")
        held.drop(), extra.drop()


def test_a_renewed_certificate_is_taken_and_a_broken_one_is_not(tmp_path):
    cert, key = make_certificate(tmp_path)
    certificate = Certificate(cert, key)
    first = certificate.context
    certificate.renew()
    assert certificate.context is first
    make_certificate(tmp_path)
    certificate.renew()
    assert certificate.context is not first
    second = certificate.context
    (tmp_path / "cert.pem").write_text("no certificate")
    with pytest.raises(ssl.SSLError):
        certificate.renew()
    assert certificate.context is second
