"""A run on Ray: the service in one actor on the head, workers anywhere in the cluster, tensors through Ray's object store.

node        Ray's own processes, as a child that ends with whoever started it
cluster     Ray started for a run or joined where it runs: addresses, token, TLS
probe       what is wrong with an address, before Ray's own patience is spent on it
actor       the service behind actor calls
link        a machine's way to it
workers     machines of ours inside the cluster
store       how much memory Ray's object store needs
engine      all of it together, watched over

Ray is imported only inside functions, so that importing this package neither needs nor loads it. Any holder of its token can run
code on every node: Ray is for machines that trust each other; the others come through the HTTPS gateway.
"""

from heloco.engine.cluster.on_ray.cluster import Cluster, Tls, start_ray
from heloco.engine.cluster.on_ray.engine import RayEngine
from heloco.engine.cluster.on_ray.link import RayLink

__all__ = ["Cluster", "RayEngine", "RayLink", "Tls", "start_ray"]
