"""Ray itself: started for a run and stopped with it, or joined where it runs already. Closed by default: it always needs a token,
listens on loopback alone unless configured otherwise, and beyond loopback uses TLS.
"""

import contextlib
import importlib
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heloco.cluster.ray.private_folder import START_LOG, TOKEN, PrivateFolder, check_secret
from heloco.cluster.ray.probe import listens, probe, split
from heloco.cluster.ray.ray_internals import (
    ADDRESS_FILE,
    COMMAND,
    KEEPALIVE,
    LOOPBACK_ONLY,
    NO_FORK_SUPPORT,
    NO_MONITOR,
    PINGS,
    QUIET,
    is_node_here,
    keep_sigterm_handler,
    reread_settings,
    silence_deaths,
    versions_in,
)
from heloco.errors import UserError

NAMESPACE = "heloco"
STORE_MINIMUM_BYTES = 150_000_000
START_S, STOP_S = 90.0, 20.0
LOOPBACK = ("127.0.0.1", "localhost")
TLS_FILES = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")


@dataclass(frozen=True)
class Tls:
    """PEM files of this machine, for all connections between Ray's processes. `ca` is the authority of all machines."""

    cert: str
    key: str
    ca: str

    def settings(self) -> dict[str, str]:
        for path in (self.cert, self.key, self.ca):
            if not os.access(path, os.R_OK):
                raise UserError(f"The TLS file {path} cannot be read: give one that is there and that you may read.")
        files = zip(TLS_FILES, (self.cert, self.key, self.ca), strict=True)
        return {"RAY_USE_TLS": "1", **{name: str(Path(path).resolve()) for name, path in files}}

    @classmethod
    def from_environment(cls) -> "Tls | None":
        """From Ray's own environment variables; None if they do not enable TLS."""
        if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
            return None
        missing_files = [name for name in TLS_FILES if not os.environ.get(name)]
        if missing_files:
            raise UserError(f"RAY_USE_TLS is set, and {', '.join(missing_files)} is not: set all of them, or none.")
        return cls(*(os.environ[name] for name in TLS_FILES))


def require_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise UserError('Ray is not installed here: `pip install "heloco[cluster]"`.') from None


def check_versions(local: str, remote: str) -> None:
    """Raises UserError if the versions differ, because Ray talks only to its own version."""
    if local != remote:
        raise UserError(f"The cluster's Ray is {remote} and this machine's is {local}: `pip install ray=={remote}` here.")


class Cluster:
    """A Ray that this process is connected to. `stop` ends only what was started here."""

    def __init__(self, address: str, client_address: str = "", token_file: Path | None = None) -> None:
        self.address, self.client_address, self.token_file = address, client_address, token_file
        self.process: subprocess.Popen[bytes] | None = None
        self.folder: PrivateFolder | None = None
        """The private folder of a Ray that was started here."""
        self._environment = _Environment()
        self._is_connected = False

    def has_ended(self) -> bool:
        """Whether one of Ray's processes has ended. The launcher then ends the others and itself."""
        return self.process is not None and self.process.poll() is not None

    def last_words(self) -> str:
        """The last line that Ray printed at its start."""
        assert self.folder is not None
        lines = [line.strip() for line in self.folder.read(self.folder.path / START_LOG).splitlines()]
        return next((line for line in reversed(lines) if line and not line.startswith("[")), "nothing")

    def stop(self, *, for_good: bool = True) -> None:
        """Disconnects, and stops Ray if it was started here. Without `for_good` the environment stays set, because another Ray is
        started at once, and a call in between must not start a third one."""
        ray = require_ray()
        if self._is_connected:
            with contextlib.suppress(Exception), keep_sigterm_handler():  # Ray may be gone already
                ray.shutdown()
            self._is_connected = False
        if self.process is not None:
            if self.process.stdin:
                self.process.stdin.close()  # makes the launcher stop Ray
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.folder is not None:
            self.folder.remove()
        if for_good:
            self._environment.restore()


def start_ray(
    address: str | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    client_port: int = 0,
    token: str = "",
    token_file: Path | None = None,
    tls: Tls | None = None,
    trusted: bool = False,
    store_bytes: int = STORE_MINIMUM_BYTES,
    run: Path | None = None,
) -> Cluster:
    """Starts Ray on this machine, or joins the one at `address`: HOST:PORT of a cluster that this machine is a node of, or
    ray://HOST:PORT as a client. Port 0 means any free port. `trusted`: the network beyond loopback encrypts by itself, so TLS is
    not needed. `run`: the folder of the run, where Ray's files may be put."""
    ray = require_ray()
    tls = tls or Tls.from_environment()
    if not address and host not in LOOPBACK and tls is None and not trusted:
        raise UserError(
            f"Ray would listen at {host} unencrypted: give certificate, key and authority (PEM), or say that the network is "
            "trusted, as a WireGuard one is."
        )
    if ray.is_initialized():
        raise UserError("This process is connected to a Ray cluster already: it can be in one at a time.")
    if address:
        return _join(ray, address.removeprefix("ray:").removeprefix("//"), "//" in address, token, token_file, tls)
    cluster = Cluster("")
    cluster.folder = PrivateFolder.make(run)
    try:
        _start(ray, cluster, cluster.folder, host, port, client_port, token, token_file, tls, store_bytes)
    except BaseException:
        cluster.stop()
        raise
    return cluster


