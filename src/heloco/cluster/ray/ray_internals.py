"""All that is used of Ray beyond its documentation, with the reason for each. Measured with Ray 2.60, which is why its version is
pinned. `tests/cluster/test_ray_internals.py`, and `test_ray_runs.py` with a running Ray, fail when a new version has other names.
"""

import contextlib
import ctypes
import importlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from typing import Any

KEEPALIVE = {
    # Under Ray's defaults a call hung for two minutes after a network cut of 40 s.
    "RAY_grpc_keepalive_time_ms": "10000", "RAY_grpc_keepalive_timeout_ms": "20000",
    "RAY_health_check_failure_threshold": "30",
}  # fmt: skip
PINGS = {"RAY_grpc_client_keepalive_time_ms": "10000", "RAY_grpc_client_keepalive_timeout_ms": "20000"}
"""Only for a Ray that we start: the processes of another Ray close connections with such frequent pings."""
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",  # otherwise a call without a connection starts another Ray
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # otherwise every shutdown takes up to 30 s
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # an actor that reserves no GPU may still use one
}
COMMAND = "ray.scripts.scripts"
"""The module with Ray's command line. `head_main.py` calls it in its own process, because the command `ray` would outlive it."""
NO_MONITOR = "--no-monitor"
"""A hidden option of `ray start`. Without it the head also runs the autoscaler, which adds and removes machines in a cloud.
Our runs do not use that. It takes 80 MB, and stopping Ray then takes a second longer."""
NO_FORK_SUPPORT = {"GRPC_ENABLE_FORK_SUPPORT": "0"}
"""For the environment of `ray start`. The head forks a server for each client while threads of gRPC run. With gRPC's fork
support, one server in twenty does not start."""
ADDRESS_FILE = "ray_current_cluster"
"""The file in Ray's folder to which it writes its address when it is up. Ray has no call that waits for that."""
LONGEST_SOCKET = "session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""The longest path of a socket in Ray's folder, with the largest process id of Linux. The path of a socket may have at most 107
bytes. Ray ends at its start if its folder's path is too long for that, so a folder is tried with this path before."""
CLUSTER_REQUEST, CLIENTS_REQUEST = "/ray.rpc.NodeInfoGcsService/GetClusterId", "/ray.rpc.RayletDriver/ClusterInfo"
"""Requests that are answered without side effects, by a head and by its server for clients. With a wrong token Ray itself would
try for minutes."""
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Ray replaces 127.0.0.1 by an address that others can reach, and then listens everywhere. It does not do so on a system on which
it believes that there can be no cluster."""


def token_header(token: str) -> tuple[str, str]:
    """The gRPC header in which Ray sends its token. Our requests go out without Ray, so they must bring it themselves."""
    return "authorization", f"Bearer {token}"


def is_node_here() -> bool:
    """Whether this machine is a node of a Ray cluster. `ray.init` would say so only after a minute."""
    services: Any = importlib.import_module("ray._private.services")
    return bool(services.find_node_ids())


def versions_in(error: RuntimeError) -> tuple[str, str] | None:
    """(the cluster's version, this process's) in Ray's error about versions that differ, which has them only in its text of
    several lines; None for any other error."""
    versions = [line.strip().removeprefix("Ray: ") for line in str(error).splitlines() if line.strip().startswith("Ray: ")]
    return (versions[0], versions[1]) if len(versions) == 2 and versions[0] != versions[1] else None


def silence_deaths() -> None:
    """Otherwise Ray prints a line for every process of ours that dies."""
    logging: Any = importlib.import_module("ray._private.ray_logging")
    logging.stdout_deduplicator.skip_re = re.compile("")


@contextlib.contextmanager
def keep_sigterm_handler() -> Iterator[None]:
    """Restores our SIGTERM handler at the end. `ray.init` replaces it. `ray.shutdown` removes it from the system, but Python
    still reports it as set. When Ray is started again, this runs outside the main thread, where Python does not allow setting
    a handler but the system does."""
    libc = ctypes.CDLL(None)
    action = ctypes.create_string_buffer(512)  # larger than a struct sigaction
    libc.sigaction(signal.SIGTERM, None, action)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
        libc.sigaction(signal.SIGTERM, action, None)


def reread_settings() -> None:
    """Makes Ray follow the environment as it is now. It reads some of its settings only once, when it is imported, and a process
    may join one cluster after the other."""
    core: Any = importlib.import_module("ray._raylet")
    core.Config.initialize("")
    core.AuthenticationTokenLoader.instance().reset_cache()
    constants: Any = importlib.import_module("ray._private.ray_constants")
    constants.ENABLE_RAY_CLUSTER = os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER") != "0"
    hook: Any = importlib.import_module("ray._private.auto_init_hook")
    hook.enable_auto_connect = os.environ.get("RAY_ENABLE_AUTO_CONNECT") != "0"
