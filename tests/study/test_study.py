"""`heloco study` from end to end: real small studies through the command line, resumed, shared, shown."""

import json
import signal
import sys
from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch

from heloco.study.output import Folder, write_results
from heloco.study.plan import carry_out, make_plan
from heloco.study.spec import find_study, names
from support.nursery import Fault
from support.runs import Done, digests, heloco

TINY = """
like = "table1"
[small]
width = 16
context = 16
inner_steps = 2
arrivals = 20
eval_every = 5
eval_windows = 2
batch_size = 2
[rows]
"1,1,6,6,6" = { paces = [1, 1, 6, 6, 6] }
"1,1,1,1,1" = { paces = [1, 1, 1, 1, 1] }
"""
TABLES = (
    TINY
    + """
[[tables]]
kind = "budget"
title = "Table 1"
variants = ["heloco", "heloco-ramp"]
against = ["mla", "async-nesterov", "sync-nesterov"]
[[tables]]
kind = "order"
title = "Order"
variants = ["heloco", "heloco-ramp"]
against = ["mla", "async-nesterov", "sync-nesterov"]
[[tables]]
kind = "sources"
title = "By language"
[[figures]]
name = "by-time"
title = "By time"
x = "time_s"
panels = ["rows"]
lines = "methods"
"""
)
STORE = "heloco.study.kept_runs:RunStore.write"
METHODS = ("heloco", "heloco-ramp", "mla", "async-nesterov", "sync-nesterov")


def write_study(folder: Path, content: str = TABLES, name: str = "tiny") -> Path:
    path = folder / f"{name}.toml"
    path.write_text(content)
    return path


