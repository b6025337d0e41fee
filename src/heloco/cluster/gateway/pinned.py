"""The client's side of the token: the certificate that the synchronizer shows must be the one in it, and no other will do."""

import ipaddress
import ssl
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from heloco.cluster.gateway.credentials import fingerprint_of
from heloco.cluster.protocol.link import LinkDown
from heloco.errors import UserError

if TYPE_CHECKING:
    import httpx

_NO_CHECK_TIME = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME, for which Python has no name."""


def clean_address(address: str) -> str:
    """https://HOST:PORT, and nothing behind it."""
    try:
        found = urlsplit(address.strip())
        whole = found.scheme == "https" and found.hostname and found.path in ("", "/") and not found.query and not found.username
        port = f":{found.port}" if found.port else ""
    except ValueError:
        whole, port = False, ""
    if not whole:
        raise UserError(f"{address!r} is no address of a gateway: it has the form https://HOST:PORT.")
    return f"https://{found.netloc.rpartition('@')[2].removesuffix(port)}{port}"


def is_loopback(address: str) -> bool:
    host = urlsplit(address).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def client(address: str, context: ssl.SSLContext, timeout_s: float, connections: int, headers: dict[str, str]) -> "httpx.Client":
    """Proxies are taken from the environment (HTTPS_PROXY, NO_PROXY), but never for this machine itself.

    Redirects are not followed: the token goes to the address that was given, and nowhere else."""
    import httpx

    return httpx.Client(
        base_url=f"{address}/v1/", verify=context, headers={"accept-encoding": "identity", **headers},
        timeout=httpx.Timeout(timeout_s, connect=min(10.0, timeout_s)), trust_env=not is_loopback(address),
        limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=30),
        follow_redirects=False,
    )  # fmt: skip


def pinned(address: str, fingerprint: str, timeout_s: float) -> ssl.SSLContext:
    """Looks at the synchronizer's certificate, without telling it anything, and trusts exactly this one if it is the token's."""
    import httpx

    unchecked = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
    try:
        with client(address, unchecked, timeout_s, 1, {}) as looking, looking.stream("GET", "") as response:
            stream: Any = response.extensions["network_stream"]
            der: bytes = stream.get_extra_info("ssl_object").getpeercert(True)
    except httpx.TransportError as error:
        raise down(address, error) from error
    if fingerprint_of(der) != fingerprint:
        raise other_certificate(address)
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.check_hostname = False  # the certificate itself is known, whatever names it has
    # Nothing but the certificate itself counts: a machine whose clock is wrong by years may take part.
    made.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
    made.load_verify_locations(cadata=der)
    return made


def other_certificate(address: str) -> UserError:
    return UserError(
        f"The certificate of {address} is not the one in the token: the token is of another run or an old one, or somebody "
        "stands in between. Paste the token that `heloco serve` prints there now."
    )


def down(address: str, error: Exception) -> LinkDown | UserError:
    """What a failed request means: to try again later, or that something must be mended first."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return other_certificate(address)
        cause = cause.__cause__ or cause.__context__
    why = str(error) or type(error).__name__
    return LinkDown(f"{address} cannot be reached ({why}).")
