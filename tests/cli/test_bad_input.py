"""Bad input: exit code 2, one sentence with the cause and the remedy, no traceback, and nothing on disk made or changed."""

import shutil
import signal
from pathlib import Path

import pytest

from support.nursery import Fault
from support.runs import TINY, assert_refused, heloco, write_text


def refused(tmp_path: Path, *arguments: str | Path, says: str) -> None:
    assert_refused(tmp_path, *arguments, says=says, cwd=tmp_path)


# ---- names


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("trian", "There is no command 'trian'; did you mean 'train'?"),
        (
            "qqq",
            "There is no command 'qqq'; known: train, resume, eval, export, schedule, plan, methods, serve, join, "
            "status, stop, pause, unpause, evict, tokens, doctor, replay, rollback, study, report, compare, watch.",
        ),
        ("train --metod mla", "There is no option --metod for `heloco train`; did you mean '--method'?"),
        ("train --inner-step=5", "There is no option --inner-step for `heloco train`; did you mean '--inner-steps'?"),
        ("train --inner_steps 5", "did you mean '--inner-steps'?"),
        ("train -x", "There is no option -x for `heloco train`; known: --help, --config, "),
        ("train run.toml", "`heloco train` does not know what to do with 'run.toml'"),
        ("train --seed", "Argument --seed: expected one argument."),
        ("schedule --pace 1,2", "There is no option --pace for `heloco schedule`; did you mean '--paces'?"),
        ("methods --jsn", "There is no option --jsn for `heloco methods`; did you mean '--json'?"),
        ("resume", "The following arguments are required: RUN."),
        ("train --method heloco-rump", "There is no method 'heloco-rump' here; did you mean 'heloco-ramp'?"),
        ("train --method nesterov", "did you mean 'sync-nesterov'?"),
        ("train --method qqq", "There is no method 'qqq' here; known: sync-nesterov, async-nesterov, delayed-nesterov, mla, "),
        ("schedule --method helco", "did you mean 'heloco'?"),
        ("train --recipe papre", "There is no recipe 'papre'; did you mean 'paper'?"),
        ("train --preset papr", "There is no model preset 'papr'; did you mean 'paper'?"),
        ("train --tokenizer byte", "There is no tokenizer 'byte': name 'bytes', 'gpt2' or the path of a tokenizer.json"),
        ("train --task image", "There is no task 'image' here; did you mean 'images'?"),
        ("train --split sourse", "split cannot be 'sourse': did you mean 'source'?"),
        ("train --assign flexibel", "There is no shard policy 'flexibel' here; did you mean 'flexible'?"),
        ("train --weight averge", "There is no arrival weight 'averge' here; did you mean 'average'?"),
        ("train --drop skipp", "drop cannot be 'skipp': did you mean 'skip'?"),
        ("train --steps dilu", "steps cannot be 'dilu': did you mean 'dylu'?"),
        ("train --languages auren,zumera", "There is no source 'zumera' in the built-in languages"),
        ("train --languages auren,auren", "The source 'auren' is named twice"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(words, says, tmp_path):
    refused(tmp_path, *words.split(), says=says)


# ---- numbers


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--paces 1,0,6", "A pace is 0.0: paces are seconds per inner step, finite and above 0."),
        ("--paces -1,2", "A pace is -1.0: paces are seconds per inner step, finite and above 0."),
        ("--paces=-1", "A pace is -1.0"),
        ("--paces nan,1", "A pace is nan"),
        ("--paces 1,inf", "A pace is inf"),
        ("--paces -inf", "A pace is -inf"),
        ("--paces 1e-12", "A pace of 1e-12 s is outside the clock's 1e-9 to 1e9"),
        ("--paces 1e308", "A pace of 1e+308 s is outside the clock's 1e-9 to 1e9"),
        ("--paces fast,slow", "paces cannot be 'fast,slow': give a list such as 1,6,6."),
        ("--paces 1,,6", "paces cannot be '1,,6'"),
        ("--paces=", "There are no paces: give one per worker"),
        ("--workers -2", "workers is -2"),
        ("--arrivals -1", "arrivals is -1: a run takes in at least one contribution."),
        ("--arrivals -3", "arrivals is -3"),
        ("--arrivals 1.5", "arrivals cannot be '1.5': give a whole number."),
        ("--inner-steps 0", "inner_steps is 0: a round needs at least one step."),
        ("--grace nan", "grace is nan"),
    ],
)
@pytest.mark.parametrize("command", ["train", "schedule"])
def test_an_impossible_schedule_is_refused(command, words, says, tmp_path):
    refused(tmp_path, command, *words.split(), says=says)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--seed -1", "seed is -1: give a number ≥ 0."),
        ("--lr nan", "lr is nan: give a finite number ≥ 0."),
        ("--lr 1e999", "lr is inf"),
        ("--clip -1", "clip is -1.0"),
        ("--batch-size 0", "batch_size is 0: give a number ≥ 1."),
        ("--keep-state perhaps", "keep_state cannot be 'perhaps': give true or false."),
        ("--outer-lr nan", "heloco-ramp: lr is nan: it must lie in [0, ∞). η, the outer learning rate."),
        ("--momentum 1", "momentum is 1.0: it must lie in [0, 1). μ, the outer momentum."),
        ("--beta-max 2", "beta_max is 2.0"),
        ("--method delayed-nesterov --delay 0", "delay is 0"),
        ("--method mla --k-d 1", "mla has no knob 'k_d'"),
        ("--width 33", "The model's width 33 is not a multiple of its 2 heads"),
        ("--width -8", "The model's width is -8"),
        ("--context -1", "A context of -1 tokens has no window"),
        ("--split dirichlet --alpha 0", "alpha is 0.0: give a finite number above 0."),
        ("--alpha nan", "alpha is nan"),
        ("--limit-mb inf --data hf:some/thing", "limit_mb is inf"),
        ("--vocab-size 100", "The tokenizer bytes has 257 tokens and the model a vocabulary of 100: leave --vocab-size out"),
        ("--vocab-size -1", "The model's vocab_size is -1"),
        ("--device foo", "The device 'foo' cannot be used here"),
        ("--device meta", "The device 'meta' cannot be used here"),
        ("--device cuda:99", "The device 'cuda:99' cannot be used here"),
        (
            "--paces 1,1,1,1,1,1",
            "6 workers but only 5 shards: give as many shards as workers, fewer paces, or --assign flexible.",
        ),
        ("--task images --paces 1,1,1,1,1,1", "6 workers but only 5 shards"),
        ("--languages auren", "5 workers but only 1 shards"),
        ("--weight share --weight-floor 2", "weight_floor 2 is above weight_ceiling 1.5: swap them."),
    ],
)
def test_an_impossible_run_is_refused(words, says, tmp_path):
    refused(tmp_path, "train", *TINY, *words.split(), says=says)


