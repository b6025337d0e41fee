"""Wire formats: how fast blocks are encoded and decoded on one core, and what codes cost the synchronizer.

    python benchmarks/wire.py [--parameters 30000000] [--out FILE.json]

Encoding and decoding are measured in GB/s of float32, next to a copy of the same numbers. Checking a contribution in each format
and an outer step of HeLoCo with it are measured next to those in float32, both from mapped files, as the synchronizer reads them.
With `--device cuda` encoding and decoding are measured on a GPU. Medians, formats taken in turn.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heloco.disk import release_for
from heloco.finite import all_finite
from heloco.methods import METHODS
from heloco.outer.kernels.windows import parts
from heloco.wire import blocks
from heloco.wire.encoder import check_scales
from heloco.wire.formats import FORMATS, Rounding, decode_block, find_format, layout_of, name_parts, read_block
from heloco.wire.layout import map_tensors, write

NAMES = ("fp32", "bf16", "int8", "int4", "e3m0")
WIDTH = 768


def seconds(work: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    began_s = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began_s


def measure_codes(x: Tensor, repeats: int) -> dict[str, dict[str, float]]:
    """GB/s of float32 in and out, on one core or on the GPU."""
    device = x.device.type
    times: dict[str, dict[str, list[float]]] = {}
    room, residual = torch.empty_like(x), torch.zeros_like(x)

    def note(name: str, kind: str, work: Callable[[], Any]) -> None:
        times.setdefault(name, {}).setdefault(kind, []).append(seconds(work, device))

    for repeat in range(repeats + 1):
        note("copy", "copy", lambda: room.copy_(x))
        for name in NAMES[2:]:
            format = find_format(name)
            codes = format.encode(x)
            block = format.block(codes, x.shape)
            note(name, "encode", lambda format=format: format.encode(x))
            note(name, "encode_with_feedback", lambda format=format: format.encode(x, Rounding(residual)))
            note(name, "decode", lambda block=block: block.read(0, room.view(-1)))
        if repeat == 0:
            times.clear()  # warming up
    rates = {name: {kind: x.nbytes / statistics.median(t) / 1e9 for kind, t in kinds.items()} for name, kinds in times.items()}
    if device == "cuda":  # as shares of the copy's traffic: what is read and written counts
        copied = 2 * rates["copy"]["copy"]
        for name in NAMES[2:]:
            traffic = 1 + FORMATS[name].bits / 32
            rates[name] |= {f"{kind}_of_copy": rates[name][kind] * traffic / copied for kind in ("encode", "decode")}
    return rates


def measure_steps(parameters: int, repeats: int) -> dict[str, float]:
    """Seconds of checking a contribution and of an outer step with it, by format."""
    shapes = [(WIDTH * 4, WIDTH)] * max(1, parameters // (4 * WIDTH * WIDTH)) + [(WIDTH,)] * 8
    draw = torch.Generator().manual_seed(0)
    deltas = [torch.randn(shape, generator=draw) * 1e-3 for shape in shapes]
    outer = METHODS["heloco-ramp"].build([torch.randn(shape, generator=draw) for shape in shapes], workers=4)
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / name for name in NAMES}
        layouts = {name: layout_of(find_format(name), blocks.PSEUDO_GRADIENT, deltas) for name in NAMES}
        for name, path in files.items():
            named: dict[str, Tensor] = {}
            for index, delta in enumerate(deltas):
                named |= name_parts(blocks.PSEUDO_GRADIENT, index, find_format(name).encode(delta))
            with path.open("wb", buffering=0) as file:
                write(file, layouts[name], named)
        for repeat in range(repeats + 1):
            for name, path in files.items():
                arrived = map_tensors(path, layouts[name])
                pseudo_gradients = [
                    read_block(find_format(name), blocks.PSEUDO_GRADIENT, i, arrived, shape) for i, shape in enumerate(shapes)
                ]
                release = release_for(layouts[name].size)

                def step(pseudo_gradients: Any = pseudo_gradients, release: Any = release, arrived: Any = arrived) -> None:
                    assert all_finite(parts(blocks.blocks_of(blocks.PSEUDO_GRADIENT, arrived), release))
                    assert check_scales(t for name, t in arrived.items() if blocks.is_of_kind(blocks.SCALE, name)) is None
                    outer.step(weight=0.1, pseudo_gradients=pseudo_gradients, scale=lambda _: (), release=release)

                spent_s = seconds(step, "cpu")
                if repeat:
                    times[name].append(spent_s)
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=30_000_000)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = 4096 if chosen.device == "cpu" else 65536
    x = torch.randn(rows, 4096, generator=torch.Generator().manual_seed(1)).to(chosen.device)
    numbers: dict[str, Any] = {"device": chosen.device, "gb_per_s": measure_codes(x, chosen.repeats)}
    assert torch.isfinite(decode_block(find_format("int4").block(find_format("int4").encode(x), x.shape), x.device)).all()
    torch.set_num_threads(threads)
    if chosen.device == "cpu":
        steps = measure_steps(chosen.parameters, chosen.repeats)
        numbers |= {"step_s": steps, "step_of_fp32": {name: value / steps["fp32"] for name, value in steps.items()}}
        numbers |= {"parameters": chosen.parameters, "threads": threads}
    for name, rates in numbers["gb_per_s"].items():
        print(f"{name:<6} " + "  ".join(f"{kind} {rate:.2f}" for kind, rate in rates.items()))
    for name, ratio in numbers.get("step_of_fp32", {}).items():
        print(f"{name:<6} check and outer step {numbers['step_s'][name] * 1e3:.0f} ms, {ratio:.2f} x float32")
    if chosen.out:
        chosen.out.write_text(json.dumps(numbers, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
