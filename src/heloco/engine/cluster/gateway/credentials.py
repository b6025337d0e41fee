"""Who may take part over HTTPS: a certificate, its key and a secret, made on first use and found again later.

What is pasted on another machine is one token: the secret, and the certificate's fingerprint. So that machine knows the
synchronizer by the certificate itself; no authority has to vouch for it, and its name and address may change.
"""

import base64
import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from heloco.engine.cluster.gateway import check_parts
from heloco.errors import UserError
from heloco.run.disk import disk_errors, sync_folder

if TYPE_CHECKING:
    from cryptography.x509 import Certificate, GeneralName

FOLDER = "credentials"
SECRET, CERTIFICATE, KEY = "secret", "certificate.pem", "key.pem"
BEGIN, END = datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
"""Our certificate outlives every run, so that a token stays valid. The end is RFC 5280's way to say that there is none."""
_TOKEN = re.compile(r"heloco1\.([A-Za-z0-9_-]{43})\.([0-9a-f]{64})")


@dataclass(frozen=True)
class Credentials:
    secret: str
    certificate: Path
    """PEM; a chain may follow the certificate itself."""
    key: Path
    fingerprint: str
    """The SHA-256 of the certificate, in hexadecimal."""
    news: str = ""
    """What whoever serves the run must be told."""

    @classmethod
    def found_or_made(
        cls, folder: Path, hosts: Iterable[str] = (), *, cert: str | Path = "", key: str | Path = ""
    ) -> "Credentials":
        """Those in `folder`, made where there are none.

        `hosts`: names and addresses for the certificate, which only browsers look at. `cert`, `key`: the user's own files."""
        if bool(cert) != bool(key):
            raise UserError("A certificate and its key belong together: give both --cert and --key, or none of them.")
        own, own_key = Path(cert), Path(key)
        with disk_errors(folder, "start again."):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
            if not cert:
                own, own_key = folder / CERTIFICATE, folder / KEY
                _make_once(own, own_key, hosts)
            secret = _secret(folder / SECRET)
        if cert:
            _check_time(own)
        return cls(secret, own, own_key, _checked(own, own_key))

    @property
    def token(self) -> str:
        """Lets a machine take part."""
        return f"heloco1.{self.secret}.{self.fingerprint}"

    @property
    def view_key(self) -> str:
        return view_key(self.token)

    def context(self) -> ssl.SSLContext:
        """For the server: TLS from 1.2 on."""
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.minimum_version = ssl.TLSVersion.TLSv1_2
        made.load_cert_chain(self.certificate, self.key)
        return made


def parse_token(token: str) -> tuple[str, str]:
    """(secret, fingerprint)"""
    found = _TOKEN.fullmatch(token.strip())
    if found is None:
        raise UserError("The token is not whole: paste the one that `heloco serve` printed, from heloco1. to its end.")
    return found[1], found[2]


def view_key(token: str) -> str:
    """Lets a browser look at the run's page, and do nothing else: the secret cannot be found from it."""
    made = hmac.digest(parse_token(token)[0].encode(), b"heloco: look at the page", "sha256")
    return base64.urlsafe_b64encode(made[:24]).decode()


def fingerprint_of(der: bytes) -> str:
    return hashlib.sha256(der).hexdigest()


# ---- the secret


def _secret(path: Path) -> str:
    if not path.exists():
        _write(path, f"{secrets.token_urlsafe(32)}\n".encode())
    path.chmod(0o600)
    found = path.read_text(encoding="ascii", errors="replace").strip()
    if _TOKEN.fullmatch(f"heloco1.{found}.{'0' * 64}") is None:
        raise UserError(f"{path} holds no secret of ours: restore it, or remove it (a new one is made, and the token changes).")
    return found


def _write(path: Path, content: bytes) -> None:
    """A file that only its owner may read, from its first moment on."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


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
    names = [_named(host) for host in dict.fromkeys([*hosts, "localhost", "127.0.0.1"])]
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), begin, end)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return made.public_bytes(serialization.Encoding.PEM), key.private_bytes(*form)


def _named(host: str) -> "GeneralName":
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise UserError(f"{host!r} is neither a name nor an address of a machine: mend --host.") from error


def _make_once(certificate: Path, key: Path, hosts: Iterable[str]) -> None:
    if certificate.exists() and key.exists():
        key.chmod(0o600)
        return
    made, made_key = self_signed(hosts, BEGIN, END)
    _write(key, made_key)
    _write(certificate, made)


def _read(path: Path) -> "Certificate":
    check_parts("cryptography")
    from cryptography import x509

    remedy = f"give a certificate in PEM, or remove {path.parent} (a new one is made, and the token changes)."
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} holds no certificate: {remedy}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): {remedy}") from error


def _check_time(certificate: Path) -> None:
    """Our machines do not look at the time of a certificate, but browsers do, and somebody meant it when it was made."""
    found, now = _read(certificate), datetime.now(UTC)
    if not found.not_valid_before_utc <= now <= found.not_valid_after_utc:
        span = f"{found.not_valid_before_utc:%Y-%m-%d} to {found.not_valid_after_utc:%Y-%m-%d}"
        raise UserError(
            f"The certificate {certificate} is valid from {span}, not today: give one that is valid today, or set this machine's "
            "clock. Without --cert and --key, one that does not expire is made."
        )


def _checked(certificate: Path, key: Path) -> str:
    """The certificate's fingerprint. The key must belong to it."""
    found = _read(certificate)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: b"")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(
            f"{key} is not the key of {certificate}, or cannot be read ({why}): give the pair that belongs together, the key "
            "without a password."
        ) from error
    from cryptography.hazmat.primitives.serialization import Encoding

    return fingerprint_of(found.public_bytes(Encoding.DER))
