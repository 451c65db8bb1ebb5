"""TLS faults of a host are distinguished in outcomes, reports and `fetch why`."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from origin import photo
from tests.kit.certificates import EXPIRED, LOOPBACK, Signed, certificate

from headrace.fetch import FetchConfig
from headrace.fetch.download import Downloader
from headrace.fetch.outcomes import is_temporary


def server_context(folder: Path, leaf: Signed, *chain: Signed) -> ssl.SSLContext:
    """The context of a server that sends `leaf` and `chain`."""
    cert_file, key_file = folder / "cert.pem", folder / "key.pem"
    leaf.write(cert_file, key_file, *chain)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert_file, key_file)
    return context


class TlsHosts:
    """A host for each kind of fault; `ca_file` holds the one root that is trusted."""

    def __init__(self, folder: Path) -> None:
        root, other = certificate("root"), certificate("another root")
        self.ca_file = folder / "ca.pem"
        self.ca_file.write_bytes(root.pem)
        between = certificate("intermediate", root)
        old_between = certificate("old intermediate", root, valid_days=EXPIRED)
        ours = (x509.DNSName("shop.test"), LOOPBACK)
        future = (1, 9)
        contexts = {
            "good": (certificate("shop.test", between, names=ours), between),
            "expired": (certificate("shop.test", between, valid_days=EXPIRED, names=ours), between),
            "expired_above": (certificate("shop.test", old_between, names=ours), old_between),
            "early": (certificate("shop.test", between, valid_days=future, names=ours), between),
            "wrong_name": (certificate("o", between, names=(x509.DNSName("o.test"),)), between),
            "self_signed": (certificate("shop.test", names=ours),),
            "untrusted": (certificate("shop.test", other, names=ours), other),
            "incomplete": (certificate("shop.test", between, names=ours),),
        }
        self._contexts: dict[str, ssl.SSLContext | None] = {
            name: server_context(folder, *chain) for name, chain in contexts.items()
        }
        self._contexts["not_tls"] = None
        self._servers: dict[str, asyncio.Server] = {}

    async def start(self) -> None:
        for name, context in self._contexts.items():
            serve = self._serve if context else self._refuse
            self._servers[name] = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)

    async def close(self) -> None:
        for server in self._servers.values():
            server.close()

    @property
    def ports(self) -> tuple[int, ...]:
        return tuple(server.sockets[0].getsockname()[1] for server in self._servers.values())

    def url(self, name: str, path: str = "/1.jpg") -> str:
        port = self._servers[name].sockets[0].getsockname()[1]
        return f"https://127.0.0.1:{port}{path}"

    async def _refuse(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer TLS with plain HTTP."""
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            body = photo("tls")
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()


FAULTS = {
    "expired": "failed:tls_expired",
    "expired_above": "failed:tls_expired",
    "early": "failed:tls_not_yet_valid",
    "wrong_name": "failed:tls_wrong_name",
    "self_signed": "failed:tls_self_signed",
    "untrusted": "failed:tls_untrusted",
    "incomplete": "failed:tls_incomplete",
    "not_tls": "failed:tls",
}
SENTENCES = {
    "expired": ("has expired", "истёк"),
    "wrong_name": ("another name", "другого имени"),
    "self_signed": ("self-signed", "самоподписанный"),
    "incomplete": ("intermediate certificate", "промежуточный сертификат"),
}


@pytest.fixture
async def hosts(tmp_path):
    hosts = TlsHosts(tmp_path)
    await hosts.start()
    yield hosts
    await hosts.close()


@pytest.fixture
def config(hosts):
    return FetchConfig(
        allow_networks=("127.0.0.0/8",),
        allow_ports=hosts.ports,
        classes=(3.0,),
        ca_file=str(hosts.ca_file),
    )


async def test_each_fault_of_a_certificate_has_its_own_outcome(hosts, config):
    downloader = Downloader(config)
    good = await downloader.download(hosts.url("good"))
    assert good.outcome == "received"
    good.body.close()
    found = {name: (await downloader.download(hosts.url(name))).outcome for name in FAULTS}
    await downloader.close()
    assert found == FAULTS
    assert not any(map(is_temporary, FAULTS.values()))


@pytest.mark.slow
@pytest.mark.usefixtures("worker")
async def test_reports_and_why_name_the_fault(hosts, shop, command, client):
    links = "|".join(hosts.url(name) for name in SENTENCES)
    run = await shop.run_to_end(f"id,name,photos\na,A,{links}\n")
    assert run.photos_by_outcome == {FAULTS[name]: 1 for name in SENTENCES}
    english, russian = [
        (await client.get(f"/v1/fetch/runs/{run.run}/report", params={"lang": lang})).text
        for lang in ("en", "ru")
    ]
    for name, (in_english, in_russian) in SENTENCES.items():
        assert in_english in english
        assert in_russian in russian
        assert in_english in (await command("why", hosts.url(name)))[1]
