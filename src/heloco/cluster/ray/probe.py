"""Checks a Ray address before Ray itself is called, because with a wrong token Ray tries for minutes."""

import contextlib
import importlib
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heloco.cluster.ray.ray_internals import CLIENTS_REQUEST, CLUSTER_REQUEST, token_header
from heloco.errors import UserError

if TYPE_CHECKING:
    from heloco.cluster.ray.ray_cluster import Tls

ANSWER_S = 5.0


def probe(address: str, token: str, tls: "Tls | None", *, client: bool = False) -> None:
    """Raises UserError if nothing answers at the address, or it refuses our token or certificate. `client`: a ray:// address."""
    host, port = split(address)
    try:
        socket.create_connection((host, port), timeout=ANSWER_S).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"Nothing answers at {address} ({reason}): check the address, and that Ray runs there.") from error
    try:
        grpc: Any = importlib.import_module("grpc")
    except ImportError:  # Ray will find out by itself, slowly
        return
    code = _status_code(grpc, address, token, tls, CLIENTS_REQUEST if client else CLUSTER_REQUEST)
    if code == grpc.StatusCode.UNAUTHENTICATED:
        problem = "was refused" if token else "is missing"
        raise UserError(
            f"The Ray cluster at {address} wants its token, and ours {problem}: set RAY_AUTH_TOKEN_PATH to a copy of the file "
            "that the head has, or give the token."
        )
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        mode = "with TLS" if tls else "without TLS"
        raise UserError(
            f"{address} answers, but not as Ray does {mode}: check the port, and that both sides have TLS files of one "
            "authority, or neither has."
        )


def split(address: str) -> tuple[str, int]:
    """The host and port of a Ray cluster. Raises UserError for anything but HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(f"{address!r} is not the address of a Ray cluster: give HOST:PORT.")
    return host.strip("[]"), int(port)


def listens(host: str, port: int) -> bool:
    """Whether anything accepts connections at this address."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=ANSWER_S):
        return True
    return False


def _status_code(grpc: Any, address: str, token: str, tls: "Tls | None", method: str) -> Any:
    """The status code of one request; None if it succeeded."""
    if tls is None:
        channel = grpc.insecure_channel(address)
    else:
        ca, key, cert = (Path(path).read_bytes() for path in (tls.ca, tls.key, tls.cert))
        channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert))
    with channel:
        try:
            metadata = [token_header(token)] if token else []
            channel.unary_unary(method)(b"", timeout=ANSWER_S, metadata=metadata)
        except grpc.RpcError as error:
            return error.code()
    return None
