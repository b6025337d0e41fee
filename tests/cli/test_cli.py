"""The commands: what they print and what they write."""

import csv
import json
import lzma
import math
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from heloco.engine.build import build_task
from heloco.methods import METHODS
from heloco.outer.kernels import native
from heloco.run import RunFolder
from heloco.run.config import knob_setting
from heloco.task.gpt import GPTConfig, TinyGPT
from heloco.task.images import ShapesNet
from support.nursery import Fault
from support.runs import TINY, assert_refused, checkpoints, digests, evals, heloco, on_threads, tape, train, write_text

# ---- schedule


def schedule(*arguments: str) -> dict:
    result = heloco("schedule", "--recipe", "plain", *arguments, "--json")
    assert (result.code, result.err) == (0, "")
    return json.loads(result.out)


def test_a_schedule_worked_out_by_hand():
    assert schedule("--paces", "1,3", "--inner-steps", "2", "--arrivals", "6") == {
        "time_s": 10,
        "workers": [
            {"arrivals": 5, "share": 5 / 6, "mean_staleness": 0, "max_staleness": 0, "inner_steps": 2},
            {"arrivals": 1, "share": 1 / 6, "mean_staleness": 3, "max_staleness": 3, "inner_steps": 2},
        ],
    }


def test_its_events_are_the_whole_history():
    events = schedule("--paces", "1,3", "--inner-steps", "2", "--arrivals", "6", "--events")["events"]
    assert [(event["time_s"], event["worker"], event["version"], event["staleness"]) for event in events] == [
        (2, 0, 0, 0), (4, 0, 1, 0), (6, 0, 2, 0), (6, 1, 0, 3), (8, 0, 4, 0), (10, 0, 5, 0),
    ]  # fmt: skip


def test_equal_workers_are_one_after_the_other_at_each_instant():
    workers = schedule("--paces", "2", "--workers", "5", "--inner-steps", "3", "--arrivals", "10")["workers"]
    assert [worker["mean_staleness"] for worker in workers] == [0, 1, 2, 3, 4]


def test_a_barrier_waits_for_the_slowest_and_nobody_is_stale():
    summary = schedule("--paces", "1,3", "--inner-steps", "2", "--arrivals", "6", "--method", "sync-nesterov")
    assert summary["time_s"] == 18
    assert [(w["arrivals"], w["max_staleness"]) for w in summary["workers"]] == [(3, 0), (3, 0)]


def test_dylu_gives_slow_workers_fewer_steps():
    paces = ".737,2.62,3.12,6.58,7.5"  # section 4.1 of the paper
    summary = schedule("--paces", paces, "--inner-steps", "20", "--arrivals", "50", "--steps", "dylu")
    assert [worker["inner_steps"] for worker in summary["workers"]] == [20, 6, 5, 2, 2]


def test_a_grace_period_lets_the_next_join():
    without, grace = (schedule("--paces", "1,1.2", "--inner-steps", "1", "--arrivals", "4", "--grace", g) for g in ("0", "0.5"))
    assert (without["time_s"], grace["time_s"]) == (2.4, 2.7)
    assert [w["mean_staleness"] for w in grace["workers"]] == [0, 1]


