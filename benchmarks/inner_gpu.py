"""Inner steps of one model beside the best plain loop: tokens per second on a GPU.

    PYTHONPATH=src python benchmarks/inner_gpu.py [--cases 124m:16 124m:64 llama:32 1.3b:4:recompute] [--plain] [--out FILE.json]

A case is a model, the samples of a step, and whether activations are recomputed. Ours: whole rounds of `SequentialInner`, as
`heloco join` and `heloco.simulate` compute them, with the loading of the start and Δ. Plain: a loop over the same batches, bf16
under autocast, fused AdamW, once as it is (eager) and once with model and loss compiled in one piece. All are in this process and
take turns. `llama` is Hugging Face's Llama with about 160M parameters. MFU counts 6 N FLOP a token and the attention's products
and is a share of the dense bf16 peak of an H100 or H200.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from heloco.corpus.prepare import Corpus, Source
from heloco.corpus.sharding import split
from heloco.inner import InnerOptions, SequentialInner
from heloco.rounds import Round
from heloco.task.gpt import PRESETS, preset
from heloco.task.hf import logits_of, transformers
from heloco.task.language import Architecture, LanguageTask

PEAK_FLOPS = 989e12
TURNS, VOCAB = 3, 50257


class Llama:
    """The language model of Hugging Face's config, with parameters drawn at random."""

    context, vocab_size = 1024, VOCAB

    def build(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        library = transformers()
        config = library.LlamaConfig(
            vocab_size=VOCAB, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
            max_position_embeddings=1024, tie_word_embeddings=False, use_cache=False,
        )  # fmt: skip
        model: nn.Module = library.LlamaForCausalLM(config)
        return model


def make_task(model: Architecture, tokens: int = 2_000_000) -> LanguageTask:
    """A task whose tokens are drawn by Zipf's law."""
    draw = np.random.default_rng(0)
    weights = 1 / np.arange(1, model.vocab_size + 1)
    text = draw.choice(model.vocab_size, tokens, p=weights / weights.sum()).astype(np.uint16)
    corpus = Corpus((Source("zipf", text, text[:20_000], tokens, 80_000, 1, 1),), "none", model.vocab_size, 0, "zipf")
    shards = split(corpus, scheme="source", context=model.context)
    return LanguageTask(corpus, shards, model, context=model.context, seed=0, eval_windows=4)


def our_loop(task: LanguageTask, options: InnerOptions, device: torch.device, steps: int) -> Callable[[], None]:
    inner = SequentialInner(task, options, seed=0, device=device)
    start = [p.detach().clone() for p in inner.model.parameters()]
    buffers = [b.detach().clone() for b in inner.model.buffers()]
    spans = ((0, steps * options.windows_per_step),)

    def run() -> None:
        inner.run([Round(0, 0, 0, 0, spans, steps, 0, 0.0, start, buffers)])

    return run


def plain_loop(
    task: LanguageTask, options: InnerOptions, device: torch.device, steps: int, *, is_compiled: bool
) -> Callable[[], None]:
    model = task.build_model().to(device)

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits_of(model(tokens[:, :-1])).flatten(0, 1), tokens[:, 1:].flatten())

    loss: Callable[[torch.Tensor], torch.Tensor] = torch.compile(loss_of) if is_compiled else loss_of
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, fused=True)
    count = options.windows_per_step
    batches = [task.batch(0, np.arange(i * count, (i + 1) * count)).to(device) for i in range(steps)]

    def run() -> None:
        for batch in batches:
            with torch.autocast(device.type, torch.bfloat16):
                value = loss(batch)
            value.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return run


def seconds(work: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def measure(case: str, chosen: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    name, batch, *flags = case.split(":")
    architecture: Architecture = Llama() if name == "llama" else preset(name, vocab_size=chosen.vocab or PRESETS[name].vocab_size)
    task = make_task(architecture)
    options = InnerOptions(batch_size=int(batch), lr=3e-4, precision="bf16", recompute="recompute" in flags)
    model = task.build_model()
    numel, layers = sum(p.numel() for p in model.parameters()), getattr(getattr(model, "config", None), "layers", 12)
    width = getattr(architecture, "width", 768)
    del model
    tokens = int(batch) * task.context
    result: dict[str, Any] = {"case": case, "parameters": numel, "tokens_per_step": tokens}
    makers = {"ours": lambda: our_loop(task, options, device, chosen.steps)}
    if chosen.plain:
        for is_compiled in (False, True):
            maker = lambda c=is_compiled: plain_loop(task, options, device, chosen.steps, is_compiled=c)  # noqa: E731
            makers["compiled" if is_compiled else "eager"] = maker
    loops = {}
    for kind, make in makers.items():
        loops[kind] = make()
        result[f"{kind}_first_s"] = round(seconds(loops[kind], device), 2)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times: dict[str, list[float]] = {kind: [] for kind in loops}
    for _ in range(TURNS):
        for kind, loop in loops.items():
            times[kind].append(seconds(loop, device))
    flop = 6 * numel + 6 * layers * width * task.context  # of a token; the attention's products see half of the context
    for kind, each in times.items():
        rate = tokens * chosen.steps / statistics.median(each)
        result[f"{kind}_tokens_per_s"], result[f"{kind}_ms"] = round(rate), round(1000 * tokens / rate, 3)
        result[f"{kind}_mfu"] = round(rate * flop / PEAK_FLOPS, 4)
    if device.type == "cuda":
        result["memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["124m:16", "124m:64", "llama:32", "1.3b:8:recompute"])
    parser.add_argument("--plain", action="store_true", help="measure the plain loops too")
    parser.add_argument("--steps", type=int, default=20, help="of a round")
    parser.add_argument("--vocab", type=int, default=0, help="of a TinyGPT")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    device = torch.device(chosen.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("This benchmark measures a GPU, and there is none here.", file=sys.stderr)
        return 2
    results = []
    for case in chosen.cases:
        results.append(measure(case, chosen, device))
        print(json.dumps(results[-1]), flush=True)
        torch.compiler.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if chosen.out:
        device_name = torch.cuda.get_device_name() if device.type == "cuda" else device.type
        numbers = {"device": device_name, "torch": torch.__version__, "command": " ".join(sys.argv), "cases": results}
        chosen.out.write_text(json.dumps(numbers, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
