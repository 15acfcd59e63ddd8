"""Links through TLS 1.3, for networks that others share: the run's key is membership.

:func:`make_tls_files` makes one self-signed certificate and its key for a run. Every worker
presents that certificate and trusts nothing else, so holding the key is membership, and others get
no further than TLS's own handshake. With an authority of your own, every certificate that it signed
is membership. Host names are not compared: workers are known by numeric addresses that change from
run to run. Nor are dates: a run may outlive its certificate, and its links are made anew meanwhile.

A stream may end without TLS's closing message: frames have lengths, and a link that is cut counts
as closed. A key protects a bounded number of records. Once half of them are used, a new link takes
over between two exchanges; at the bound it does so at any moment.
"""

from __future__ import annotations

import datetime
import errno
import logging
import os
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import final

from gossipdp.links.sockets import Stream

logger = logging.getLogger("gossipdp")

# One call of OpenSSL takes at most this much, so that a turn on a fast link ends.
SLICE_BYTES = 1 << 20
# OpenSSL's codes for a chain that does not end in a certificate that we trust.
_UNKNOWN_AUTHORITY = (2, 18, 19, 20, 21)
# <openssl/x509_vfy.h>: X509_V_FLAG_NO_CHECK_TIME, for which the ssl module has no name.
_NO_CHECK_TIME = 0x200000
# RFC 8446, section 5.5: AES-GCM protects at most 2**24.5 full records with one key. OpenSSL neither
# counts nor renews it.
MAX_RECORDS = 1 << 24
RECORD_BYTES = 16 << 10
CERTIFICATE_DAYS = 365
# The files of a directory. Without an authority the certificate is its own.
CERT, KEY, AUTHORITY = "cert.pem", "key.pem", "ca.pem"


def make_tls_files(directory: Path) -> None:
    """Make the certificate of a run, ``cert.pem``, and its key, ``key.pem``, in ``directory``.

    The certificate is self-signed (ECDSA, P-256); its dates are not checked. Only you can read the
    key. The directory is made if it is not there.

    Raises:
        FileExistsError: one of the files is there; nothing is overwritten.
        OSError: they cannot be written.

    Example:
        >>> make_tls_files(getfixture("tmp_path"))
    """
    # Imported here: it takes a tenth of a second, and nothing else needs it.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a gossipdp run")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=CERTIFICATE_DAYS))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    cert, private = directory / CERT, serialization.PrivateFormat.PKCS8
    if cert.exists():
        raise FileExistsError(f"{cert} is there already: use it, or name another directory")
    _write_new(directory / KEY, key.private_bytes(pem, private, plain), 0o600)
    _write_new(cert, certificate.public_bytes(pem), 0o644)


