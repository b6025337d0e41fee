"""From an address to a link: https://HOST:PORT is a gateway, ray:HOST:PORT or ray://HOST:PORT a Ray cluster.

Only the module that an address needs is imported. It is found by name, because this room may not import the links."""

import getpass
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from heloco.errors import UserError

if TYPE_CHECKING:
    from heloco.cluster.protocol.link import RunLink

LINKS = {"https:": ("heloco.cluster.gateway.https_link", "HttpsLink"), "ray:": ("heloco.cluster.ray.ray_link", "RayLink")}
TOKEN, TOKEN_FILE = "HELOCO_TOKEN", "HELOCO_TOKEN_FILE"


def connect(address: str, token: str | None = None) -> "RunLink":
    """A link to the run at this address."""
    for scheme, (module, name) in LINKS.items():
        if address.startswith(scheme):
            link: RunLink = getattr(import_module(module), name)(address, token or "")
            return link
    raise UserError(f"{address!r} is not the address of a run: it must begin with https:// (a gateway) or ray: (a Ray cluster).")


def find_token(token: str | None, file: str | Path | None = None, *, may_ask: bool = False) -> str | None:
    """The token from the argument, a file or the environment. With `may_ask` the user is asked for it at a terminal.

    Prefer a file or the environment: every user of the machine can read the command line of a process."""
    if token:
        return token
    if file := file or (None if os.environ.get(TOKEN) else os.environ.get(TOKEN_FILE)):
        try:
            return Path(file).expanduser().read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"The token file {file} cannot be read ({error}): give a file that holds the token.") from error
    if token := os.environ.get(TOKEN):
        return token
    if may_ask and sys.stdin is not None and sys.stdin.isatty():
        try:
            return getpass.getpass("Token (as `heloco serve` printed it): ").strip() or None
        except EOFError:
            return None
    return None