# ---- the config file


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[round]\npaces = [1]", "there is no section [round]; did you mean 'rounds'?"),
        ("paces = [1]", "there is no section [paces]"),
        ("[rounds]\npacse = [1]", "[rounds] has no setting 'pacse'; did you mean 'paces'?"),
        ("[rounds]\nlr = 1", "[rounds] has no setting 'lr'"),
        ("workers = 3", "there is no section [workers]"),
        ('[run]\narrivals = "many"', "arrivals cannot be 'many': give a whole number."),
        ("[run]\narrivals = 2.5", "arrivals cannot be 2.5: give a whole number."),
        ("[run]\narrivals = true", "arrivals cannot be True: give a whole number."),
        ("[run]\nseed = 1979-05-27", "seed cannot be datetime.date(1979, 5, 27): give a whole number."),
        ("[inner]\nkeep_state = 1", "keep_state cannot be 1: give true or false."),
        ("[inner]\nlr = [1]", "lr cannot be [1]: give a number."),
        ("[inner]\nlr = nan", "lr is nan"),
        ("[rounds]\npaces = 1", "paces cannot be 1: give a list such as 1,6,6."),
        ('[rounds]\npaces = [1, "fast"]', "paces cannot be [1, 'fast']: give a list such as 1,6,6."),
        ("[rounds]\npaces = [1, nan]", "A pace is nan"),
        ("[rounds]\npaces = []", "There are no paces"),
        ("[input]\ndata = 3", "data cannot be 3: give text."),
        ('[outer]\nmethod = "heloko"', "did you mean 'heloco'?"),
        ("[run\narrivals = 3", "run.toml is not valid TOML ("),
        ("[run]\narrivals = 3\narrivals = 4", "run.toml is not valid TOML ("),
        (b"[input]\ndata = '\xff'", "run.toml is not valid TOML ("),
    ],
)
def test_a_wrong_config_file_is_refused(content, says, tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(tmp_path, "train", "--config", "run.toml", says=says)


def test_a_config_file_that_cannot_be_read_is_refused(tmp_path):
    refused(tmp_path, "train", "--config", "missing.toml", says="There is no config file missing.toml: check the path.")
    refused(tmp_path, "train", "--config", tmp_path, says="cannot be read (Is a directory)")


# ---- the data


LONG = "un deux " * 90


def with_text(tmp_path: Path, **files: str | bytes) -> Path:
    """A folder of text with some files replaced or added, their dots written as two underscores."""
    folder = write_text(tmp_path / "text")
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def test_data_that_is_not_there_is_refused(tmp_path):
    (tmp_path / "file.txt").write_text("text")
    (tmp_path / "empty").mkdir()
    for data, says in (
        ("missing", "The data folder missing does not exist: --data takes 'builtin', a folder with one text file per source"),
        ("file.txt", "The data folder file.txt is a file"),
        ("empty", "The data folder empty holds no training text: put one file per source there"),
    ):
        refused(tmp_path, "train", *TINY, "--data", data, says=says)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"fr__train__txt": "", "fr__val__txt": "un deux"}, "The source 'fr' has no train text: its files hold no document."),
        ({"fr__train__txt": LONG, "fr__val__txt": "\n \n"}, "The source 'fr' has no val text"),
        ({"fr__train__txt": "un", "fr__val__txt": LONG}, "The source 'fr' has 3 training tokens, too few for one window"),
        ({"fr__train__txt": LONG, "fr__val__txt": "un"}, "The validation text of 'fr' has 3 tokens, too few for a context of 16"),
        ({"fr__val__txt": LONG}, "has validation text for 'fr' (fr.val.txt) but no fr.train"),
        ({"de__train__txt": b"gut " * 99 + b"\xff\xfe" + b"gut " * 99}, "de.train.txt is not valid UTF-8"),
        ({"fr__jsonl": '{"text": "un"}\n{"txt": "deux"}\n'}, "fr.jsonl:2"),
        ({"fr__jsonl": '{"text": "un"}\n{"text": \n'}, "fr.jsonl:2"),
        ({"fr__csv": "un,deux"}, "fr.csv is of a type that is not known here (.csv)"),
        ({"fr__txt__gz": b"no gzip"}, "fr.txt.gz"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_text_that_cannot_be_used_is_refused(files, says, tmp_path):
    with_text(tmp_path, **files)
    refused(tmp_path, "train", *TINY, "--data", "text", "--paces", "1,2", says=says)


def test_fewer_shards_than_workers_is_refused_and_its_remedies_work(tmp_path):
    with_text(tmp_path)
    says = "3 workers but only 2 shards: give as many shards as workers, fewer paces, or --assign flexible."
    few = (*TINY, "--data", "text", "--arrivals", "3")
    refused(tmp_path, "train", *few, "--paces", "1,2,3", says=says)
    for remedy in (("--assign", "flexible"), ("--assign", "liu"), ("--split", "iid"), ("--paces", "1,2")):
        assert heloco("train", *few, "--paces", "1,2,3", *remedy, cwd=tmp_path).code == 0


def test_a_vocabulary_that_does_not_fit_the_model_is_refused_and_a_larger_one_is_taken(tmp_path):
    with_text(tmp_path)
    few = (*TINY, "--data", "text", "--paces", "1,2", "--arrivals", "2")
    refused(tmp_path, "train", *few, "--vocab-size", "256", says="leave --vocab-size out, or give at least 257.")
    assert heloco("train", *few, "--vocab-size", "300", cwd=tmp_path).code == 0


@pytest.mark.parametrize("content", ["", "{", "{}", '{"version": "1.0", "model": {"type": "Strange"}}', "\x00\x01"])
def test_a_tokenizer_file_that_is_none_is_refused(content, tmp_path):
    (tmp_path / "tokenizer.json").write_text(content)
    refused(tmp_path, "train", *TINY, "--tokenizer", "tokenizer.json", says="tokenizer.json")


# ---- a run


def test_a_run_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    refused(tmp_path, "train", *TINY, "--out", "file/run", says="file/run cannot be written (Not a directory)")
    refused(tmp_path, "train", *TINY, "--out", "/proc/run", says="/proc/run cannot be written (")
    (tmp_path / "runs").write_text("a file where the folder of all runs should be")
    refused(tmp_path, "train", *TINY, says="runs cannot be written (File exists)")


def test_an_export_that_cannot_be_written_is_refused(tmp_path, unbroken):
    (tmp_path / "file").write_text("")
    refused(tmp_path, "export", unbroken(), "--out", tmp_path, says="is a folder: name the file to write")
    refused(tmp_path, "export", unbroken(), "--out", "file/model", says="file/model cannot be written (")


def test_data_for_a_run_of_images_is_refused(tmp_path, nursery):
    fault = Fault("heloco.run.folder:RunFolder.write_arrival", 3, signal=signal.SIGKILL)
    nursery.run("train", *TINY, "--task", "images", "--out", tmp_path / "run", fault=fault)
    for command in ("eval", "resume"):
        says = "The run's images are drawn by code: leave --data out."
        refused(tmp_path, command, tmp_path / "run", "--data", tmp_path, says=says)


# ---- looking at runs


@pytest.mark.parametrize("command", ["report", "compare"])
def test_runs_that_cannot_be_looked_at_are_refused(command, tmp_path, unbroken):
    (tmp_path / "empty").mkdir()
    for folder in ("missing", "empty"):
        says = f"{folder} is no run folder (it has no config.toml): give the folder that `heloco train` or `serve` named."
        refused(tmp_path, command, unbroken(), folder, says=says)
    refused(tmp_path, command, says="The following arguments are required: RUN.")
    images, text = unbroken("--task", "images", "--arrivals", "4"), unbroken()
    refused(tmp_path, command, text, images, says=f"{text} trains on the task language and {images} on images: give runs of one")
    other = unbroken("--languages", "auren,vesnar", "--paces", "1,2")
    refused(tmp_path, command, text, other, says=f"{text} and {other} were trained on different text or with different token")
    fresh = Path(shutil.copytree(text, tmp_path / "fresh"))
    (fresh / "evals.jsonl").unlink()
    refused(tmp_path, command, fresh, says=f"Nothing has been evaluated yet in {fresh}: ")
    (fresh / "run.json").write_text("{}")
    refused(
        tmp_path,
        command,
        fresh,
        says="run.json was edited at method (Object missing required field `method`): restore",
    )
    (fresh / "config.toml").write_text("[")
    refused(tmp_path, command, fresh, says="config.toml cannot be read (")


def test_a_report_that_cannot_be_written_is_refused(tmp_path, unbroken):
    (tmp_path / "file").write_text("")
    refused(tmp_path, "report", unbroken(), "--out", tmp_path, says=f"{tmp_path} is a folder: name the file to write")
    refused(tmp_path, "report", unbroken(), "--out", "file/page.html", says="file/page.html cannot be written (")
    refused(tmp_path, "report", unbroken(), "--out", "/proc/page.html", says="/proc/page.html cannot be written (")


def test_evaluating_on_data_that_is_not_there_is_refused(tmp_path, unbroken):
    refused(tmp_path, "eval", unbroken(), "--data", "missing", says="The data folder missing does not exist")
