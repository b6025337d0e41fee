"""Who evaluates the outer model of a served run: a thread of this process, or for a large model a process of its own.

The process is a child that reads a config and then the paths of models from its standard input, a line of JSON each. It answers
each path with a line: the scores, or an error.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import torch
from msgspec import Struct
from torch import nn

from heloco.cluster.server.evaluation_queue import NICENESS, Scorer
from heloco.engine.build import build_task, pick_device
from heloco.errors import UserError
from heloco.run import RunConfig, resolve, with_fields
from heloco.run.settings import parse_toml, to_toml
from heloco.task import Scores, Task
from heloco.wire import blocks
from heloco.wire.layout import Stored

SCORED_HERE_BYTES = 64 << 20
"""A model up to this size is evaluated in a thread: another process would take longer to start than the evaluation."""


class ScorerAnswer(Struct, frozen=True):
    """What the process answers about one model. As JSON of the standard library, because scores may be NaN, which msgspec does
    not write."""

    scores: Scores = msgspec.field(default_factory=dict)
    error: str | None = None
    """For people: why there are no scores; None if there are."""

    def encode(self) -> bytes:
        """The answer as one line of JSON, NaN included."""
        scores = {source: {name: float(value) for name, value in each.items()} for source, each in self.scores.items()}
        return json.dumps({"scores": scores, "error": self.error}).encode() + b"\n"  # a task's numbers may be NumPy's

    @classmethod
    def decode(cls, line: bytes) -> "ScorerAnswer":
        """The answer in a line that `encode` wrote."""
        return msgspec.convert(json.loads(line), cls)


class ScorerHere:
    """Evaluates in this process, with a model of its own."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self._task, self._device = task, device
        self._model: nn.Module | None = None

    @torch.no_grad()
    def __call__(self, model: Path) -> Scores:
        if self._model is None:
            self._model = self._task.build_model().to(self._device)
        tensors = Stored(model)
        for kind, ours in ((blocks.PARAMETER, self._model.parameters()), (blocks.BUFFER, self._model.buffers())):
            for index, tensor in enumerate(ours):
                tensor.copy_(tensors[blocks.block_name(kind, index)])
        return self._task.evaluate(self._model)

    def close(self) -> None:
        """An evaluation under way goes on to its end."""


class ScorerProcess:
    """Evaluates in another process, which is started for the first evaluation and ends with this one."""

    def __init__(self, config: RunConfig) -> None:
        """`config`: with the data that the run's task was built from."""
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        """Of the process; 0 if there is none."""
        return self._process.pid if self._process is not None else 0

    def __call__(self, model: Path) -> Scores:
        try:
            answer = self._ask(model)
        except OSError:  # it was killed, for example because memory was short: once more
            self._end()
            answer = self._ask(model)
        if answer.error is not None:
            raise UserError(answer.error)
        return answer.scores

    def _ask(self, model: Path) -> ScorerAnswer:
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(msgspec.json.encode(str(model.resolve())) + b"\n")
        process.stdin.flush()
        if not (line := process.stdout.readline()):
            raise BrokenPipeError("the process that evaluates has ended")
        return ScorerAnswer.decode(line)

    def _started(self) -> "subprocess.Popen[bytes]":
        with self._lock:
            if self._is_closed:
                raise UserError("The run is being closed.")
            if self._process is None:
                command = [sys.executable, "-m", "heloco.cluster.server.scorers"]
                self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
                assert self._process.stdin is not None
                self._process.stdin.write(msgspec.json.encode(to_toml(self._config)) + b"\n")
            return self._process

    def _end(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    assert pipe is not None
                    pipe.close()

    def close(self) -> None:
        """Kills the process. An evaluation that it was making is lost."""
        self._is_closed = True
        self._end()


def scorer_for(task: Task, config: RunConfig, task_config: RunConfig | None, *, model_bytes: int) -> Scorer:
    """`task_config`: what another process can build the task from; None if only this process has it."""
    if task_config is None or model_bytes <= SCORED_HERE_BYTES:
        return ScorerHere(task, pick_device(config.run.device))
    return ScorerProcess(task_config)


def main() -> None:
    """The child's side."""
    os.nice(NICENESS)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever a task prints goes to the log
    lines = sys.stdin.buffer
    values = parse_toml(msgspec.json.decode(lines.readline(), type=str), "the run's config")
    task, config = build_task(resolve(with_fields(RunConfig(), values)))
    score = ScorerHere(task, pick_device(config.run.device))
    for line in lines:
        try:
            answer = ScorerAnswer(scores=score(Path(msgspec.json.decode(line, type=str)))).encode()
        except Exception as error:  # a task is the user's own code
            answer = ScorerAnswer(error=f"{type(error).__name__}: {error}").encode()
        answers.write(answer)


if __name__ == "__main__":
    main()
