"""Certificates of a test's own: an authority, what it signs, and files for servers."""

from __future__ import annotations

import datetime as dt
import ipaddress
import ssl
from pathlib import Path
from typing import Final, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

LOOPBACK: Final = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
EXPIRED: Final = (-9.0, -1.0)
"""Days of validity of a certificate that was right until yesterday."""


class Signed(NamedTuple):
    """A certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def pem(self) -> bytes:
        """The certificate."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def write(self, cert_file: Path, key_file: Path, *chain: Signed) -> None:
        """Write the certificate with the `chain` above it, and its key."""
        cert_file.write_bytes(b"".join(one.pem for one in (self, *chain)))
        form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        key_file.write_bytes(self.key.private_bytes(serialization.Encoding.PEM, form, plain))


def certificate(
    name: str,
    by: Signed | None = None,
    *,
    valid_days: tuple[float, float] = (-10.0, 10.0),
    names: tuple[x509.GeneralName, ...] = (),
) -> Signed:
    """A certificate signed `by` another or by itself; an authority if it has no `names`."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.UTC)
    is_authority = not names
    own_id = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    above = by.key.public_key() if by else key.public_key()
    above_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(above)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(by.certificate.subject if by else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + dt.timedelta(days=valid_days[0]))
        .not_valid_after(now + dt.timedelta(days=valid_days[1]))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(_usage(is_authority=is_authority), critical=True)
        .add_extension(own_id, critical=False)
        .add_extension(above_id, critical=False)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return Signed(builder.sign(by.key if by else key, hashes.SHA256()), key)


def _usage(*, is_authority: bool) -> x509.KeyUsage:
    """What the key may be used for. Python 3.13 verifies it, and the identifiers of keys."""
    rights = dict.fromkeys(
        (
            *("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
            *("encipher_only", "decipher_only"),
        ),
        False,
    )
    signs = {"key_cert_sign": is_authority, "crl_sign": is_authority}
    return x509.KeyUsage(digital_signature=True, **signs, **rights)


def self_signed_files(
    folder: Path, name: str = "media.test", *, valid_days: tuple[float, float] = (-2.0, 1.0)
) -> tuple[str, str]:
    """Files with a self-signed certificate for `name` and 127.0.0.1, and with its key."""
    cert_file, key_file = folder / "cert.pem", folder / "key.pem"
    names = (x509.DNSName(name), LOOPBACK)
    certificate(name, valid_days=valid_days, names=names).write(cert_file, key_file)
    return str(cert_file), str(key_file)


def client_context(cert_file: str) -> ssl.SSLContext:
    """A client that trusts this certificate only."""
    return ssl.create_default_context(cafile=cert_file)