def study(path: Path | str, out: Path, *arguments: str) -> Done:
    return heloco("study", path, "--scale", "small", "--out", out, *arguments)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The results of a tiny study with two seeds that nothing disturbed. Only look at them."""
    folder = tmp_path_factory.mktemp("whole")
    result = study(write_study(folder), folder / "results", "--seeds", "2")
    assert result.code == 0, result.err
    assert "18 runs, 0 of them there already, on cpu." in result.out
    return folder / "results"


def numbers(out: Path, name: str = "tiny") -> dict:
    return json.loads((out / name / f"{name}.json").read_text())


def runs(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "runs").iterdir())


# ---- what it leaves


def test_a_study_leaves_its_runs_tables_figures_and_page(whole):
    assert len(runs(whole)) == 2 * (2 * 4 + 1)
    manifest = json.loads((whole / "tiny" / "study.json").read_text())
    assert sorted([*manifest["files"], "study.json"]) == sorted(path.name for path in (whole / "tiny").iterdir())
    assert {"tiny.json", "tables.md", "by-time.svg", "by-time.png", "index.html", "by-language.csv"} <= set(manifest["files"])
    assert (manifest["scale"], manifest["seeds"], manifest["methods"]) == ("small", [0, 1], list(METHODS))
    page = (whole / "tiny" / "index.html").read_text()
    assert page.count("<table") == 6 and page.count("<svg") == 1


def test_every_record_is_its_runs(whole):
    records = numbers(whole)["records"]
    assert len(records) == 2 * 5 * 2
    for record in records:
        run = json.loads((whole / "runs" / f"{record['run']}.json").read_text())
        assert (run["verdict"], run["settings"]["seed"]) == ("finished", record["seed"])
        assert record["loss"] == run["evals"]["loss"][-1]
        assert record["loss"] == pytest.approx(fmean(record["loss by source"].values()), abs=1e-4)
        assert record["loss by source"] == {name: m["loss"][-1] for name, m in run["evals"]["sources"].items()}
        assert record["bits_per_byte by source"].keys() == record["loss by source"].keys()
        slowest = 6 if record["row"] == "1,1,6,6,6" else 1
        if record["method"] == "sync-nesterov":
            assert run["evals"]["arrival"] == [0, 5, 10, 15, 20] and run["settings"]["paces"] == [1] * 5
            assert record["time_s"] == 4 * 2 * slowest
            rounds = int(record["T"] // (2 * slowest))
            assert record["loss at T"] == run["evals"]["loss"][min(rounds, 4)]
        else:
            assert record["loss at T"] == record["loss"] and record["T"] == record["time_s"] == run["time_s"]
            assert sum(run["arrivals"]) == 20 and sum(run["cases"].values()) > 0


def test_the_summary_is_made_of_the_records(whole):
    results = numbers(whole)
    by = {(r["row"], r["method"], r["seed"]): r for r in results["records"]}
    for row, summary in results["summary"]["rows"].items():
        for method in METHODS:
            losses = [by[row, method, seed]["loss"] for seed in (0, 1)]
            assert summary["loss"][method]["mean"] == pytest.approx(fmean(losses), abs=1e-5)
            assert summary["loss"][method]["spread"] == pytest.approx(stdev(losses), abs=1e-5)
            assert summary["loss"][method]["n"] == 2
        for variant in ("heloco", "heloco-ramp"):
            for other in METHODS[2:]:
                for kind, key in (("gain", "loss"), ("time gain", "loss at T")):
                    pairs = [(by[row, variant, s][key], by[row, other, s][key]) for s in (0, 1)]
                    gains = [100 * (theirs - ours) / theirs for ours, theirs in pairs]
                    assert summary[kind][variant][other]["mean"] == pytest.approx(fmean(gains), abs=1e-4)
                    assert summary[kind][variant][other]["spread"] == pytest.approx(stdev(gains), abs=1e-4)
            order = sorted((variant, *METHODS[2:]), key=lambda m: summary["loss"][m]["mean"])
            assert summary["order"][variant]["ours"] == order
        assert summary["T at the paper's setting"] == summary["T in the paper"] == {"1,1,6,6,6": 9600, "1,1,1,1,1": 4800}[row]
    assert results["summary"]["rows whose T agrees"] == 2
    papers = results["summary"]["rows"]["1,1,1,1,1"]["order"]["heloco-ramp"]["paper"]
    assert papers == ["heloco-ramp", "sync-nesterov", "mla", "async-nesterov"]
    for method, mean in results["summary"]["mean over rows"]["loss"].items():
        losses = [r["loss"] for r in results["records"] if r["method"] == method]
        assert mean["mean"] == pytest.approx(fmean(losses), abs=1e-5)


def test_the_tables_show_the_papers_numbers_beside_ours(whole):
    text = (whole / "tiny" / "tables.md").read_text()
    assert text.count("\n## ") + text.startswith("## ") == 6
    [line] = [ln for ln in text.split("\n## ")[0].splitlines() if ln.startswith("| 1,1,1,1,1 |")]
    for paper in ("paper 6.50", "paper 6.63", "paper 7.03", "paper 6.62", "paper +1.84", "paper +7.50", "paper +1.78"):
        assert paper in line
    assert "n = 2 seeds" in text and "exactly in 2 of 2 rows" in text
    loss = numbers(whole)["summary"]["rows"]["1,1,1,1,1"]["loss"]["heloco"]
    assert f"{loss['mean']:.3f} ± {loss['spread']:.3f}" in line


def test_rows_may_have_more_seeds_and_fewer_methods(tmp_path):
    """Two tables of budgets; a row without the method that is compared with; T is when the slower of two methods ends."""
    table = '[[tables]]\nkind = "budget"\ntitle = "{}"\nvariants = ["dylu"]\nagainst = ["{}"]\n'
    study_text = TINY.replace("6, 6, 6] }", "6, 6, 6], seeds = 2 }").replace("1, 1, 1] }", "1, 1, 1], seeds = 1 }")
    study_text = f"""
