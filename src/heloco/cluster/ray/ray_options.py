"""How a supervisor starts Ray, or joins one."""

from dataclasses import dataclass
from pathlib import Path

from heloco.cluster.ray.ray_cluster import Cluster, Tls, start_ray


@dataclass(frozen=True)
class RayOptions:
    """Where Ray listens and what protects it, see `start_ray`. When a Ray that runs already is joined, only its token and the
    certificates count."""

    host: str = "127.0.0.1"
    port: int = 0
    client_port: int = 0
    token: str = ""
    token_file: Path | None = None
    tls: Tls | None = None
    trusted: bool = False

    def start(self, address: str | None, *, store_bytes: int, run: Path) -> Cluster:
        """Starts Ray for the run in the folder `run`, or joins the one at `address`."""
        return start_ray(
            address, host=self.host, port=self.port, client_port=self.client_port, token=self.token, token_file=self.token_file,
            tls=self.tls, trusted=self.trusted, store_bytes=store_bytes, run=run,
        )  # fmt: skip
