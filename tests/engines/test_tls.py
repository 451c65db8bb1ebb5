"""TLS to PostgreSQL and Valkey: certificates are verified, replaced ones are used at once."""

from __future__ import annotations

from pathlib import Path

import asyncpg
import pytest
from tests.kit.certificates import EXPIRED, LOOPBACK, certificate
from tests.kit.own_postgres import OwnPostgres, missing_server
from tests.kit.processes import free_ports
from tests.kit.stock_valkey import StockValkey, program_of
from tests.kit.waiting import wait_true

from headrace.engines.multiplex import Multiplexer
from headrace.engines.postgres import Postgres, PostgresConfig
from headrace.engines.postgres_errors import PostgresDown, PostgresRefused
from headrace.engines.sql import compile_query
from headrace.engines.valkey import Valkey, ValkeyConfig, ValkeyDown

pytestmark = pytest.mark.slow
USES_TLS = compile_query(
    "test",
    "-- Whether this connection is encrypted.\n"
    "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()",
)
ROOT = certificate("root")
GOOD = certificate("127.0.0.1", ROOT, names=(LOOPBACK,))
OLD = certificate("127.0.0.1", ROOT, names=(LOOPBACK,), valid_days=EXPIRED)


@pytest.fixture
def ca_file(tmp_path):
    file = tmp_path / "root.pem"
    file.write_bytes(ROOT.pem)
    return file


@pytest.fixture
async def server(servers_folder):
    if reason := missing_server("15"):
        pytest.skip(reason)
    server = OwnPostgres(servers_folder / "p", "15", ssl="on")
    await server.make()
    await server.use_certificate(GOOD)
    await server.start()
    yield server
    server.end()


@pytest.fixture
async def connect(server):
    """`connect("sslmode=...", host="localhost")`: a pool to the server with these parameters."""
    pools = []

    def make(parameters: str, host: str = "127.0.0.1") -> Postgres:
        url = server.url.replace("127.0.0.1", host)
        pools.append(Postgres(f"{url}?{parameters}", PostgresConfig()))
        return pools[-1]

    yield make
    for pool in pools:
        await pool.close()


async def test_postgres_is_verified_and_used_again_when_its_certificate_is_replaced(
    server, connect, ca_file
):
    verified = f"sslmode=verify-full&sslrootcert={ca_file}"
    pool = connect(verified)
    assert await pool.value(USES_TLS)
    with pytest.raises(PostgresDown, match=r"not accepted \(Hostname mismatch.*replace it, or"):
        await connect(verified, "localhost").value(USES_TLS)
    await server.use_certificate(OLD)
    await server.end_connections()
    with pytest.raises(PostgresDown, match=r"not accepted \(certificate has expired\)"):
        await pool.value(USES_TLS)
    await server.use_certificate(GOOD)

    async def works() -> bool:
        try:
            return await pool.value(USES_TLS)
        except PostgresDown:
            return False

    await wait_true(works, what="the pool uses the new certificate")


@pytest.mark.usefixtures("server")
async def test_the_authorities_of_the_system_verify_postgres(connect, ca_file, monkeypatch):
    """`SSL_CERT_FILE` names them for OpenSSL."""
    with pytest.raises(PostgresDown, match="not accepted"):
        await connect("sslmode=verify-full&sslrootcert=system").value(USES_TLS)
    monkeypatch.setenv("SSL_CERT_FILE", str(ca_file))
    assert await connect("sslrootcert=system").value(USES_TLS)
    with pytest.raises(PostgresDown, match="Hostname mismatch"):
        await connect("sslmode=verify-full&sslrootcert=system", "localhost").value(USES_TLS)


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ("sslmode=verify-full&sslrootcert=/absent/ca.pem", "sslrootcert is '/absent/ca.pem', a"),
        ("sslmode=verify-full&sslrootcert={key}", "NO_CERTIFICATE_OR_CRL_FOUND"),
        ("sslmode=require&sslrootcert=system", "requires sslmode=verify-full"),
    ],
)
async def test_wrong_parameters_are_named_and_are_no_outage(
    server, connect, tmp_path, parameters, reason
):
    GOOD.write(tmp_path / "c", tmp_path / "key")
    with pytest.raises(PostgresRefused, match=reason) as found:
        await connect(parameters.format(key=tmp_path / "key")).value(USES_TLS)
    assert "Correct the parameters in postgres.url" in found.value.text
    assert isinstance(found.value.__cause__, asyncpg.ClientConfigurationError)


async def test_both_kinds_of_connections_verify_the_certificate_of_valkey(
    servers_folder, ca_file, tmp_path, monkeypatch
):
    """`SSL_CERT_FILE` names the authorities of the system for OpenSSL."""
    if program_of("redis7") is None:
        pytest.skip("redis7 is not installed")
    [port] = free_ports(1)
    files = {}
    for name, signed in (("good", GOOD), ("old", OLD)):
        files[name] = tmp_path / f"{name}.pem", tmp_path / f"{name}.key"
        signed.write(*files[name])
    names = "tls-cert-file", "tls-key-file"
    settings = dict(zip(names, map(str, files["good"]), strict=True))
    settings |= {"tls-port": str(port), "tls-ca-cert-file": str(ca_file), "tls-auth-clients": "no"}
    server = StockValkey(servers_folder / "v", "redis7", **settings)
    server.start()

    async def outcomes(host: str, more: str = "", authorities: Path | None = ca_file) -> set[str]:
        """Of each kind of connection."""
        trusted = f"ssl_ca_certs={authorities}" if authorities else ""
        url = f"valkeys://{host}:{port}?{trusted}{more}"
        pooled = Valkey(url, ValkeyConfig())
        shared = Multiplexer(url, ValkeyConfig())
        found = set()
        for client in (pooled, shared):
            try:
                await client.open()
                found.add("works")
            except ValkeyDown as error:
                found.add(error.text.partition("accepted: ")[2].partition(")")[0])
            await client.close()
        return found

    try:
        assert await outcomes("127.0.0.1") == {"works"}
        mismatch = {"Hostname mismatch, certificate is not valid for 'localhost'"}
        assert await outcomes("localhost") == mismatch
        assert await outcomes("localhost", "&ssl_check_hostname=false") == {"works"}
        other = tmp_path / "other.pem"
        other.write_bytes(certificate("other root").pem)
        unknown = {"self-signed certificate in certificate chain"}
        assert await outcomes("127.0.0.1", authorities=None) == unknown
        monkeypatch.setenv("SSL_CERT_FILE", str(ca_file))
        assert await outcomes("127.0.0.1", authorities=None) == {"works"}
        assert await outcomes("127.0.0.1", authorities=other) == unknown
        words = [word for pair in zip(names, map(str, files["old"]), strict=True) for word in pair]
        assert server.command("CONFIG", "SET", *words) == b"OK"
        assert await outcomes("127.0.0.1") == {"certificate has expired"}
    finally:
        server.end()
