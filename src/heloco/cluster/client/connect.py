"""From an address to a link: https://HOST:PORT is a gateway, ray:HOST:PORT or ray://HOST:PORT a Ray cluster.

Only the module that an address needs is loaded. Links are over this room, so they are found by name."""

import getpass
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from heloco.errors import UserError

LINKS = {"https:": ("heloco.cluster.gateway.https_link", "HttpsLink"), "ray:": ("heloco.cluster.ray.ray_link", "RayLink")}
TOKEN, TOKEN_FILE = "HELOCO_TOKEN", "HELOCO_TOKEN_FILE"


def connect(address: str, token: str | None = None) -> Any:
    """A link to the run at this address; it is a `Link` and an `AdminLink`."""
    for scheme, (module, name) in LINKS.items():
        if address.startswith(scheme):
            return getattr(import_module(module), name)(address, token or "")
    raise UserError(f"{address!r} is no address of a run: it begins with https:// (the gateway) or ray: (a Ray cluster).")


def find_token(given: str | None, file: str | Path | None = None, *, may_ask: bool = False) -> str | None:
    """A token that was given, from a file, or from the environment; asked for where somebody sits there.

    What is given on the command line stands in the list of processes, which everybody on the machine can read."""
    if given:
        return given
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
