"""Supervises a run on Ray. If the synchronizer dies, it is started again from its journal. If a worker dies, it is replaced, and
its round goes to another at once. If Ray itself ends, everything is started again from the run's folder."""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from msgspec import structs

from heloco.cluster.protocol.link import LinkDown
from heloco.cluster.protocol.messages import Ended, Right, Status
from heloco.cluster.protocol.refusals import Refused
from heloco.cluster.ray.actor import make_actor
from heloco.cluster.ray.probe import split
from heloco.cluster.ray.ray_cluster import NAMESPACE, Cluster, require_ray
from heloco.cluster.ray.ray_link import RayLink
from heloco.cluster.ray.ray_options import RayOptions
from heloco.cluster.ray.replies import NAME, Answer, Begun, Reply, while_restarting
from heloco.cluster.ray.store import store_bytes
from heloco.cluster.ray.workers import WorkerHandle, WorkerStatus, start_worker
from heloco.cluster.server.process import ServeSpec
from heloco.errors import RunStopped, UserError
from heloco.records.events import EndKind

log = logging.getLogger("heloco.ray")
LOOK_S, NAME_FREE_S, ENDING_S = 0.5, 20.0, 2.0
CLOSE_S, WORKERS_END_S = 60.0, 15.0
RESTART_LIMIT = 5
"""How often the synchronizer or the local workers are restarted without an arrival in between, before the supervisor gives up."""


