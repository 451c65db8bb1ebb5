"""A client's socket with TLS, and the certificate.

The native data plane encrypts what it sends (`media/native/tls.h`). A connection that it passes on
keeps its TLS state there, and is read and written through it. Without the plane Python encrypts.

The bytes pass through this process: a block is read and encrypted in pieces of PIECE_BYTES. A piece
that was begun is offered again until it is taken completely, since it must be the same bytes
(SSL_write(3)).
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from headrace.kernel.logs import SparseLogger, logger
from headrace.media.model import MediaConfig
from headrace.media.worker.socket_io import Channel

log, often = logger(__name__), SparseLogger(logger(__name__))
CERTIFICATE_LOOK_S: Final = 10.0
PIECE_BYTES: Final = 64 * 1024
_CERTIFICATE: Final = re.compile(rb"^-----BEGIN (TRUSTED |X509 )?CERTIFICATE-----", re.MULTILINE)
_PRIVATE_KEY: Final = re.compile(rb"^-----BEGIN ([A-Z]+ )?PRIVATE KEY-----", re.MULTILINE)
_ENCRYPTED: Final = re.compile(
    rb"^(-----BEGIN ENCRYPTED PRIVATE KEY-----|Proc-Type: *4,ENCRYPTED)", re.MULTILINE
)
_NOT_CURRENT: Final = (9, 10)
"""X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""
_input: Final = ctypes.create_string_buffer(PIECE_BYTES)


class TlsChannel(Channel):
    """TLS over TCP by Python. The handshake happens within the first `receive`."""

    __slots__ = ("_begun",)

    def __init__(self, client: socket.socket) -> None:
        super().__init__(client)
        self._begun: bytes | memoryview = b""
        """The piece that was offered and not taken."""

    def receive(self, bytes_max: int) -> bytes:
        try:
            return self._socket.recv(bytes_max)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def send(self, data: memoryview, *, is_more: bool = False) -> int:  # noqa: ARG002 - a record is a record
        return self._offer(data[:PIECE_BYTES])

    def send_file(self, descriptor: int, offset: int, count: int) -> int:
        if self._begun:
            return self._offer(self._begun)
        data = os.pread(descriptor, min(count, PIECE_BYTES), offset)
        return self._offer(data) if data else 0

    def end(self) -> None:
        self._send_notice()
        super().end()

    def _offer(self, data: bytes | memoryview) -> int:
        # Whatever the quantum allows now, offer the same piece again.
        data = self._begun or data
        self._begun = data
        sent = self._encrypt(data)
        self._begun = b""
        return sent

    def _encrypt(self, data: bytes | memoryview) -> int:
        try:
            return self._socket.send(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def _send_notice(self) -> None:
        with suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
            # Without waiting for the client's close_notify.
            assert isinstance(self._socket, ssl.SSLSocket), "Python encrypts"
            self._socket.unwrap()


class NativeTlsChannel(TlsChannel):
    """TLS of a connection that the native data plane passed on."""

    __slots__ = ("_library", "_state")

    def __init__(self, client: socket.socket, library: ctypes.CDLL, state: int) -> None:
        super().__init__(client)
        self._library, self._state = library, state

    def receive(self, bytes_max: int) -> bytes:
        got = self._library.plane_tls_receive(self._state, _input, min(bytes_max, PIECE_BYTES))
        return ctypes.string_at(_input, _checked(got))

    def close(self) -> None:
        state, self._state = self._state, 0
        self._library.tls_free(state)
        super().close()

    def detach(self) -> tuple[int, int]:
        state, self._state = self._state, 0
        return self._socket.detach(), state

    def _encrypt(self, data: bytes | memoryview) -> int:
        return _checked(self._library.plane_tls_send(self._state, bytes(data), len(data)))

    def _send_notice(self) -> None:
        self._library.tls_end(self._state)


def _checked(result: int) -> int:
    if result == -1:
        raise BlockingIOError
    if result < 0:
        raise ConnectionResetError("the TLS connection is broken")
    return result


class ServerTls:
    """The node's certificate, which is loaded again after its files changed.

    Connections keep the certificate of their handshake.
    """

    def __init__(
        self, config: MediaConfig, set_natively: Callable[[str, str], None] | None
    ) -> None:
        """Load the certificate. `set_natively` gives its files to the native data plane; None:
        Python encrypts. Raises: OSError.

        It may have expired: the successor of a dead worker must serve plain HTTP at least.
        """
        assert config.tls_cert is not None, "a TLS listener has a certificate"
        self._files = (config.tls_cert, config.tls_key or config.tls_cert)
        self._set_natively = set_natively
        self._context: ssl.SSLContext | None = None
        self._look_s = 0.0
        self._seen = self._state()
        self._load()

    def wrap(self, client: socket.socket) -> TlsChannel:
        """Wrap `client` before its handshake. Raises: OSError."""
        assert self._context is not None, "Python encrypts"
        wrapped = self._context.wrap_socket(client, server_side=True, do_handshake_on_connect=False)
        return TlsChannel(wrapped)

    def renew(self, now_s: float) -> None:
        """Load the files if they changed, and log the result; looks each CERTIFICATE_LOOK_S.

        Files that do not match are refused, and the last ones stay in use.
        """
        if now_s < self._look_s:
            return
        self._look_s = now_s + CERTIFICATE_LOOK_S
        try:
            state = self._state()
            if state != self._seen:
                require_current(*self._files)
                self._load()
                self._seen = state
                log.info("certificate_loaded", file=self._files[0])
        except OSError as error:  # ssl.SSLError is one
            often.warning("certificate_refused", error=str(error), used="the last one")

    def _load(self) -> None:
        if self._set_natively is not None:
            self._set_natively(*self._files)
        else:
            self._context = tls_context(*self._files)

    def _state(self) -> tuple[tuple[int, int], ...]:
        found = [Path(file).stat() for file in self._files]
        return tuple((status.st_mtime_ns, status.st_ino) for status in found)


def tls_context(cert: str, key: str) -> ssl.SSLContext:
    """TLS 1.2 and newer by Python. Raises: OSError (also ssl.SSLError) for unusable files."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1", "http/1.0"])
    # Without a password OpenSSL would read one from the terminal.
    context.load_cert_chain(cert, key, password="")
    return context


def require_current(cert: str, key: str) -> None:
    """Check that the files are a certificate that is valid now and its key. Raises: OSError.

    A handshake in memory, whose client trusts the certificate, decides. OpenSSL's errors do not
    name the file.
    """
    _require_pem(cert, _CERTIFICATE, "certificate")
    _require_pem(key, _PRIVATE_KEY, "private key")
    context = tls_context(cert, key)
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    trusting.load_verify_locations(cert)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server):
        with suppress(ssl.SSLWantReadError):
            side.do_handshake()
    try:
        client.do_handshake()
    except ssl.SSLCertVerificationError as error:
        # Other faults, such as of a chain, are for the clients to judge.
        if error.verify_code in _NOT_CURRENT:
            raise OSError(error.verify_message) from error


def _require_pem(file: str, wanted: re.Pattern[bytes], what: str) -> None:
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        raise OSError(f"cannot read {file}: {error.strerror}") from error
    if not wanted.search(content):
        raise OSError(f"{file} contains no {what} in PEM format")
    if what == "private key" and _ENCRYPTED.search(content):
        raise OSError(f"the private key in {file} has a password; write it without one")