def _write_new(path: Path, data: bytes, mode: int) -> None:
    """Write a file that is not there yet; never through a symbolic link in its place."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def check_private(name: str, path: Path) -> None:
    """Warn if others than its owner may read or change a file with a secret."""
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        text = (
            "others than you may read %s %s (mode %03o) and so take part in the run; chmod 600 it"
        )
        logger.warning(text, name, path, mode)


@final
class Tls:
    """The certificate (or chain), key and authority of a directory, for both ends of a connection.

    They are PEM files, read here once.

    Raises:
        ValueError: a file cannot be read or used, the key does not fit the certificate, or another
            worker with the same authority would refuse the certificate (not signed by it, not
            meant for both ends of a connection).
    """

    def __init__(self, directory: Path) -> None:
        cert, key, ca = (directory / name for name in (CERT, KEY, AUTHORITY))
        self._files = cert, key, ca if ca.exists() else cert
        for path in self._files:
            try:
                path.read_text("ascii")
            except UnicodeDecodeError:
                raise ValueError(f"{path} is no PEM file; convert it with openssl") from None
            except OSError as error:
                made = "gossipdp tls-init DIR makes a certificate and its key"
                raise ValueError(f"cannot read {path}: {error.strerror}; {made}") from None
        check_private("the key", key)
        self._server = _context(ssl.PROTOCOL_TLS_SERVER, *self._files)
        # No session tickets: every link shows its certificate, and no unexpected message follows.
        self._server.num_tickets = 0
        self._client = _context(ssl.PROTOCOL_TLS_CLIENT, *self._files)
        self._meet_oneself()

    def wrap(self, connection: socket.socket, *, server_side: bool) -> TlsStream:
        """Return the stream over a connected socket, whose object is emptied; handshake is due."""
        context = self._server if server_side else self._client
        wrapped = context.wrap_socket(
            connection, server_side=server_side, do_handshake_on_connect=False
        )
        return TlsStream(wrapped)

    def _meet_oneself(self) -> None:
        """Connect two ends that both have these files, as two workers would."""
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = self._client.wrap_bio(back, there)
        server = self._server.wrap_bio(there, back, server_side=True)
        try:
            for end in (client, server, client, server):
                with suppress(ssl.SSLWantReadError):
                    end.do_handshake()
        except ssl.SSLError as error:
            cert, _, ca = self._files
            raise ValueError(
                f"the certificate {cert} is of no use with the authority {ca}: "
                f"{explain(error)}; every other worker would refuse it"
            ) from None


@final
class TlsStream(Stream):
    """TLS over a non-blocking socket, by OpenSSL in the :mod:`ssl` module.

    OpenSSL reads and writes one record (16 KiB) a system call, straight between the kernel and its
    own buffer and from there to ours: one copy more than in the clear, besides the cipher.
    """

    def __init__(self, connection: ssl.SSLSocket) -> None:
        self.connection = self._secured = connection
        # Each direction has a key of its own. No read takes more than a record.
        self._num_sent = self._num_received = 0
        self._error: OSError | None = None

    def do_handshake(self) -> None:
        """Go on with TLS's handshake until it is over; raise BlockingIOError to await the peer."""
        try:
            self._secured.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except OSError as error:
            if _is_end(error) or error.errno == errno.ENOTCONN:
                raise ConnectionResetError(errno.ECONNRESET, "gone in the handshake") from None
            raise _readable(error) from None

    def receive_into(self, rooms: Sequence[memoryview]) -> int:
        if self._error is not None:
            raise self._error
        total = 0
        try:
            for room in rooms:
                rest = room
                while rest and not self.has_more:
                    count = self._secured.recv_into(rest)
                    self._num_received += 1
                    self.has_more = count == 0  # the end, to be said once more
                    total += count
                    rest = rest[count:]
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if total == 0:
                raise BlockingIOError from None
        except OSError as error:
            if total == 0:
                raise _readable(error) from None
            self._error = _readable(error)  # raised after the bytes before it
            self.has_more = True
        return total

    @property
    def is_aging(self) -> bool:  # type: ignore[override]
        """True once half of the records are used; both ends find it at about the same time."""
        return 2 * max(self._num_sent, self._num_received) >= MAX_RECORDS

    def send(self, parts: Sequence[bytes | memoryview]) -> int:
        # OpenSSL requires that a call that found no room is repeated unchanged.
        total = 0
        try:
            for part in parts:
                view = memoryview(part)
                for start in range(0, len(view), SLICE_BYTES):
                    count = self._secured.send(view[start : start + SLICE_BYTES])
                    total += count
                    self._num_sent += -(-count // RECORD_BYTES)
                    self.is_worn = self._num_sent >= MAX_RECORDS
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if total == 0:
                raise BlockingIOError from None
        except OSError as error:
            raise _readable(error) from None
        return total


def explain(error: OSError) -> str:
    """Return the reason why TLS failed, for the user of the worker that found it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        message = error.verify_message
        if error.verify_code in _UNKNOWN_AUTHORITY:
            message = f"it is not this run's, nor signed by this worker's authority ({message})"
        return f"certificate refused: {message}"
    reason = getattr(error, "reason", None) or error.strerror or str(error)
    if reason == "WRONG_VERSION_NUMBER":
        return "the other end does not speak TLS"
    _, is_alert, said = reason.partition("ALERT_")
    if is_alert:  # TLSV13_ALERT_CERTIFICATE_REQUIRED, TLSV1_ALERT_UNKNOWN_CA, ...
        said = said.replace("_", " ").lower()
        return f"the other end refused this worker's certificate or its TLS: {said}"
    return reason.replace("_", " ").lower() if reason.isupper() else reason


def _readable(error: OSError) -> OSError:
    """Return an error of OpenSSL as one whose ``strerror`` is a sentence, others as they are."""
    # Found by writing; the last is how CPython says it since 3.11.9, 3.12.3 and 3.13.
    if _is_end(error) or isinstance(error, ssl.SSLZeroReturnError | BrokenPipeError):
        return BrokenPipeError(errno.EPIPE, "closed by the peer")
    return OSError(errno.EPROTO, explain(error)) if isinstance(error, ssl.SSLError) else error


def _is_end(error: OSError) -> bool:
    """Return whether the connection ended; with OpenSSL 3.6 the class does not tell."""
    is_eof = getattr(error, "reason", None) == "UNEXPECTED_EOF_WHILE_READING"
    return is_eof or isinstance(error, ssl.SSLEOFError)


def _context(protocol: int, cert: Path, key: Path, ca: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= _NO_CHECK_TIME
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError:
        raise ValueError(f"{ca} holds no certificate in PEM form") from None

    def refuse_to_ask() -> str:
        raise ValueError(
            f"{key} is encrypted, and workers cannot ask for its passphrase; "
            "give a key without one, readable by you alone"
        )

    try:
        context.load_cert_chain(cert, key, password=refuse_to_ask)
    except ssl.SSLError as error:
        fault = f"one of them is not usable PEM ({explain(error)})"
        if error.reason == "KEY_VALUES_MISMATCH":
            fault = "the key is not that of the certificate"
        raise ValueError(f"{cert} and {key}: {fault}") from None
    return context
