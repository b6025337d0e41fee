"""`heloco serve` until the run is finished, as real processes; what is made of it; wrong folders and settings; a script."""

import json
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from heloco.records.journal_reader import FOLDER, segments
from support.programs import HERE, SMALL, Programs, assert_whole, get
from support.repository import REPOSITORY
from support.runs import assert_refused, checkpoints, evals, heloco, tape

for part in ("uvicorn", "starlette", "httpx", "cryptography"):
    pytest.importorskip(part, reason=f"{part} is not installed")


# ---- two workers of this machine, to the end


@pytest.fixture(scope="module")
def finished_run(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that two local workers did. Only look at it."""
    folder = tmp_path_factory.mktemp("ended") / "run"
    config_file = folder.parent / "run.toml"
    config_file.write_text("[run]\narrivals = 40\neval_every = 10\n[rounds]\ninner_steps = 3\n")
    served = programs.serve(folder, *SMALL, "--workers", "2", config=config_file)
    result = served.program.end()
    assert result.code == 0, (result.out, result.err)
    assert f"The run's folder: {folder}" in result.out and "arrival     40/40" in result.out and "local-1 is here" in result.out
    return folder


def test_two_workers_do_a_run(finished_run: Path) -> None:
    assert_whole(finished_run, 40)
    assert {line["worker"] for line in tape(finished_run)} == {0, 1}
    assert [line["arrival"] for line in evals(finished_run)] == [0, 10, 20, 30, 40]
    assert checkpoints(finished_run)[-1].name == "arrival-00000040"
    assert len(list((finished_run / "journal").glob("*.safetensors"))) == 40 and len(segments(finished_run / FOLDER)) == 1
    assert (finished_run / "credentials" / "key.pem").stat().st_mode & 0o777 == 0o600
    assert "The run has ended: all arrivals are in" in (finished_run / "workers" / "0.log").read_text()


def test_real_machines_keep_the_state_of_muon(programs: Programs, tmp_path: Path) -> None:
    muon = ("--inner-optimizer", "muon", "--keep-state", "--arrivals", "8", "--inner-steps", "3")
    result = programs.serve(tmp_path / "run", *SMALL, "--workers", "2", *muon).program.end()
    assert result.code == 0, (result.out, result.err)
    assert_whole(tmp_path / "run", 8)


def test_replay_in_json(finished_run: Path) -> None:
    replay_result = json.loads(heloco("replay", finished_run, "--json").out)
    assert (replay_result["begun_at"], replay_result["lines"], replay_result["difference"]) == (0, 40, None)
    assert replay_result["digest"] == tape(finished_run)[-1]["digest"]


def test_a_real_run_is_reported_and_compared(finished_run: Path, tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="plotly is not installed")
    result = heloco("report", finished_run, "--out", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    data = json.loads(re.findall(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)[0])
    assert result.code == 0 and "real time (s)" in json.dumps(data) and "virtual" not in json.dumps(data)
    rows = [[cell["text"] for cell in row] for row in data["tables"][1]["rows"]]
    assert [row[0] for row in rows] == ["local-0", "local-1"] and sum(int(row[2]) for row in rows) == 40
    assert "are here" in data["tables"][2]["rows"][0][-1]["text"]  # until the first machine came, the run paused
    result = heloco("compare", finished_run, finished_run)
    assert result.code == 0 and "s of real time" in result.out, result.err
    simulated = ("--arrivals", "4", "--paces", "1,2", "--out", tmp_path / "simulated")
    assert heloco("train", *SMALL, *simulated).code == 0
    assert (
        "Virtual seconds are not real ones" in heloco("compare", finished_run, tmp_path / "simulated", "--format", "markdown").out
    )
    assert heloco("report", finished_run, tmp_path / "simulated", "--out", tmp_path / "both.html").code == 0
    assert "Simulated time is not real time: run ran on real machines." in (tmp_path / "both.html").read_text()


def test_a_real_run_goes_on_with_serve_only(finished_run: Path) -> None:
    assert_refused(finished_run, "resume", finished_run, says=f"`heloco serve {finished_run}` goes on with it.")


def test_serving_a_finished_run_says_so_and_changes_nothing(finished_run: Path) -> None:
    before = tape(finished_run)
    result = heloco("serve", finished_run, *HERE, "--port", "0")
    assert (
        result.code == 0
        and result.out == f"{finished_run} is finished: all 40 arrivals are in.\n"
        and tape(finished_run) == before
    )


# ---- folders and settings that are wrong


def test_folders_that_are_none(tmp_path: Path, unbroken: Callable[..., Path]) -> None:
    (tmp_path / "empty").mkdir()
    for command in ("serve", "replay"):
        assert_refused(tmp_path, command, tmp_path / "empty", says="is no run folder")
    assert_refused(tmp_path, "serve", tmp_path / "nothing.toml", says="There is no config file")
    simulated = unbroken()
    assert_refused(simulated, "replay", simulated, says="it was a simulation. The same config gives the same run")
    assert_refused(simulated, "serve", simulated, *HERE, "--port", "0", says=f"`heloco resume {simulated}` goes on with it")


def test_settings_that_are_wrong(finished_run: Path, tmp_path: Path) -> None:
    assert_refused(
        finished_run,
        "serve",
        finished_run,
        "--arrivals",
        "99",
        says="--arrivals cannot change in a run that has begun: leave it out.",
    )
    assert_refused(
        tmp_path, "serve", *SMALL, "--workers", "abc", says="workers cannot be 'abc': give a whole number", cwd=tmp_path
    )
    assert_refused(tmp_path, "serve", *SMALL, "--workers", "-1", says="give a whole number", cwd=tmp_path)
    assert_refused(tmp_path, "serve", *SMALL, "--port", "70000", says="0 to 65535", cwd=tmp_path)
    assert_refused(tmp_path, "serve", *SMALL, "--prot", "1", says="--port", cwd=tmp_path)
    assert_refused(finished_run, "serve", *SMALL, "--out", finished_run, says=str(finished_run))


def cut_journal(finished_run: Path, folder: Path, cut: Callable[[list[str]], list[str]]) -> Path:
    """A copy of the run as a kill would have left it after its first checkpoint, but for its journal."""
    shutil.copytree(finished_run, folder)
    for path in checkpoints(folder)[1:]:
        shutil.rmtree(path)
    [(_, events)] = segments(folder / FOLDER)
    events.write_text("".join(cut(events.read_text().splitlines(keepends=True))))
    return folder


def test_a_journal_that_was_cut(finished_run: Path, tmp_path: Path) -> None:
    run = cut_journal(finished_run, tmp_path / "edited", lambda lines: [*lines[:20], *lines[21:]])
    for command in ("serve", "replay"):
        more = (*HERE, "--port", "0") if command == "serve" else ()
        result = heloco(command, run, *more)
        assert result.code == 2 and "the line of event 20 was edited, or lines before it are missing" in result.sentence, (
            result.err
        )
        assert "Restore the file" in result.sentence and f"heloco rollback {run}" in result.sentence
    run = cut_journal(finished_run, tmp_path / "short", lambda lines: lines[: len(lines) // 2])
    before = tape(run)
    result = heloco("serve", run, *HERE, "--port", "0")
    assert result.code == 2 and "is cut short: it reaches to event" in result.sentence and "Restore it" in result.sentence, (
        result.err
    )
    assert before == tape(finished_run)


def test_a_journal_shorter_than_the_checkpoint(finished_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    [(_, events)] = segments(run / FOLDER)
    events.write_text("".join(events.read_text().splitlines(keepends=True)[:30]))
    result = heloco("serve", run, *HERE, "--port", "0")  # all that was acknowledged is in the checkpoint
    assert result.code == 0 and result.out.endswith("is finished: all 40 arrivals are in.\n"), (result.out, result.err)


def test_too_few_machines(tmp_path: Path) -> None:
    run = tmp_path / "run"
    few = ("--min-workers", "2", "--give-up-after-s", "0.5")
    assert_refused(tmp_path, "serve", *SMALL, "--seats", "1", *few, *HERE, "--out", run, says="that many machines can never take")
    result = heloco("serve", *SMALL, "--arrivals", "6", "--seats", "2", *few, *HERE, "--port", "0", "--out", run)
    assert result.code == 2 and "The run pauses: 0 of at least 2 machines are here." in result.out
    assert (
        "0 of at least 2 machines are here, for more than 0.5 s" in result.sentence
        and f"`heloco serve {run}` goes on" in result.sentence
    )
    result = heloco("serve", run, "--give-up-after-s", "3600", "--min-workers", "1", "--workers", "1", *HERE, "--port", "0")
    assert result.code == 0, (result.out, result.err)
    assert_whole(run, 6)


# ---- a loop of one's own


def test_a_script_joins_by_its_environment(programs: Programs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = ("--task", "external", "--seats", "1", "--inner-steps", "5", "--arrivals", "6", "--device", "cpu")
    early = programs.serve(run, *settings)
    assert "join it from a training script" in early.ask("join").sentence
    assert "no machine has brought its model yet" in get(early, f"/page/?key={early.key}")[1]
    early.program.signal(signal.SIGINT)
    result = early.program.end()
    assert result.code == 130 and f"the same command with --out {run} starts again" in result.out, result

    served = programs.serve(run, *settings)
    assert served.token == early.token
    watching = programs.heloco("watch", served.address, "--text", HELOCO_TOKEN=served.viewer)  # waits for a model
    script = REPOSITORY / "examples" / "plain_loop.py"
    loop = programs.start(
        "loop", [sys.executable, str(script), "--steps", "100"], HELOCO_ADDRESS=served.address, HELOCO_TOKEN=served.token
    )
    assert served.program.end().code == 0
    result = loop.end()
    assert result.code == 0 and "29 steps, the last loss is" in result.out and "After 6 contributions from here" in result.out, (
        result
    )
    assert_whole(run, 6)
    assert {line["worker"] for line in tape(run)} == {0} and all(line["loss"] > 0 for line in tape(run))
    watched = watching.end()
    assert watched.code == 0 and "arrival      6/6  real " in watched.out and "mean training loss" in watched.out, watched
    assert "mean training loss" in served.program.out.read_text()
