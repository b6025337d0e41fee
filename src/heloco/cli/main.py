"""The `heloco` command and its subcommands."""

import argparse
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import heloco
from heloco.cli import admin
from heloco.cli.doctor import add_doctor_flags, doctor
from heloco.cli.flags import Parser, add_config_flags, fail, given_fields, take_plugins, warn_of_rates
from heloco.cli.join import add_join_flags, add_status_flags, join, status
from heloco.cli.journal_commands import add_replay_flags, add_rollback_flags, replay, rollback
from heloco.cli.methods_command import add_methods_flags, methods
from heloco.cli.plan_command import add_plan_flags, plan
from heloco.cli.report_command import add_compare_flags, add_report_flags, compare, report, report_command
from heloco.cli.serve import add_serve_flags, serve, train_on_ray, with_seats
from heloco.cli.study_command import add_study_flags, study
from heloco.cli.train_seeds import seed_count, train_seeds
from heloco.cli.watch import add_watch_flags, watch
from heloco.errors import RunStopped, UserError

if TYPE_CHECKING:
    from heloco.engine.local import LocalRun
    from heloco.run import RunConfig, RunFolder

WITH_PLUGINS = (
    "train", "resume", "eval", "export", "schedule", "methods", "serve", "join", "doctor", "replay", "rollback", "study",
)  # fmt: skip
"""The commands that build something a run names."""


def main() -> None:
    sys.exit(run(sys.argv[1:], is_program=True))


def run(words: list[str], *, is_program: bool = False) -> int:
    """Runs a command line, and returns its exit code. `is_program`: the process does nothing else, so a command may fork it."""
    try:
        arguments = parser().parse_all(take_plugins(words))
        arguments.is_program = is_program
        command: Callable[[argparse.Namespace], int] = arguments.command
        return command(arguments)
    except (UserError, RunStopped) as error:
        return fail(str(error))
    except KeyboardInterrupt:
        return fail("interrupted.") and 130
    except BrokenPipeError:  # the reader closed the pipe, as `head` does
        sys.stderr.close()
        return 0


def parser() -> Parser:
    top = Parser(prog="heloco", description="Asynchronous low-communication training on unequal machines with unequal data.")
    top.add_argument("--version", action="version", version=f"heloco {heloco.__version__}")
    top.set_defaults(command=list_commands, parser=top)
    commands = top.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)

    def add(name: str, command: Callable[[argparse.Namespace], int], add_flags: Callable[[Parser], None], about: str) -> None:
        parser = commands.add_parser(
            name, help=about, description=about, allow_abbrev=False, add_flags=add_flags, has_plugins=name in WITH_PLUGINS
        )
        parser.set_defaults(command=command, parser=parser)

    add("train", train, add_train_flags, "Train one model with unequal workers under a virtual clock, on this machine.")
    add("resume", resume, add_resume_flags, "Go on with a run that was stopped or killed.")
    add("eval", evaluate, add_eval_flags, "Evaluate a run's model, on its own validation data or on other text.")
    about = "Write a run's model as safetensors, or as a folder that Hugging Face's transformers loads."
    add("export", export, add_export_flags, about)
    add("schedule", schedule, add_schedule_flags, "Who would arrive when, without training.")
    add("plan", plan, add_plan_flags, "What a run on real machines needs: rounds, formats, load. Nothing is trained.")
    add("methods", methods, add_methods_flags, "The outer methods: equations and knobs.")
    add("serve", serve, add_serve_flags, "A run on real machines: serves it to those that join, over Ray and HTTPS.")
    add("join", join, add_join_flags, "Take part in a run with this machine, until it ends.")
    add("status", status, add_status_flags, "How a run on real machines is doing.")
    add("stop", admin.stop, admin.add_stop_flags, "Stop a run on real machines, or suspend it: what was done is saved.")
    add("pause", admin.pause, admin.add_pause_flags, "Hand out no more rounds of a run on real machines, until `heloco unpause`.")
    add("unpause", admin.unpause, admin.add_admin_flags, "Hand out rounds again.")
    add("evict", admin.evict, admin.add_evict_flags, "Send a machine away from a run for good.")
    add("tokens", admin.tokens, admin.add_tokens_flags, "List, make and revoke the tokens of a run on real machines.")
    add("doctor", doctor, add_doctor_flags, "This machine's facts; with an address, whether it can take part in the run there.")
    add("replay", replay, add_replay_flags, "Make a real run again from its journal, and compare.")
    about = "Return a real run to an earlier arrival, and leave out what a machine contributed after it."
    add("rollback", rollback, add_rollback_flags, about)
    add("study", study, add_study_flags, "The paper's experiments, compared with its numbers: rows of paces × methods × seeds.")
    add("report", report, add_report_flags, "Runs on one page to look at: a single HTML file with charts, for any browser.")
    add("compare", compare, add_compare_flags, "Runs side by side at the same budget of tokens, and of time.")
    add("watch", watch, add_watch_flags, "Runs that are still going, live in a browser, or in the terminal with --text.")
    return top


