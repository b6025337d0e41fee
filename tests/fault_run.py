"""A run of real processes over real TLS that meets faults from a list, and the account of what came of it.

    python tests/fault_run.py [--faults 200] [--arrivals 4000] [--seed 0] [--workers 4] [--minutes M]

Faults are data: at so many arrivals, this happens to that process. Whoever is killed is started again at once, as a service
manager would. With --minutes it goes on with new lists until the time is over.
"""

import argparse
import asyncio
import collections
import contextlib
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

KINDS = {
    "kill a worker": 5, "kill a worker at a point": 5, "kill the synchronizer": 2, "cut": 4, "half-open": 2, "full disk": 1,
    "corrupt": 2, "double": 2, "stop a worker": 1,
}  # fmt: skip
"""Kind -> how often, relative to the others."""


@dataclass(frozen=True)
class Fault:
    at: int
    """Arrivals that are in when it strikes."""
    kind: str
    worker: int = 0
    point: str = ""
    seconds: float = 0.0


def faults_of(seed: int, count: int, workers: int, arrivals: int, kinds: dict[str, int] = KINDS) -> list[Fault]:
    from fault_children import POINTS

    draw = random.Random(seed)
    picked = draw.choices(list(kinds), weights=list(kinds.values()), k=count)
    times = sorted(draw.randrange(1, max(2, arrivals - 5)) for _ in range(count))
    made = []
    for at, kind in zip(times, picked, strict=True):
        seconds = draw.uniform(0.2, 1.0) if kind in ("half-open", "stop a worker", "full disk") else 0.0
        made.append(Fault(at, kind, draw.randrange(workers), draw.choice(POINTS), seconds))
    return made