def test_table_1s_times_come_out_exactly(shared):
    with (shared / "paper" / "table1.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 13
    for row in rows:
        assert schedule("--paces", row["paces"], "--inner-steps", "80", "--arrivals", "300")["time_s"] == float(row["time_s"])


def test_a_schedule_is_what_a_run_does(unbroken):
    events = schedule("--paces", "1,2,3,4,5", "--inner-steps", "2", "--arrivals", "12", "--events")["events"]
    lines = tape(unbroken("--paces", "1,2,3,4,5", "--arrivals", "12"))
    assert events == [{key: line[key] for key in ("time_s", "worker", "version", "staleness")} for line in lines]


def test_without_flags_a_schedule_is_that_of_the_default_run():
    workers = schedule("--recipe", "best")["workers"]
    assert [worker["inner_steps"] for worker in workers] == [10, 10, 5, 3, 2]
    assert workers == json.loads(heloco("schedule", "--json").out)["workers"]


def test_a_schedule_as_text():
    plain = ("--recipe", "plain", "--paces", "1,3", "--inner-steps", "2", "--arrivals", "6")
    result = heloco("schedule", *plain, "--events")
    assert result.code == 0
    assert result.out.splitlines()[:2] == [
        "           2 s  worker 0  version 0  staleness 0",
        "           4 s  worker 0  version 1  staleness 0",
    ]
    assert "Virtual time 0:10 (10 s)" in result.out
    [row] = [line for line in result.out.splitlines() if line.startswith("│ 1 ")]
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["1", "3 s", "2", "1", "16.7%", "3.00", "3"]


# ---- methods


def test_methods_names_every_method_with_its_equation_and_knobs():
    result = heloco("methods")
    assert result.code == 0
    sections = {section.split("\n")[0]: section for section in result.out.strip().split("\n\n")}
    advice = sections.pop("What to use")
    assert "heloco-adaptive with --assign flexible" in advice and "--assign fixed" in advice
    assert list(sections) == list(METHODS) == [
        "sync-nesterov", "async-nesterov", "delayed-nesterov", "mla", "mla-lookahead", "heloco", "heloco-ramp",
        "heloco-adaptive",
    ]  # fmt: skip
    for name, method in METHODS.items():
        assert method.equation in sections[name] and method.about in sections[name]
        assert f"ρ: {method.weight}" in sections[name] and method.flexible_weight in sections[name]
        for knob, value in method.knobs().items():
            flag = f"--{knob_setting(knob).replace('_', '-')} "
            assert (value is None) != (flag in sections[name])
    assert "--reorient ramp --weigh before" in sections["heloco-ramp"] and "--outer-lr 0.07" in sections["async-nesterov"]


@pytest.mark.parametrize("name", ["async-nesterov", "delayed-nesterov", "heloco-adaptive"])
def test_the_flags_of_knobs_that_methods_prints_are_those_of_train(name, tmp_path):
    """Copied from there to the command line, they give the method's own run."""
    [section] = [part for part in heloco("methods").out.split("\n\n") if part.startswith(f"{name}\n")]
    flags = section.partition("knobs: ")[2].split()
    assert flags[0] == "--outer-lr"
    plain, with_flags = (
        train(tmp_path / part, "--method", name, "--arrivals", "3", *more) for part, more in (("plain", ()), ("flags", flags))
    )
    assert tape(plain) == tape(with_flags)
    config = "config.toml"
    assert (plain / config).read_text() == (with_flags / config).read_text()


def test_methods_as_json():
    described = {method["name"]: method for method in json.loads(heloco("methods", "--json").out)}
    assert described.keys() == METHODS.keys()
    assert described["sync-nesterov"]["barrier"] and not described["heloco"]["barrier"]
    assert described["heloco"]["knobs"]["k_d"] == 1.0 and described["mla"]["rule"] == "MLA"


# ---- rates that are far above their defaults


def test_an_inner_rate_that_was_meant_as_the_outer_one_is_warned_of(tmp_path):
    result = heloco("train", *TINY, "--recipe", "best", "--arrivals", "1", "--lr", "0.7", "--out", tmp_path / "run")
    assert result.code == 0
    assert result.warnings == [
        "--lr is 0.7, 109 times the default 0.0064 of muon: the training may diverge. --lr is the rate of the inner steps, "
        "--outer-lr that of the outer method."
    ]


def test_an_outer_rate_a_hundred_times_its_default_is_warned_of(tmp_path):
    result = heloco("train", *TINY, "--method", "async-nesterov", "--arrivals", "1", "--outer-lr", "7", "--out", tmp_path / "run")
    assert result.code == 0
    assert result.warnings == ["--outer-lr is 7, 100 times the default 0.07 of async-nesterov: the training may diverge."]


@pytest.mark.parametrize("rates", [("--lr", "0.1"), ("--outer-lr", "6"), ("--lr", "0.0000001"), ("--outer-lr", "0")])
def test_other_rates_are_not_warned_of(rates, tmp_path):
    assert heloco("train", *TINY, "--arrivals", "1", *rates, "--out", tmp_path / "run").warnings == []


# ---- eval


@pytest.mark.parametrize("settings", [(), ("--task", "images"), ("--preset", "30m")], ids=["language", "images", "tied"])
def test_eval_gives_the_last_evaluation_again(settings, unbroken):
    folder = unbroken(*settings)
    before = digests(folder)
    result = heloco("eval", folder, "--json")
    assert result.code == 0, result.err
    last = evals(folder)[-1]
    assert json.loads(result.out) == {key: last[key] for key in ("arrival", "mean", "scores")}
    assert digests(folder) == before


def test_eval_as_text(unbroken):
    folder = unbroken()
    last = evals(folder)[-1]
    rows = [line.strip("│").split("│") for line in heloco("eval", folder).out.splitlines() if line.startswith("│")]
    scores = {**last["scores"], "mean": last["mean"]}
    expected = {name: [f"{score['loss']:.3f}", f"{score['bits_per_byte']:.3f}"] for name, score in scores.items()}
    assert {name.strip(): [cell.strip() for cell in cells] for name, *cells in rows} == expected


def test_eval_on_other_text_scores_that_text(tmp_path, unbroken, text):
    folder = unbroken()
    scores = json.loads(heloco("eval", folder, "--data", text, "--json").out)["scores"]
    assert list(scores) == ["de", "en"]
    model = TinyGPT(GPTConfig(width=32, layers=1, heads=2, context=16, vocab_size=257))
    heloco("export", folder, "--out", tmp_path / "model.safetensors")
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    for name, score in scores.items():  # by hand: four windows spread over the validation text
        tokens = [t for d in (text / f"{name}.val.txt").read_text().split("\n\n") if d for t in [*d.encode(), 256]]
        windows = (len(tokens) - 1) // 16
        picked = [math.floor(i * (windows - 1) / 3) for i in range(4)]
        batch = torch.tensor([tokens[16 * i : 16 * i + 17] for i in picked])
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).item()
        assert score["loss"] == pytest.approx(loss, abs=1e-6)


