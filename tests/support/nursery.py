"""The command line in processes that are forked, and may meet a fault."""

import gc
import importlib
import json
import math
import os
import runpy
import signal
import subprocess
import sys
import textwrap
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from support.disks import fill_disk
from support.repository import TESTS
from support.runs import TINY, Done, fitting, heloco


@dataclass(frozen=True)
class Fault:
    """Around the `call`-th call of `at` ("module:name"): first `mess` is made, then `signal` is sent to the process itself."""

    at: str
    call: int = 1
    when: str = "after"
    signal: int = 0
    mess: str = ""
    """"torn": half a line is on the tape. "halved": the file just written lost its second half. "full": the disk is."""
    ballast: str = ""
    """The file that fills the disk."""
    room: int = 0
    """The bytes it leaves."""


@dataclass(frozen=True)
class KillAtEvent:
    """SIGKILL at the `event`-th thing that Python does with a file in or below `folder` (open, mkdir, rename, remove, …)."""

    folder: str
    event: int


class ForkedProcess:
    """What `subprocess.Popen` offers, for a process that the nursery forked."""

    def __init__(self, nursery: "Nursery", pid: int) -> None:
        self._nursery, self.pid = nursery, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.ask({"look at": self.pid})
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """Runs `heloco` in processes of their own. They are forked from one that has imported everything: 0.1 s instead of 3 s."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        search_path = os.pathsep.join([str(TESTS), *sys.path])
        environment = os.environ | {"PYTHONPATH": search_path, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", "from support.nursery import obey; obey()"]
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(
        self, *arguments: str | Path, out: Path, err: Path, environment: dict[str, str], cwd: Path | None = None
    ) -> ForkedProcess:
        """`python -m heloco.cli ARGUMENTS`."""
        return ForkedProcess(self, self._fork(arguments, out, err, environment, cwd))

    def run(
        self, *arguments: str | Path, cwd: Path | None = None, fault: Fault | KillAtEvent | None = None, patch: str = ""
    ) -> Done:
        """The same, until it ends or is stopped. With a fault, or after some code has changed it."""
        out, err = self.folder / "out", self.folder / "err"
        return self._end(self._fork(arguments, out, err, dict(os.environ), cwd, fault, patch))

    def wake(self, stopped: Done, number: int = signal.SIGCONT) -> Done:
        """Sends a signal to a process that was stopped, and waits for its end."""
        os.kill(stopped.pid, number)
        return self._end(stopped.pid)

    def _fork(
        self, arguments: Sequence[str | Path], out: Path, err: Path, environment: dict[str, str], cwd: Path | None,
        fault: Fault | KillAtEvent | None = None, patch: str = "",
    ) -> int:  # fmt: skip
        pid: int = self.ask({
            "arguments": fitting(arguments), "out": str(out), "err": str(err), "environment": environment,
            "cwd": str(cwd or self.folder), "fault": vars(fault) if fault else None,
            "patch": textwrap.dedent(patch),
        })  # fmt: skip
        return pid

    def _end(self, pid: int) -> Done:
        code = self.ask({"wait for": pid})
        return Done(code, (self.folder / "out").read_text(), (self.folder / "err").read_text(), pid)

    def ask(self, order: dict[str, Any]) -> Any:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()


IMPORTED = (
    "heloco.cli.page", "heloco.cli.serve_view", "heloco.cli.warm_serve", "heloco.cluster.client.worker",
    "heloco.cluster.gateway.https_link", "heloco.cluster.gateway.https_server", "heloco.cluster.server.open_run",
    "heloco.cluster.server.process", "heloco.engine.build", "heloco.report.live",
)  # fmt: skip
"""What `heloco serve` and `heloco join` import late."""


def obey() -> None:
    """The nursery's own process: a line with an order, a line with the answer."""
    import tempfile

    torch.set_num_threads(1)
    for name in IMPORTED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:  # whatever a first run imports and sets up; threads, it has none
        heloco("train", *TINY, "--inner-optimizer", "muon", "--out", Path(folder) / "run")
        heloco("train", *TINY, "--task", "images", "--out", Path(folder) / "images")
    tempfile.tempdir = None  # each child looks for its own
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page
    for line in sys.stdin:
        order = json.loads(line)
        if "arguments" in order:
            answer: int | None = os.fork()
            if not answer:
                _live(order)
        else:
            looking = "look at" in order
            pid, status = os.waitpid(order["look at" if looking else "wait for"], os.WNOHANG if looking else os.WUNTRACED)
            answer = None if pid == 0 or os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status)
        print(json.dumps(answer), flush=True)


def _live(order: dict[str, Any]) -> None:
    """The life of one child, as of a Python that was started with `-m heloco.cli`. It never returns."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(order[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), number)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["environment"])
    if order["fault"]:
        _count_events(**order["fault"]) if "event" in order["fault"] else _wrap(Fault(**order["fault"]))
    exec(order["patch"], {})
    sys.argv = ["heloco", *order["arguments"]]
    code: Any = 1  # an exception that nobody caught
    try:
        runpy.run_module("heloco.cli", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # Python's own end would take torch apart: more than a second


def _count_events(folder: str, event: int) -> None:
    event_count = 0

    def look(_: str, arguments: tuple[Any, ...]) -> None:
        nonlocal event_count
        if any(isinstance(a, str | os.PathLike) and os.fspath(a).startswith(folder) for a in arguments):
            event_count += 1
            if event_count == event:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)


def _wrap(fault: Fault) -> None:
    module, _, path = fault.at.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    real, calls = getattr(owner, name), 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == fault.call and fault.when == "before":
            _strike(fault, arguments)
        result = real(*arguments, **options)
        if calls == fault.call and fault.when == "after":
            _strike(fault, arguments)
        return result

    setattr(owner, name, counted)


def _strike(fault: Fault, arguments: tuple[Any, ...]) -> None:
    if fault.mess == "torn":
        with arguments[0].path.open("ab") as file:
            file.write(b'{"arrival":3,"verd')
    if fault.mess == "halved":
        os.truncate(arguments[0].fileno(), os.fstat(arguments[0].fileno()).st_size // 2)
    if fault.mess == "full":
        fill_disk(Path(fault.ballast), fault.room)
    if fault.signal:
        os.kill(os.getpid(), fault.signal)
