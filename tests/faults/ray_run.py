"""A run on Ray with faults: the synchronizer in an actor on the head, one worker next to it, some on a second node of the
cluster, and the others over HTTPS. Both nodes are on this machine, at loopback addresses of their own."""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from faults.fault_list import KINDS, Fault
from faults.fault_places import children_of, free_port, send
from faults.fault_run import FaultRun
from heloco.cluster.ray.ray_options import RayOptions

RAY_KINDS = {**KINDS, "kill a Ray worker": 3, "kill the Ray node": 2, "kill the Ray head": 1}
STORE = 150_000_000


# ---- Ray's processes, as the system knows them


def process_of(launcher: int, name: str) -> int:
    """Process id of one of Ray's own processes; 0 if there is none."""
    return next((pid for pid, command in children_of(launcher).items() if name in command.split(" ")[0]), 0)


class Node:
    """The cluster's second node. It is started again when it dies, as a service manager would do."""

    def __init__(self, head: str, address: str, token_file: Path) -> None:
        self.head, self.address, self.token_file = head, address, token_file
        self.process: subprocess.Popen[bytes] | None = None
        self._folder = Path()

    def start(self) -> None:
        from heloco.cluster.ray import head_main, ray_internals

        self._folder = Path(tempfile.mkdtemp(prefix="heloco-ray-"))  # short: Ray's sockets lie below it
        command = [
            sys.executable, "-P", head_main.__file__, str(self._folder), ray_internals.COMMAND, "--block",
            "--disable-usage-stats", f"--address={self.head}", f"--node-ip-address={self.address}", f"--temp-dir={self._folder}",
            f"--object-store-memory={STORE}", "--include-log-monitor=false",
        ]  # fmt: skip
        settings = {**ray_internals.KEEPALIVE, **ray_internals.PINGS, **ray_internals.QUIET, "GRPC_ENABLE_FORK_SUPPORT": "0"}
        settings["RAY_gcs_rpc_server_reconnect_timeout_s"] = "5"  # otherwise it takes a minute to notice another head
        settings |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token_file)}
        with (self._folder / "start.log").open("wb") as log:
            self.process = subprocess.Popen(
                command, env=os.environ | settings, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def raylet(self) -> int:
        """Process id of the node; 0 while it is not up. If a process dies during Ray's start-up,
        Ray waits half a minute for it."""
        if self.process is None or "Ray runtime started" not in (self._folder / "start.log").read_text(errors="replace"):
            return 0
        return process_of(self.process.pid, "raylet")

    def keep(self) -> bool:
        """Starts the node again if it has died. True if it had."""
        if self.process is None or self.process.poll() is None:
            return False
        print(f"node: it ended with {self.process.returncode}", file=sys.stderr, flush=True)
        shutil.rmtree(self._folder, ignore_errors=True)
        self.start()
        return True

    def end(self) -> None:
        if self.process is not None:
            assert self.process.stdin
            self.process.stdin.close()  # makes the launcher stop Ray
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
            self.process.kill()
            self.process.wait()
            shutil.rmtree(self._folder, ignore_errors=True)


# ---- the run


class RayFaultRun(FaultRun):
    """Workers by number: first those over HTTPS, then those on the second node, last the one on the head."""

    modules = ("faults.ray_children", "ray")
    run_count = 0

    def __init__(self, folder: Path, faults: list[Fault], **options: Any) -> None:
        super().__init__(folder, faults, **options)
        RayFaultRun.run_count += 1
        self.net = f"127.{100 + RayFaultRun.run_count}.{os.getpid() % 250 + 1}"  # no other Ray uses these addresses
        self.on_node = range((self.workers - 1) // 2 + (self.workers - 1) % 2, self.workers - 1)
        self.on_head = self.workers - 1
        self.token_file = folder / "ray-token"
        self.token_file.write_text(secrets.token_hex(32))
        self.token_file.chmod(0o600)
        self.ray = RayOptions(
            host=f"{self.net}.1", port=free_port(), client_port=free_port(), token_file=self.token_file, trusted=True
        )
        self.node = Node(f"{self.net}.1:{self.ray.port}", f"{self.net}.2", self.token_file)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "beat_s": max(0.5, self.step_s)}

    def start_synchronizer(self) -> None:
        from faults import ray_children

        spec, papers = (str(self.run), self.config(), self.port), (str(self.folder), self.on_head, self.step_s)
        arguments = (spec, str(self.state), self.ray, papers)
        self.synchronizer = self.context.Process(target=ray_children.serve_on_ray, args=arguments, daemon=True)
        self.synchronizer.start()

    def start_worker(self, number: int) -> None:
        from faults import ray_children

        if number == self.on_head:
            return  # the engine's
        if number not in self.on_node:
            super().start_worker(number)
            return
        if self.node.process is None:
            self.node.start()
        arguments = (number, self.node.head, str(self.token_file), self.node.address, str(self.folder), self.step_s)
        self.processes[number] = self.context.Process(target=ray_children.work_on_node, args=arguments, daemon=True)
        self.processes[number].start()

    def restart_the_dead(self) -> None:
        super().restart_the_dead()
        self.restarts["node"] += self.node.keep()

    # ---- faults

    def pid_of(self, fault: Fault) -> int:
        """Process id of the target of a fault; 0 if it does not run at the moment."""
        status = self.status()
        launcher = int(status.get("launcher", 0))
        if fault.kind in ("kill the synchronizer", "stop the synchronizer"):
            return int(status.get("pid", 0))
        if fault.kind == "kill the Ray head":
            return process_of(launcher, "raylet" if fault.worker % 2 else "gcs_server")
        if fault.kind == "kill the Ray node":
            return self.node.raylet
        if fault.kind in ("kill heloco serve", "damage a file"):
            return int(self.synchronizer.pid)
        number = self.number_of(fault)
        if number < self.on_node.start:
            return super().pid_of(fault)
        if number in self.processes:
            return int(self.processes[number].pid)
        raylet = process_of(launcher, "raylet")
        return next((pid for pid, command in children_of(raylet).items() if "OrderedActor" in command), 0)

    def damage_after_a_kill(self, fault: Fault) -> None:
        """Ray has no parent that waits: the whole `heloco serve` is killed, and started again after the damage."""
        self.to_damage.append(hash(fault))
        self.killed.add(pid := self.pid_of(fault))
        send(signal.SIGKILL, pid)

    def children_that_must_end(self, parent: int) -> list[int]:  # noqa: ARG002
        """Ray's own processes notice by themselves, after a while, and nobody waits for that."""
        return []

    def number_of(self, fault: Fault) -> int:
        if fault.kind in ("cut", "half-open", "kill heloco join"):
            return fault.worker % self.on_node.start
        if fault.kind == "kill a Ray worker":
            return self.on_node.start + fault.worker % (len(self.on_node) + 1)
        return fault.worker

    def end(self) -> None:
        super().end()
        self.node.end()
        code = self.synchronizer.exitcode if self.synchronizer else 0
        assert code == 0, f"it did not end as it was told to ({code})"
