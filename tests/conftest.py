"""Shared by the tests: tiny runs of the real command line, in this process or in one that meets a fault; comparing runs."""

import contextlib
import fcntl
import gc
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from heloco.cli.main import run

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported: its interpreter then runs the kernels here

if "OMP_NUM_THREADS" not in os.environ:  # several test processes share the cores: threads of each would wait for those of others
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)

hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)  # a slow moment is no failure
hypothesis.settings.load_profile("repeatable")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as whoever runs tests in several processes likes to have it
    signal.signal(signal.SIGINT, signal.default_int_handler)

TINY_MODEL = (
    "--preset", "1m", "--width", "32", "--layers", "1", "--heads", "2", "--context", "16", "--eval-windows", "4",
)  # fmt: skip
TINY = (
    *TINY_MODEL, "--inner-steps", "2", "--arrivals", "8", "--batch-size", "2", "--lr", "0.003", "--paces", "1,1,6,6,6",
)  # fmt: skip
"""The smallest run: about 0.3 s. Give other values behind it: the last one counts."""


def fitting(arguments: Sequence[str | Path]) -> list[str]:
    """The arguments as text, for images without TINY's model, which is a language model."""
    words = [str(argument) for argument in arguments]
    behind = 1 + len(TINY_MODEL)
    return [words[0], *words[behind:]] if "images" in words and tuple(words[1:behind]) == TINY_MODEL else words


LONG_FILES = (
    "test_serve", "test_warm_restart", "test_faults", "test_attacks", "test_durability", "test_gateway", "test_ray", "test_fleet",
    "test_report_browser", "test_watch", "test_study", "test_stacked", "test_private_folder", "test_join_hooks", "test_resume",
)  # fmt: skip
"""The files that take longest. They begin first, so that in the end no process works alone."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {name: rank for rank, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The task's kernels serve, as on a GPU with TF32 allowed; where there is none, Triton's interpreter runs them."""
    pytest.importorskip("triton", reason="triton is not installed")
    if not torch.cuda.is_available():
        monkeypatch.setattr("heloco.task.rounding.runs_on", lambda _: True)
        monkeypatch.setattr("heloco.task.head._stages", lambda _: 1)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One cache for all: the built-in languages are made once."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("HELOCO_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder beside the repository with the real text and GPT-2's vocabulary."""
    folder = Path(__file__).parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip(f"there is no {folder} with real text on this machine")
    return folder


# ---- the command line in this process


@dataclass(frozen=True)
class Done:
    """A command that has ended; a negative code is the signal that ended it, None that it was stopped."""

    code: int | None
    out: str
    err: str
    pid: int = 0

    @property
    def sentence(self) -> str:
        """The one sentence on stderr; beside it there may be only the bars of the tokenising."""
        said = [line for line in self.err.splitlines() if line.strip() and not line.startswith("tokenising ")]
        assert len(said) == 1 and said[0].startswith("heloco: "), self.err
        return said[0].removeprefix("heloco: ")


