"""The command line in processes that meet a fault."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from heloco.cli.main import run
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


class Nursery:
    """Runs `heloco` in processes of their own. They are forked from one that has imported everything: 0.1 s instead of 3 s."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        search_path = os.pathsep.join([str(TESTS), *sys.path])
        environment = os.environ | {"PYTHONPATH": search_path, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", "from support.nursery import obey; obey()"]
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, *arguments: str | Path, cwd: Path | None = None, fault: Fault | KillAtEvent | None = None) -> Done:
        order = {
            "arguments": fitting(arguments),
            "cwd": str(cwd or self.folder),
            "fault": vars(fault) if fault else None,
        }
        return self._ask(order)

    def wake(self, stopped: Done, number: int = signal.SIGCONT) -> Done:
        """Sends a signal to a process that was stopped, and waits for its end."""
        return self._ask({"wake": stopped.pid, "signal": number})

    def _ask(self, order: dict[str, Any]) -> Done:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps({**order, "out": str(self.folder / "out"), "err": str(self.folder / "err")}) + "\n")
        self.process.stdin.flush()
        pid, code = json.loads(self.process.stdout.readline())
        return Done(code, (self.folder / "out").read_text(), (self.folder / "err").read_text(), pid)

    def close(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()


def obey() -> None:
    """The nursery's own process: a line with an order, a line with (pid, exit code)."""
    import tempfile

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:  # whatever a first run imports and sets up; threads, it has none
        heloco("train", *TINY, "--out", Path(folder) / "run")
        heloco("train", *TINY, "--task", "images", "--out", Path(folder) / "images")
    for line in sys.stdin:
        order = json.loads(line)
        if "wake" in order:
            pid = order["wake"]
            os.kill(pid, order["signal"])
        elif not (pid := os.fork()):
            _live(order)
        _, status = os.waitpid(pid, os.WUNTRACED)
        print(json.dumps([pid, None if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status)]), flush=True)


def _live(order: dict[str, Any]) -> None:
    """The life of one child. It never returns."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(order[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(order["cwd"])
    if order["fault"]:
        _count_events(**order["fault"]) if "event" in order["fault"] else _wrap(Fault(**order["fault"]))
    code = 99  # an exception that nobody caught
    try:
        code = run(order["arguments"])
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


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
    import importlib

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
