"""Runs that several files of tests serve, and their clock."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from heloco.cluster.server.open_run import new_run
from heloco.engine.build import build_task
from heloco.run import RunConfig, resolve, with_fields
from heloco.task import Task
from support.gateways import SETTINGS, Serve, Served
from support.small_cluster import Clock


@pytest.fixture(scope="session")
def tiny(cache: Path) -> tuple[Task, RunConfig]:  # noqa: ARG001
    return build_task(resolve(with_fields(RunConfig(), SETTINGS)))


@pytest.fixture
def serve(tiny: tuple[Task, RunConfig], tmp_path: Path) -> Iterator[Serve]:
    served_runs: list[Served] = []

    def begin(page: Any = None, **settings: Any) -> Served:
        task, config = tiny
        folder = tmp_path / f"run-{len(served_runs)}"
        served_runs.append(Served(new_run(task, with_fields(config, settings), folder), folder, page))
        return served_runs[-1]

    yield begin
    for served in served_runs:
        served.close()


@pytest.fixture
def served(serve: Serve) -> Served:
    return serve()


@pytest.fixture
def clock() -> Clock:
    return Clock()