def test_eval_takes_rows_whose_text_is_in_another_field(tmp_path, unbroken, text):
    folder, rows = unbroken(), tmp_path / "rows"
    rows.mkdir()
    for path in text.iterdir():
        documents = [document for document in path.read_text().split("\n\n") if document]
        lines = [json.dumps({"body": document, "text": "not this"}) for document in documents]
        (rows / f"{path.stem}.jsonl").write_text("\n".join(lines))
    plain = heloco("eval", folder, "--data", text, "--json")
    result = heloco("eval", folder, "--data", rows, "--field", "body", "--json")
    assert (result.code, json.loads(result.out)) == (0, json.loads(plain.out))
    assert_refused(tmp_path, "eval", folder, "--data", rows, "--field", "bdy", says="has no field 'bdy', only body, text")
    assert_refused(tmp_path, "eval", folder, "--field", "body", says="give --data too, or leave --field out.")


def test_eval_and_export_take_a_run_that_was_broken_off(tmp_path, nursery):
    folder = tmp_path / "run"
    fault = Fault("heloco.run.folder:RunFolder.write_arrival", 6, signal=9)
    nursery.run("train", *TINY, "--checkpoint-every", "4", "--eval-every", "4", "--out", folder, fault=fault)
    scores = json.loads(heloco("eval", folder, "--json").out)
    assert scores["arrival"] == 4 and scores["mean"] == evals(folder)[1]["mean"]
    assert heloco("export", folder).out == f"Wrote 29,728 parameters to {folder / 'model.safetensors'}.\n"


# ---- export