first_seed = 5
{study_text}
alone = {{ paces = [2, 2, 2, 2, 2], seeds = 1 }}
[methods]
dylu = {{ method = "mla", steps = "dylu", inner_steps = 6, grace = 0.2 }}
mla = {{ inner_steps = 6, rows = ["1,1,6,6,6", "1,1,1,1,1"] }}
sync-nesterov = {{ inner_steps = 6, rows = ["1,1,6,6,6", "1,1,1,1,1"] }}
{table.format("Asynchronous", "mla")}
{table.format("Synchronous", "sync-nesterov")}
"""
    result = study(write_study(tmp_path, study_text, "own"), tmp_path / "results")
    assert result.code == 0, result.err
    results = numbers(tmp_path / "results", "own")
    by = {(r["row"], r["method"], r["seed"]): r for r in results["records"]}
    assert {(row, seed) for row, _, seed in by} == {("1,1,6,6,6", 5), ("1,1,6,6,6", 6), ("1,1,1,1,1", 5), ("alone", 5)}
    for summary in results["summary"].values():
        assert list(summary["rows"]) == ["1,1,6,6,6", "1,1,1,1,1"]
        losses = [by[row, "dylu", 5]["loss"] for row in summary["rows"]]
        mean = summary["mean over rows"]["loss"]["dylu"]
        assert (mean["mean"], mean["n"]) == (pytest.approx(fmean(losses), abs=1e-5), 1)
        assert [summary["rows"][row]["loss"]["dylu"]["n"] for row in summary["rows"]] == [2, 1]
    for row in ("1,1,6,6,6", "1,1,1,1,1"):
        ends = [by[row, method, 5]["time_s"] for method in ("dylu", "mla")]
        assert by[row, "dylu", 5]["T"] == max(ends) and by[row, "dylu", 5]["loss at T"] == by[row, "dylu", 5]["loss"]
    text = (tmp_path / "results" / "own" / "tables.md").read_text()
    assert "n = 1 to 2 seeds" in text and "diverged" not in text


# ---- resuming and sharing


def test_a_second_call_runs_nothing_and_changes_nothing(whole, tmp_path):
    before = digests(whole)
    result = study(write_study(tmp_path), whole, "--seeds", "2")
    assert result.code == 0 and "18 runs, 18 of them there already" in result.out
    assert digests(whole) == before


def test_parts_then_the_whole_are_the_whole(whole, tmp_path):
    path, out = write_study(tmp_path), tmp_path / "results"
    result = study(path, out, "--seeds", "1", "--rows", "1,1,6,6,6", "--methods", "mla,sync-nesterov")
    assert result.code == 0 and "2 runs, 0 of them" in result.out
    assert not (out / "tiny" / "table-1-fixed-tokens-heloco.csv").exists()
    assert study(path, out, "--seeds", "2", "--rows", "1,1,6,6,6;1,1,1,1,1", "--methods", "heloco", "--methods", "mla").code == 0
    result = study(path, out, "--seeds", "2")
    assert result.code == 0 and "18 runs, 9 of them there already" in result.out
    assert runs(out) == runs(whole)
    # stacked with other runs a run is the same within float tolerance
    ours, theirs = numbers(out), numbers(whole)
    for one, other in zip(ours["records"], theirs["records"], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3)
        assert {k: v for k, v in one.items() if k in ("row", "method", "seed", "run", "T")} == {
            k: v for k, v in other.items() if k in ("row", "method", "seed", "run", "T")
        }


def test_fewer_rows_leave_no_old_figures_or_tables(whole, tmp_path):
    import shutil

    out = tmp_path / "results"
    shutil.copytree(whole, out)
    assert study(write_study(tmp_path), out, "--seeds", "1", "--methods", "async-nesterov").code == 0
    assert sorted(p.name for p in (out / "tiny").iterdir()) == sorted(
        ["study.json", "tiny.json", "tables.md", "by-language.csv", "by-time.svg", "by-time.png", "index.html"]
    )
    assert runs(out) == runs(whole)


def test_built_in_studies_share_their_runs(tmp_path):
    chosen = ("--seeds", "1", "--rows", "1,6,6,6,6", "--methods", "heloco-ramp")
    result = study("table1", tmp_path / "results", *chosen)
    assert result.code == 0, result.err
    result = study("staleness", tmp_path / "results", *chosen)
    assert result.code == 0 and "1 runs, 1 of them there already" in result.out
    result = study("dropping", tmp_path / "results", "--seeds", "1", "--rows", "1,6,6,6,6", "--methods", "heloco-ramp")
    assert result.code == 0 and "1 runs, 1 of them there already" in result.out
    assert {p.name for p in (tmp_path / "results").iterdir()} == {"runs", "table1", "staleness", "dropping"}


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_signal_keeps_the_finished_runs_and_the_same_command_goes_on(number, whole, tmp_path, nursery):
    path, out = write_study(tmp_path), tmp_path / "results"
    command = ("study", path, "--scale", "small", "--out", out, "--seeds", "2")
    result = nursery.run(*command, fault=Fault(STORE, 1, signal=number))
    assert result.code == 128 + number, result.err
    run_names = runs(out)
    assert 1 <= len(run_names) < 18
    sentence = f"Stopped: {len(run_names)} of 18 runs are finished and kept in {out / 'runs'}. The same command goes on."
    assert result.out.splitlines()[-1] == sentence
    assert not (out / "tiny").exists()
    before = digests(out / "runs")
    result = nursery.run(*command)
    assert result.code == 0 and f"18 runs, {len(run_names)} of them there already" in result.out
    assert runs(out) == runs(whole) and before.items() <= digests(out / "runs").items()
    assert len(numbers(out)["records"]) == 20


def test_killed_it_leaves_whole_runs_and_goes_on(whole, tmp_path, nursery):
    path, out = write_study(tmp_path), tmp_path / "results"
    command = ("study", path, "--scale", "small", "--out", out, "--seeds", "2")
    result = nursery.run(*command, fault=Fault("heloco.disk:os.fsync", 5, signal=signal.SIGKILL))
    assert result.code == -signal.SIGKILL
    assert len([name for name in runs(out) if not name.startswith(".")]) == 2
    assert study(path, out, "--seeds", "2").code == 0
    assert [name for name in runs(out) if not name.startswith(".")] == runs(whole)


def test_the_first_seeds_runs_come_first(whole):
    assert whole.exists()
    plan = make_plan(find_study("table1"), scale="small", seeds=2, rows=["1,6,6,6,6"])
    assert [run.config.run.seed for run in plan.runs.values()] == [0] * 5 + [1] * 5


# ---- what does not go as planned


def test_a_run_that_diverges_is_kept_as_such_and_said(tmp_path):
    text = (
        TINY
        + """
