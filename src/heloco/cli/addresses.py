"""Finds the run and the token for a command: from an address, or from the folder of a run that is served on this machine."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from heloco.cli.flags import Parser
from heloco.errors import UserError

if TYPE_CHECKING:
    from heloco.cluster.protocol.link import RunLink
    from heloco.cluster.protocol.messages import Right

T = TypeVar("T")


def add_address_flags(parser: Parser, right: str) -> None:
    parser.add_argument(
        "address", metavar="ADDRESS", nargs="?",
        help="https://HOST:PORT, ray:…, or the folder of a run that is served on this machine [HELOCO_ADDRESS]",
    )  # fmt: skip
    parser.add_argument("--address", metavar="ADDRESS", dest="address_flag", help=argparse.SUPPRESS)
    add_token_flags(parser, right)


def add_token_flags(parser: Parser, right: str) -> None:
    parser.add_argument(
        "--token",
        metavar="TEXT",
        help=f"a token of the run with the right {right!r}; other users can see it in the list of processes [HELOCO_TOKEN]",
    )
    parser.add_argument("--token-file", metavar="FILE", help="a file that holds the token [HELOCO_TOKEN_FILE]")


def named_address(arguments: argparse.Namespace) -> str:
    """The address from the command line or the environment; empty if there is none."""
    return str(arguments.address or arguments.address_flag or os.environ.get("HELOCO_ADDRESS") or "").rstrip("/")


def link_from_flags(arguments: argparse.Namespace, right: "Right") -> "RunLink":
    """A link to the run named on the command line, with a token of that right."""
    address = named_address(arguments)
    if not address:
        raise UserError("There is no address: give the one that `heloco serve` printed, or set HELOCO_ADDRESS.")
    return link_to(address, arguments.token, arguments.token_file, right)


def link_to(address: str, token: str | None, token_file: str | None, right: "Right") -> "RunLink":
    from heloco.cluster.client.connect import connect, find_token

    if not address.startswith(("https:", "ray:")) and Path(address).is_dir():
        address, token = local_run(Path(address), right)
        return connect(address, token)
    is_gateway = address.startswith("https:")
    return connect(address, find_token(token, token_file, may_ask=is_gateway))


def local_run(folder: Path, right: "Right") -> tuple[str, str]:
    """(address, token) of a run that is served on this machine, from its folder."""
    from heloco.cluster.gateway.credentials import CERTIFICATE, fingerprint_in
    from heloco.cluster.server.process import ListenConfig
    from heloco.cluster.server.token_book import FILE, TokenBook
    from heloco.records.run_files import CREDENTIALS

    listen = ListenConfig.load(folder)
    if listen is None or not (folder / CREDENTIALS / FILE).exists():
        raise UserError(f"{folder} was never served from this machine: give the address that `heloco serve` printed.")
    tokens = TokenBook(folder / CREDENTIALS)
    fingerprint = fingerprint_in(Path(listen.cert) if listen.cert else folder / CREDENTIALS / CERTIFICATE)
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(listen.host, listen.host)
    valid = tokens.valid(right)
    if not valid:
        raise UserError(f"All {right} tokens of {folder} were revoked: make one with `heloco tokens {folder} --new {right}`.")
    return f"https://{host}:{listen.port}", tokens.text(valid[0], fingerprint)


def ask_once(ask: Callable[[], T]) -> T:
    """Makes one request without retries, and turns failures into UserError."""
    from heloco.cluster.protocol.link import LinkDown
    from heloco.cluster.protocol.refusals import RefusalCode, Refused

    try:
        return ask()
    except LinkDown as error:
        raise UserError(f"{error} Check the address, and that `heloco serve` runs there.") from error
    except Refused as error:
        remedy = " `heloco tokens RUN`, where the run is served, lists and makes them." if error.code is RefusalCode.RIGHT else ""
        raise UserError(f"{error.text}{remedy}") from error
