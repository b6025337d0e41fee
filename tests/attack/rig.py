"""For attacks with real processes over loopback: a `heloco serve`, honest machines that contribute, and strangers on raw
sockets. Honest machines come from 127.0.0.1, strangers from other addresses of 127.0.0.0/8."""

import argparse
import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from heloco.cli.addresses import local_run
from heloco.cluster.client.run_client import MachineStopRequested, NotHeld, RunClient, RunEnded
from heloco.cluster.gateway.https_link import HttpsLink
from heloco.cluster.protocol.messages import ContributionReport, Right
from heloco.cluster.protocol.tokens import parse_token
from heloco.errors import RunStopped, UserError
from heloco.records.events import Part
from heloco.records.journal_reader import FOLDER, read_events
from heloco.wire.layout import Layout

TINY = (
    "--preset", "1m", "--width", "32", "--layers", "1", "--heads", "2", "--context", "16", "--eval-windows", "4",
    "--batch-size", "2", "--lr", "0.003", "--inner-steps", "4", "--arrivals", "1000000", "--eval-every", "0",
    "--checkpoint-every", "100", "--device", "cpu", "--beat-s", "0.5",
)  # fmt: skip
START_S, STOP_S, SETTLE_S = 90.0, 5.0, 20.0
REPORT = ContributionReport(loss=1.0, last_loss=1.0, samples=1, units=1)


class Failed(AssertionError):
    """An attack has found something broken."""


def check(holds: object, what: str) -> None:
    if not holds:
        raise Failed(what)


def judge(figures: dict[str, Any], **claims: bool) -> dict[str, Any]:
    """Returns the figures if all claims about them hold; otherwise raises `Failed`."""
    broken = [name for name, holds in claims.items() if not holds]
    check(not broken, f"{', '.join(broken)}: {json.dumps(figures)}")
    return figures


def until(condition: Callable[[], Any], what: str, limit_s: float = START_S) -> Any:
    end = time.monotonic() + limit_s
    while not (value := condition()):
        check(time.monotonic() < end, f"after {limit_s:g} s still not: {what}")
        time.sleep(0.02)
    return value


