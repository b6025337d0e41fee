"""A run on Ray: the service in one actor on the head, workers anywhere in the cluster, tensors through Ray's object store.

head_main      Ray's own processes, as a child that ends with its parent
ray_cluster    starting Ray for a run, or joining a Ray that runs: addresses, token, TLS
probe          finds what is wrong with an address, before Ray itself tries it for minutes
actor          the service as actor calls
ray_link       a machine's link to the actor
workers        worker processes inside the cluster
store          how much memory Ray's object store needs
supervisor     starts all of it, and restarts what dies

Ray is imported only inside functions, so importing this package neither needs nor loads it. Any holder of Ray's token can run
code on every node, so Ray is for machines that trust each other. All others use the HTTPS gateway.
"""

from heloco.cluster.ray.ray_cluster import Cluster, Tls, start_ray
from heloco.cluster.ray.ray_link import RayLink
from heloco.cluster.ray.supervisor import RaySupervisor

__all__ = ["Cluster", "RayLink", "RaySupervisor", "Tls", "start_ray"]
