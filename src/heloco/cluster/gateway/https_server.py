"""The gateway's server: TLS on one port, in a thread with its own event loop."""

import asyncio
import errno
import logging
import socket
import threading
from pathlib import Path
from typing import Any

from heloco.cluster.gateway import check_parts
from heloco.cluster.gateway.admission import Admission, Places
from heloco.cluster.gateway.calls import started_pool
from heloco.cluster.gateway.credentials import Credentials
from heloco.cluster.server.descriptors import descriptor_limit
from heloco.cluster.server.process import ListenConfig, RunHost
from heloco.errors import UserError

KEEP_ALIVE_S = 75
GRACE_S = 2
"""Seconds that requests under way get when the server stops. Transfers can continue later."""
BACKLOG = 256
PAGE_THREADS = 4
"""Threads for the live page."""

log = logging.getLogger("heloco.gateway")


class GatewayServer:
    """Serves a run over HTTPS from `start` to `stop`. `page`: see `app`. `places`: how many connections may
    be open; by default as many as the process has descriptors for."""

    def __init__(
        self, run: RunHost, credentials: Credentials, host: str = "0.0.0.0", port: int = 8443, page: Any = None,
        places: Places | None = None,
    ) -> None:  # fmt: skip
        check_parts("starlette", "uvicorn", "httptools")
        self.run, self.credentials, self.host, self.port, self.page = run, credentials, host, port, page
        self._places = places
        self._has_started = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._server: Any = None
        self.api: Any = None

    @property
    def fingerprint(self) -> str:
        return self.credentials.fingerprint

    @property
    def address(self) -> str:
        return f"https://[{self.host}]:{self.port}" if ":" in self.host else f"https://{self.host}:{self.port}"

    def start(self) -> None:
        places = self._places or Places.within(descriptor_limit(), self.run.service.state.roster.seats)
        listening = listen(self.host, self.port)
        self.port = listening.getsockname()[1]
        try:
            self._server = self._build(listening, Admission(places))
        except BaseException:
            listening.close()
            raise
        self._thread = threading.Thread(target=self._run, name="heloco-gateway", daemon=True)
        self._thread.start()
        self._has_started.wait()
        if self._loop is None:
            listening.close()
            raise RuntimeError("The gateway did not start: its log has the details.")

    def _build(self, listening: socket.socket, admission: Admission) -> Any:
        import uvicorn

        from heloco.cluster.gateway.app import app
        from heloco.cluster.gateway.connection import Connection, fastest_loop
        from heloco.cluster.gateway.listener import Listener
        from heloco.uvicorn_internals import OwnListener

        application = app(self.run, self.page)
        self.api = application.state.api
        config = uvicorn.Config(
            application, loop=fastest_loop(), ws="none", lifespan="on", proxy_headers=False, server_header=False,
            access_log=False, log_config=None, log_level="critical",
            timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=GRACE_S,
        )  # fmt: skip
        context, page_threads = self.credentials.context(), started_pool(PAGE_THREADS, "gateway-page")

        def open_listener(make_http: Any) -> Listener:
            self._loop = asyncio.get_running_loop()
            self._loop.set_default_executor(page_threads)
            listener = Listener([listening], context, admission, lambda visitor: Connection(make_http, visitor, admission))
            self._has_started.set()
            return listener

        return OwnListener(config, open_listener)

    def _run(self) -> None:
        try:
            self._server.run()
        except BaseException as error:
            log.error("The gateway has ended: %r", error, exc_info=error)
        finally:
            self._has_started.set()

    def stop(self) -> None:
        """Gives requests under way a moment to finish, and waits until nothing touches the service any more."""
        if self._thread is None or self._loop is None:
            return
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self.api.end_waiting)
            self._server.end_soon()
        self._thread.join()
        self._thread = None


def open_gateway(run: RunHost, listen: ListenConfig, folder: Path, page: Any) -> GatewayServer:
    """Starts a gateway for the run, with the certificate in `folder`, which is made if there is none."""
    credentials = Credentials.load_or_make(folder, listen.names, cert=listen.cert, key=listen.key)
    gateway = GatewayServer(run, credentials, listen.host, listen.port, page)
    gateway.start()
    return gateway


def listen(host: str, port: int) -> socket.socket:
    """A listening socket at the address. Raises UserError if that is not possible."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
    except (OSError, OverflowError) as error:
        raise UserError(f"{host!r} with port {port} is not an address to listen at ({error}): fix --host or --port.") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        reasons = {
            errno.EADDRINUSE: f"port {port} is taken: stop what listens there, or choose another --port (0: any free one).",
            errno.EACCES: f"port {port} needs special rights: choose a --port from 1024 on.",
            errno.EADDRNOTAVAIL: f"{host} is not an address of this machine: fix --host (0.0.0.0: all of them).",
        }.get(error.errno or 0, f"{error.strerror}: choose another --host or --port.")
        raise UserError(f"The gateway cannot listen at {host}:{port}: {reasons}") from error
    return listening