@pytest.mark.parametrize(
    ("settings", "fresh"),
    [
        ((), lambda: TinyGPT(GPTConfig(width=32, layers=1, heads=2, context=16, vocab_size=257))),
        (("--preset", "30m"), lambda: TinyGPT(GPTConfig(width=32, layers=1, heads=2, context=16, vocab_size=257, tied=True))),
        (("--task", "images"), ShapesNet),
    ],
    ids=["language", "tied", "images"],
)
def test_an_exported_model_loads_strictly_and_scores_the_same(settings, fresh, tmp_path, unbroken):
    folder, out = unbroken(*settings), tmp_path / "some" / "model.safetensors"
    result = heloco("export", folder, "--out", out)
    model = fresh()
    count = sum(p.numel() for p in model.parameters())
    assert (result.code, result.out) == (0, f"Wrote {count:,} parameters to {out}.\n")
    assert [path.name for path in out.parent.iterdir()] == ["model.safetensors"]
    model.load_state_dict(load_file(out), strict=True)
    task, _ = build_task(RunFolder.open(folder).config())
    with on_threads(1):
        assert task.evaluate(model) == evals(folder)[-1]["scores"]
    with safe_open(out, "pt") as file:
        assert file.metadata() == {"format": "pt", "method": "heloco-ramp", "arrival": "8"}


def test_export_writes_into_the_runs_folder_by_default_and_resume_goes_on(tmp_path):
    folder = train(tmp_path / "run")
    assert heloco("export", folder).code == 0
    ours = load_file(folder / "model.safetensors")
    checkpoint = load_file(checkpoints(folder)[-1] / "tensors.safetensors")
    assert torch.equal(ours["token.weight"], checkpoint["parameter.0"])
    assert heloco("resume", folder).code == 0
    assert heloco("export", folder).code == 0  # again: the file is replaced


# ---- the command line itself


def test_heloco_alone_lists_its_commands():
    result = heloco()
    assert (result.code, result.err, result.out) == (0, "", heloco("--help").out)
    assert all(f"\n    {command} " in result.out for command in ("train", "serve", "join", "report", "study", "methods"))


def test_a_finished_run_prints_the_command_that_shows_it(tmp_path):
    pytest.importorskip("plotly", reason="plotly is not installed")
    folder = tmp_path / "my run"
    *_, command, last = heloco("train", *TINY, "--arrivals", "2", "--out", folder).out.splitlines()
    assert last == f"The run's folder: {folder}"
    words = shlex.split(command.removeprefix("To look at it: "))
    assert words == ["heloco", "report", str(folder)]
    assert heloco(*words[1:], cwd=tmp_path).code == 0 and (tmp_path / "report.html").exists()


@pytest.mark.parametrize("command", [(), ("train",), ("resume",), ("eval",), ("export",), ("schedule",), ("methods",)])
def test_help_is_there_and_ends_with_0(command):
    result = heloco(*command, "--help")
    assert result.code == 0
    assert result.out.startswith(f"usage: {' '.join(('heloco', *command))} ")


def test_a_real_process_ends_with_the_exit_code_and_the_sentence(tmp_path):
    command = [sys.executable, "-m", "heloco.cli", "train", "--method", "heloko"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert (process.returncode, process.stdout) == (2, "")
    assert (
        process.stderr.startswith("heloco: There is no method 'heloko' here; did you mean 'heloco'?")
        and process.stderr.count("\n") == 1
    )
    assert not any(tmp_path.iterdir())


def test_a_closed_pipe_is_no_error():
    """More than a pipe holds, and a reader that leaves after the first line."""
    command = f"{sys.executable} -m heloco.cli schedule --paces 1 --inner-steps 10 --events --arrivals 9999"
    script = f"{command} | head -n 1; exit ${{PIPESTATUS[0]}}"
    process = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120)
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout.split() == ["10", "s", "worker", "0", "version", "0", "staleness", "0"]


