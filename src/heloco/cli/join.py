"""`heloco join`, `status`, `stop`, `doctor`, `replay`: a real run from the side of a machine, and of whoever looks after it."""

import argparse
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

from heloco.cli.flags import Parser
from heloco.errors import UserError

if TYPE_CHECKING:
    from heloco.engine.cluster.link import Link


T = TypeVar("T")
IN_A_PIPE = 160
"""Columns where nobody says how many there are."""


def add_address_flags(made: Parser) -> None:
    made.add_argument("address", metavar="ADDRESS", nargs="?", help="https://HOST:PORT, or ray:… [HELOCO_ADDRESS]")
    made.add_argument("--address", metavar="ADDRESS", dest="address_flag", help=argparse.SUPPRESS)
    made.add_argument("--token", metavar="TEXT", help="what `heloco serve` printed [HELOCO_TOKEN]")


def add_join_flags(made: Parser) -> None:
    add_address_flags(made)
    made.add_argument("--data", metavar="DIR", help="where the run's text is on this machine [as in the run's config]")
    made.add_argument("--tokenizer", metavar="FILE", help="where the run's tokenizer is on this machine [as in the run's config]")
    made.add_argument("--hf", metavar="DIR", help="where the run's Hugging Face model is here [as in the run's config]")
    made.add_argument("--device", metavar="TEXT", default="auto", help="cpu, cuda, cuda:1, or auto [auto]")
    made.add_argument("--name", metavar="TEXT", default=socket.gethostname(), help="what this machine is called [its host name]")
    made.add_argument("--patience", metavar="SECONDS", default="3600", help="how long to try when the run is out of reach [3600]")


def add_status_flags(made: Parser) -> None:
    add_address_flags(made)
    made.add_argument("--json", action="store_true", help="print JSON")


def address_of(parsed: argparse.Namespace) -> str:
    return parsed.address or parsed.address_flag or os.environ.get("HELOCO_ADDRESS") or ""


def linked(parsed: argparse.Namespace) -> "Link":
    from heloco.engine.cluster.connect import connect

    address = address_of(parsed)
    if not address:
        raise UserError("There is no address: give the one that `heloco serve` printed, or set HELOCO_ADDRESS.")
    return connect(address.rstrip("/"), parsed.token)


def answered(ask: Callable[[], T]) -> T:
    """One request, for commands that do not wait for a run to come back."""
    from heloco.engine.cluster.link import Denied, LinkDown

    try:
        return ask()
    except LinkDown as error:
        raise UserError(f"{error} Check the address, and that `heloco serve` runs there.") from error
    except Denied as error:
        raise UserError(str(error)) from error


def join(parsed: argparse.Namespace) -> int:
    import torch

    from heloco.cli.main import preparing
    from heloco.engine.cluster.link import Denied
    from heloco.engine.cluster.worker import Worker, task_of

    try:
        patience_s = float(parsed.patience)
    except ValueError:
        raise UserError(f"patience cannot be {parsed.patience!r}: give seconds.") from None
    link = linked(parsed)
    described = answered(link.describe)
    if described["ended"]:
        raise UserError(f"The run has ended: {described['ended']}")
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    with preparing() as progress:
        task, config = task_of(
            described, data=parsed.data, tokenizer=parsed.tokenizer, hf=parsed.hf, device=parsed.device, progress=progress
        )
    worker = Worker(task, config, tell=lambda text: print(text, flush=True))

    def stop(number: int, _: FrameType | None) -> None:
        if worker.stop_requested:  # asked twice: at once
            raise KeyboardInterrupt
        worker.stop_requested = f"stopped by {signal.Signals(number).name}"

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        print(worker.run(link, parsed.name, described["run"], patience_s=patience_s), flush=True)
    except Denied as error:
        raise UserError(str(error)) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def status(parsed: argparse.Namespace) -> int:
    from rich.console import Console

    from heloco.cli.serve_view import machines_table, status_lines

    found = answered(linked(parsed).status)
    if parsed.json:
        print(json.dumps(found))
        return 0
    for line in status_lines(found):
        print(line)
    Console(width=None if sys.stdout.isatty() else IN_A_PIPE).print(machines_table(found))
    return 0


def stop(parsed: argparse.Namespace) -> int:
    answered(lambda: linked(parsed).stop("stopped by `heloco stop`"))
    print("The run is stopped and saved: `heloco serve` with its folder goes on.")
    return 0


# ---- replay


def add_replay_flags(made: Parser) -> None:
    made.add_argument("folder", type=Path, metavar="RUN")
    made.add_argument("--data", metavar="DIR", help="where the run's data is now, if it was moved")
    made.add_argument("--json", action="store_true", help="print JSON")


def replay(parsed: argparse.Namespace) -> int:
    from dataclasses import asdict

    from heloco.cli.main import rebuild_task
    from heloco.engine.cluster.replay import replay as again
    from heloco.run import RunFolder

    folder = RunFolder.open(parsed.folder)
    config = folder.config()
    task = None if config.data.task == "external" else rebuild_task(config, parsed.data)
    found = again(folder, task)
    if parsed.json:
        print(json.dumps(asdict(found)))
    else:
        since = f" behind arrival {found.begun_at}" if found.begun_at else ""
        print(f"{found.lines} lines of the tape{since} made again from the journal; the parameters' digest is {found.digest}.")
        print(f"They differ: {found.difference}." if found.difference else "All are the same, to the bit.")
    return 1 if found.difference else 0
