"""`heloco study`: runs the paper's experiments, and shows their results."""

import argparse
import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from heloco.cli.flags import Parser
from heloco.errors import UserError, nearest

if TYPE_CHECKING:
    from heloco.study.output import Folder
    from heloco.study.plan import Plan
    from heloco.study.spec import Study


def add_study_flags(parser: Parser) -> None:
    def add(flag: str, metavar: str, about: str, **options: Any) -> None:
        parser.add_argument(flag, metavar=metavar, help=about, **options)

    parser.add_argument("study", nargs="?", metavar="STUDY", help="which one, by name, or the path of a TOML file of yours")
    parser.add_argument("--list", action="store_true", help="what there is, how many runs each has and what they cost")
    add("--data", "DIR", "a folder of text with a file or sub-folder per language, or hf:DATASET [small: builtin]")
    add("--tokenizer", "TEXT", "bytes, gpt2, or the path of a tokenizer.json [gpt2; small: bytes]")
    add("--languages", "X,X,…", "which sources of the data, in the workers' order [all]")
    add("--seeds", "N", "how many seeds [as the study says: 3, and more for some rows]")
    add("--rows", "X;X;…", 'only these rows: "1,6,6,6,6;1,1,1,1,1", or the flag repeated [all]', action="append")
    add("--methods", "X,X,…", "only these methods [all]", action="append")
    add("--out", "DIR", "where results and finished runs are kept [results; small: results-small]", type=Path)
    add("--scale", "{paper,small}", "the paper's size, or small: minutes on two CPU cores [paper]", default="paper")
    add("--device", "TEXT", "cpu, cuda, or auto: a GPU if there is one [auto]", default="auto")


def study(arguments: argparse.Namespace) -> int:
    from heloco.engine.build import pick_device
    from heloco.report.fitted_table import FittedTable
    from heloco.report.table_text import wide_console
    from heloco.study.display import list_table
    from heloco.study.output import Folder
    from heloco.study.spec import SCALES, find_study

    if arguments.list:
        wide_console().print(FittedTable(list_table()))
        return 0
    if arguments.study is None:
        raise UserError("Name a study, e.g. `heloco study table1 --scale small`; `heloco study --list` describes them.")
    selected_study = find_study(arguments.study)
    if arguments.scale not in SCALES:
        raise UserError(f"There is no scale {arguments.scale!r}; {nearest(arguments.scale, SCALES)}")
    if arguments.data is None and arguments.scale == "paper":
        raise UserError(
            "At the paper's scale a study needs text: give --data DIR, a folder with a file or sub-folder per language. "
            "`--scale small` needs none."
        )
    pick_device(arguments.device)  # a missing device is reported before the data is prepared
    folder = Folder(arguments.out or Path("results" if arguments.scale == "paper" else "results-small"), selected_study.name)
    folder.check_ours()
    plan = plan_of(arguments, selected_study)
    folder.check_same(plan)
    return carry_out(arguments, plan, folder)


def plan_of(arguments: argparse.Namespace, selected_study: "Study") -> "Plan":
    from heloco.corpus import rich_progress
    from heloco.engine.build import build_task
    from heloco.study.plan import make_plan

    names = ("data", "tokenizer", "languages", "device")
    settings = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    with rich_progress() as progress:
        return make_plan(
            selected_study,
            scale=arguments.scale,
            seeds=None if arguments.seeds is None else whole_number("seeds", arguments.seeds),
            rows=split_names(arguments.rows, ";"),
            methods=split_names(arguments.methods, ","),
            settings=settings,
            build_task=lambda config: build_task(config, progress),
        )


def whole_number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{name} cannot be {text!r}: give a whole number.") from None


def split_names(texts: list[str] | None, separator: str) -> list[str]:
    return [name.strip() for text in texts or () for name in text.split(separator)]


def carry_out(arguments: argparse.Namespace, plan: "Plan", folder: "Folder") -> int:
    """Makes the missing runs, to the end or to a signal. Writes and prints the results."""
    import torch

    from heloco.engine.build import pick_device
    from heloco.engine.local import StopRequested
    from heloco.report.charts.drawing import available
    from heloco.report.table_text import in_terminal, wide_console
    from heloco.study.display import StudyDisplay
    from heloco.study.output import PAGE, write_results
    from heloco.study.plan import carry_out as run_all

    device = pick_device(arguments.device)
    missing_runs = plan.find_missing(folder.store)
    if missing_runs and device.type == "cpu" and arguments.scale == "paper" and arguments.device == "auto":
        refuse_the_cpu(arguments, plan, folder)
    if device.type == "cpu" and arguments.scale == "small":
        torch.set_num_threads(1)  # threads would mostly wait for each other, because the matrices are small
    console = wide_console()
    finished = len(plan.runs) - len(missing_runs)
    print(f"{plan.study.title}: {len(plan.runs)} runs, {finished} of them there already, on {device.type}.", flush=True)
    signals: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        signals.append(number)

    old_handlers = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with StudyDisplay(len(plan.runs), finished, console) as display:
            run_all(plan, folder.store, device=device, display=display, is_stopping=lambda: bool(signals))
    except StopRequested:
        finished = len(plan.runs) - len(plan.find_missing(folder.store))
        print(
            f"Stopped: {finished} of {len(plan.runs)} runs are finished and kept in {folder.store.folder}. "
            "The same command goes on."
        )
        return 128 + signals[0]
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
    for table in write_results(plan, folder):
        console.print(in_terminal(table))
    if not available():
        print('Without matplotlib there are no figures: pip install "heloco[figures]", then give the same command again.')
    print(f"The study's folder: {folder.path}. All on one page: {folder.path / PAGE}")
    return 0


def refuse_the_cpu(arguments: argparse.Namespace, plan: "Plan", folder: "Folder") -> None:
    from heloco.study.cost import hours_here

    missing_runs = plan.find_missing(folder.store)
    hours = hours_here(missing_runs, "cpu")
    hours_text = f"{hours:,.0f}" if hours >= 10 else f"{hours:.1f}"
    raise UserError(
        f"There is no GPU here, and on this CPU the {len(missing_runs)} missing runs of {plan.study.name} would take about "
        f"{hours_text} hours: `heloco study {arguments.study} --scale small` takes minutes, and --device cpu "
        "goes ahead all the same."
    )
