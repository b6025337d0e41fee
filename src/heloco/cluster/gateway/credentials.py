"""The synchronizer's certificate and its key, made on first use and stored. Tokens carry the certificate's fingerprint."""

import contextlib
import hashlib
import ipaddress
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from heloco.cluster.gateway import check_parts
from heloco.disk import disk_errors, write_atomically
from heloco.errors import UserError

if TYPE_CHECKING:
    from cryptography.x509 import Certificate, GeneralName

CERTIFICATE, KEY = "certificate.pem", "key.pem"
BEGIN, END = datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
"""A certificate that we make never expires, so that a token stays valid. The end date is RFC 5280's value for "never"."""


@dataclass(frozen=True)
class Credentials:
    """The certificate that the gateway shows, its key, and the fingerprint by which tokens know it."""

    certificate: Path
    """PEM; a chain may follow the certificate itself."""
    key: Path
    fingerprint: str
    """The SHA-256 of the certificate, in hexadecimal."""

    @classmethod
    def load_or_make(
        cls, folder: Path, hosts: Iterable[str] = (), *, cert: str | Path = "", key: str | Path = ""
    ) -> "Credentials":
        """The credentials in `folder`, made if there are none.

        `hosts`: names and addresses for the certificate, which only browsers look at. `cert`, `key`: the user's own files."""
        if bool(cert) != bool(key):
            raise UserError("A certificate and its key belong together: give both --cert and --key, or none of them.")
        certificate, certificate_key = Path(cert), Path(key)
        with disk_errors(folder, "start again."):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
            if not cert:
                certificate, certificate_key = folder / CERTIFICATE, folder / KEY
                _make_once(certificate, certificate_key, hosts)
        if cert:
            _check_time(certificate)
        return cls(certificate, certificate_key, _check_pair(certificate, certificate_key))

    def context(self) -> ssl.SSLContext:
        """The server's TLS context, for TLS 1.2 and later."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.certificate, self.key)
        return context


def fingerprint_of(der: bytes) -> str:
    """SHA-256 of a certificate in DER, by which a machine recognises the gateway."""
    return hashlib.sha256(der).hexdigest()


def fingerprint_in(path: Path) -> str:
    """Fingerprint of the certificate in a PEM file."""
    from cryptography.hazmat.primitives.serialization import Encoding

    return fingerprint_of(_read(path).public_bytes(Encoding.DER))


# ---- the certificate


def self_signed(hosts: Iterable[str], begin: datetime, end: datetime) -> tuple[bytes, bytes]:
    """A certificate and its key, as PEM."""
    check_parts("cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509 import oid

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(oid.NameOID.COMMON_NAME, "heloco")])
    names = [_general_name(host) for host in dict.fromkeys([*hosts, "localhost", "127.0.0.1"])]
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), begin, end)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return certificate.public_bytes(serialization.Encoding.PEM), key.private_bytes(*form)


def _general_name(host: str) -> "GeneralName":
    from cryptography import x509

    with contextlib.suppress(ValueError):  # not an address: it is a name
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise UserError(f"--host {host!r} is neither the name nor the address of a machine.") from error


def _make_once(certificate: Path, key: Path, hosts: Iterable[str]) -> None:
    if certificate.exists() and key.exists():
        key.chmod(0o600)
        return
    content, key_content = self_signed(hosts, BEGIN, END)
    write_atomically(key, key_content, mode=0o600)
    write_atomically(certificate, content, mode=0o600)


def _read(path: Path) -> "Certificate":
    check_parts("cryptography")
    from cryptography import x509

    remedy = f"give a certificate in PEM, or remove {path.parent} (a new one is made, and the token changes)."
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} does not hold a certificate: {remedy}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): {remedy}") from error


def _check_time(certificate: Path) -> None:
    """Raises UserError if a user's certificate is not valid today. Machines ignore the dates, but browsers do not."""
    content, now = _read(certificate), datetime.now(UTC)
    if not content.not_valid_before_utc <= now <= content.not_valid_after_utc:
        span = f"{content.not_valid_before_utc:%Y-%m-%d} to {content.not_valid_after_utc:%Y-%m-%d}"
        raise UserError(
            f"The certificate {certificate} is valid from {span}, not today: give one that is valid today, or set this machine's "
            "clock. Without --cert and --key, one that does not expire is made."
        )


def _check_pair(certificate: Path, key: Path) -> str:
    """Checks that the key belongs to the certificate, and returns the certificate's fingerprint."""
    content = _read(certificate)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: b"")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(
            f"{key} is not the key of {certificate}, or cannot be read ({reason}): give the pair that belongs together, the key "
            "without a password."
        ) from error
    from cryptography.hazmat.primitives.serialization import Encoding

    return fingerprint_of(content.public_bytes(Encoding.DER))