def children_of(pid: int) -> list[int]:
    children = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((path / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                children.append(int(path.name))
    return children


# ---- the run


class Serving:
    """`heloco serve` in a process of its own. `descriptors`: how many files it may open, at most. With
    wait=False, `wait` must be called before it is used."""

    def __init__(
        self, folder: Path, *flags: str, settings: Sequence[str] = TINY, workers: int = 2, descriptors: int = 0, ray: str = "off",
        wait: bool = True,
    ) -> None:  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        self._child = -1
        self.folder, self._log_path = folder / "run", folder / "serve.log"
        serve = [sys.executable, "-m", "heloco.cli", "serve", *settings, "--paces", ",".join(["1"] * workers), *flags]
        place = ["--ray", ray, "--host", "127.0.0.1", "--port", "0", "--out", str(self.folder)]
        limit = ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh"] if descriptors else []
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        environment.setdefault("HELOCO_CACHE", str(Path(tempfile.gettempdir()) / "heloco-attack-cache"))
        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [*limit, *serve, *place], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        if wait:
            self.wait()

    def wait(self) -> None:
        """Waits until the run can be joined."""
        try:
            until(self._announced, "the line to join with")
        except BaseException:
            self.close()
            raise
        self.address, self.token = local_run(self.folder, "worker")
        self.port = int(self.address.rpartition(":")[2])

    def _announced(self) -> bool:
        check(self.process.poll() is None, f"`heloco serve` ended: {self.log()}")
        return "HELOCO_TOKEN=" in self.log()

    def token_for(self, right: Right) -> str:
        return local_run(self.folder, right)[1]

    @property
    def secret(self) -> str:
        """What a worker shows with each request."""
        return parse_token(self.token).secret

    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def arrivals(self) -> int:
        tape = self.folder / "tape.jsonl"
        return tape.read_bytes().count(b"\n") if tape.exists() else 0

    def lost(self) -> int:
        """How many machines counted as lost."""
        return sum(isinstance(event, Part) and event.kind == "lost" for event, _ in read_events(self.folder / FOLDER))

    @property
    def pid(self) -> int:
        """Of the synchronizer's process: the only child of a `heloco serve` without Ray."""
        if not Path(f"/proc/{self._child}").exists():
            [self._child] = children_of(self.process.pid)
        return self._child

    def resident_mb(self) -> float:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]

    def open_files(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def settled_mb(self, before_mb: float) -> float:
        """Memory of the process, once it is within a tenth of `before_mb`, or after `SETTLE_S`."""
        with contextlib.suppress(Failed):
            until(lambda: self.resident_mb() < 1.1 * before_mb, "memory is given back", SETTLE_S)
        return self.resident_mb()

    def check_well(self) -> None:
        check(self.process.poll() is None, f"the run ended: {self.log()[-2000:]}")
        self.check_no_traceback()
        check("started again" not in self.log(), f"the synchronizer died: {self.log()[-3000:]}")

    def check_no_traceback(self) -> None:
        before, _, traceback = self.log().partition("Traceback")
        check(not traceback, f"a traceback: {before[-500:]}Traceback{traceback[:3000]}")

    def close(self) -> None:
        """Stops the process. It is killed after `STOP_S`, because it would wait for its machines."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def __enter__(self) -> "Serving":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Contributor(threading.Thread):
    """An honest machine that does not train: it hands in small numbers as fast as it gets rounds."""

    def __init__(self, serving: Serving, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._is_over = threading.Event()
        link = HttpsLink(serving.address, serving.token)
        self._client = RunClient(link, name, patience_s=600.0, is_stopping=self._is_over.is_set, tell=self._note)
        self.notes: list[str] = []
        self.trouble = ""
        self.start()

    def _note(self, text: str) -> None:
        self.notes.append(text)

    def run(self) -> None:
        numbers = torch.Generator().manual_seed(0)
        try:
            layout = Layout(self._client.join().contribution_layout or ())
            delta = {name: torch.randn(shape, generator=numbers) * 1e-3 for name, _, shape in layout.entries}
            while (taken_round := self._client.take(self._is_over.is_set)) is not None:
                with contextlib.suppress(NotHeld):
                    self._client.hand_in(taken_round.key, delta, REPORT)
        except MachineStopRequested:
            pass
        except (RunEnded, RunStopped, UserError) as error:
            self.trouble = str(error)

    def end(self) -> None:
        self._is_over.set()
        self.join(30)
        self._client.leave()


@contextlib.contextmanager
def contributing(serving: Serving, count: int = 2) -> Iterator[list[Contributor]]:
    """Runs honest machines. The body begins when all of them have contributed."""
    machines = [Contributor(serving, f"honest-{i}") for i in range(count)]
    try:
        until(lambda: serving.arrivals() >= 5 * count, "the first arrivals")
        yield machines
        check(not any(machine.trouble for machine in machines), f"an honest machine gave up: {[m.trouble for m in machines]}")
    finally:
        for machine in machines:
            machine.end()


@dataclass
class Rate:
    """Arrivals per second over time spans."""

    serving: Serving
    figures: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def measured(self, name: str) -> Iterator[None]:
        arrivals_before, began = self.serving.arrivals(), time.monotonic()
        yield
        self.figures[name] = round((self.serving.arrivals() - arrivals_before) / (time.monotonic() - began), 1)

    def measure(self, name: str, arrivals: int) -> None:
        """Measures the rate over the next `arrivals` arrivals."""
        with self.measured(name):
            target = self.serving.arrivals() + arrivals
            until(lambda: self.serving.arrivals() >= target, f"{arrivals} arrivals ({name})")


class Peak(threading.Thread):
    """The most memory that the run's process has from now until `end`, in MB."""

    def __init__(self, serving: Serving) -> None:
        super().__init__(daemon=True)
        self._serving, self._is_over, self.peak_mb = serving, threading.Event(), serving.resident_mb()
        self.start()

    def run(self) -> None:
        while not self._is_over.wait(0.05):
            self.peak_mb = max(self.peak_mb, self._serving.resident_mb())

    def end(self) -> float:
        self._is_over.set()
        self.join()
        return self.peak_mb


# ---- strangers


def addresses() -> Iterator[str]:
    """Source addresses for strangers."""
    return (f"127.{a}.{b}.{c}" for a, b, c in itertools.product(range(9, 250), range(1, 250), range(1, 250)))


def connect(port: int, address: str, timeout_s: float = 10.0) -> socket.socket:
    """A TCP connection from this source address."""
    return socket.create_connection(("127.0.0.1", port), timeout=timeout_s, source_address=(address, 0))


def connect_many(port: int, address: str, count: int) -> list[socket.socket]:
    """Connections from one address, without those that are refused at once."""
    connections = []
    for _ in range(count):
        with contextlib.suppress(ConnectionError):
            connections.append(connect(port, address))
    return connections


def unchecked() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def is_open(connection: socket.socket) -> bool:
    """Whether the other side has left the connection open: there is nothing to read, not even an end."""
    connection.setblocking(False)
    try:
        return bool(connection.recv(1 << 16))
    except (BlockingIOError, ssl.SSLWantReadError):
        return True
    except OSError:
        return False


@contextlib.contextmanager
def elsewhere(work: Callable[..., Any], *arguments: Any) -> Iterator[Callable[[float], Any]]:
    """Runs `work` in a process of its own, so that it does not slow down the honest machines here. Yields a function that waits
    for the result, for at most the given seconds."""
    spawning = multiprocessing.get_context("spawn")
    receiving, sending = spawning.Pipe()
    process = spawning.Process(target=_report, args=(work, arguments, sending), daemon=True)
    process.start()

    def result(limit_s: float) -> Any:
        check(receiving.poll(limit_s), f"{work.__name__} took longer than {limit_s:g} s")
        return receiving.recv()

    try:
        yield result
    finally:
        process.kill()
        process.join()


def _report(work: Callable[..., Any], arguments: tuple[Any, ...], pipe: Any) -> None:
    pipe.send(work(*arguments))


# ---- one attack as a program


def on_new_run(attack: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """The same attack for a folder instead of a served run. It serves a new run in the folder."""

    @functools.wraps(attack)
    def alone(folder: Path, **options: Any) -> dict[str, Any]:
        with Serving(folder) as serving:
            return attack(serving, **options)

    return alone


def run_alone(attack: Callable[..., dict[str, Any]], **options: Any) -> None:
    """`python tests/attack/NAME.py [--OPTION N]`: prints the figures; exit code 1 if a claim did not hold."""
    parser = argparse.ArgumentParser(description=(attack.__doc__ or "").splitlines()[0])
    for name, value in options.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    values = vars(parser.parse_args())
    with tempfile.TemporaryDirectory(prefix="heloco-attack-") as folder:
        try:
            figures = attack(Path(folder), **values)
        except Failed as broken:
            log = Path(folder) / "serve.log"
            print(f"FAILED: {broken}\n{log.read_text()[-4000:] if log.exists() else ''}")
            sys.exit(1)
    print(json.dumps(figures))