@contextlib.contextmanager
def on_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tiny models: threads would only wait for each other."""
    with on_threads(1):
        yield


def heloco(*arguments: str | Path, cwd: Path | None = None, threads: int = 1) -> Done:
    """`heloco ARGUMENTS`; on one thread, for a tiny model is faster on one than on two."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.chdir(cwd or "."), on_threads(threads):
        try:
            code = run(fitting(arguments))
        except SystemExit as end:  # argparse's way to end --help
            code = int(end.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


def train(out: Path, *settings: str | Path) -> Path:
    """A tiny run that must go well; returns its folder."""
    done = heloco("train", *TINY, *settings, "--out", out)
    assert done.code == 0, done.err
    return out


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`unbroken(*settings)`: the folder of a run with these settings that nothing disturbed. Made once: only look at it."""
    made: dict[tuple[str, ...], Path] = {}

    def get(*settings: str) -> Path:
        if settings not in made:
            made[settings] = train(tmp_path_factory.mktemp("unbroken") / "run", *settings)
        return made[settings]

    return get


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two short texts, de and en: a tiny run goes through them several times. Only look at it."""
    return write_text(tmp_path_factory.mktemp("text") / "text")


def write_text(folder: Path, **changed: str) -> Path:
    words = {"de": "der die das und ist nicht ein mit", "en": "the of and to in that is was"} | changed
    folder.mkdir()
    for name, line in words.items():
        (folder / f"{name}.train.txt").write_text(f"{line}\n\n" * 25)
        (folder / f"{name}.val.txt").write_text(f"{line}\n\n" * 5)
    return folder


# ---- looking at a run's folder


def digests(folder: Path) -> dict[str, str]:
    """Every file and folder below, hidden ones too, with a digest of its content: whatever changes shows."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = "folder" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return found


def outcome(folder: Path) -> dict[str, str]:
    """What must be the same to the bit however the run was broken off: all but the checkpoints before the last."""
    last = f"checkpoints/{checkpoints(folder)[-1].name}/"
    return {name: digest for name, digest in digests(folder).items() if "/" not in name or name.startswith(last)}


def checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "checkpoints").iterdir() if not path.name.startswith("."))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def tape(folder: Path) -> list[dict[str, Any]]:
    return lines(folder / "tape.jsonl")


def evals(folder: Path) -> list[dict[str, Any]]:
    return lines(folder / "evals.jsonl")


def assert_refused(around: Path, *arguments: str | Path, says: str, cwd: Path | None = None) -> None:
    """Exit code 2, one sentence with `says` in it, and the folder `around` it all as it was."""
    before = digests(around)
    done = heloco(*arguments, cwd=cwd)
    assert done.code == 2, (done.out, done.err)
    assert says in done.sentence
    assert digests(around) == before


# ---- a real browser

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def find_browser() -> str | None:
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


@pytest.fixture(scope="session")
def browser_path(tmp_path_factory: pytest.TempPathFactory) -> str | None:
    """The system's browser. Debian's chromium is installed where there is none and that may be done: once for all processes."""
    if find_browser() is None and os.geteuid() == 0 and shutil.which("apt-get"):
        with (tmp_path_factory.getbasetemp().parent / "browser.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            for command in (["apt-get", "update"], ["apt-get", "install", "--yes", "--no-install-recommends", "chromium"]):
                if find_browser() is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        subprocess.run(command, env=quiet, capture_output=True, timeout=240)
    return find_browser()


# ---- the command line in processes that meet a fault


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
        found = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        environment = os.environ | {"PYTHONPATH": found, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", "import conftest; conftest.obey()"]
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


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Nursery]:  # noqa: ARG001
    made = Nursery(tmp_path_factory.mktemp("nursery"))
    yield made
    made.close()


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
    seen = 0

    def look(_: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if any(isinstance(a, str | os.PathLike) and os.fspath(a).startswith(folder) for a in arguments):
            seen += 1
            if seen == event:
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
        arguments[0]._file.write(b'{"arrival":3,"verd')
    if fault.mess == "halved":
        os.truncate(arguments[0].fileno(), os.fstat(arguments[0].fileno()).st_size // 2)
    if fault.mess == "full":
        fill_disk(Path(fault.ballast), fault.room)
    if fault.signal:
        os.kill(os.getpid(), fault.signal)


@contextlib.contextmanager
def mounted_disk(folder: Path, size: str) -> Iterator[Path]:
    """A disk of its own, of that size."""
    folder.mkdir()
    if not shutil.which("mount"):
        pytest.skip("there is no mount command here")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        gc.collect()  # tensors of a file on it may still be mapped into memory
        subprocess.run(["umount", folder], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted_disk(tmp_path / "disk", "4m") as disk:
        yield disk


def fill_disk(ballast: Path, room: int = 0) -> None:
    """Writes to `ballast` until its disk is full, but for `room` bytes."""
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    os.truncate(ballast, ballast.stat().st_size - room)
