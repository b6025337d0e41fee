"""`heloco study` and bad input: exit code 2, a sentence with cause and remedy, nothing made or changed."""

import json
from pathlib import Path

import pytest
import torch

from support.runs import assert_refused, heloco, write_text

TINY = """
like = "table1"
[settings]
preset = "1m"
tokenizer = "bytes"
width = 16
heads = 2
layers = 1
context = 16
inner_steps = 1
arrivals = 5
eval_every = 5
eval_windows = 2
[small]
inner_steps = 1
arrivals = 5
eval_every = 5
width = 16
context = 16
eval_windows = 2
[rows]
"1,1,1,1,1" = { paces = [1, 1, 1, 1, 1] }
[methods]
mla = {}
heloco = {}
[[tables]]
kind = "losses"
title = "Losses"
"""
SMALL = ("--scale", "small", "--seeds", "1")


@pytest.fixture
def tiny(tmp_path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def refused(around: Path, *arguments: str | Path, says: str) -> None:
    assert_refused(around, "study", *arguments, says=says, cwd=around)


def done(tiny: Path, out: Path, *arguments: str) -> None:
    finished = heloco("study", tiny, *SMALL, "--out", out, *arguments)
    assert finished.code == 0, finished.err


# ---- names and numbers


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "Name a study, e.g. `heloco study table1 --scale small`"),
        ("tabel1 --scale small", "There is no study 'tabel1'; did you mean 'table1'?"),
        ("missing.toml --scale small", "The study missing.toml cannot be read (No such file or directory): check the path."),
        ("table1 --scale smal", "There is no scale 'smal'; did you mean 'small'?"),
        ("table1 --scale small --rows 1,6,6,6", "table1 has no row '1,6,6,6'; did you mean '1,6,6,6,6'?"),
        ("table1 --scale small --rows 1,6,6,6,6;", "table1 has no row ''"),
        ("table1 --scale small --methods mla,helloco", "table1 has no method 'helloco'; did you mean 'heloco'?"),
        ("flexible --scale small --methods mla", "flexible has no method 'mla'; known: heloco-ramp."),
        (
            "convergence --scale small --rows iid-dylu --methods sync-nesterov",
            "convergence pairs none of these rows with any of these methods",
        ),
        ("table1 --scale small --seeds 0", "seeds is 0: a study needs at least one."),
        ("table1 --scale small --seeds -2", "seeds is -2"),
        ("table1 --scale small --seeds two", "seeds cannot be 'two': give a whole number."),
        ("table1 --scale small --device foo", "The device 'foo' cannot be used here"),
        ("table1 --scale small --tokenizer byte", "There is no tokenizer 'byte'"),
        ("table1 --scale small --data nowhere", "nowhere"),
        ("table1 --seed 3", "There is no option --seed for `heloco study`; did you mean '--seeds'?"),
        ("table1", "At the paper's scale a study needs text: give --data DIR"),
    ],
)
def test_unknown_names_and_junk_are_refused(words, says, tmp_path):
    refused(tmp_path, *words.split(), says=says)


def test_too_few_and_too_many_languages_are_refused(tmp_path):
    text = write_text(tmp_path / "text")
    refused(
        tmp_path, "table1", *SMALL, "--data", text,
        says="table1 needs 5 sources (languages), a worker's each, but the data has 2 (de, en): add what is missing to --data.",
    )  # fmt: skip
    many = write_text(tmp_path / "many", **dict.fromkeys(("es", "fr", "it", "pt"), "la el de que y a en un"))
    refused(tmp_path, "table1", *SMALL, "--data", many, says="pick 5 with --languages.")
    refused(tmp_path, "flexible", *SMALL, "--data", text, says="flexible needs 5 sources")


def test_languages_picks_and_orders_the_sources(tmp_path, tiny):
    many = write_text(tmp_path / "many", **dict.fromkeys(("es", "fr", "it", "pt"), "la el de que y a en un"))
    done(tiny, tmp_path / "results", "--data", str(many), "--languages", "it,de,en,es,fr")
    manifest = json.loads((tmp_path / "results" / "tiny" / "study.json").read_text())
    assert manifest["sources"] == ["it", "de", "en", "es", "fr"]


# ---- the paper's scale without a GPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_papers_scale_says_what_it_would_cost(tmp_path, tiny):
    command = ("table1", "--data", "builtin", "--tokenizer", "bytes", "--rows", "1,6,6,6,6")
    before = set(tmp_path.iterdir())
    refusal = heloco("study", *command, cwd=tmp_path)
    assert refusal.code == 2 and set(tmp_path.iterdir()) == before
    sentence = refusal.sentence
    assert sentence.startswith("There is no GPU here, and on this CPU the 15 missing runs of table1 would take about ")
    assert sentence.endswith(
        "hours: `heloco study table1 --scale small` takes minutes, and --device cpu goes ahead all the same."
    )
    hours = float(sentence.split("would take about ")[1].split(" hours")[0].replace(",", ""))
    assert 0.1 < hours < 1000  # 15 runs of 24,000 steps, a few milliseconds to seconds each
    ahead = heloco("study", tiny, "--data", "builtin", "--device", "cpu", "--seeds", "1", "--out", tmp_path / "results")
    assert ahead.code == 0 and "on cpu" in ahead.out
    repeat = heloco("study", tiny, "--data", "builtin", "--seeds", "1", "--out", tmp_path / "results")
    assert repeat.code == 0 and "2 of them there already" in repeat.out  # nothing is missing, so nothing needs a GPU