def list_commands(arguments: argparse.Namespace) -> int:
    """What `heloco` alone does."""
    arguments.parser.print_help()
    return 0


def add_train_flags(parser: Parser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="a TOML file; flags override it")
    parser.add_argument("--recipe", metavar="NAME", default="best", help="best, paper (the paper's setting) or plain [best]")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the run's folder [runs/METHOD-001, …]")
    parser.add_argument("--engine", metavar="{simulation,ray}", default="simulation", help="a virtual clock, or real workers")
    parser.add_argument("--seeds", metavar="N", help="train with N seeds, from --seed on, and show the mean; a folder each")
    add_log_flag(parser)
    add_config_flags(parser)


def add_resume_flags(parser: Parser) -> None:
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN", help="several are resumed one after the other")
    parser.add_argument("--data", metavar="DIR", help="where the run's data is now, if it was moved")
    add_log_flag(parser)


def add_eval_flags(parser: Parser) -> None:
    parser.add_argument("folder", type=Path, metavar="RUN")
    parser.add_argument("--data", metavar="DIR", help="a folder of text, builtin, or hf:DATASET [the run's]")
    parser.add_argument("--field", metavar="TEXT", help="the field or column of that data that holds the text [the run's]")
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_export_flags(parser: Parser) -> None:
    parser.add_argument("folder", type=Path, metavar="RUN")
    parser.add_argument("--format", metavar="{safetensors,hf}", default="safetensors", help="one file, or a folder [safetensors]")
    parser.add_argument("--out", type=Path, metavar="PATH", help="[RUN/model.safetensors, RUN/hf]")
    parser.add_argument("--hf", type=Path, metavar="DIR", help="where its config.json is, if the model came with the machines")


def add_schedule_flags(parser: Parser) -> None:
    parser.add_argument("--paces", metavar="X,X,…", default="1,1,2,3,6", help="seconds per inner step of each worker [1,1,2,3,6]")
    parser.add_argument(
        "--workers", metavar="N", default="0", help="how many workers; they have the paces in turn [as many as paces]"
    )
    parser.add_argument("--inner-steps", metavar="N", default="10", help="H, the inner steps of a round [10]")
    parser.add_argument("--arrivals", metavar="N", help="how many arrivals [120, or 20 from each worker]")
    parser.add_argument("--recipe", metavar="NAME", default="best", help="best, paper or plain, as in `heloco train` [best]")
    parser.add_argument("--method", metavar="NAME", help="only whether it waits matters [the recipe's]")
    parser.add_argument("--steps", metavar="{constant,dylu}", help="H for all, or DyLU [the recipe's]")
    parser.add_argument("--grace", metavar="X", help="grace period, a share of the fastest worker's round [the recipe's]")
    parser.add_argument("--events", action="store_true", help="list every arrival")
    parser.add_argument("--json", action="store_true", help="print JSON")


# ---- train and resume


def add_log_flag(parser: Parser) -> None:
    parser.add_argument("--log", metavar="NAME,…", default="", help="also log to tensorboard, wandb, trackio, mlflow")


def logs_of(arguments: argparse.Namespace) -> list[str]:
    from heloco.report.mirrors import check_mirrors

    names = [name.strip() for name in arguments.log.split(",") if name.strip()]
    check_mirrors(names)
    return names


