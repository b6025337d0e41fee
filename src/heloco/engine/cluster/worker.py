"""A machine that works: it trains the run's own task, round after round, until the run ends or somebody stops it."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heloco.engine.build import build_task, model_digest, pick_device
from heloco.engine.cluster.identity import Identity
from heloco.engine.cluster.link import Link
from heloco.engine.cluster.member import Ended, Member, NotHeld, Stopped, Taken
from heloco.errors import UserError
from heloco.inner import SequentialInner
from heloco.run.config import RunConfig, parse_toml, resolve, with_fields
from heloco.synchronizer import Contribution, Round
from heloco.task import Task

PACE_STEPS = 3


class Abandoned(Exception):
    """The round was given up between two steps."""


def task_of(described: dict[str, Any], *, progress: Any = None, **here: str | None) -> tuple[Task, RunConfig]:
    """The run's task, built here; refuses other data. `here`: settings that differ on this machine, such as device, and where
    data, tokenizer or hf lie."""
    if described["external"]:
        raise UserError("This run trains the model that its machines bring: join it from a training script with heloco.join(…).")
    values = parse_toml(described["config"], "the run's config")
    if here.get("hf") and Path(values.get("tokenizer", "")).parent == Path(values.get("hf", "")):
        values["tokenizer"] = ""  # the model's own
    values |= {"device": "auto"} | {name: value for name, value in here.items() if value is not None}
    task, config = build_task(resolve(with_fields(RunConfig(), values)), progress)
    if task.digest != described["task_digest"]:
        raise UserError("The data here is not the run's: copy the run's text to this machine and give it with --data DIR.")
    if model_digest(task) != described.get("model_digest", model_digest(task)):
        raise UserError(
            "The config.json of the model here is not the run's: copy its folder to this machine, and give it with --hf DIR."
        )
    return task, config


class Worker:
    def __init__(self, task: Task, config: RunConfig, *, tell: Callable[[str], Any] = print) -> None:
        self.tell = tell
        self.inner = SequentialInner(task, config.inner, seed=config.run.seed, device=pick_device(config.run.device))
        self.inner.before_step = self._before_step
        self.keep_state = config.inner.keep_state
        self.stop_requested = ""
        self.rounds = 0
        self._config = config
        self._memory: dict[int, dict[str, Tensor] | None] = {}
        self._member: Member | None = None
        self._began = 0.0

    def measure_pace(self) -> float:
        """Seconds per inner step, after a first round to warm up."""
        per_step = self._config.inner.windows_per_step
        start = [p.detach().clone() for p in self.inner.model.parameters()]
        buffers = [b.detach().clone() for b in self.inner.model.buffers()]
        for steps in (1, PACE_STEPS):
            began = time.perf_counter()
            self.inner.run([Round(0, 0, 0, 0, ((0, steps * per_step),), steps, 0, 0.0, start, buffers)])
            if self.inner.device.type == "cuda":
                torch.cuda.synchronize(self.inner.device)
        return (time.perf_counter() - began) / PACE_STEPS

    def run(self, link: Link, name: str, run: str | None = None, **options: Any) -> str:
        """Until the run ends (the answer says why) or a stop is requested (then what became of the round)."""
        identity = Identity(run, name)
        pace_s = self.measure_pace()
        member = self._member = Member(
            link, name, pace_s=pace_s, returning=identity.machine, stopping=lambda: self.stop_requested, tell=self.tell, **options
        )
        outcome = "nothing was under way"
        try:
            answer = member.join()
            identity.keep(answer["machine"])
            where = f"worker {answer['seat']}" if answer["seat"] is not None else "a spare: all seats are taken"
            self.tell(f"Joined {link.address} as {where}, {pace_s:.3g} s per step.")
            while (taken := member.take(lambda: bool(self.stop_requested))) is not None:
                outcome = self._round(member, taken)
                if self.stop_requested:
                    break
            member.leave(self.stop_requested)
            identity.forget()
            return f"Left the run ({self.stop_requested}): {outcome}."
        except Stopped:
            member.leave(self.stop_requested)
            return f"Left the run ({self.stop_requested}), which is out of reach: it will give what was under way to another."
        except Ended as end:
            member.leave()
            identity.forget()
            return str(end)

    def _round(self, member: Member, taken: Taken) -> str:
        """One round; what became of it."""
        name = f"round {taken.key[1]} of worker {taken.key[0]}"
        self._began = time.perf_counter()
        try:
            contribution = self.inner.run([self._as_round(taken)])[0]
            member.pace_s = (time.perf_counter() - self._began) / taken.inner_steps
            ack = member.hand_in(taken.key, _named(contribution), _report(contribution))
            if self.keep_state and ack["verdict"] != "refused":
                self._memory[taken.key[0]] = contribution.memory
            self.rounds += 1
            return f"{name} was handed in and is {ack['verdict']}"
        except Abandoned as reason:
            member.abandon(str(reason))
            return f"{name} was given back undone"
        except NotHeld as reason:
            self.tell(f"{name} came to nothing: {reason}")
            return f"{name} came to nothing"

    def _before_step(self) -> None:
        if self._member is None:
            return
        if reason := self.stop_requested or self._member.doomed:
            raise Abandoned(reason)
        self._member.steps += 1

    def _as_round(self, taken: Taken) -> Round:
        device = self.inner.device

        def numbered(kind: str) -> list[Tensor]:
            count = sum(name.startswith(f"{kind}.") for name in taken.start)
            return [taken.start[f"{kind}.{i}"].to(device) for i in range(count)]

        worker, index, version = taken.key
        return Round(
            worker, index, version, taken.shard, taken.spans, taken.inner_steps, taken.shard_steps, taken.run_steps,
            numbered("parameter"), numbered("buffer"), self._memory.get(worker),
        )  # fmt: skip


def _named(contribution: Contribution) -> dict[str, Tensor]:
    named = {f"pseudo_gradient.{i}": t for i, t in enumerate(contribution.pseudo_gradient)}
    return named | {f"buffer.{i}": t for i, t in enumerate(contribution.buffers)}


def _report(contribution: Contribution) -> dict[str, Any]:
    return {
        "loss": contribution.loss, "last_loss": contribution.last_loss, "samples": contribution.samples,
        "units": contribution.units,
    }  # fmt: skip
