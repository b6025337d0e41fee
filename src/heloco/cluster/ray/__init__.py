"""A run on Ray: the service in one actor on the head, workers anywhere in the cluster, tensors through Ray's object store.

head_main      Ray's own processes, as a child that ends with its parent
ray_cluster    starting Ray for a run, or joining a Ray that runs: addresses, token, TLS
ray_options    how a supervisor starts Ray, or joins one
probe          finds what is wrong with an address, before Ray itself tries it for minutes
actor          the service as actor calls
replies        the actor's replies, and what else both of its sides know
ray_link       a machine's link to the actor
workers        worker processes inside the cluster
store          how much memory Ray's object store needs
supervisor     starts all of it, and restarts what dies

Ray is imported only inside functions, so importing this package neither needs nor loads it. The package's own names are
imported when they are first used, so that the link to a run loads no server. Any holder of Ray's token can run
code on every node, so Ray is for machines that trust each other. All others use the HTTPS gateway.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heloco.cluster.ray.ray_cluster import Cluster as Cluster
    from heloco.cluster.ray.ray_cluster import Tls as Tls
    from heloco.cluster.ray.ray_cluster import start_ray as start_ray
    from heloco.cluster.ray.ray_link import RayLink as RayLink
    from heloco.cluster.ray.supervisor import RaySupervisor as RaySupervisor

_MODULE_OF = {
    "Cluster": "ray_cluster", "Tls": "ray_cluster", "start_ray": "ray_cluster", "RayLink": "ray_link",
    "RaySupervisor": "supervisor",
}  # fmt: skip
__all__ = [*_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
