"""TLS faults of a seller's host are distinguished in outcomes, reports and `fetch why`."""

from __future__ import annotations

import pytest
from tls_hosts import TlsHosts

from headrace.fetch import FetchConfig
from headrace.fetch.download import Downloader
from headrace.fetch.outcomes import is_temporary

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


async def test_each_fault_of_a_certificate_has_an_outcome_of_its_own(hosts, config):
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
    for name, (told, in_russian) in SENTENCES.items():
        assert told in english
        assert in_russian in russian
        assert told in (await command("why", hosts.url(name)))[1]