[methods]
mla = {}
wild = { method = "mla", lr = 1e25, lr_min = 1e25 }
[[tables]]
kind = "losses"
title = "Losses"
baseline = "mla"
"""
    )
    result = study(write_study(tmp_path, text, "wild"), tmp_path / "results", "--seeds", "1", "--rows", "1,1,1,1,1")
    assert result.code == 0, result.err
    assert "wild  diverged: " in result.out
    records = {record["method"]: record for record in numbers(tmp_path / "results", "wild")["records"]}
    assert (records["wild"]["verdict"], records["wild"]["loss"]) == ("diverged", None)
    assert records["mla"]["verdict"] == "finished"
    [line] = [
        ln for ln in (tmp_path / "results" / "wild" / "tables.md").read_text().splitlines() if ln.startswith("| 1,1,1,1,1 |")
    ]
    assert line.endswith("| diverged |")
    repeat = study(tmp_path / "wild.toml", tmp_path / "results", "--seeds", "1", "--rows", "1,1,1,1,1")
    assert repeat.code == 0 and "2 runs, 2 of them there already" in repeat.out


def test_without_matplotlib_there_are_tables_and_a_sentence(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = study(write_study(tmp_path), tmp_path / "results", "--seeds", "1", "--methods", "mla")
    assert result.code == 0 and 'pip install "heloco[figures]"' in result.out
    names = {path.name for path in (tmp_path / "results" / "tiny").iterdir()}
    assert {"tables.md", "tiny.json", "index.html"} <= names and not any(name.endswith((".svg", ".png")) for name in names)


def test_a_task_of_ones_own(tmp_path, one_thread):  # noqa: ARG001
    from heloco import DatasetTask

    def build_task(config):
        draw = torch.Generator().manual_seed(config.run.seed)
        rule = torch.randn(5, 4, generator=draw)
        datasets = []
        for i in range(5):
            x = torch.randn(64, 4, generator=draw)
            datasets.append(torch.utils.data.TensorDataset(x, x @ rule[i]))
        parts = {f"part {i}": data for i, data in enumerate(datasets)}
        model = torch.nn.Linear(4, 1)
        torch.nn.init.zeros_(model.weight)

        def loss(model, batch):
            return ((model(batch[0])[:, 0] - batch[1]) ** 2).mean()

        return DatasetTask(model, loss, shards=parts, validation=parts), config

    chosen = find_study(str(write_study(tmp_path, TABLES, "own")))
    plan = make_plan(chosen, scale="small", seeds=1, methods=["mla", "heloco-ramp", "sync-nesterov"], build_task=build_task)
    folder = Folder(tmp_path / "results", "own")
    carry_out(plan, folder.store, device=torch.device("cpu"))
    tables = write_results(plan, folder)
    assert [table.title for table in tables] == [
        "Table 1, fixed tokens: heloco-ramp", "Table 1, fixed time: heloco-ramp", "Order", "By language",
    ]  # fmt: skip
    records = numbers(tmp_path / "results", "own")["records"]
    assert len(records) == 6 and list(records[0]["loss by source"]) == [f"part {i}" for i in range(5)]
    assert all(record["loss"] < 5 for record in records)


def test_the_list_names_every_study_with_its_runs():
    result = heloco("study", "--list")
    assert result.code == 0
    rows = {cells[1].strip(): [c.strip() for c in cells] for ln in result.out.splitlines() if len(cells := ln.split("│")) > 6}
    assert rows["table1"][3:7] == ["13 × 5", "53", "53", "1,272,000"]
    assert rows["staleness"][3:7] == ["13 × 2", "26", "0", "0"]
    assert list(rows) == names()