class Proxies:
    """A way to the gateway for each worker, which can be cut, or stop passing anything on."""

    def __init__(self, target: int, count: int) -> None:
        self.ports: list[int] = []
        self._target = target
        self._writers: list[set[asyncio.StreamWriter]] = [set() for _ in range(count)]
        self._passing: list[asyncio.Event] = []
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        threading.Thread(target=self._run, args=(count, ready), daemon=True).start()
        ready.wait()

    def _run(self, count: int, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._open(count))
        ready.set()
        self._loop.run_forever()

    async def _open(self, count: int) -> None:
        for number in range(count):
            self._passing.append(asyncio.Event())
            self._passing[number].set()
            server = await asyncio.start_server(lambda r, w, n=number: self._carry(n, r, w), "127.0.0.1", 0)  # type: ignore[misc]
            self.ports.append(server.sockets[0].getsockname()[1])

    async def _carry(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, onward = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        self._writers[number] |= {writer, onward}
        await asyncio.gather(self._pump(number, reader, onward), self._pump(number, there, writer))
        self._writers[number] -= {writer, onward}

    async def _pump(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(1 << 16):
                await self._passing[number].wait()
                writer.write(piece)
                await writer.drain()
        with contextlib.suppress(OSError, RuntimeError):
            writer.close()

    def cut(self, number: int) -> None:
        self._loop.call_soon_threadsafe(lambda: [w.transport.abort() for w in self._writers[number]])

    def hold(self, number: int, seconds: float) -> None:
        """Connections stay open, and nothing goes through; then they are gone."""

        def begin() -> None:
            self._passing[number].clear()
            self._loop.call_later(seconds, end)

        def end() -> None:
            self.cut(number)
            self._passing[number].set()

        self._loop.call_soon_threadsafe(begin)


class FaultRun:
    def __init__(self, folder: Path, faults: list[Fault], *, workers: int, arrivals: int, disk: Path | None = None) -> None:
        self.folder, self.faults, self.disk = folder, collections.deque(faults), disk
        self.run = (disk or folder) / "run"
        self.workers, self.arrivals = workers, arrivals
        self.planned = len(faults)
        self.struck: collections.Counter[str] = collections.Counter()
        self.restarts: collections.Counter[str] = collections.Counter()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.state = folder / "state.json"
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["fault_children"])
        self.proxies = Proxies(self.port, workers)
        self.processes: dict[int, Any] = {}
        self.synchronizer: Any = None

    # ---- processes

    def config(self) -> str:
        from heloco.run import RunConfig, resolve, with_fields
        from heloco.run.config import to_toml

        values = {
            "preset": "1m", "width": 32, "layers": 1, "heads": 2, "context": 16, "eval_windows": 4, "inner_steps": 4,
            "batch_size": 2, "lr": 0.003,
            "paces": [1.0] * self.workers, "arrivals": self.arrivals, "method": "heloco-ramp", "device": "cpu",
            "checkpoint_every": 25, "eval_every": 0, "beat_s": 0.2, "journal_gb": 10.0, "max_refusals": 1000,
        }  # fmt: skip
        return to_toml(resolve(with_fields(RunConfig(), values)))

    def start_synchronizer(self) -> None:
        import fault_children

        arguments = (str(self.run), self.config(), self.port, str(self.state))
        self.synchronizer = self.context.Process(target=fault_children.serve, args=arguments, daemon=True)
        self.synchronizer.start()

    def start_worker(self, number: int) -> None:
        import fault_children

        address = f"https://127.0.0.1:{self.proxies.ports[number]}"
        arguments = (number, address, self.token, str(self.folder / f"orders-{number}"), str(self.folder / f"acks-{number}"))
        self.processes[number] = self.context.Process(target=fault_children.work, args=arguments, daemon=True)
        self.processes[number].start()

    def status(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self.state.read_text())
            return found
        except (OSError, ValueError):
            return {"arrivals": 0, "ended": ""}

    def restart_the_dead(self) -> None:
        if not self.synchronizer.is_alive():
            self.restarts["synchronizer"] += 1
            if self.restarts["synchronizer"] > 3 * self.planned + 10:
                raise RuntimeError("the synchronizer cannot be started any more")
            self.start_synchronizer()
        for number, process in list(self.processes.items()):
            if not process.is_alive():
                self.restarts["worker"] += 1
                self.start_worker(number)

    # ---- faults

    def strike(self, fault: Fault) -> None:
        from conftest import fill_disk

        self.struck[fault.kind] += 1
        process = self.processes[fault.worker]
        orders = self.folder / f"orders-{fault.worker}"
        if fault.kind == "kill a worker":
            os.kill(process.pid, signal.SIGKILL)
        elif fault.kind == "kill the synchronizer":
            os.kill(self.synchronizer.pid, signal.SIGKILL)
        elif fault.kind == "cut":
            self.proxies.cut(fault.worker)
        elif fault.kind == "half-open":
            self.proxies.hold(fault.worker, fault.seconds)
        elif fault.kind == "stop a worker" and process.is_alive():
            os.kill(process.pid, signal.SIGSTOP)
            threading.Timer(fault.seconds, _go_on, (process.pid,)).start()
        elif fault.kind == "full disk" and self.disk is not None:
            ballast = self.disk / "ballast"
            fill_disk(ballast)
            time.sleep(fault.seconds)
            ballast.unlink()
        elif fault.kind in ("kill a worker at a point", "corrupt", "double"):
            point = {"corrupt": "hand in", "double": "handed in"}.get(fault.kind, fault.point)
            do = fault.kind if fault.kind in ("corrupt", "double") else "kill"
            orders.write_text(json.dumps({"point": point, "do": do}))

    def go(self, limit_s: float) -> dict[str, Any]:
        """To the end of the run; the account."""
        began = time.monotonic()
        self.start_synchronizer()
        while "token" not in self.status():
            self._check(began, limit_s)
            time.sleep(0.02)
        self.token = self.status()["token"]
        for number in range(self.workers):
            self.start_worker(number)
        first = None
        while (status := self.status())["ended"] != "finished":
            self._check(began, limit_s)
            if first is None and status["arrivals"] > 0:
                first = time.monotonic()
            while self.faults and self.faults[0].at <= status["arrivals"]:
                self.strike(self.faults.popleft())
            self.restart_the_dead()
            time.sleep(0.02)
        seconds = time.monotonic() - (first or began)
        self.end()
        return self.account(seconds)

    def _check(self, began: float, limit_s: float) -> None:
        if time.monotonic() - began > limit_s:
            status = self.status()
            self.end()
            raise TimeoutError(f"the run stands at {status} after {limit_s} s")

    def end(self) -> None:
        for process in self.processes.values():
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self.synchronizer.terminate()
        self.synchronizer.join(20)
        if self.synchronizer.is_alive():
            self.synchronizer.kill()
            self.synchronizer.join()

    # ---- the account

    def account(self, seconds: float) -> dict[str, Any]:
        from heloco.engine.cluster.replay import replay
        from heloco.engine.cluster.worker import task_of
        from heloco.run import RunFolder, checkpoint
        from heloco.run.lines import read_lines

        folder = RunFolder.open(self.run)
        tape = list(read_lines(self.run / "tape.jsonl"))
        accepted = [line for line in tape if line["verdict"] != "refused"]
        check_arrivals(accepted, self.arrivals)
        check_acks(tape, self.folder)
        state, _ = checkpoint.load(checkpoint.found(self.run / "checkpoints")[-1])
        check_ledger(accepted, state["books"])
        described = {"external": False, "config": self.config(), "task_digest": folder.meta()["task_digest"]}
        task, _ = task_of(described, device="cpu")
        found = replay(folder, task)
        assert (found.begun_at, found.lines, found.difference) == (0, len(tape), ""), found
        return {
            "arrivals": len(accepted), "seconds": round(seconds, 2), "arrivals_per_s": round(len(accepted) / seconds, 2),
            "faults": dict(self.struck), "restarts": dict(self.restarts), "replayed": asdict(found),
        }  # fmt: skip


def _go_on(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def check_arrivals(accepted: list[dict[str, Any]], planned: int) -> None:
    assert [line["arrival"] for line in accepted] == list(range(1, planned + 1))
    rounds = [(line["worker"], line["round"]) for line in accepted]
    assert len(rounds) == len(set(rounds)), "a contribution counts twice"


def check_acks(tape: list[dict[str, Any]], folder: Path) -> None:
    """Every acknowledgement that a worker got is on the tape, once, as it was told."""
    known = {(line["worker"], line["round"], line["version"]): line for line in tape}
    assert len(known) == len(tape)
    for path in folder.glob("acks-*"):
        for text in path.read_text().splitlines():
            ack = json.loads(text)
            line = known[ack["worker"], ack["round"], ack["version"]]
            assert (line["verdict"], line["arrival"], line["outer_step"]) == (ack["verdict"], ack["arrival"], ack["outer_step"])


def check_ledger(accepted: list[dict[str, Any]], books: dict[str, Any]) -> None:
    """No window of data was skipped or used twice: what was used, is under way or waits to be handed out again is all of it."""
    for shard, page in enumerate(books["ledger"]):
        spans = [tuple(span) for line in accepted if line["shard"] == shard for span in line["spans"]]
        spans += [tuple(span) for held in books["held"] if held[3] == shard for span in held[4]]
        spans += [tuple(span) for span in page["returned"]]
        at = 0
        for first, count in sorted(spans):
            assert first == at, f"shard {shard}: window {at} {'was skipped' if first > at else 'was used twice'}"
            at += count
        assert at == page["cursor"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--arrivals", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=0.0)
    given = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    until, seed = time.monotonic() + 60 * given.minutes, given.seed
    while True:
        faults = faults_of(seed, given.faults, given.workers, given.arrivals)
        print(json.dumps(one(faults, given.workers, given.arrivals, limit_s=3600.0)), flush=True)
        seed += 1
        if time.monotonic() > until:
            return


def one(faults: list[Fault], workers: int, arrivals: int, limit_s: float) -> dict[str, Any]:
    """On a small disk of its own where that can be had."""
    from conftest import mounted_disk

    with tempfile.TemporaryDirectory() as made, contextlib.ExitStack() as stack:
        folder = Path(made)
        os.environ.setdefault("HELOCO_CACHE", str(folder / "cache"))
        try:
            disk = stack.enter_context(mounted_disk(folder / "disk", f"{40 + arrivals // 5}m"))
        except BaseException as error:  # pytest's skip is no Exception
            print(f"without a full disk: {error}", file=sys.stderr)
            disk = None
        return FaultRun(folder, faults, workers=workers, arrivals=arrivals, disk=disk).go(limit_s)


if __name__ == "__main__":
    main()
