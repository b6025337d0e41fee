"""The processes of a run on Ray with faults: `heloco serve`, a worker on another node, and one on the head."""

import contextlib
import functools
import os
import signal
import sys
import time
from typing import Any

from faults.fault_workers import Obedient, OrderedWorker, Papers, flipped, work_over
from faults.synchronizer_child import spec_for, write
from heloco.cluster.protocol.messages import to_plain
from heloco.cluster.ray import RayLink, RaySupervisor
from heloco.cluster.ray import workers as workers_module
from heloco.cluster.ray.ray_options import RayOptions
from heloco.errors import RunStopped, UserError

FOLDER, NUMBER, STEP_S = "FAULT_FOLDER", "FAULT_NUMBER", "FAULT_STEP_S"
"""Ray's workers inherit these."""


class OrderedRayLink(Obedient, RayLink):
    def put_tensors(self, layout: Any, tensors: Any) -> Any:
        boxed, digest = super().put_tensors(layout, tensors)
        return (super().put_tensors(layout, flipped(tensors))[0], digest) if self.flips else (boxed, digest)


class OrderedActor(workers_module.WorkerActor):
    """The worker on the head, which the engine starts and replaces."""

    def run(self) -> Any:
        papers = Papers(os.environ[FOLDER], int(os.environ[NUMBER]))
        OrderedRayLink.papers = OrderedWorker.papers = papers
        OrderedWorker.step_s = float(os.environ[STEP_S])
        workers_module.RayLink, workers_module.Worker = OrderedRayLink, OrderedWorker  # type: ignore[misc]
        return super().run()


def serve_on_ray(spec: tuple[str, str, int], state: str, ray: RayOptions, papers: tuple[str, int, float]) -> None:
    """Serves the run as `heloco serve` does, with one local worker."""
    for name, value in zip((FOLDER, NUMBER, STEP_S), papers, strict=True):
        os.environ[name] = str(value)
    workers_module.WorkerActor = OrderedActor  # type: ignore[misc]
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    tell = functools.partial(print, "head:", file=sys.stderr, flush=True)
    try:
        with RaySupervisor(spec_for(*spec), workers=1, tell=tell, ray=ray) as engine:
            tokens = {right: engine.token(right) for right in ("worker", "admin")}
            while not signals:
                about = {"tokens": tokens, "launcher": launcher_of(engine), "pid": engine.pid}
                write(state, {**to_plain(engine.status()), **about})
                with contextlib.suppress(TimeoutError):
                    engine.wait(0.02)
                    time.sleep(0.1)  # the run has ended: wait for the signal
    except (UserError, RunStopped, OSError) as error:
        tell(error)


def launcher_of(engine: RaySupervisor) -> int:
    process = engine.cluster.process
    return process.pid if process else 0


def work_on_node(number: int, address: str, token_file: str, node: str, folder: str, step_s: float) -> None:
    """A worker as `heloco join ray:ADDRESS` makes it, on the node with that address."""
    import ray

    os.environ["RAY_AUTH_TOKEN_PATH"] = token_file
    ray.init = functools.partial(ray.init, _node_ip_address=node)  # there are several nodes on this machine
    while True:
        try:
            link = OrderedRayLink(f"ray:{address}")
            break
        except UserError as error:
            print(f"worker {number}: {error}", file=sys.stderr, flush=True)
            time.sleep(0.5)
    link.papers = Papers(folder, number)
    work_over(link, number, step_s)
