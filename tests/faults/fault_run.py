"""A run of real processes that meets the faults of a list, and is accounted for at its end."""

import collections
import contextlib
import errno
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from faults.account import account
from faults.damage import damage
from faults.fault_list import Fault
from faults.fault_places import Disk, children_of, end_process, failing_fsync, free_port, is_alive, make_findable, nursery, send
from faults.proxies import Proxies

INNER_STEPS = 4
LOOK_S = 0.02
AT_THE_EARLIEST_S = 0.5
"""Seconds between two tries to start a synchronizer that cannot start, for example on a full disk."""
ORDERED = {
    "kill a worker at a point": ("", "kill"), "corrupt": ("hand in", "corrupt"), "double": ("handed in", "double"),
    "replay": ("handed in", "replay"),
}  # fmt: skip
"""Faults that a worker carries out itself: kind -> (point, order)."""
AT_THE_CHILD = ("kill the synchronizer", "stop the synchronizer", "damage a file")
"""Faults of the process that serves, and not of its parent."""


class FaultRun:
    """The synchronizer with its gateway in one process, and workers over HTTPS."""

    modules: tuple[str, ...] = ()
    """Further modules that the processes need."""

    def __init__(
        self,
        folder: Path,
        faults: list[Fault],
        *,
        workers: int,
        arrivals: int,
        disk: Disk | None = None,
        step_s: float = 0.0,
        fresh: bool = False,
        wire: str = "fp32",
    ) -> None:
        """`step_s`: minimal duration of an inner step. `fresh`: processes are started, as real ones are, and not forked. `wire`:
        the format of contributions."""
        self.folder, self.faults, self.disk, self.step_s = folder, list(faults), disk, step_s
        self.run = (disk.path if disk else folder) / "run"
        self.workers, self.arrivals, self.wire = workers, arrivals, wire
        self.planned = len(faults)
        self.struck: collections.Counter[str] = collections.Counter()
        self.restarts: collections.Counter[str] = collections.Counter()
        self.killed: set[int] = set()
        self.port = free_port()
        self.state = folder / "state.json"
        make_findable()
        self.context = multiprocessing.get_context("spawn") if fresh else nursery(*self.modules)
        self.proxies = Proxies(self.port, workers)
        self.processes: dict[int, Any] = {}
        self.synchronizer: Any = None
        """The process that stands for `heloco serve`; the synchronizer itself is its child."""
        self.serving = 0
        """The synchronizer's process, as it was seen last."""
        self.orphans: list[int] = []
        """Children of a `heloco serve` that was killed."""
        self.last_start_s = 0.0
        self.tokens: dict[str, str] = {}
        self.fsync_order = folder / "orders-fsync"
        self.library = failing_fsync(folder)
        self.to_damage: list[int] = []
        """Seeds of damage that waits until the synchronizer is down."""
        self.damaged: list[str] = []

    # ---- processes

    def settings(self) -> dict[str, Any]:
        return {
            "preset": "1m", "width": 32, "layers": 1, "heads": 2, "context": 16, "eval_windows": 4, "inner_steps": INNER_STEPS,
            "batch_size": 2, "lr": 0.003,
            "paces": [1.0] * self.workers, "assign": "fixed" if self.workers <= 5 else "flexible",
            "arrivals": self.arrivals, "method": "heloco-ramp", "device": "cpu",
            "checkpoint_every": 25, "eval_every": 0, "beat_s": max(0.2, self.step_s), "journal_gb": 10.0, "max_refusals": 1000,
            "wire": self.wire,
        }  # fmt: skip

    def config(self) -> str:
        from heloco.run import RunConfig, resolve, with_fields
        from heloco.run.settings import to_toml

        return to_toml(resolve(with_fields(RunConfig(), self.settings())))

    def start_synchronizer(self) -> None:
        from faults.synchronizer_child import serve

        arguments = (str(self.run), self.config(), self.port, str(self.state))
        self.synchronizer = self.context.Process(target=serve, args=arguments, daemon=True)
        self.synchronizer.start()

    def start_worker(self, number: int) -> None:
        from faults.fault_workers import work

        address = f"https://127.0.0.1:{self.proxies.ports[number]}"
        arguments = (number, address, self.tokens["worker"], str(self.folder), self.step_s)
        self.processes[number] = self.context.Process(target=work, args=arguments, daemon=True)
        self.processes[number].start()

    def status(self) -> dict[str, Any]:
        try:
            status: dict[str, Any] = json.loads(self.state.read_text())
            return status
        except (OSError, ValueError):
            return {"arrivals": 0, "ended": None, "machines": []}

    def is_finished(self) -> bool:
        end = self.status()["ended"]
        return end is not None and end["kind"] == "finished"

    def note_restarts(self) -> None:
        """Of the synchronizer, which its parent starts again."""
        pid = int(self.status().get("pid", 0))
        if pid and pid != self.serving:
            self.restarts["synchronizer"] += self.serving != 0
            self.serving = pid

    def restart_the_dead(self) -> None:
        self.note_restarts()
        is_down = not self.synchronizer.is_alive() and not any(map(is_alive, self.orphans))
        if is_down and time.monotonic() > self.last_start_s + AT_THE_EARLIEST_S:
            self.last_start_s = time.monotonic()
            self.restarts["heloco serve"] += 1
            if self.restarts["heloco serve"] > 3 * self.planned + 10:
                raise RuntimeError("the synchronizer cannot be started any more")
            self.damage_files()
            self.start_synchronizer()
        for number, process in list(self.processes.items()):
            if not process.is_alive():
                self.start_worker(number)

    def damage_files(self) -> None:
        """Damages the run's folder while no process writes to it."""
        for seed in self.to_damage:
            if (self.run / "checkpoints").is_dir():
                self.damaged.append(damage(self.run, seed))
                print(f"damaged: {self.damaged[-1]}", file=sys.stderr, flush=True)
        self.to_damage.clear()

    # ---- faults

    def number_of(self, fault: Fault) -> int:
        return fault.worker

    def pid_of(self, fault: Fault) -> int:
        """Process id of the target of a fault; 0 if it does not run at the moment."""
        if fault.kind in AT_THE_CHILD:
            return int(self.status().get("pid", 0))
        if fault.kind == "kill heloco serve":
            return int(self.synchronizer.pid)
        number = self.number_of(fault)
        return int(self.processes[number].pid) if fault.kind == "kill heloco join" else self.starts_of(number)[-1]

    def starts_of(self, number: int) -> list[int]:
        """The processes of a worker, one after the other; 0 before the first."""
        path = self.folder / f"starts-{number}"
        return [0, *map(int, path.read_text().split())] if path.exists() else [0]

    def children_that_must_end(self, parent: int) -> list[int]:
        """Before a `heloco serve` that was killed is started again."""
        return list(children_of(parent))

    def can_strike(self, fault: Fault) -> bool:
        """Whether the target of the fault runs and has no order yet. Otherwise the fault waits."""
        if fault.kind in ORDERED:
            return not (self.folder / f"orders-{self.number_of(fault)}").exists()
        if fault.kind in ("cut", "half-open", "full disk"):
            return True
        if fault.kind == "fail an fsync":
            return not self.fsync_order.exists()
        pid = self.pid_of(fault)
        return is_alive(pid) and pid not in self.killed

    def strike(self, fault: Fault) -> None:
        self.struck[fault.kind] += 1
        number = self.number_of(fault)
        print(f"{time.strftime('%H:%M:%S')} {fault}", file=sys.stderr, flush=True)
        if fault.kind in ORDERED:
            point, do = ORDERED[fault.kind]
            (self.folder / f"orders-{number}").write_text(json.dumps({"point": point or fault.point, "do": do}))
        elif fault.kind == "cut":
            self.proxies.cut(number)
        elif fault.kind == "half-open":
            self.proxies.hold(number, fault.seconds)
        elif fault.kind == "full disk":
            if self.disk is not None:
                self.disk.fill(fault.seconds)
        elif fault.kind in ("stop a worker", "stop the synchronizer"):
            send(signal.SIGSTOP, pid := self.pid_of(fault))
            threading.Timer(fault.seconds, send, (signal.SIGCONT, pid)).start()
        elif fault.kind == "fail an fsync":
            number_of_error = (errno.ENOSPC, errno.EDQUOT, errno.EIO)[fault.worker % 3]
            self.fsync_order.write_text(str(number_of_error))
        elif fault.kind == "damage a file":
            self.damage_after_a_kill(fault)
        else:
            self.killed.add(pid := self.pid_of(fault))
            if fault.kind == "kill heloco serve":
                send(signal.SIGSTOP, pid)  # so that it starts no other child meanwhile
                self.orphans = self.children_that_must_end(pid)
            send(signal.SIGKILL, pid)

    def damage_after_a_kill(self, fault: Fault) -> None:
        """Kills the synchronizer, and damages a file before its parent starts it again."""
        parent = int(self.synchronizer.pid)
        send(signal.SIGSTOP, parent)
        self.killed.add(child := self.pid_of(fault))
        send(signal.SIGKILL, child)
        while is_alive(child):
            time.sleep(0.001)
        self.to_damage.append(hash(fault))
        self.damage_files()
        send(signal.SIGCONT, parent)

    # ---- from its beginning to its end

    def begin(self, limit_s: float) -> None:
        """Waits until all workers have joined and the first contribution has arrived."""
        began = time.monotonic()
        if self.library is not None:  # every process that is started from here on; only a synchronizer makes anything durable
            os.environ |= {"LD_PRELOAD": str(self.library), "FAULT_FSYNC": str(self.fsync_order)}
        self.start_synchronizer()
        while "tokens" not in self.status():
            self.check(began, limit_s)
            time.sleep(LOOK_S)
        self.tokens = self.status()["tokens"]
        for number in range(self.workers):
            self.start_worker(number)
        while len((status := self.status())["machines"]) < self.workers or not status["arrivals"]:
            self.check(began, limit_s)
            assert status["ended"] is None, (
                f"the run ended ({status['ended']}) before all workers had joined: give it more arrivals"
            )
            time.sleep(LOOK_S)

    def look(self, now: float) -> None:
        """Carries out the faults that are due at `now`, in arrivals or seconds. A fault that has to
        wait does not delay the others."""
        for fault in list(self.faults):
            if fault.at <= now and self.can_strike(fault):
                self.faults.remove(fault)
                self.strike(fault)
        self.restart_the_dead()

    def go(self, limit_s: float) -> dict[str, Any]:
        """Runs until the run ends by itself, and returns the account."""
        self.begin(limit_s)
        began = time.monotonic()
        while not self.is_finished():
            self.check(began, limit_s)
            self.look(self.status()["arrivals"])
            time.sleep(LOOK_S)
        seconds = time.monotonic() - began
        self.end()
        speed = {"seconds": round(seconds, 2), "arrivals_per_s": round(self.arrivals / seconds, 2)}
        return {**self.account(self.arrivals), **speed}

    def stop(self, limit_s: float = 120.0) -> int:
        """Stops the run as `heloco stop` does. Returns the number of contributions."""
        from heloco.cluster.gateway.https_link import HttpsLink

        began = time.monotonic()
        while not (status := self.status())["ended"]:
            self.check(began, limit_s)
            self.restart_the_dead()
            with contextlib.suppress(Exception):  # it may just be started again
                HttpsLink(f"https://127.0.0.1:{self.port}", self.tokens["admin"]).stop("stopped")
            time.sleep(0.2)
        self.end()
        return int(status["arrivals"])

    def check(self, began: float, limit_s: float) -> None:
        if time.monotonic() - began > limit_s:
            raise TimeoutError(f"the run stands at {self.status()} after {limit_s} s")

    def end(self) -> None:
        """Ends all processes."""
        os.environ.pop("LD_PRELOAD", None)
        self.fsync_order.unlink(missing_ok=True)
        for process in self.processes.values():
            end_process(process, 10.0)
        if self.synchronizer is not None:
            self.synchronizer.terminate()
            end_process(self.synchronizer, 60.0)

    def account(self, arrivals: int) -> dict[str, Any]:
        figures = account(self.run, self.folder, arrivals)
        damaged = dict(collections.Counter(self.damaged))
        self.restarts["worker"] = sum(len(self.starts_of(number)) - 2 for number in range(self.workers))
        return {**figures, "faults": dict(self.struck), "restarts": dict(self.restarts), "damaged": damaged}