def test_looking_at_a_schedule_needs_no_data(tmp_path, monkeypatch):
    """Nothing is prepared: the cache stays empty."""
    monkeypatch.setenv("HELOCO_CACHE", str(tmp_path / "cache"))
    assert heloco("schedule", "--arrivals", "10").code == 0
    assert heloco("methods").code == 0
    assert not (tmp_path / "cache").exists()


# ---- real text


def slice_of(corpus: Path, folder: Path, size: int) -> Path:
    folder.mkdir()
    for path in sorted(corpus.glob("*.xz")):
        with lzma.open(path, "rt", encoding="utf-8") as file:
            (folder / path.name.removesuffix(".xz")).write_text(file.read(size if ".train." in path.name else size // 10))
    return folder


def test_the_papers_model_trains_on_real_text(shared, tmp_path):
    text = slice_of(shared / "corpus", tmp_path / "text", 200_000)
    settings = ["--preset", "paper", "--tokenizer", shared / "gpt2" / "tokenizer.json", "--inner-steps", "2", "--arrivals", "5"]
    few = ["--paces", "1,1,1,1,1", "--batch-size", "2", "--eval-windows", "4", "--eval-every", "0"]
    result = heloco("train", "--data", text, *settings, *few, "--out", tmp_path / "run")
    assert result.code == 0, result.err
    meta = json.loads((tmp_path / "run" / "run.json").read_text())
    assert meta["parameters"] == 14_468_608
    assert [shard["name"] for shard in meta["shards"]] == ["de", "en", "es", "fr", "it"]
    first, last = evals(tmp_path / "run")
    assert first["mean"]["loss"] == pytest.approx(math.log(50257), abs=0.4)
    assert all(last["scores"][name]["loss"] < first["scores"][name]["loss"] for name in ("de", "en", "es", "fr", "it"))
    assert [line["staleness"] for line in tape(tmp_path / "run")] == [0, 1, 2, 3, 4]


@pytest.mark.long
def test_the_papers_recipe_trains_on_the_whole_corpus(shared, tmp_path):
    settings = ["--recipe", "paper", "--data", shared / "corpus", "--arrivals", "10", "--inner-steps", "10", "--eval-every", "5"]
    result = heloco("train", *settings, "--out", tmp_path / "run", threads=2)
    assert result.code == 0, result.err
    losses = [line["mean"]["loss"] for line in evals(tmp_path / "run")]
    assert len(losses) == 3 and losses[0] > losses[1] > losses[2]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["parameters"] == 14_468_608


def test_runs_on_own_text_differ_by_their_text(tmp_path, text):
    """Guards the tests on small texts: the text is really what is trained on."""
    other = write_text(tmp_path / "other", en="one two three four five six seven")
    first, second = (train(tmp_path / f"run-{path.name}", "--data", path, "--paces", "1,2") for path in (text, other))
    losses = [[(line["shard"], line["loss"]) for line in tape(folder)] for folder in (first, second)]
    assert losses[0][0] == losses[1][0] and losses[0] != losses[1]


# ---- which kernels serve


def test_the_doctor_needs_no_address_to_tell_of_this_machine(monkeypatch):
    monkeypatch.delenv("HELOCO_ADDRESS", raising=False)
    result = heloco("doctor")
    assert result.code == 0 and len(result.out.splitlines()) == 3
    findings = {finding["subject"]: finding for finding in json.loads(heloco("doctor", "--json").out)}
    assert list(findings) == ["this machine", "GPU", "kernels"]
    assert findings["kernels"]["text"].startswith("cpu: compiled" if native.available else "cpu: portable torch operations")


def test_a_run_says_which_kernels_made_its_outer_steps(tmp_path, monkeypatch):
    for available, name in ((True, "compiled"), (False, "portable")):
        monkeypatch.setattr(native, "available", available and native.available)
        train(tmp_path / name, "--arrivals", "1")
        expected = name if native.available else "portable"
        assert json.loads((tmp_path / name / "run.json").read_text())["kernels"] == expected