# ---- folders


def test_a_folder_that_belongs_to_something_else_is_refused(tmp_path, tiny):
    (tmp_path / "file").write_text("text")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "heloco-001").mkdir()
    (tmp_path / "half" / "tiny").mkdir(parents=True)
    (tmp_path / "half" / "tiny" / "notes.txt").write_text("mine")
    for out, says in (
        ("file", "is no folder: choose another --out."),
        ("other", "belongs to something else (there is no study in it): choose another --out."),
        (".", "belongs to something else (it holds heloco-001): choose another --out."),
        ("half", "belongs to something else (it has no study.json): choose another --out, or empty it."),
    ):
        refused(tmp_path, tiny, *SMALL, "--out", tmp_path / out, says=says)


def test_where_no_folder_is_named_each_scale_has_its_own(tmp_path, tiny):
    assert heloco("study", tiny, *SMALL, cwd=tmp_path).code == 0
    assert heloco("study", tiny, "--seeds", "1", "--data", "builtin", "--device", "cpu", cwd=tmp_path).code == 0
    descriptions = {out: json.loads((tmp_path / out / "tiny" / "study.json").read_text()) for out in ("results", "results-small")}
    assert [descriptions[out]["scale"] for out in descriptions] == ["paper", "small"]


def test_results_of_another_scale_or_other_data_are_not_overwritten(tmp_path, tiny):
    out = tmp_path / "results"
    done(tiny, out)
    names = ("de", "en", "es", "fr", "it")
    text = write_text(tmp_path / "text", **dict.fromkeys(names, "la el de que y a en un"))
    refused(tmp_path, tiny, *SMALL, "--out", out, "--data", text, says="holds this study of other data or another tokenizer")
    paper = ("--seeds", "1", "--data", "builtin", "--device", "cpu")
    refused(tmp_path, tiny, *paper, "--out", out, says="holds this study at --scale small, not paper")
    manifest = out / "tiny" / "study.json"
    for broken in ("", "[]", "{", '{"study": "table1", "scale": "small", "data": "", "files": []}', '{"study": "tiny"}'):
        manifest.write_text(broken)
        refused(tmp_path, tiny, *SMALL, "--out", out, says=f"{manifest} is no study.json of this study")


def test_a_damaged_or_foreign_run_is_named(tmp_path, tiny):
    out = tmp_path / "results"
    done(tiny, out)
    first, second = sorted((out / "runs").iterdir())
    content = first.read_text()
    record = json.loads(content)
    short = {**record, "evals": {**record["evals"], "loss": record["evals"]["loss"][:-1]}}
    words = {**record, "evals": {**record["evals"], "loss": ["low"] * len(record["evals"]["loss"])}}
    broken = [content[: len(content) // 2], "", "3", "[]", "{}", json.dumps({**record, "format": 99}), second.read_text()]
    broken += [json.dumps(short), json.dumps(words), json.dumps({**record, "more": 1}), json.dumps({**record, "verdict": "fine"})]
    for damaged in broken:
        first.write_text(damaged)
        refused(tmp_path, tiny, *SMALL, "--out", out, says=f"{first} is not the finished run that its name says (")
    first.unlink()
    done(tiny, out)  # the remedy
    assert json.loads(first.read_text())["evals"]["arrival"] == record["evals"]["arrival"]


# ---- studies of one's own


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('like = "table1"', 'lke = "table1"', "a study has no 'lke'; did you mean 'like'?"),
        ('like = "table1"', 'like = "tabel1"', "There is no study 'tabel1'; did you mean 'table1'?"),
        ('like = "table1"', "like = 3", "like must be a text."),
        ("arrivals = 5", "arrivls = 5", "There is no setting 'arrivls'; did you mean 'arrivals'?"),
        ("mla = {}", "mla = 3", "'mla' must be a table of settings."),
        ("mla = {}", "mlaa = {}", "There is no method 'mlaa' here; did you mean 'mla'?"),
        ("mla = {}", 'mla = { rows = ["1,1"] }', "there is no row '1,1'; did you mean '1,1,1,1,1'?"),
        ("[1, 1, 1, 1, 1]", '"fast"', "paces cannot be 'fast'"),
        (
            "mla = {}",
            "sync-nesterov = { eval_every = 7 }",
            "eval_every is 7, but sync-nesterov waits for all 5 workers: give a multiple of 5.",
        ),
        ('kind = "losses"', 'kind = "loses"', "kind cannot be 'loses'; did you mean 'losses'?"),
        ('title = "Losses"', "", "a table has no title: give one."),
        ('title = "Losses"', 'title = "Losses"\nbaseline = "sgd"', "there is no method 'sgd'"),
        ('title = "Losses"', 'title = "Losses"\nlines = ["rows"]', "lines must be one value."),
        ("[[tables]]", "[[tables", "is not valid TOML"),
    ],
)
def test_a_mistake_in_a_study_of_ones_own_is_named(old, new, says, tmp_path):
    assert old in TINY
    path = tmp_path / "own.toml"
    path.write_text(TINY.replace(old, new))
    refused(tmp_path, path, *SMALL, says=says)
