"""`heloco join` and `heloco status`."""

import argparse
import json
import mmap
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from heloco.cli.addresses import add_address_flags, ask_once, link_from_flags, named_address
from heloco.cli.flags import Parser
from heloco.cli.warm_restart import CAN_RESTART, WarmRestart, Wording, import_ahead
from heloco.errors import UserError

if TYPE_CHECKING:
    from heloco.cluster.client.worker import Worker
    from heloco.cluster.protocol.link import Link
    from heloco.report.run_state import RunState


def add_join_flags(parser: Parser) -> None:
    add_address_flags(parser, "worker")
    add_task_flags(parser)
    parser.add_argument(
        "--name", metavar="TEXT", default=socket.gethostname(), help="what this machine is called [its host name]"
    )
    parser.add_argument("--evaluate", action="store_true", help="also evaluate the run's model here, between rounds")
    parser.add_argument("--patience", metavar="SECONDS", default="3600", help="how long to try to reach the run again [3600]")

    parser.add_argument("--end-with-stdin", action="store_true", help=argparse.SUPPRESS)


def add_task_flags(parser: Parser) -> None:
    """Where this machine has what the run's task is built from."""
    parser.add_argument("--data", metavar="DIR", help="where the run's text is on this machine [as in the run's config]")
    parser.add_argument(
        "--tokenizer", metavar="FILE", help="where the run's tokenizer is on this machine [as in the run's config]"
    )
    parser.add_argument("--hf", metavar="DIR", help="where the run's Hugging Face model is here [as in the run's config]")
    parser.add_argument("--device", metavar="TEXT", default="auto", help="cpu, cuda, cuda:1, or auto [auto]")


def add_status_flags(parser: Parser) -> None:
    add_address_flags(parser, "viewer")
    parser.add_argument("--json", action="store_true", help="print JSON")


TRAINING_MODULES = (
    "heloco.cluster.client.worker", "heloco.cluster.gateway.https_link", "heloco.engine.build", "heloco.task.language",
    "heloco.task.hf", "heloco.cli.join_view", "httpx", "encodings.idna", "numpy.ma", "numpy.random",
)  # fmt: skip
"""What training over HTTPS imports."""
TRAINING = Wording("The worker", "it is started again, and comes back as the same machine", "a round")


def join(arguments: argparse.Namespace) -> int:
    """Trains in a child, which is started again if it is killed: for example because the machine's memory ran out."""
    if not arguments.is_program or not CAN_RESTART or named_address(arguments).startswith("ray:"):
        return train(arguments)
    import_ahead(TRAINING_MODULES)
    rounds = mmap.mmap(-1, mmap.PAGESIZE)  # shared with the children

    def count() -> None:
        struct.pack_into("q", rounds, 0, rounds_done() + 1)

    def rounds_done() -> int:
        return int(struct.unpack_from("q", rounds, 0)[0])

    return WarmRestart(lambda is_restart: train(arguments, count, is_restart), rounds_done, TRAINING).run()


def train(arguments: argparse.Namespace, count: Callable[[], None] = lambda: None, is_restart: bool = False) -> int:
    """Joins the run and trains until it ends. `count` is called after each round. `is_restart`: this machine was in the run, and
    waits for it if it is out of reach."""
    if arguments.end_with_stdin:
        threading.Thread(target=end_with_stdin, daemon=True).start()
    import torch

    from heloco.cli.join_view import JoinView
    from heloco.cli.main import show_preparation
    from heloco.cluster.client.run_client import RunClient
    from heloco.cluster.client.worker import Worker, task_of

    try:
        patience_s = float(arguments.patience)
    except ValueError:
        raise UserError(f"patience cannot be {arguments.patience!r}: give seconds.") from None
    if named_address(arguments).startswith("ray:"):
        print("Connecting to Ray …", flush=True)
    link = link_from_flags(arguments, "worker")
    info = ask_once(RunClient(link, arguments.name, patience_s=patience_s).describe if is_restart else link.describe)
    if info.ended is not None:
        raise UserError(f"The run has ended: {info.ended.text}")
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    with show_preparation() as progress:
        task, config = task_of(
            info, data=arguments.data, tokenizer=arguments.tokenizer, hf=arguments.hf, device=arguments.device, progress=progress
        )
    view = JoinView(arguments.name)

    def after_round() -> None:
        count()
        view.note_round()

    tell = lambda text: print(text, flush=True)  # noqa: E731
    worker = Worker(task, config, tell=tell, after_round=after_round, before_request=view.note_request)
    with view.display(worker.activity):
        end = work(worker, link, arguments, info.run, patience_s)
    print(end, flush=True)
    return 0


def work(worker: "Worker", link: "Link", arguments: argparse.Namespace, run: str, patience_s: float) -> str:
    """Works until the run ends or a signal comes. Returns a sentence: why it ended."""
    from heloco.cluster.protocol.refusals import Refused

    def stop(number: int, _: FrameType | None) -> None:
        if worker.stop_requested is not None:  # second signal: stop at once
            raise KeyboardInterrupt
        worker.stop_requested = f"stopped by {signal.Signals(number).name}"

    old_handlers = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return worker.run(link, arguments.name, run, patience_s=patience_s, evaluates=arguments.evaluate)
    except Refused as error:
        raise UserError(error.text) from error
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


def end_with_stdin() -> None:
    """Ends this process at the end of its standard input: the `heloco serve` that started it has died."""
    os.read(0, 1)
    os._exit(1)


def status(arguments: argparse.Namespace) -> int:
    from heloco.cli.prose import wrap_line
    from heloco.cli.serve_view import machines_table, status_lines
    from heloco.cluster.protocol.messages import to_plain
    from heloco.report.table_text import wide_console

    if not arguments.json and (state := state_in_folder(named_address(arguments))) is not None:
        print_state(state)
        return 0
    run_status = ask_once(link_from_flags(arguments, "viewer").status)
    if arguments.json:
        print(json.dumps(to_plain(run_status)))
        return 0
    for line in status_lines(run_status):
        print(wrap_line(line))
    wide_console().print(machines_table(run_status))
    return 0


def state_in_folder(address: str) -> "RunState | None":
    """The state of a run that nobody can ask, as its folder tells it: a simulation, or a run that is not served at the moment.
    None if the address is no run's folder, or if the run there can be asked."""
    from heloco.cluster.server.process import ListenConfig
    from heloco.records.folder_lock import is_locked
    from heloco.records.run_files import CONFIG
    from heloco.report.run_reader import Run
    from heloco.report.run_state import StateWatch

    folder = Path(address)
    if not address or address.startswith(("https:", "ray:")) or not (folder / CONFIG).is_file():
        return None
    if is_locked(folder) is not False and ListenConfig.load(folder) is not None:
        return None
    return StateWatch(Run(folder)).look()


def print_state(state: "RunState") -> None:
    """Prints the state of a run that was read from its folder."""
    from heloco.cli.prose import wrap_line
    from heloco.report.fitted_table import FittedTable
    from heloco.report.state_terminal import machine_states_table, state_line
    from heloco.report.table_text import wide_console

    print(wrap_line(f"{state.name}: {state_line(state)}."))
    if state.goes_on:
        print(f"`{state.goes_on}` goes on with it.")
    if state.machines:
        wide_console().print(FittedTable(machine_states_table(state)))
