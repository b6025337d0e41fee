"""Worker processes inside the cluster: actors that train the run's task."""

import os
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import torch

from heloco.cluster.client.run_client import FIRST_PAUSE_S, PAUSE_LIMIT_S, RunEnded
from heloco.cluster.client.worker import Worker, task_of
from heloco.cluster.protocol.link import LinkDown
from heloco.cluster.protocol.messages import RunInfo
from heloco.cluster.ray.actor import this_node
from heloco.cluster.ray.ray_cluster import require_ray
from heloco.cluster.ray.ray_link import RayLink
from heloco.errors import RunStopped, UserError

LINE_LIMIT = 20
PREPARE_LIMIT_S = 3600.0


@dataclass(frozen=True)
class WorkerStatus:
    """What a local worker says of itself."""

    name: str
    pid: int
    rounds: int
    """Contributions that were acknowledged."""
    lines: list[str]
    """The last it had to tell."""
    ended: str | None = None
    """How it ended, as a sentence; None while it works."""
    has_failed: bool = False


class WorkerActor:
    """A Ray actor that joins the run as a machine and trains the run's task until the run ends."""

    def __init__(self, name: str, synchronizer: str, threads: int, data: str | None = None) -> None:
        self._name, self._synchronizer, self._threads, self._data = name, synchronizer, threads, data
        self._worker: Worker | None = None
        self._stop: str | None = None
        self._lines: deque[str] = deque(maxlen=LINE_LIMIT)

    def run(self) -> WorkerStatus:
        """Works until the run ends or a stop is requested. Returns its status and how it ended."""
        torch.set_num_threads(self._threads)
        try:
            link = RayLink(name=self._synchronizer)
            info = self._describe(link)
            task, config = task_of(info, data=self._data)
            self._worker = Worker(task, config, tell=self._lines.append)
            self._worker.stop_requested = self._stop
            sentence, has_failed = self._worker.run(link, self._name, info.run), False
        except RunEnded as end:
            sentence, has_failed = str(end), False
        except (UserError, RunStopped) as error:
            sentence, has_failed = str(error), True
        return replace(self.status(), ended=sentence, has_failed=has_failed)

    def _describe(self, link: RayLink) -> RunInfo:
        began, pause_s = time.monotonic(), FIRST_PAUSE_S
        while True:
            try:
                return link.describe()
            except LinkDown as error:
                if self._stop is not None or time.monotonic() - began > PREPARE_LIMIT_S:
                    raise RunStopped(str(error)) from error
            time.sleep(pause_s)
            pause_s = min(PAUSE_LIMIT_S, pause_s * 2)

    def stop(self, reason: str) -> None:
        """Stops the worker between two steps. Its round is given back."""
        self._stop = reason
        if self._worker is not None:
            self._worker.stop_requested = reason

    def status(self) -> WorkerStatus:
        """What the worker does at the moment."""
        return WorkerStatus(self._name, os.getpid(), self._worker.rounds if self._worker else 0, list(self._lines))


@dataclass(frozen=True)
class WorkerHandle:
    """A running worker: its actor, and a reference that becomes ready when it has ended."""

    name: str
    handle: Any
    end: Any


def start_worker(name: str, synchronizer: str, *, among: int, data: str | None = None, spread: bool = False) -> WorkerHandle:
    """Starts a worker. `among`: how many share this machine. `spread`: place it on any node of the cluster, not only here."""
    ray = require_ray()
    gpus = ray.cluster_resources().get("GPU", 0.0)
    remote = ray.remote(
        max_restarts=0, max_task_retries=0, max_concurrency=4, num_cpus=0.01, num_gpus=min(1.0, int(1000 * gpus / among) / 1000),
        scheduling_strategy="SPREAD" if spread else this_node(),
    )  # fmt: skip
    handle = remote(WorkerActor).remote(name, synchronizer, max(1, (os.cpu_count() or 1) // among), data)
    return WorkerHandle(name, handle, handle.run.remote())
