"""The way of a contribution over HTTPS, from the inner loop to the tape: few files, those that docs/design.md shows.

An instrumented run lists the files with a function that is handed the contribution in one of its forms: its tensors, the file
that receives them, the worker's report, the event, the arrival, the line of the tape. What every request passes (admission, who
asks) is not counted, nor are the files inside the outer rule's room. The files that run anything between hand-in and
acknowledgement, in any thread, are more: they are printed, and their number is bounded too.
"""

import re
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import heloco
from heloco.cluster.client.worker import Worker
from heloco.cluster.gateway.https_link import HttpsLink
from heloco.cluster.protocol.messages import ContributionReport
from heloco.cluster.server.open_run import new_run
from heloco.cluster.server.process import ListenConfig, RunHost
from heloco.cluster.server.transfers import Upload
from heloco.engine.build import build_task
from heloco.records.events import Receive
from heloco.records.tape import ArrivalRecord
from heloco.run import RunConfig, resolve, with_fields
from heloco.synchronizer import Arrival, Contribution
from support.repository import REPOSITORY
from support.runs import on_threads

pytest.importorskip("uvicorn", reason="uvicorn is not installed")
ROOT = Path(heloco.__file__).parent
DESIGN = REPOSITORY / "docs" / "design.md"
FORMS = (Contribution, ContributionReport, Upload, Receive, Arrival, ArrivalRecord)
SETTINGS = {
    "preset": "1m", "width": 32, "layers": 1, "heads": 2, "context": 16, "eval_windows": 4, "batch_size": 2, "inner_steps": 2,
    "paces": [1.0], "arrivals": 3, "device": "cpu", "eval_every": 0, "checkpoint_every": 0,
}  # fmt: skip


PATH_LIMIT, RUNNING_LIMIT = 18, 60


class Trail:
    """Notes the files that a contribution passes, while it is on, and those that run anything while it is handed in."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self.running_files: set[str] = set()
        self.is_on = self.is_handing_in = False
        self._lists: list[Any] = []
        """The pseudo-gradients of contributions, which the outer rule gets as they are."""

    def __call__(self, frame: Any, event: str, result: Any) -> None:
        code = frame.f_code
        if not self.is_on or event not in ("call", "return") or not code.co_filename.startswith(str(ROOT)):
            return
        file = str(Path(code.co_filename).relative_to(ROOT))
        if self.is_handing_in:
            self.running_files.add(file)
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        handed_out = [result] if isinstance(result, list) else []  # by the inner loop
        values = [frame.f_locals.get(name) for name in names] if event == "call" else handed_out
        if any(map(self._is_contribution, values)):
            self.files[file] = None

    def _is_contribution(self, value: Any) -> bool:
        if isinstance(value, Contribution):
            self._lists.append(value.pseudo_gradient)
        if isinstance(value, list):
            return any(value is each for each in self._lists) or any(isinstance(each, Contribution) for each in value)
        if isinstance(value, Mapping):
            return "pseudo_gradient.0" in value or {"verdict", "staleness"} <= value.keys()
        return isinstance(value, FORMS)


def test_a_contribution_passes_few_files_and_the_docs_show_them(tmp_path, cache, monkeypatch):  # noqa: ARG001
    path = Trail()
    task, config = build_task(resolve(with_fields(RunConfig(), SETTINGS)))
    threading.setprofile(path)
    with on_threads(1):
        host = RunHost(new_run(task, config, tmp_path / "run"), ListenConfig("127.0.0.1", 0, ("localhost",)))
        try:
            assert host.gateway is not None
            link = HttpsLink(f"https://127.0.0.1:{host.gateway.port}", host.token("worker"))
            worker = Worker(task, config, tell=lambda _: None)
            run = worker.inner.run

            def second_round(rounds: Any) -> Any:
                path.is_on = worker.rounds == 1
                contributions = run(rounds)
                path.is_handing_in = path.is_on
                return contributions

            monkeypatch.setattr(worker.inner, "run", second_round)
            worker.after_round = lambda: setattr(path, "is_on", False)
            sys.setprofile(path)
            worker.run(link, "m", link.describe().run)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
            host.close()
    assert worker.rounds == 3
    print(f"{len(path.running_files)} files run between hand-in and acknowledgement:", *sorted(path.running_files), sep="\n    ")
    assert path.files.keys() - {"inner/sequential.py"} <= path.running_files and len(path.running_files) <= RUNNING_LIMIT
    figure = re.search(r"## The way of a contribution(.*?)\n## ", DESIGN.read_text(), re.S)
    assert figure is not None
    drawn = re.findall(r"[a-z_/]+\.py", "".join(re.findall(r"^    .*$", figure[1], re.M)))
    assert set(path.files) == set(drawn) and len(path.files) <= PATH_LIMIT
