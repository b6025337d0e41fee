"""Fixtures for all tests, and how they run."""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from support.browsers import find_browser
from support.disks import mounted_disk
from support.nursery import Nursery
from support.programs import Programs
from support.repository import SHARED
from support.runs import on_threads, train, write_text

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported: its interpreter then runs the kernels here

os.environ.pop("COLUMNS", None)  # pytest-xdist sets it, and output would be wrapped as in a terminal

if "OMP_NUM_THREADS" not in os.environ:  # several test processes share the cores: threads of each would wait for those of others
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)

hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)  # a slow moment is no failure
hypothesis.settings.load_profile("repeatable")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as whoever runs tests in several processes likes to have it
    signal.signal(signal.SIGINT, signal.default_int_handler)


LONG_FILES = (
    "test_serve_going_run", "test_warm_restart", "test_faults", "test_attacks", "test_serve_finished_run", "test_failing_disks",
    "test_gateway_transfers", "test_ray_runs", "test_fleet", "test_report_browser", "test_watch", "test_study", "test_stacked",
    "test_private_folder", "test_join_hooks_numbers", "test_resume", "test_gateway_tokens", "test_gateway_runs",
    "test_ray_reach", "test_join_hooks_processes",
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
        monkeypatch.setattr("heloco.task.head.stages", lambda _: 1)
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
    if not SHARED.is_dir():
        pytest.skip(f"there is no {SHARED} with real text on this machine")
    return SHARED


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tiny models: threads would only wait for each other."""
    with on_threads(1):
        yield


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`unbroken(*settings)`: the folder of a run with these settings that nothing disturbed. Made once: only look at it."""
    folders: dict[tuple[str, ...], Path] = {}

    def get(*settings: str) -> Path:
        if settings not in folders:
            folders[settings] = train(tmp_path_factory.mktemp("unbroken") / "run", *settings)
        return folders[settings]

    return get


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two short texts, de and en: a tiny run goes through them several times. Only look at it."""
    return write_text(tmp_path_factory.mktemp("text") / "text")


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


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Nursery]:  # noqa: ARG001
    nursery = Nursery(tmp_path_factory.mktemp("nursery"))
    yield nursery
    nursery.close()


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Iterator[Programs]:
    launcher = Programs(tmp_path_factory.mktemp("programs"), nursery)
    yield launcher
    for program in reversed(launcher.programs):  # machines before those they would have to take leave of
        program.clear_away()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted_disk(tmp_path / "disk", "4m") as disk:
        yield disk