def train(arguments: argparse.Namespace) -> int:
    from heloco.engine.build import build_task
    from heloco.engine.local import LocalRun, describe
    from heloco.run import RunConfig, RunFolder, make_next, resolve, with_fields
    from heloco.run.settings import check_knob_names, read_toml, with_recipe

    logs, seeds = logs_of(arguments), seed_count(arguments)
    flags = given_fields(arguments)
    settings = (read_toml(arguments.config, overridden=flags) if arguments.config else {}) | flags
    is_real = arguments.engine == "ray"
    values = with_recipe(arguments.recipe, settings, is_real=is_real)
    config = resolve(with_fields(RunConfig(), with_seats(values, 0) if is_real else values))
    if not is_real:
        check_knob_names(config, flags)
    warn_of_rates(config)
    if arguments.out:
        RunFolder.check_free(arguments.out)
    if seeds:
        return train_seeds(config, seeds, arguments.out, logs)
    if is_real:
        return train_on_ray(config, arguments.out or make_next(Path("runs"), config.outer.method), logs)
    with show_preparation() as progress:
        task, config = build_task(config, progress)
    local = LocalRun(task, config)
    facts = describe(task, config, local.model, execution=local.execution)  # before a folder is claimed
    local.folder = RunFolder.create(arguments.out or make_next(Path("runs"), config.outer.method), config, facts)
    local.folder.start_writing()
    return carry_out(local, local.folder, logs)


def resume(arguments: argparse.Namespace) -> int:
    logs = logs_of(arguments)
    for path in arguments.folders:
        if code := resume_run(path, arguments.data, logs):
            return code
    return 0


def resume_run(path: Path, data: str | None, logs: list[str]) -> int:
    import torch

    from heloco.engine.build import check_model
    from heloco.engine.local import LocalRun, LocalState
    from heloco.records.journal_reader import FOLDER as JOURNAL
    from heloco.records.run_end import FINISHED_TEXT
    from heloco.records.run_files import CONFIG
    from heloco.run import RunFolder
    from heloco.run.checkpoint import NO_LINES

    folder = RunFolder.open(path)
    if (folder.path / JOURNAL).exists():
        raise UserError(f"{folder.path} is a run on real machines: `heloco serve {folder.path}` goes on with it.")
    config, facts = folder.config(), folder.facts()
    if config.digest() != facts.config_digest:
        raise UserError(
            f"{folder.path / CONFIG} is not the config this run was started with: restore it, or start a new run with "
            f"`heloco train --config {folder.path / CONFIG}`."
        )
    start_point = folder.load_latest(LocalState)
    if start_point and start_point[0].arrival >= config.run.arrivals and start_point[0].evaluated_at == start_point[0].arrival:
        folder.note_end("finished", FINISHED_TEXT)  # a kill may have come between the last checkpoint and this
        print(f"{folder.path} is finished: all {config.run.arrivals} arrivals are in.")
        return 0
    torch.set_num_threads(facts.threads)  # the inner steps' sums depend on it, to the bit
    task = rebuild_task(config, data)
    if task.digest != facts.task_digest:
        raise UserError(
            "The data or the tokenizer is not the one this run was started with: give the same text, e.g. with --data."
        )
    check_model(task, config, facts)
    local = LocalRun(task, config, folder=folder, begun_as=facts.execution or "sequential")
    if start_point:
        local.load(*start_point)
    folder.start_writing(start_point[0].lines if start_point else NO_LINES)
    print(f"Resuming {folder.path} at arrival {local.synchronizer.arrivals} of {config.run.arrivals}.", flush=True)
    return carry_out(local, folder, logs)


def rebuild_task(config: "RunConfig", data: str | None, languages: list[str] | None = None, field: str | None = None) -> Any:
    """The task of a run, with its text from `data` if that is given: from the run's own languages, or from `languages`.
    `field`: where the rows of this data hold the text, if not where the run's do."""
    from dataclasses import replace

    from heloco.engine.build import build_task

    if data is not None:
        if config.input.task == "images":
            raise UserError("The run's images are drawn by code: leave --data out.")
        chosen_languages = config.input.languages if languages is None else languages
        config = replace(config, input=replace(config.input, data=data, languages=chosen_languages))
    if field is not None:
        config = replace(config, input=replace(config.input, field=field))
    with show_preparation() as progress:
        return build_task(config, progress)[0]


