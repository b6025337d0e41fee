"""A run on Ray: the service in one actor on the head, workers anywhere in the cluster, tensors through Ray's object store.

head_main      Ray's own processes, as a child that ends with whoever started it
ray_cluster    Ray started for a run or joined where it runs: addresses, token, TLS
probe          what is wrong with an address, before Ray's own patience is spent on it
actor          the service as actor calls
ray_link       a machine's way to it
workers        our machines inside the cluster
store          how much memory Ray's object store needs
supervisor     all of it together, watched over

Ray is imported only inside functions, so that importing this package neither needs nor loads it. Any holder of its token can run
code on every node: Ray is for machines that trust each other; the others come through the HTTPS gateway.
"""

from heloco.cluster.ray.ray_cluster import Cluster, Tls, start_ray
from heloco.cluster.ray.ray_link import RayLink
from heloco.cluster.ray.supervisor import RaySupervisor

__all__ = ["Cluster", "RayLink", "RaySupervisor", "Tls", "start_ray"]
