"""From an address to a link: https://HOST:PORT is the gateway, ray://HOST:PORT or ray:HOST:PORT a Ray cluster."""

import os

from heloco.engine.cluster.link import Link
from heloco.errors import UserError


def connect(address: str, token: str | None = None) -> Link:
    """Imports only what the address needs."""
    if address.startswith("https://"):
        from heloco.engine.cluster.gateway.client import HttpsLink

        token = token or os.environ.get("HELOCO_TOKEN")
        if not token:
            raise UserError(
                f"{address} needs a token: give the one that `heloco serve` printed, with --token or in HELOCO_TOKEN."
            )
        return HttpsLink(address, token)
    if address.startswith("ray:"):
        from heloco.engine.cluster.on_ray import RayLink

        return RayLink(address, token=token or "")
    raise UserError(f"{address!r} is no address of a run: it begins with https:// (the gateway) or ray: (a Ray cluster).")
