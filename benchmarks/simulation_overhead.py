"""What the simulation costs over the bare inner loop that does the same steps: paper preset, H = 80. Goal: at most 2 %.

Both take turns step by step in one process, so that the machine's noise meets both alike: before each inner step of the
simulation the same step of a plain torch loop is run on a model of its own. The simulation's time is all the rest: dispatch,
loading, its steps, the pseudo-gradient, the outer step, the tape's line. Evaluations and checkpoints are the user's choice and
left out.

    python benchmarks/simulation_overhead.py [--rounds 6] [--inner-steps 80]
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from heloco.engine.build import build_task
from heloco.engine.local import LocalRun, describe
from heloco.inner import learning_rate
from heloco.run import RunConfig, RunFolder, resolve, with_fields


class BareLoop:
    """The steps of the simulation's rounds as anybody would write them, and how long they took."""

    def __init__(self, run: LocalRun) -> None:
        self.run = run
        self.model = run.task.build_model()
        self.seconds = 0.0
        self._steps: Iterator[None] = iter(())

    def step(self) -> None:
        began = time.perf_counter()
        try:
            next(self._steps)
        except StopIteration:
            self._steps = self._round()
            next(self._steps)
        self.seconds += time.perf_counter() - began

    def _round(self) -> Iterator[None]:
        options, worker_round = self.run.config.inner, self.run.simulation.next_needed()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.lr, weight_decay=options.weight_decay, fused=True)
        [(start, count)] = worker_round.spans
        for h, positions in enumerate(np.arange(start, start + count).reshape(worker_round.inner_steps, options.batch_size)):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(options, worker_round.shard_steps + h)
            loss = self.run.task.loss(self.model, self.run.task.batch(worker_round.shard, positions))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--inner-steps", type=int, default=80)
    arguments = parser.parse_args()
    settings = {"preset": "paper", "vocab_size": 50257, "inner_steps": arguments.inner_steps, "batch_size": 2, "device": "cpu"}
    config = resolve(with_fields(RunConfig(), settings | {"arrivals": arguments.rounds + 1}))
    task, config = build_task(config)
    run = LocalRun(task, config)
    bare = BareLoop(run)
    run.inner.before_step = bare.step
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        run.folder = RunFolder.create(Path(folder) / "run", config, describe(task, config, run.model))
        run.folder.start_writing()
        while not run.simulation.finished:
            bare.seconds, began = 0.0, time.perf_counter()
            while (outcome := run.simulation.advance()) is None:
                run.simulation.give(run.inner.run([run.simulation.next_needed()])[0])
            run.take_in(*outcome)
            rounds.append((time.perf_counter() - began - bare.seconds, bare.seconds))
        run.folder.close()
    rounds = rounds[1:]  # the first warms up
    ours, theirs = (statistics.median(seconds) for seconds in zip(*rounds, strict=True))
    overhead = sum(r[0] for r in rounds) / sum(r[1] for r in rounds) - 1
    print(
        f"{len(rounds)} rounds of {arguments.inner_steps} steps, {sum(p.numel() for p in bare.model.parameters()):,} parameters"
    )
    print(f"medians: simulation {ours:.2f} s, bare loop {theirs:.2f} s a round")
    print("each round: " + ", ".join(f"{a / b - 1:+.1%}" for a, b in rounds))
    print(f"overhead over all rounds: {overhead:+.2%} (goal: at most 2 %)")


if __name__ == "__main__":
    main()
