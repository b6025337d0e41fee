"""Disks, ports and processes for runs with faults."""

import contextlib
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BYTES_PER_ARRIVAL = 200_000
"""Bytes of the journal per arrival, rounded up generously."""


class Disk:
    """A small disk that can be filled for a while."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size

    def _resize(self, size: int) -> bool:
        command = ["mount", "-o", f"remount,size={size}", str(self.path)]
        return subprocess.run(command, capture_output=True).returncode == 0

    def fill(self, seconds: float) -> None:
        for _ in range(20):  # retry if something was written between the two calls
            if self._resize(max(4096, shutil.disk_usage(self.path).used)):
                break
        threading.Timer(seconds, self._resize, (self.size,)).start()


@contextlib.contextmanager
def place(arrivals: int) -> Iterator[tuple[Path, Disk | None]]:
    """A folder, and a small disk if one can be mounted."""
    from support.disks import mounted_disk  # imported here, because fresh processes do not need it

    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder, size = Path(name), 40_000_000 + BYTES_PER_ARRIVAL * arrivals
        os.environ.setdefault("HELOCO_CACHE", str(folder / "cache"))
        try:
            disk = Disk(stack.enter_context(mounted_disk(folder / "disk", str(size))), size)
        except BaseException as error:  # pytest's skip is not an Exception
            print(f"without a full disk: {error}", file=sys.stderr)
            disk = None
        yield folder, disk


def failing_fsync(folder: Path) -> Path | None:
    """A library for LD_PRELOAD that makes an fsync fail on request; None without a C compiler."""
    compiler, library = shutil.which("cc"), folder / "failing_fsync.so"
    if compiler is None or sys.platform != "linux":
        return None
    source = Path(__file__).with_name("failing_fsync.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    return library


def nursery(*modules: str) -> Any:
    """A context that forks processes from one that has imported everything: 0.1 s instead of 5 s."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["faults.synchronizer_child", "faults.fault_workers", "torch._dynamo", *modules])
    return context


def make_findable() -> None:
    """Puts these modules on PYTHONPATH, for the fork server (Python 3.11 passes sys.path on too late) and for Ray's workers."""
    tests = str(Path(__file__).parents[1])
    if tests not in (search_path := os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        os.environ["PYTHONPATH"] = os.pathsep.join([tests, *filter(None, search_path)])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def end_process(process: Any, patience_s: float) -> None:
    process.join(patience_s)
    if process.is_alive():
        process.kill()
        process.join()


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return pid > 0 and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def children_of(pid: int) -> dict[int, str]:
    """Child -> its command line."""
    children = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == pid:
                    children[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return children


def send(number: int, pid: int) -> None:
    """Sends a signal to a process that may have ended already."""
    if pid > 0:  # 0 would mean our own process group
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
