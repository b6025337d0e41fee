"""A run on Ray, watched over: a synchronizer that dies is started again from its journal, a worker that dies is replaced and its
round given to another at once, and where Ray itself ends all begins again. What was acknowledged is in the run's folder."""

import contextlib
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
from heloco.cluster.protocol.messages import Ended, EndKind, Paused, Right, Status
from heloco.cluster.protocol.refusals import Refused
from heloco.cluster.ray.actor import NAME, OK, make_actor
from heloco.cluster.ray.probe import split
from heloco.cluster.ray.ray_cluster import NAMESPACE, Cluster, require_ray, start_ray
from heloco.cluster.ray.ray_link import RayLink
from heloco.cluster.ray.store import store_bytes
from heloco.cluster.ray.workers import Started, start_worker
from heloco.cluster.server.process import ServeSpec
from heloco.errors import RunStopped, UserError

LOOK_S = 0.5
NAME_FREE_S, ENDING_S = 20.0, 2.0
CLOSE_S = 60.0
WORKERS_END_S = 15.0
MOST_RESTARTS = 5
"""Of the synchronizer without an arrival in between, and of local workers without a round: then something is wrong for good."""


class RaySupervisor:
    """Serves a run from the moment it is made until `close`. `keep`: local workers that die are replaced."""

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
        **ray: Any,
    ) -> None:
        """`address`: of a Ray cluster to join. `cluster`: one that is connected already, and stays. `threads`: of the
        synchronizer. `ray`: what `start_ray` takes besides."""
        self.spec, self.keep, self.tell, self.name = spec, keep, tell, name
        self.address = ""
        """Of the gateway, where the spec has one."""
        self.notices: list[str] = []
        """What whoever serves the run should know."""
        self.restarts = 0
        self._threads = threads or max(1, min(8, (os.cpu_count() or 1) // 2))
        self._wanted, self._spread, self._made = 0, spread, 0
        self._deaths = self._arrivals_at_death = 0
        self._actor: Any = None
        self._end_of_run: Any = None
        """Becomes ready when the run has ended or the synchronizer's process; None where that has not been started."""
        self.pid = 0
        self._link: RayLink | None = None
        self._workers: list[Started] = []
        self._done: list[dict[str, Any]] = []
        """What became of the workers that ended by themselves."""
        self._gone: set[str] = set()
        """Names of workers that died and whose machines have not left the run yet."""
        self._last: Status | None = None
        """The last that was heard of the service."""
        self._ended: Ended | None = None
        self._trouble = ""
        self._over = threading.Event()
        self._closing = threading.Event()
        self._lock = threading.RLock()
        self._watching: threading.Thread | None = None
        self._fruitless, self._arrivals = 0, 0
        self._options = {"store_bytes": store_bytes(spec), "run": Path(spec.folder), **ray}
        self._ray = require_ray()
        self._own_cluster = cluster is None
        self.cluster: Cluster = cluster or start_ray(address, **(ray if address else self._options))
        self._start(workers)

    def _start(self, workers: int) -> None:
        try:
            self._check_free()
            self._begin()
            self.start_workers(workers)
            self._watching = threading.Thread(target=self._watch, name="heloco-supervisor", daemon=True)
            self._watching.start()
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
        assert self._link is not None, "the synchronizer was not started"
        return self._link

    # ---- the synchronizer

    def _check_free(self) -> None:
        until = time.monotonic() + ENDING_S  # one that was just closed is there a little longer
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
        """The synchronizer from the spec; what is wrong with that is a UserError."""
        self._actor = self._named_actor()
        reply = self._when_ready(self._actor.begin.remote(self.spec, self._threads))
        if reply[0] != OK:
            raise UserError(reply[1])
        self.address, self.notices = reply[1]["address"], reply[1]["notices"]
        if self.spec.listen is not None:  # others know this address: after a restart it is the same
            port = int(self.address.rpartition(":")[2])
            self.spec = replace(self.spec, listen=replace(self.spec.listen, port=port))
        self.pid = reply[1]["pid"]
        self._end_of_run = self._actor.over.remote()
        self._link = RayLink(name=self.name)
        self._last = self.link.status()

    def _named_actor(self) -> Any:
        """One that died keeps its name until it is killed by Ray too, and a little longer."""
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

    def _when_ready(self, reference: Any) -> Any:
        """However long it takes (data may be prepared, a journal followed), as long as Ray is there."""
        while not self._ray.wait([reference], timeout=LOOK_S)[0]:
            if self.cluster.broken():
                raise RunStopped(f"Ray ended. The last it said at its start: {self.cluster.words()}")
        return self._ray.get(reference, timeout=CLOSE_S)

    # ---- workers

    def start_workers(self, count: int) -> None:
        """More machines of ours."""
        with self._lock:
            self._wanted += count
            for _ in range(count):
                self._start_worker()

    def _start_worker(self) -> None:
        name = f"local-{self._made}"
        self._made += 1
        data = self.spec.data
        self._workers.append(start_worker(name, self.name, among=max(1, self._wanted), data=data, spread=self._spread))

    def workers(self) -> list[dict[str, Any]]:
        """How each local worker is doing, or did ("ended"); those that cannot be asked are left out."""
        found = list(self._done)
        for worker in list(self._workers):
            with contextlib.suppress(self._ray.exceptions.RayError):
                found.append(self._ray.get(worker.handle.status.remote(), timeout=10))
        return found

    # ---- watching over

    def _watch(self) -> None:
        while not self._closing.is_set():
            try:
                self._look()
            except Exception as error:
                if not self._closing.is_set():
                    self._finish("failed", f"The supervisor met an error of its own ({type(error).__name__}: {error}).")
                return

    def _look(self) -> None:
        """One look around: it returns when something happened, or after a while."""
        if self.cluster.broken() and self._ended is None:
            self._again("Ray ended", anew=True)
            return
        if self._end_of_run is None and self._ended is None:
            self._again("The synchronizer could not be started", anew=False)
            return
        waited = [worker.ended for worker in self._workers]
        if self._ended is None:
            waited.append(self._end_of_run)
        if not waited:
            self._closing.wait(LOOK_S)
            return
        ready, _ = self._ray.wait(waited, num_returns=1, timeout=LOOK_S)
        if self._end_of_run in ready and self._ended is None:
            self._heard_of_synchronizer()
        for worker in [w for w in self._workers if w.ended in ready]:
            self._heard_of(worker)
        if self._gone:
            self._tell_off()

    def _heard_of_synchronizer(self) -> None:
        try:
            ended: Ended = self._ray.get(self._end_of_run, timeout=LOOK_S)[1]
            self._finish(ended.kind, ended.text)
        except self._ray.exceptions.ActorUnavailableError:  # it may be there all the same
            self._closing.wait(0.05)
            self._end_of_run = self._actor.over.remote()
        except self._ray.exceptions.RayError:
            if self.cluster.broken():
                return
            self._again("The synchronizer's process died", anew=False)

    def _again(self, why: str, *, anew: bool) -> None:
        """From the run's folder; with `anew` in a new Ray, if that was ours."""
        arrivals = self._last.arrivals if self._last else 0
        self._fruitless = 0 if arrivals > self._arrivals else self._fruitless + 1
        self._arrivals = arrivals
        if self._fruitless > MOST_RESTARTS or (anew and not self._own_cluster):
            goes_on = f"What was done is kept: `heloco serve {self.spec.folder}` goes on."
            self._finish("failed", f"{why}, {self._fruitless + 1} times without an arrival in between. {goes_on}")
            self._workers.clear()
            return
        self.restarts += 1
        self._end_of_run = None
        self.tell(f"{why}: it is started again from its journal.")
        self.spec = self.spec.for_restart()
        try:
            if anew:
                self._new_ray()
            self._begin()
            for _ in range(self._wanted if anew else 0):
                self._start_worker()
        except (UserError, RunStopped) as error:
            self._finish("failed", str(error))
        except self._ray.exceptions.RayError:
            pass  # it died again: the next look finds out

    def _new_ray(self) -> None:
        """At the same addresses."""
        ports = {"port": split(self.cluster.address)[1], "client_port": split(self.cluster.client_address)[1]}
        self._workers.clear()
        self.cluster.stop(for_good=False)
        self._actor = None
        self.cluster = start_ray(**{**self._options, **ports})

    def _heard_of(self, worker: Started) -> None:
        with self._lock:
            self._workers.remove(worker)
        try:
            found = self._ray.get(worker.ended, timeout=LOOK_S)
            self._done.append(found)
            if not found["well"] and self._ended is None:
                self._trouble = found["ended"]
                self.tell(f"{worker.name}: {found['ended']}")
        except self._ray.exceptions.RayError as error:
            why = str(error).strip().splitlines()[-1] if isinstance(error, self._ray.exceptions.RayTaskError) else ""
            self._kill(worker.handle)  # after an error of its own the process is still there
            self._gone.add(worker.name)
            self._tell_off()
            self._replace(worker.name, why)

    def _kill(self, handle: Any) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(handle)

    def _replace(self, name: str, why: str) -> None:
        said = f"{name} died{f' ({why})' if why else ''}"
        arrivals = self._last.arrivals if self._last else 0
        self._deaths = 1 if arrivals > self._arrivals_at_death else self._deaths + 1
        self._arrivals_at_death = arrivals
        if self._ended or not self.keep:
            self.tell(f"{said}.")
        elif self._deaths > max(MOST_RESTARTS, 2 * self._wanted):
            self._trouble = f"{said}, as others did before it; is there enough memory?"
            self.tell(self._trouble)
        else:
            self.tell(f"{said}: another takes its place.")
            with self._lock:
                self._start_worker()

    def _tell_off(self) -> None:
        """Their rounds go to others now, not after the time-out. Where the synchronizer is away, the next look tries again."""
        with contextlib.suppress(LinkDown, Refused, RunStopped):
            self._last = self.link.status()
            for machine in self._last.machines:
                if machine.name in self._gone:
                    self.link.declare_lost(machine.machine, "its process died")
            self._gone.clear()

    def _finish(self, kind: EndKind, text: str) -> None:
        self._ended = Ended(kind=kind, text=text)
        self._over.set()

    # ---- what the command line asks for

    def status(self) -> Status:
        """The service's. While the synchronizer is away, the last that was known of it."""
        try:
            self._last = status = self.link.status()
        except (LinkDown, Refused, RunStopped):
            assert self._last is not None
            status = structs.replace(self._last, paused=Paused(kind="admin", text="the synchronizer is being started again"))
        return structs.replace(status, ended=self._ended or status.ended)

    def token(self, right: Right) -> str:
        """A token of the gateway that holds, as it is pasted; empty where there is none."""
        return self.link.token(right)

    def trouble(self) -> str:
        return self._trouble

    def wait(self, timeout_s: float | None = None) -> Ended:
        """Until the run has ended; says why. A run that cannot go on is a RunStopped."""
        if not self._over.wait(timeout_s):
            raise TimeoutError(f"The run has not ended within {timeout_s} s.")
        assert self._ended is not None
        if self._ended.kind in ("failed", "gave-up"):
            raise RunStopped(self._ended.text)
        return self._ended

    def stop(self, reason: str = "stopped") -> None:
        """What is there is saved, and the machines are told."""
        until = time.monotonic() + CLOSE_S
        while not self._over.is_set():
            try:
                self.link.stop(reason)
                break
            except Refused:  # it has ended already
                break
            except LinkDown:
                if time.monotonic() > until:
                    raise
                self._over.wait(LOOK_S)
        self._over.wait(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """Ends all that was started here."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._watching is not None:
            self._watching.join(CLOSE_S)
        try:
            self._end_processes()
        finally:
            if self._own_cluster:
                self.cluster.stop()

    def _end_processes(self) -> None:
        errors = (self._ray.exceptions.RayError, LinkDown, Refused, RunStopped)
        actor = self._actor
        if self._ended is None and self._link is not None:
            with contextlib.suppress(*errors):
                self.link.stop("stopped")
        if self.cluster.broken():
            return
        with contextlib.suppress(*errors):
            for worker in self._workers:
                worker.handle.stop.remote("the run has ended")
            if ended := [worker.ended for worker in self._workers]:
                self._ray.wait(ended, num_returns=len(ended), timeout=WORKERS_END_S)
        with contextlib.suppress(*errors):
            if actor is not None:
                self._ray.get(actor.close.remote(), timeout=CLOSE_S)
        for handle in [*(worker.handle for worker in self._workers), *([actor] if actor is not None else [])]:
            self._kill(handle)