def carry_out(local: "LocalRun", folder: "RunFolder", logs: list[str]) -> int:
    """Runs to the end or to a signal; prints what came out."""
    from rich.console import Console

    from heloco.engine.local import StopRequested
    from heloco.report.mirrors import open_mirrors
    from heloco.report.summary import read_summary
    from heloco.report.terminal import Progress, show_progress, tables
    from heloco.run.config import by_section

    console = Console()
    facts = folder.facts()
    summary = read_summary(folder.path, facts)
    signals: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        signals.append(number)
        local.stop_requested = True

    old_handlers = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with open_mirrors(logs, folder.path, by_section(local.config)) as mirrors:
            local.observers += mirrors
            with show_progress(Progress(summary, facts, local.config.run.arrivals, console)) as progress:
                local.observers.append(progress)
                local.run()
    except StopRequested:
        print(f"Stopped at arrival {local.synchronizer.arrivals}, checkpointed. `heloco resume {folder.path}` goes on.")
        return 128 + signals[0]
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
        folder.close()
    for table in tables(summary):
        console.print(table)
    print(f"To look at it: {report_command(folder.path)}")
    print(f"The run's folder: {folder.path}")  # not through the console, which would break a long path over lines
    return 0


def show_preparation() -> Any:
    from heloco.corpus import rich_progress

    return rich_progress()


# ---- a run's model


def evaluate(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from heloco.engine.build import check_model, load_model, pick_device
    from heloco.records.json_numbers import finite_measures
    from heloco.report.fitted_table import FittedTable
    from heloco.report.terminal import scores_table
    from heloco.run import RunFolder
    from heloco.task import mean_scores

    folder = RunFolder.open(arguments.folder)
    config = folder.config(for_task=True)
    state, tensors = folder.load_model()
    if arguments.field is not None and arguments.data is None:
        raise UserError("--field says where other data holds its text: give --data too, or leave --field out.")
    task = rebuild_task(config, arguments.data, languages=[], field=arguments.field)
    if config.model.lora is not None:  # the checkpoint has nothing of the model under the adapter
        check_model(task, config, folder.facts())
    scores = task.evaluate(load_model(task, tensors, pick_device(config.run.device)))
    mean = finite_measures(mean_scores(scores))
    per_source = {name: finite_measures(measures) for name, measures in scores.items()}
    if arguments.json:
        print(json.dumps({"arrival": state.arrival, "mean": mean, "scores": per_source}, indent=1))
    else:
        Console().print(FittedTable(scores_table(mean, per_source)))
    return 0


def export(arguments: argparse.Namespace) -> int:
    from heloco.errors import nearest
    from heloco.run import RunFolder
    from heloco.run.export import FORMATS, export_hf, export_model

    if arguments.format not in FORMATS:
        raise UserError(f"There is no export format {arguments.format!r}; {nearest(arguments.format, FORMATS)}")
    folder = RunFolder.open(arguments.folder)
    if arguments.format == "hf":
        out, without = arguments.out or folder.path / "hf", ""
        count, tokenizer = export_hf(folder, out, arguments.hf)
        if not tokenizer and arguments.hf is None:
            name = folder.config(for_task=True).input.tokenizer
            without = f" Its tokenizer, {name}, is not on this machine any more and was left out."
        print(f"Wrote {count:,} parameters to {out}.{without}")
        return 0
    out = arguments.out or folder.path / "model.safetensors"
    count = export_model(folder, out)
    print(f"Wrote {count:,} parameters to {out}.")
    return 0


# ---- without training


def schedule(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from heloco.engine.schedule import planned_arrivals, summarize
    from heloco.policy import inner_steps
    from heloco.report.fitted_table import FittedTable
    from heloco.report.terminal import schedule_table
    from heloco.run import RunConfig, resolve, with_fields
    from heloco.run.config import Settings
    from heloco.run.settings import with_recipe

    names = ("paces", "workers", "inner_steps", "arrivals", "method", "steps", "grace")
    settings: Settings = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    config = resolve(with_fields(RunConfig(), with_recipe(arguments.recipe, settings)))
    rounds = config.rounds
    steps = inner_steps(rounds.steps, rounds.inner_steps, rounds.paces)
    events = planned_arrivals(config)
    arrivals = list(events) if arguments.events else []
    time_s, shares = summarize(iter(arrivals) if arguments.events else events, steps)
    if arguments.json:
        rows = [{"time_s": t, "worker": a.worker, "version": a.version, "staleness": a.staleness} for t, a in arrivals]
        table = [asdict(share) for share in shares]
        print(json.dumps({"time_s": time_s, "workers": table} | ({"events": rows} if arguments.events else {})))
        return 0
    for at_s, arrival in arrivals:
        print(f"{at_s:>12g} s  worker {arrival.worker}  version {arrival.version}  staleness {arrival.staleness}")
    Console().print(FittedTable(schedule_table(time_s, shares, rounds.paces)))
    return 0
