"""`heloco doctor [ADDRESS]`: facts about this machine, how fast its connection to a run is, and whether it can do its rounds."""

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from heloco.cli.addresses import add_address_flags, link_from_flags, named_address
from heloco.cli.doctor_run import check_task
from heloco.cli.findings import Finding
from heloco.cli.flags import Parser
from heloco.cli.join import add_task_flags
from heloco.errors import UserError

if TYPE_CHECKING:
    from heloco.cluster.protocol.messages import RunInfo

PROBE_BYTES = (1 << 16, 1 << 20, 1 << 23, 1 << 26)
ENOUGH_S = 1.0
"""A probe of at least this duration measures the bandwidth well enough."""
CLOCK_OFF_S = 60.0


def add_doctor_flags(parser: Parser) -> None:
    add_address_flags(parser, "worker")
    add_task_flags(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def doctor(arguments: argparse.Namespace) -> int:
    """Prints the findings. The exit code is 0 if all are good, 2 otherwise."""
    findings = []
    for finding in examine(arguments):
        findings.append(finding)
        if not arguments.json:
            print(f"{'ok ' if finding.is_good else 'BAD'}  {finding.subject:<12} {finding.text}", flush=True)
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings]))
    return 0 if all(finding.is_good for finding in findings) else 2


def examine(arguments: argparse.Namespace) -> Iterator[Finding]:
    yield Finding("this machine", True, describe_machine())
    yield gpu()
    yield kernels()
    if not named_address(arguments):
        return
    from heloco.cluster.protocol.link import LinkDown
    from heloco.cluster.protocol.refusals import Refused

    try:
        link = link_from_flags(arguments, "worker")
        info = link.describe()
    except (UserError, LinkDown, Refused) as error:
        yield Finding("connection", False, str(error))
        return
    yield Finding("connection", True, f"{link.address} answers, and shows the token's certificate")
    if (right := getattr(link, "right", "worker")) != "worker":
        yield Finding("token", True, f"is for a {right}: with it this machine can look at the run, and cannot join it")
    run = run_of(info)
    yield run
    for ask in (clock, latency, bandwidth):
        try:
            yield from ask(link)
        except (LinkDown, Refused) as error:
            yield Finding(ask.__name__, False, str(error))
    link.close()
    if run.is_good:
        yield from check_task(info, arguments)


def describe_machine() -> str:
    import torch

    import heloco

    parts = [f"heloco {heloco.__version__}", f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    for name in ("ray", "httpx", "transformers"):
        try:
            parts.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            parts.append(f"no {name}")
    return ", ".join(parts)


def gpu() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("GPU", True, f"none; {torch.get_num_threads()} CPU threads")
    devices = range(torch.cuda.device_count())
    names = [f"{torch.cuda.get_device_name(i)} ({torch.cuda.mem_get_info(i)[0] / 1e9:.0f} GB free)" for i in devices]
    return Finding("GPU", True, ", ".join(names))


def kernels() -> Finding:
    """Which kernels make the outer steps here. On a CPU they give the same bits, compiled or not."""
    import torch

    from heloco.outer.kernels import name_for
    from heloco.outer.kernels.switch import VARIABLE, compiled_kernels_wanted

    reason = "no C compiler at installation" if compiled_kernels_wanted() else f"{VARIABLE}=portable"
    sentences = {
        "compiled": "compiled",
        "triton": "Triton",
        "portable": f"portable torch operations, which are slower ({reason})",
    }
    devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
    return Finding("kernels", True, ", ".join(f"{device}: {sentences[name_for(device)]}" for device in devices))


def run_of(info: "RunInfo") -> Finding:
    import heloco

    if info.ended is not None:
        return Finding("run", False, f"{info.run} has ended: {info.ended.text}")
    if info.heloco.split(".")[:2] != heloco.__version__.split(".")[:2]:
        return Finding("run", False, f"has heloco {info.heloco}: install the same here")
    return Finding("run", True, f"{info.run}, heloco {info.heloco}")


def clock(link: Any) -> Iterator[Finding]:
    if hasattr(link, "clock"):
        began = time.time()
        off_s = link.clock() - (began + time.time()) / 2
        text = f"{abs(off_s):.1f} s {'behind' if off_s > 0 else 'ahead of'} the synchronizer's"
        yield Finding("clock", abs(off_s) < CLOCK_OFF_S, text if abs(off_s) >= 0.1 else "the same as the synchronizer's")


def latency(link: Any) -> Iterator[Finding]:
    times = []
    for _try in range(5):
        began = time.perf_counter()
        link.describe()
        times.append(time.perf_counter() - began)
    yield Finding("latency", True, f"{sorted(times)[2] * 1e3:.1f} ms for a request and its answer")


def bandwidth(link: Any) -> Iterator[Finding]:
    for name, probe in (("download", getattr(link, "probe_down", None)), ("upload", getattr(link, "probe_up", None))):
        if probe is not None:
            rate = _rate(probe)
            times = f"a model of 15M parameters takes {60e6 / rate:.1f} s, one of 124M {496e6 / rate:.1f} s"
            yield Finding(name, True, f"{rate / 1e6:.1f} MB/s: {times}")


def _rate(probe: Callable[[int], float]) -> float:
    """Bytes per second, measured with growing probes."""
    for size in PROBE_BYTES:
        seconds = probe(size)
        if seconds > ENOUGH_S:
            break
    return size / seconds