def _start(
    ray: Any, cluster: Cluster, folder: PrivateFolder, host: str, port: int, client_port: int, token: str,
    token_file: Path | None, tls: Tls | None, store_bytes: int,
) -> None:  # fmt: skip
    cluster.token_file = token_file or folder.path / TOKEN
    if not cluster.token_file.exists():
        write_secret(cluster.token_file, token or secrets.token_hex(32))
    check_secret(cluster.token_file)
    for number in (port, client_port):
        if number and listens("127.0.0.1" if host in LOOPBACK else host, number):
            raise UserError(f"The port {number} is in use on {host}: choose another, or end what uses it.")
    client_port = client_port or _free_port()
    cluster._environment.change(PINGS | ray_settings(token_file=cluster.token_file, tls=tls, loopback=host in LOOPBACK))
    host = "127.0.0.1" if host in LOOPBACK else host
    store = min(max(store_bytes, STORE_MINIMUM_BYTES), int(0.8 * shutil.disk_usage("/dev/shm").free))
    command = [
        sys.executable, "-P", str(Path(__file__).with_name("head_main.py")), str(folder.path), COMMAND,
        "--head", "--block", "--disable-usage-stats",
        f"--port={port}", f"--node-ip-address={host}", f"--ray-client-server-port={client_port}", "--include-dashboard=false",
        f"--temp-dir={folder.rays_own}", f"--object-store-memory={store}", "--include-log-monitor=false", NO_MONITOR,
    ]  # fmt: skip
    environment = os.environ | NO_FORK_SUPPORT
    folder.check()
    with (folder.path / START_LOG).open("wb") as log:
        cluster.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
        )
    cluster.address = _wait_until_up(cluster, folder)
    cluster.client_address = f"ray://{host}:{client_port}"
    _connect(ray, cluster, cluster.address)


def _wait_until_up(cluster: Cluster, folder: PrivateFolder) -> str:
    """Waits for Ray's address, which Ray writes to a file when it is up."""
    until = time.monotonic() + START_S
    while not (address := folder.read(folder.rays_own / ADDRESS_FILE).strip()):
        if cluster.has_ended():
            raise UserError(f"Ray did not start. Its last line: {cluster.last_words()}")
        if time.monotonic() > until:
            raise UserError(
                f"Ray did not start within {START_S:g} s: is the machine very busy? Its last line: {cluster.last_words()}"
            )
        time.sleep(0.05)
    return address


def _join(ray: Any, address: str, client: bool, token: str, token_file: Path | None, tls: Tls | None) -> Cluster:
    cluster = Cluster(address, token_file=token_file)
    host, port = split(address)
    ray_token = token or _find_token(token_file)
    probe(address, ray_token, tls, client=client)
    loopback = not client and host in LOOPBACK and not listens(ray.util.get_node_ip_address(), port)
    cluster._environment.change(ray_settings(token=ray_token, token_file=token_file, tls=tls, loopback=loopback))
    try:
        if not client and not is_node_here():
            raise UserError(
                f"This machine is not a node of the Ray cluster at {address}: `ray start --address={address}` makes it one; or "
                "join as a client, with ray://HOST:PORT."
            )
        _connect(ray, cluster, f"ray://{address}" if client else address)
    except BaseException:
        cluster.stop()
        raise
    return cluster


def _find_token(token_file: Path | None) -> str:
    """The token from the file, or from the places where Ray itself looks for it."""
    if token_file is None and (token := os.environ.get("RAY_AUTH_TOKEN")):
        return token
    path = token_file or Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""


def ray_settings(*, token: str = "", token_file: Path | None = None, tls: Tls | None, loopback: bool) -> dict[str, str]:
    settings = {**KEEPALIVE, **QUIET, **(tls.settings() if tls else {})}
    if token_file is not None:
        settings |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file.resolve()), "RAY_AUTH_TOKEN": ""}
    elif token:
        settings |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    return settings | (LOOPBACK_ONLY if loopback else {})


def _connect(ray: Any, cluster: Cluster, address: str) -> None:
    with keep_sigterm_handler():
        for last in (False, False, True):
            try:
                ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
                break
            except RuntimeError as error:
                raise translate(error, cluster.address) from error
            except (ConnectionError, ray.exceptions.RayError, OSError) as error:
                if last or not address.startswith("ray://"):
                    raise UserError(f"The Ray cluster at {cluster.address} cannot be joined ({_words(error)}).") from error
                ray.shutdown()  # the server that Ray starts for a client may fail to start
    cluster._is_connected = True
    silence_deaths()


def translate(error: RuntimeError, address: str) -> UserError:
    """A UserError for Ray's own error."""
    if versions := versions_in(error):
        try:
            check_versions(versions[1], versions[0])
        except UserError as sentence:
            return sentence
    return UserError(f"The Ray cluster at {address} cannot be joined ({_words(error)}).")


def _words(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


class _Environment:
    """Environment variables for Ray's settings, some of which Ray reads only once, when it is imported."""

    def __init__(self) -> None:
        self._previous: dict[str, str | None] = {}

    def change(self, values: dict[str, str]) -> None:
        self._previous |= {name: os.environ.get(name) for name in values if name not in self._previous}
        os.environ.update(values)
        reread_settings()

    def restore(self) -> None:
        for name, value in self._previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._previous.clear()
        reread_settings()


def write_secret(path: Path, text: str) -> None:
    """Writes a new file that no other user can read at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "w") as out:
        out.write(text)


def _free_port() -> int:
    with socket.socket() as probe_socket:
        probe_socket.bind(("127.0.0.1", 0))
        port: int = probe_socket.getsockname()[1]
        return port
