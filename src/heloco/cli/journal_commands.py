"""`heloco replay` and `heloco rollback`: what can be done with the journal of a real run."""

import argparse
import json
from pathlib import Path

from heloco.cli.flags import Parser
from heloco.errors import UserError


def add_replay_flags(parser: Parser) -> None:
    parser.add_argument("folder", type=Path, metavar="RUN")
    parser.add_argument("--data", metavar="DIR", help="where the run's data is now, if it was moved")
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_rollback_flags(parser: Parser) -> None:
    parser.add_argument("folder", type=Path, metavar="RUN")
    parser.add_argument("--to", metavar="ARRIVAL", help="the arrival to return to [the last one that is whole]")
    parser.add_argument(
        "--without", metavar="MACHINE", action="append", default=[],
        help="keep what came after --to from other machines, and leave out and bar this one; can be given several times",
    )  # fmt: skip
    parser.add_argument("--data", metavar="DIR", help="where the run's data is now, if it was moved")


def rollback(arguments: argparse.Namespace) -> int:
    from heloco.cli.main import rebuild_task
    from heloco.cluster.server.open_run import rebuild
    from heloco.cluster.server.rollback import Rollback
    from heloco.run import RunFolder

    if arguments.to is not None and not arguments.to.isdigit():
        raise UserError(f"to cannot be {arguments.to!r}: give the number of an arrival.")
    if arguments.without and arguments.to is None:
        raise UserError("--without leaves out what came after an arrival: say after which one with --to.")
    folder = RunFolder.open(arguments.folder)
    config = folder.config()
    task = None if config.input.task == "external" else rebuild_task(config, arguments.data)
    to = None if arguments.to is None else int(arguments.to)
    result = Rollback(folder, to=to, without=frozenset(arguments.without)).run(lambda new: rebuild(new, folder, task))
    if arguments.without:
        left_out = f"{result.left_out} contributions of {', '.join(result.machines)} were left out"
        print(f"{arguments.folder} stands at arrival {result.arrivals} now: {left_out}.")
    else:
        print(f"{arguments.folder} stands at arrival {result.arrivals} now.")
    print(f"As it was before, it is in {result.old_folder}. `heloco serve {arguments.folder}` goes on.")
    return 0


def replay(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from heloco.cli.main import rebuild_task
    from heloco.cluster.server.replay import replay as make_again
    from heloco.run import RunFolder

    folder = RunFolder.open(arguments.folder)
    config = folder.config()
    task = None if config.input.task == "external" else rebuild_task(config, arguments.data)
    replayed = make_again(folder, task)
    if arguments.json:
        print(json.dumps(asdict(replayed)))
    else:
        since = f" after arrival {replayed.begun_at}" if replayed.begun_at else ""
        print(
            f"{replayed.lines} lines of the tape{since} made again from the journal; the parameters' digest is {replayed.digest}."
        )
        print("All are the same, to the bit." if replayed.difference is None else f"They differ: {replayed.difference}.")
    return 0 if replayed.difference is None else 1
