"""Does a command's work in a child process, and starts another one when it dies: `heloco serve` and `heloco join`.

Starting Python with torch from nothing takes seconds. So the parent imports everything that the work needs, does nothing else,
and forks: a child that is killed is replaced by another fork within a fraction of a second. When the parent itself dies, its
child dies at once, so that a person who starts the parent again finds its files and its port free.

Only on Linux: elsewhere a process cannot ask to be killed with its parent, and macOS's own libraries may crash after a fork.
"""

import contextlib
import ctypes
import gc
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from heloco.errors import RunStopped

START_AGAIN = 75
"""Exit code of a child that may succeed when it is started again, for example after a disk error: EX_TEMPFAIL of sysexits.h."""
RESTART_LIMIT = 8
"""Restarts in a row without progress. After that many something is wrong for good."""
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 16.0
PAUSE_LOOK_S = 0.05
STOPPING = (signal.SIGINT, signal.SIGTERM)
PR_SET_PDEATHSIG = 1
CAN_RESTART = sys.platform == "linux"


def import_ahead(modules: Iterable[str]) -> None:
    """Imports what children will need, as far as it is installed. They share its memory with the parent."""
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a child would otherwise write to every object, and so copy every page


# ---- what to do when a child has ended


def reason_to_restart(status: int) -> str | None:
    """What happened to a child with this wait status that is to be started again; None if its end is final."""
    code = os.waitstatus_to_exitcode(status)
    if code == START_AGAIN:
        return "stopped"
    if code < 0 and -code not in STOPPING:
        return f"was killed by {_name(-code)}"
    return None


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def exit_code(status: int) -> int:
    """The exit code that a shell reports for this wait status: 128 + the signal of a process that was killed."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


@dataclass
class RestartLimit:
    """Counts restarts in a row that brought no progress."""

    progress: int = 0
    fruitless: int = 0

    def pause_s(self, progress: int) -> float | None:
        """Seconds to wait before the next start: none after progress, then ever longer. None: give up."""
        self.fruitless = 1 if progress > self.progress else self.fruitless + 1
        self.progress = progress
        if self.fruitless > RESTART_LIMIT:
            return None
        return 0.0 if self.fruitless == 1 else min(LONGEST_PAUSE_S, SHORTEST_PAUSE_S * 2 ** (self.fruitless - 2))


# ---- the parent


@dataclass(frozen=True)
class Wording:
    """How a restart is described: `subject` was killed by SIGKILL: `restart`."""

    subject: str
    restart: str
    progress: str
    """What has not come when it is given up."""
    remedy: str = ""


class WarmRestart:
    """Runs `work(is_restart)` in a child process, and again in a new child if it was killed. `work` returns an exit code.
    `progress` grows when the work gets on: after several restarts without any, it is given up."""

    def __init__(
        self, work: Callable[[bool], int], progress: Callable[[], int], wording: Wording, tell: Callable[[str], Any] = print
    ) -> None:
        self._work, self._progress, self._wording, self._tell = work, progress, wording, tell
        self._limit = RestartLimit()
        self._child = self._stopped_by = 0

    def run(self) -> int:
        """Returns twice: in the parent with the exit code of the last child, and in each child with its own."""
        before = {number: signal.signal(number, self._pass_on) for number in STOPPING}
        try:
            return self._keep_working()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _keep_working(self) -> int:
        is_restart = False
        while not self._stopped_by:
            if self._fork() == 0:
                return self._work(is_restart)
            _, status = os.waitpid(self._child, 0)
            self._child = 0
            reason = reason_to_restart(status)
            if reason is None:
                return exit_code(status)
            if self._stopped_by:
                break
            self._wait_or_give_up(reason)
            is_restart = True
        return 128 + self._stopped_by

    def _fork(self) -> int:
        """0 in the child. A signal that comes meanwhile reaches the parent, which passes it on."""
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        self._child = os.fork()
        if self._child == 0:
            die_with(parent)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, _interrupt_once)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        if self._child and self._stopped_by:  # it came a moment before the child did; a second time does no harm
            self._pass_on(self._stopped_by, None)
        return self._child

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        self._stopped_by = number
        if self._child:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, number)

    def _wait_or_give_up(self, reason: str) -> None:
        pause_s, wording = self._limit.pause_s(self._progress()), self._wording
        if pause_s is None:
            vain = f"{self._limit.fruitless} times without {wording.progress} in between"
            raise RunStopped(f"{wording.subject} {reason}, {vain}. {wording.remedy}".strip())
        self._tell(f"{wording.subject} {reason}: {wording.restart}{f' in {pause_s:g} s' if pause_s else ''}.")
        sys.stdout.flush()
        until = time.monotonic() + pause_s
        while not self._stopped_by and time.monotonic() < until:
            time.sleep(PAUSE_LOOK_S)


# ---- the child


def die_with(parent: int) -> None:
    """Lets the system kill this process when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the system was asked
        os.kill(os.getpid(), signal.SIGKILL)


def _interrupt_once(_: int, __: FrameType | None) -> None:
    """Ctrl-C on a terminal reaches the child twice: from the terminal and from its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt
