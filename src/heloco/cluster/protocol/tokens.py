"""Tokens as text: a right, a secret, and the fingerprint of the synchronizer's certificate.

    heloco-worker.SECRET.FINGERPRINT

The fingerprint identifies the synchronizer: no certificate authority is needed, and its host name may change."""

import re
from typing import NamedTuple, get_args

from heloco.cluster.protocol.messages import Right
from heloco.errors import UserError

RIGHTS: tuple[Right, ...] = get_args(Right)
_TOKEN = re.compile(rf"heloco-({'|'.join(RIGHTS)})\.([A-Za-z0-9_-]{{43}})\.([0-9a-f]{{64}})")


class ParsedToken(NamedTuple):
    """The three parts of a token's text."""

    right: Right
    secret: str
    fingerprint: str
    """SHA-256 of the certificate, in hexadecimal."""


def format_token(right: Right, secret: str, fingerprint: str) -> str:
    """The text of a token, as people copy it."""
    return f"heloco-{right}.{secret}.{fingerprint}"


def parse_token(token: str) -> ParsedToken:
    """The parts of a token's text. Raises `UserError` if it is not whole."""
    match = _TOKEN.fullmatch(token.strip())
    if match is None:
        raise UserError(
            "The token is not whole: paste one that `heloco serve` or `heloco tokens` printed, from heloco- to its end."
        )
    right, secret, fingerprint = match.groups()
    return ParsedToken(right, secret, fingerprint)  # type: ignore[arg-type]
