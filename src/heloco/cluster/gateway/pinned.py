"""Certificate pinning: a client trusts exactly the certificate whose fingerprint is in the token."""

import ssl
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from heloco.cluster.gateway.credentials import fingerprint_of
from heloco.cluster.protocol.link import LinkDown
from heloco.errors import UserError
from heloco.hosts import is_loopback

if TYPE_CHECKING:
    import httpx

_NO_CHECK_TIME = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME, for which Python has no name."""


def clean_address(address: str) -> str:
    """The address in the form https://HOST:PORT. Raises UserError for anything else."""
    try:
        parts = urlsplit(address.strip())
        is_complete = (
            parts.scheme == "https" and parts.hostname and parts.path in ("", "/") and not parts.query and not parts.username
        )
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        is_complete, port = False, ""
    if not is_complete:
        raise UserError(f"{address!r} is not the address of a gateway: it must have the form https://HOST:PORT.")
    return f"https://{parts.netloc.rpartition('@')[2].removesuffix(port)}{port}"


def make_client(
    address: str, context: ssl.SSLContext, timeout_s: float, connections: int, headers: dict[str, str]
) -> "httpx.Client":
    """An HTTP client. It takes proxies from the environment (HTTPS_PROXY, NO_PROXY), except for loopback addresses.

    It follows no redirects, so that the token goes to the given address and nowhere else."""
    import httpx

    is_local = is_loopback(urlsplit(address).hostname or "")
    return httpx.Client(
        base_url=f"{address}/v1/", verify=context, headers={"accept-encoding": "identity", **headers},
        timeout=httpx.Timeout(timeout_s, connect=min(10.0, timeout_s)), trust_env=not is_local,
        limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=30),
        follow_redirects=False,
    )  # fmt: skip


def pin_certificate(address: str, fingerprint: str, timeout_s: float) -> ssl.SSLContext:
    """A TLS context that trusts exactly the server's certificate, if it has this fingerprint. No secret is sent before that."""
    import httpx

    stranger_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    stranger_context.check_hostname, stranger_context.verify_mode = False, ssl.CERT_NONE
    try:
        with make_client(address, stranger_context, timeout_s, 1, {}) as session, session.stream("GET", "") as response:
            stream: Any = response.extensions["network_stream"]
            der: bytes = stream.get_extra_info("ssl_object").getpeercert(True)
    except httpx.TransportError as error:
        raise link_error(address, error) from error
    if fingerprint_of(der) != fingerprint:
        raise certificate_error(address)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False  # the certificate itself is pinned, so its names do not matter
    # Dates do not matter either: a machine whose clock is wrong by years may take part.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
    context.load_verify_locations(cadata=der)
    return context


def certificate_error(address: str) -> UserError:
    return UserError(
        f"The certificate of {address} is not the one in the token: the token is old or of another run, or somebody "
        "intercepts the connection. Paste the token that `heloco serve` prints there now."
    )


def link_error(address: str, error: Exception) -> LinkDown | UserError:
    """The exception for a failed request: `LinkDown` to try again later, or UserError if the certificate is wrong."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return certificate_error(address)
        cause = cause.__cause__ or cause.__context__
    reason = str(error) or type(error).__name__
    return LinkDown(f"{address} cannot be reached ({reason}).")
