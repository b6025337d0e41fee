"""What the simulation costs over the bare inner loop that does the same steps: paper preset, H = 80. Goal: at most 2 %.

Both sides run rounds in turn in one process, so that the machine's noise meets both: a round of the simulation (dispatch, load,
80 steps, pseudo-gradient, receive, outer step, tape line), then the same 80 steps as a plain torch loop. Evaluations and
checkpoints are left out: they are the user's choice. Median of the pairwise ratios.

    python benchmarks/simulation_overhead.py [--rounds 12] [--inner-steps 80]
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from heloco.engine.build import build_task
from heloco.engine.local import LocalRun, describe
from heloco.inner import learning_rate
from heloco.run import RunConfig, RunFolder, resolve, with_fields
from heloco.synchronizer import Round


def bare_round(run: LocalRun, model: torch.nn.Module, handed: Round) -> None:
    """The steps of a round as anybody would write them."""
    options = run.config.inner
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=options.weight_decay, fused=True)
    [(start, count)] = handed.spans
    for h, positions in enumerate(np.arange(start, start + count).reshape(handed.inner_steps, options.batch_size)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(options, handed.shard_steps + h)
        loss = run.task.loss(model, run.task.batch(handed.shard, positions))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--inner-steps", type=int, default=80)
    asked = parser.parse_args()
    settings = {"preset": "paper", "vocab_size": 50257, "inner_steps": asked.inner_steps, "batch_size": 2, "device": "cpu"}
    config = resolve(with_fields(RunConfig(), settings | {"arrivals": asked.rounds + 1}))
    task, config = build_task(config)
    run = LocalRun(task, config)
    model = task.build_model()
    with tempfile.TemporaryDirectory() as folder:
        run.folder = RunFolder.create(Path(folder) / "run", config, describe(task, config, run.model))
        run.folder.start_writing(0, 0)
        pairs = []
        while not run.simulation.finished:
            began = time.perf_counter()
            while (arrived := run.simulation.advance()) is None:
                handed = run.simulation.next_needed()
                run.simulation.give(run.inner.run([handed])[0])
            run._take_in(*arrived)
            middle = time.perf_counter()
            bare_round(run, model, handed)
            pairs.append((middle - began, time.perf_counter() - middle))
        run.folder.close()
    pairs = pairs[1:]  # the first warms up
    ratio = statistics.median(ours / bare for ours, bare in pairs)
    print(f"{len(pairs)} rounds of {asked.inner_steps} steps, {sum(p.numel() for p in model.parameters()):,} parameters")
    print(
        f"simulation {statistics.median(p[0] for p in pairs):.2f} s, bare loop {statistics.median(p[1] for p in pairs):.2f} s a round"
    )
    print(f"overhead, median of pairwise ratios: {(ratio - 1):+.2%} (goal: at most 2 %)")


if __name__ == "__main__":
    main()