class RaySupervisor:
    """Serves a run from its construction until `close`. With `keep`, local workers that die are replaced."""

    def __init__(
        self,
        spec: ServeSpec,
        *,
        workers: int = 0,
        address: str | None = None,
        cluster: Cluster | None = None,
        keep: bool = True,
        spread: bool = False,
        threads: int = 0,
        name: str = NAME,
        tell: Callable[[str], Any] = print,
        ray: RayOptions | None = None,
    ) -> None:
        """`address`: a Ray cluster to join. `cluster`: one that is connected already, and stays connected. `threads`: number of
        threads of the synchronizer. `ray`: where Ray listens, and what protects it."""
        self.spec, self.keep, self.tell, self.name = spec, keep, tell, name
        self.address = ""
        """Address of the gateway; empty if the spec has none."""
        self.notices: list[str] = []
        """Sentences for the person who serves the run."""
        self.restarts = 0
        self._threads = threads or max(1, min(8, (os.cpu_count() or 1) // 2))
        self._workers_wanted, self._spread, self._workers_started = 0, spread, 0
        self._deaths = self._arrivals_at_death = 0
        self._actor: Any = None
        self._end_of_run: Any = None
        """A reference that becomes ready when the run or the synchronizer's process has ended; None if that was not started."""
        self.pid = 0
        self._link: RayLink | None = None
        self._workers: list[WorkerHandle] = []
        self._worker_results: list[WorkerStatus] = []
        """Results of the workers that ended by themselves."""
        self._dead_workers: set[str] = set()
        """Names of dead workers whose machines are still in the roster."""
        self._last_status: Status | None = None
        """The last status of the service."""
        self._end: Ended | None = None
        self._trouble: str | None = None
        self._has_ended = threading.Event()
        self._is_closing = threading.Event()
        self._lock = threading.RLock()
        self._watcher: threading.Thread | None = None
        self._vain_restarts, self._arrivals = 0, 0
        self._ray, self._own_cluster = require_ray(), cluster is None
        self._options, self._store_bytes = ray or RayOptions(), store_bytes(spec)
        self.cluster: Cluster = cluster or self._options.start(address, store_bytes=self._store_bytes, run=Path(spec.folder))
        self._start(workers)

    def _start(self, workers: int) -> None:
        try:
            self._check_free()
            self._begin()
            self.start_workers(workers)
            self._watcher = threading.Thread(target=self._watch, name="heloco-supervisor", daemon=True)
            self._watcher.start()
        except self._ray.exceptions.RayError as error:
            self.close()
            raise RunStopped(f"The synchronizer's process could not be started ({str(error).splitlines()[-1]}).") from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "RaySupervisor":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def link(self) -> RayLink:
        """The connection to the synchronizer's process. A restart replaces it, so do not keep it."""
        assert self._link is not None, "the synchronizer was not started"
        return self._link

    # ---- the synchronizer

    def _check_free(self) -> None:
        until = time.monotonic() + ENDING_S  # an actor that was just closed keeps its name a little longer
        while self._is_served():
            if time.monotonic() > until:
                raise UserError(
                    f"The Ray cluster at {self.cluster.address} serves a run already: stop that one (`heloco stop ray:…`), or "
                    "start another Ray."
                )
            time.sleep(0.05)

    def _is_served(self) -> bool:
        try:
            self._ray.get_actor(self.name, namespace=NAMESPACE)
            return True
        except ValueError:
            return False

    def _begin(self) -> None:
        """Starts the synchronizer from the spec. Raises UserError if the spec is wrong."""
        self._actor = self._named_actor()
        reply: Reply[Begun] = self._wait_until_ready(self._actor.begin.remote(self.spec, self._threads))
        if not isinstance(reply, Answer):
            raise UserError(reply.text)
        begun = reply.value
        self.address, self.notices, self.pid = begun.address, list(begun.notices), begun.pid
        if self.spec.listen is not None:  # keep the port after a restart, because machines know the address
            port = int(self.address.rpartition(":")[2])
            self.spec = replace(self.spec, listen=replace(self.spec.listen, port=port))
        self._end_of_run = self._actor.wait_for_end.remote()
        self._link = RayLink(name=self.name)
        self._last_status = self.link.status()

    def _named_actor(self) -> Any:
        """Makes the actor. A dead actor keeps its name until it is also killed through Ray, and a little longer."""
        if self._actor is not None:
            self._kill(self._actor)
        until = time.monotonic() + NAME_FREE_S
        while True:
            try:
                return make_actor(self.name)
            except ValueError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)

    def _wait_until_ready(self, reference: Any) -> Any:
        """Waits as long as Ray runs: preparing data or following a journal may take long."""
        while not self._ray.wait([reference], timeout=LOOK_S)[0]:
            if self.cluster.has_ended():
                raise RunStopped(f"Ray ended. The last line it printed at its start: {self.cluster.last_words()}")
        return self._ray.get(reference, timeout=CLOSE_S)

    # ---- workers

    def start_workers(self, count: int) -> None:
        """Starts more local workers."""
        with self._lock:
            self._workers_wanted += count
            for _ in range(count):
                self._start_worker()

    def _start_worker(self) -> None:
        name = f"local-{self._workers_started}"
        self._workers_started += 1
        data = self.spec.data
        self._workers.append(start_worker(name, self.name, among=max(1, self._workers_wanted), data=data, spread=self._spread))

    def workers(self) -> list[WorkerStatus]:
        """Status of each local worker, or its result if it has ended. Workers that do not answer are left out."""
        results = list(self._worker_results)
        for worker in list(self._workers):
            with contextlib.suppress(self._ray.exceptions.RayError):
                results.append(self._ray.get(worker.handle.status.remote(), timeout=10))
        return results

    # ---- supervision

    def _watch(self) -> None:
        while not self._is_closing.is_set():
            try:
                self._look()
            except Exception as error:
                if not self._is_closing.is_set():
                    log.error("The supervisor failed with an internal error.", exc_info=error)
                    self._finish("failed", f"The supervisor failed with an internal error ({type(error).__name__}: {error}).")
                return

    def _look(self) -> None:
        """Waits until something has happened, at most `LOOK_S`, and handles it."""
        if self.cluster.has_ended() and self._end is None:
            self._restart("Ray ended", new_ray=True)
            return
        if self._end_of_run is None and self._end is None:
            self._restart("The synchronizer could not be started", new_ray=False)
            return
        references = [worker.end for worker in self._workers]
        if self._end is None:
            references.append(self._end_of_run)
        if not references:
            self._is_closing.wait(LOOK_S)
            return
        ready, _ = self._ray.wait(references, num_returns=1, timeout=LOOK_S)
        if self._end_of_run in ready and self._end is None:
            self._handle_synchronizer_end()
        for worker in [w for w in self._workers if w.end in ready]:
            self._handle_worker_end(worker)
        if self._dead_workers:
            self._report_dead_workers()

    def _handle_synchronizer_end(self) -> None:
        try:
            end: Ended = self._ray.get(self._end_of_run, timeout=LOOK_S)
            self._finish(end.kind, end.text)
        except self._ray.exceptions.ActorUnavailableError:  # the actor may still be alive
            self._is_closing.wait(0.05)
            self._end_of_run = self._actor.wait_for_end.remote()
        except self._ray.exceptions.RayError:
            if self.cluster.has_ended():
                return
            self._restart("The synchronizer's process died", new_ray=False)

    def _restart(self, reason: str, *, new_ray: bool) -> None:
        """Starts the synchronizer again from the run's folder. With `new_ray`, starts Ray again first."""
        arrivals_before, self._arrivals = self._arrivals, self._last_status.arrivals if self._last_status else 0
        self._vain_restarts = 0 if self._arrivals > arrivals_before else self._vain_restarts + 1
        if self._vain_restarts > RESTART_LIMIT or (new_ray and not self._own_cluster):
            goes_on = f"What was done is kept: `heloco serve {self.spec.folder}` goes on."
            self._finish("failed", f"{reason}, {self._vain_restarts + 1} times without an arrival in between. {goes_on}")
            self._workers.clear()
            return
        self.restarts += 1
        self._end_of_run = None
        self.tell(f"{reason}: it is started again from its journal.")
        self.spec = self.spec.for_restart()
        try:
            if new_ray:
                self._new_ray()
            self._begin()
            for _ in range(self._workers_wanted if new_ray else 0):
                self._start_worker()
        except (UserError, RunStopped) as error:
            self._finish("failed", str(error))
        except self._ray.exceptions.RayError as error:  # it died again: the next look handles it
            log.info("the synchronizer died while it was started: %s", error)

    def _new_ray(self) -> None:
        """Starts Ray again, at the same addresses."""
        options = replace(self._options, port=split(self.cluster.address)[1], client_port=split(self.cluster.client_address)[1])
        self._workers.clear()
        self.cluster.stop(for_good=False)
        self._actor = None
        self.cluster = options.start(None, store_bytes=self._store_bytes, run=Path(self.spec.folder))

    def _handle_worker_end(self, worker: WorkerHandle) -> None:
        with self._lock:
            self._workers.remove(worker)
        try:
            result: WorkerStatus = self._ray.get(worker.end, timeout=LOOK_S)
            self._worker_results.append(result)
            if result.has_failed and self._end is None:
                self._trouble = result.ended
                self.tell(f"{worker.name}: {result.ended}")
        except self._ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1] if isinstance(error, self._ray.exceptions.RayTaskError) else ""
            self._kill(worker.handle)  # after an exception the process is still alive
            self._dead_workers.add(worker.name)
            self._report_dead_workers()
            self._replace(worker.name, reason)

    def _kill(self, handle: Any) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(handle)

    def _replace(self, name: str, reason: str) -> None:
        sentence = f"{name} died{f' ({reason})' if reason else ''}"
        arrivals_before, self._arrivals_at_death = self._arrivals_at_death, self._last_status.arrivals if self._last_status else 0
        self._deaths = 1 if self._arrivals_at_death > arrivals_before else self._deaths + 1
        if self._end or not self.keep:
            self.tell(f"{sentence}.")
        elif self._deaths > max(RESTART_LIMIT, 2 * self._workers_wanted):
            self._trouble = f"{sentence}, as others did before it; is there enough memory?"
            self.tell(self._trouble)
        else:
            self.tell(f"{sentence}: another takes its place.")
            with self._lock:
                self._start_worker()

    def _report_dead_workers(self) -> None:
        """Declares the machines of dead workers lost, so that their rounds go to others before the
        timeout. If the synchronizer is down, the next look tries again."""
        with contextlib.suppress(LinkDown, Refused, RunStopped):
            self._last_status = self.link.status()
            for machine in self._last_status.machines:
                if machine.name in self._dead_workers:
                    self.link.declare_lost(machine.machine, "its process died")
            self._dead_workers.clear()

    def _finish(self, kind: EndKind, text: str) -> None:
        self._end = Ended(kind=kind, text=text)
        self._has_ended.set()

    # ---- what the command line asks for

    def status(self) -> Status:
        """The service's status. While the synchronizer is down, its last status."""
        try:
            self._last_status = status = self.link.status()
        except (LinkDown, Refused, RunStopped):
            assert self._last_status is not None
            status = while_restarting(self._last_status)
        return structs.replace(status, ended=self._end or status.ended)

    def token(self, right: Right) -> str:
        """A valid token of the gateway, in the form that is pasted; empty if there is no gateway."""
        return self.link.token(right)

    def trouble(self) -> str | None:
        """Why the local workers cannot go on; None if they can."""
        return self._trouble

    def wait(self, timeout_s: float | None = None) -> Ended:
        """Waits until the run has ended, and returns why. Raises RunStopped if the run cannot continue."""
        if not self._has_ended.wait(timeout_s):
            raise TimeoutError(f"The run has not ended within {timeout_s} s.")
        assert self._end is not None
        if self._end.kind in ("failed", "gave-up"):
            raise RunStopped(self._end.text)
        return self._end

    def stop(self, reason: str = "stopped") -> None:
        """Saves the run and ends it for all machines."""
        self._order(lambda: self.link.stop(reason))

    def suspend(self, reason: str) -> None:
        """Saves the run, to be served again."""
        self._order(lambda: self.link.suspend(reason))

    def _order(self, end: Callable[[], None]) -> None:
        until = time.monotonic() + CLOSE_S
        while not self._has_ended.is_set():
            try:
                end()
                break
            except Refused:  # it has ended already
                break
            except LinkDown:
                if time.monotonic() > until:
                    raise
                self._has_ended.wait(LOOK_S)
        self._has_ended.wait(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """Stops everything that was started here."""
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        if self._watcher is not None:
            self._watcher.join(CLOSE_S)
        try:
            self._end_processes()
        finally:
            if self._own_cluster:
                self.cluster.stop()

    def _end_processes(self) -> None:
        errors = (self._ray.exceptions.RayError, LinkDown, Refused, RunStopped)
        actor = self._actor
        if self._end is None and self._link is not None:
            with contextlib.suppress(*errors):
                self.link.suspend("its supervisor was closed")
        if self.cluster.has_ended():
            return
        with contextlib.suppress(*errors):
            for worker in self._workers:
                worker.handle.stop.remote("its supervisor ends")
            if references := [worker.end for worker in self._workers]:
                self._ray.wait(references, num_returns=len(references), timeout=WORKERS_END_S)
        with contextlib.suppress(*errors):
            if actor is not None:
                self._ray.get(actor.close.remote(), timeout=CLOSE_S)
        for handle in [*(worker.handle for worker in self._workers), *([actor] if actor is not None else [])]:
            self._kill(handle)
