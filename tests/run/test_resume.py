"""Kill and resume: whatever ends a run, `heloco resume` leaves the tape, evaluations and parameters of an unbroken one."""

import itertools
import json
import re
import signal
from pathlib import Path

import pytest
import torch

from heloco.cli.main import run
from support.nursery import Fault, KillAtEvent
from support.programs import Program
from support.runs import TINY, Done, assert_refused, checkpoints, digests, evals, heloco, outcome, tape, train, write_text

OFTEN = ("--checkpoint-every", "3", "--eval-every", "2")
TAPE_LINE = "heloco.run.folder:RunFolder.write_arrival"
SAVE = "heloco.run.checkpoint:save"

SETTINGS = {
    "heloco": ("--method", "heloco"),
    "heloco-ramp": ("--method", "heloco-ramp", "--paces", "1,2,3,4,5"),
    "sync-nesterov": ("--method", "sync-nesterov", "--arrivals", "12"),
    "async-nesterov": ("--method", "async-nesterov", "--paces", "1,1.5,2"),
    "delayed-nesterov": ("--method", "delayed-nesterov", "--delay", "4"),
    "mla-lookahead": ("--method", "mla-lookahead", "--weight", "share"),
    "kept optimizer state": ("--keep-state", "--paces", "1,1,2,2,3"),
    "shared second moment": ("--keep-state", "--second-moment", "rows", "--paces", "1,1,2,2,3"),
    "Muon": ("--inner-optimizer", "muon", "--keep-state", "--second-moment", "rows", "--paces", "1,1,2,2,3"),
    "SGD": ("--inner-optimizer", "sgd", "--lr", "0.05", "--keep-state", "--paces", "1,1,2,2,3"),
    "the best recipe": ("--recipe", "best", "--inner-steps", "6"),
    "annealed weight": ("--method", "heloco-adaptive", "--assign", "flexible", "--weight", "discounted"),
    "kept state and barrier": ("--keep-state", "--method", "sync-nesterov", "--paces", "1,2,3"),
    "flexible shards": ("--assign", "flexible", "--paces", "1,2,3", "--split", "iid"),
    "Liu's shards": ("--assign", "liu", "--paces", "1,2,3,3,3,3,4"),
    "dropped as zero": ("--drop", "zero", "--drop-above", "0"),
    "dropped by skipping": ("--drop", "skip", "--drop-above", "0"),
    "DyLU with grace": ("--steps", "dylu", "--inner-steps", "6", "--paces", "1,2,3,4,5", "--grace", "0.25"),
    "much of the inner loop": (
        "--accumulate",
        "2",
        "--clip",
        "0.5",
        "--warmup",
        "3",
        "--lr-position",
        "run",
        "--precision",
        "bf16",
    ),
    "several epochs": ("--data", "TEXT", "--batch-size", "8", "--inner-steps", "9", "--paces", "1,4"),
    "Dirichlet": ("--data", "TEXT", "--split", "dirichlet", "--alpha", "0.3", "--paces", "1,2,3"),
    "images": ("--task", "images", "--batch-size", "8"),
    "images with barrier": ("--task", "images", "--batch-size", "8", "--method", "sync-nesterov", "--paces", "1,2,2,3"),
}


FIRST = (
    "heloco", "sync-nesterov", "the best recipe", "Muon", "annealed weight", "kept state and barrier", "Liu's shards",
    "DyLU with grace",
    "much of the inner loop", "several epochs",
)  # fmt: skip
"""The others are combinations of the same parts, and run with the long tests."""


def settings_of(name: str, text: Path) -> tuple[str, ...]:
    return (*OFTEN, *(str(text) if word == "TEXT" else word for word in SETTINGS[name]))


def kill(at: str, call: int = 1, when: str = "after", mess: str = "") -> Fault:
    return Fault(at, call, when, signal.SIGKILL, mess)


def assert_killed(result: Done) -> None:
    assert result.code == -signal.SIGKILL, (result.code, result.out, result.err)


def assert_resumes_to(expected: Path, folder: Path) -> None:
    """Every file the same as in the unbroken run, checkpoints and all, and nothing left lying about."""
    result = heloco("resume", folder)
    assert result.code == 0, result.err
    if "is finished" in result.out:  # killed after its last checkpoint: there is nothing to do, not even to tidy up
        assert outcome(folder) == outcome(expected)
    else:
        assert digests(folder) == digests(expected)


# ---- kill -9


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FIRST else pytest.mark.long) for name in SETTINGS])
def test_killed_after_some_arrival_it_resumes_to_the_bit(name, tmp_path, nursery, unbroken, text):
    settings = settings_of(name, text)
    expected = unbroken(*settings)
    arrivals = len(tape(expected))
    for arrival in (2, arrivals // 2 + 1, arrivals - 1)[1 if "images" in name else 0 :]:
        folder = tmp_path / f"killed-{arrival}"
        assert_killed(nursery.run("train", *TINY, *settings, "--out", folder, fault=kill(TAPE_LINE, arrival)))
        assert len(tape(folder)) == arrival
        assert_resumes_to(expected, folder)


def test_the_barrier_settings_are_killed_inside_a_barrier(unbroken):
    """Guards the test above: a checkpoint it resumes from holds a half-filled barrier."""
    folder = unbroken(*OFTEN, *SETTINGS["sync-nesterov"])
    verdicts = [line["verdict"] for line in tape(folder)]
    assert verdicts == (["gathered"] * 4 + ["applied"]) * 2 + ["gathered"] * 2
    state = json.loads((checkpoints(folder)[0] / "state.json").read_text())
    assert state["books"]["arrivals"] == 9 and state["books"]["gathered_workers"] == [0, 1, 2, 3]


def test_killed_at_any_touch_of_its_folder_it_resumes_to_the_bit(tmp_path, nursery, unbroken):
    expected = unbroken(*OFTEN)
    last_event = 0
    for event in itertools.count(1, step=4):
        folder = tmp_path / f"event-{event}"
        result = nursery.run("train", *TINY, *OFTEN, "--out", folder, fault=KillAtEvent(str(folder), event))
        if result.code == 0:
            last_event = event
            break
        assert_killed(result)
        if (folder / "config.toml").exists():
            assert_resumes_to(expected, folder)
        else:  # nothing of a run yet: it is told so, and a new one is started
            refused = heloco("resume", folder)
            assert refused.code == 2 and "is no run folder" in refused.err
    assert last_event > 60, "the events were not seen"


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(kill("heloco.run.folder:RunFolder.start_writing", 1, "before"), id="before the tape is opened"),
        pytest.param(kill("heloco.run.folder:RunFolder.write_eval", 1, "before"), id="before the first evaluation"),
        pytest.param(kill(SAVE, 1, "before"), id="before the first checkpoint"),
        pytest.param(kill("heloco.run.checkpoint:write", 1, "after", "halved"), id="in the first checkpoint's tensors"),
        pytest.param(kill("heloco.records.lines:Lines.append", 6, "before", "torn"), id="in the middle of a line of the tape"),
        pytest.param(kill("heloco.run.checkpoint:write", 3, "before"), id="before a checkpoint's tensors"),
        pytest.param(kill("heloco.run.checkpoint:write", 3, "after", "halved"), id="in the middle of a checkpoint's tensors"),
        pytest.param(kill("heloco.run.checkpoint:write", 3, "after"), id="between a checkpoint's tensors and its state"),
        pytest.param(kill("heloco.run.checkpoint:make_folder_durable", 5, "before"), id="before a checkpoint is renamed"),
        pytest.param(kill("heloco.run.checkpoint:make_folder_durable", 6, "before"), id="after a checkpoint is renamed"),
        pytest.param(kill("heloco.run.checkpoint:shutil.rmtree", 3, "before"), id="before an old checkpoint is removed"),
        pytest.param(kill("heloco.inner.sequential:SequentialInner.step", 9), id="in the middle of a round"),
        pytest.param(kill("heloco.run.folder:RunFolder.write_eval", 5), id="after the last evaluation"),
        pytest.param(kill(SAVE, 4, "before"), id="before the last checkpoint"),
        pytest.param(kill(SAVE, 4), id="after the last checkpoint"),
    ],
)
def test_killed_at_a_delicate_moment_it_resumes_to_the_bit(fault, tmp_path, nursery, unbroken):
    folder = tmp_path / "run"
    assert_killed(nursery.run("train", *TINY, *OFTEN, "--out", folder, fault=fault))
    assert_resumes_to(unbroken(*OFTEN), folder)


def test_killed_again_and_again_it_resumes_to_the_bit(tmp_path, nursery, unbroken):
    folder = tmp_path / "run"
    assert_killed(nursery.run("train", *TINY, *OFTEN, "--out", folder, fault=kill(TAPE_LINE, 2)))
    for fault in (kill(SAVE, 1, "before"), kill(TAPE_LINE, 5), kill("heloco.run.checkpoint:write", 1), kill(TAPE_LINE, 1)):
        assert_killed(nursery.run("resume", folder, fault=fault))
    assert_resumes_to(unbroken(*OFTEN), folder)


def signal_at_line(program: Program, start: str, number: int) -> Done:
    """Sends the signal when the process has printed a line that starts so, and waits for its end."""
    program.match_output(f"(?m)^{re.escape(start)}")
    program.process.send_signal(number)
    return program.end()


ENDLESS = ("--arrivals", "100000", "--schedule-steps", "10", "--checkpoint-every", "3", "--eval-every", "1")


def test_a_real_process_killed_from_outside_goes_on_as_if_nothing_had_happened(tmp_path, programs):
    """The two processes are killed wherever they happen to be; what they had durable is compared with a run that was not."""
    folder, settings = tmp_path / "run", (*TINY, *ENDLESS)
    killed_run = signal_at_line(programs.heloco("train", *settings, "--out", folder), "arrival     11/", signal.SIGKILL)
    killed_again = signal_at_line(programs.heloco("resume", folder), "arrival     20/", signal.SIGKILL)
    assert killed_run.code == killed_again.code == -signal.SIGKILL
    arrivals = len(tape(folder))
    assert arrivals >= 20
    # the same config but for where it ends: the tape must be the same as far as both go
    expected = train(tmp_path / "expected", *ENDLESS, "--arrivals", "20")
    ours, theirs = ((f / "tape.jsonl").read_bytes().splitlines()[:20] for f in (folder, expected))
    assert ours == theirs
    assert [line["mean"] for line in evals(folder)[:21]] == [line["mean"] for line in evals(expected)]


# ---- SIGINT and SIGTERM


@pytest.mark.parametrize(
    ("name", "number"),
    [("heloco", signal.SIGINT), ("heloco", signal.SIGTERM), ("kept state and barrier", signal.SIGTERM),
     ("images with barrier", signal.SIGINT)],
)  # fmt: skip
def test_a_signal_makes_a_checkpoint_and_the_run_resumes_to_the_bit(name, number, tmp_path, nursery, unbroken):
    settings, folder = (*OFTEN, *SETTINGS[name]), tmp_path / "run"  # no TEXT among these
    result = nursery.run(
        "train", *TINY, *settings, "--out", folder, fault=Fault("heloco.inner.sequential:SequentialInner.step", 9, signal=number)
    )
    assert result.code == 128 + number
    assert result.out.splitlines()[-1] == f"Stopped at arrival 4, checkpointed. `heloco resume {folder}` goes on."
    assert checkpoints(folder)[-1].name == "arrival-00000004"
    assert len(tape(folder)) == 4
    resumed = heloco("resume", folder)
    assert resumed.code == 0
    assert resumed.out.startswith(f"Resuming {folder} at arrival 4 of ")
    assert outcome(folder) == outcome(unbroken(*settings))


@pytest.mark.parametrize(
    ("fault", "arrival"),
    [
        pytest.param(Fault("heloco.task.language:LanguageTask.evaluate", 1, signal=signal.SIGTERM), 0, id="first evaluation"),
        pytest.param(Fault("heloco.task.language:LanguageTask.evaluate", 3, signal=signal.SIGINT), 4, id="an evaluation"),
        pytest.param(Fault("heloco.run.checkpoint:write", 2, signal=signal.SIGINT), 3, id="a checkpoint"),
        pytest.param(Fault(TAPE_LINE, 7, signal=signal.SIGTERM), 7, id="an arrival"),
    ],
)
def test_a_signal_at_another_moment_is_heeded_too(fault, arrival, tmp_path, nursery, unbroken):
    folder = tmp_path / "run"
    result = nursery.run("train", *TINY, *OFTEN, "--out", folder, fault=fault)
    assert result.code == 128 + fault.signal
    assert f"Stopped at arrival {arrival}, checkpointed." in result.out
    assert checkpoints(folder)[-1].name == f"arrival-{arrival:08d}"
    assert heloco("resume", folder).code == 0
    assert outcome(folder) == outcome(unbroken(*OFTEN))


def test_a_signal_at_the_very_end_changes_nothing(tmp_path, nursery, unbroken):
    folder = tmp_path / "run"
    fault = Fault("heloco.task.language:LanguageTask.evaluate", 5, signal=signal.SIGINT)
    result = nursery.run("train", *TINY, *OFTEN, "--out", folder, fault=fault)
    assert result.code == 0
    assert digests(folder) == digests(unbroken(*OFTEN))


def test_ctrl_c_while_the_run_is_being_prepared_leaves_no_folder(tmp_path, nursery):
    fault = Fault("heloco.engine.build:build_task", 1, "before", signal.SIGINT)
    result = nursery.run("train", *TINY, "--out", tmp_path / "run", fault=fault)
    assert (result.code, result.sentence) == (130, "interrupted.")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_real_process_stops_at_a_signal_from_outside(number, tmp_path, programs):
    folder = tmp_path / "run"
    result = signal_at_line(programs.heloco("train", *TINY, *ENDLESS, "--out", folder), "arrival      5/", number)
    assert (result.code, result.err.strip()) == (128 + number, "")
    arrivals = len(tape(folder))
    sentence = f"Stopped at arrival {arrivals}, checkpointed. `heloco resume {folder}` goes on."
    assert result.out.splitlines()[-1] == sentence
    assert checkpoints(folder)[-1].name == f"arrival-{arrivals:08d}"


# ---- what cannot be resumed


def killed(nursery, folder: Path, *settings: str | Path, arrival: int = 5) -> Path:
    assert_killed(nursery.run("train", *TINY, *OFTEN, *settings, "--out", folder, fault=kill(TAPE_LINE, arrival)))
    return folder


def test_a_finished_run_says_so_and_stays_as_it_is(unbroken):
    folder = unbroken(*OFTEN)
    before = digests(folder)
    result = heloco("resume", folder)
    assert (result.code, result.out) == (0, f"{folder} is finished: all 8 arrivals are in.\n")
    assert digests(folder) == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("seed = 0", "seed = 1"),
        ("lr = 0.003", "lr = 0.004"),
        ("arrivals = 8", "arrivals = 9"),
        ("arrivals = 8", "arrivals = 4"),
        ("width = 32", "width = 34"),
        ("outer_lr = 0.7", "outer_lr = 0.8"),
    ],
)
def test_another_config_is_refused(old, new, tmp_path, nursery):
    for name, arrival in (("with", 5), ("without-checkpoint", 0)):
        folder = tmp_path / name
        if arrival:
            killed(nursery, folder)
        else:
            assert_killed(nursery.run("train", *TINY, "--out", folder, fault=kill(SAVE, 1, "before")))
        config = folder / "config.toml"
        content = config.read_text()
        assert content.count(f"\n{old}\n") == 1
        config.write_text(content.replace(f"\n{old}\n", f"\n{new}\n"))
        assert_refused(folder, "resume", folder, says="is not the config this run was started with: restore it")
        config.write_text(content)
        assert heloco("resume", folder).code == 0


def test_a_config_that_is_no_config_any_more_is_refused(tmp_path, nursery):
    folder = killed(nursery, tmp_path / "run")
    content = (folder / "config.toml").read_text()
    for broken, says in (
        (content.replace("seed", "sed"), "did you mean 'seed'?"),
        (content.replace("6.0", "-6.0", 1), "A pace is -6.0"),
        (content[: content.index("6.0")], "is not valid TOML"),
        (content.replace('method = "heloco-ramp"', 'method = "heloco-rump"'), "did you mean 'heloco-ramp'?"),
    ):
        (folder / "config.toml").write_text(broken)
        assert_refused(folder, "resume", folder, says=says)


def test_other_text_is_refused_and_the_same_text_elsewhere_is_taken(tmp_path, nursery):
    text, moved = write_text(tmp_path / "text"), tmp_path / "moved"
    settings = ("--data", text, "--paces", "1,2")
    expected = train(tmp_path / "expected", *OFTEN, *settings)
    with_checkpoint, without = killed(nursery, tmp_path / "with", *settings), tmp_path / "without"
    assert_killed(nursery.run("train", *TINY, *OFTEN, *settings, "--out", without, fault=kill(SAVE, 1, "before")))
    text.rename(moved)
    for folder in (with_checkpoint, without):
        assert_refused(folder, "resume", folder, says="does not exist")
    write_text(text, en="the of and to in that is wos")
    for folder in (with_checkpoint, without):
        assert_refused(folder, "resume", folder, says="The data or the tokenizer is not the one this run was started with")
        assert heloco("resume", folder, "--data", moved).code == 0
        assert outcome(folder) == outcome(expected)


def test_another_tokenizer_is_refused(tmp_path, nursery, text):
    from tokenizers import Tokenizer, models, pre_tokenizers

    def write(path: Path, *words: str) -> None:
        vocabulary = {word: i for i, word in enumerate(("[UNK]", "[EOS]", *words))}
        word_tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        word_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        word_tokenizer.add_special_tokens(["[EOS]", "[UNK]"])
        word_tokenizer.save(str(path))

    tokenizer = tmp_path / "tokenizer.json"
    write(tokenizer, "der", "die", "the", "of")
    folder = killed(nursery, tmp_path / "run", "--data", text, "--paces", "1,2", "--tokenizer", tokenizer)
    write(tokenizer, "der", "die", "the", "and")
    assert_refused(folder, "resume", folder, says="The data or the tokenizer is not the one this run was started with")
    write(tokenizer, "der", "die", "the", "of")
    assert heloco("resume", folder).code == 0


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("text")
    for path in (tmp_path / "empty", tmp_path / "missing", tmp_path / "file"):
        for command in ("resume", "eval", "export"):
            assert_refused(tmp_path, command, path, says=f"{path} is no run folder (it has no config.toml)")


def test_a_run_that_another_process_is_writing_is_refused(tmp_path, nursery, unbroken):
    folder = tmp_path / "run"
    writing = nursery.run("train", *TINY, *OFTEN, "--out", folder, fault=Fault(TAPE_LINE, 5, signal=signal.SIGSTOP))
    assert writing.code is None
    try:
        assert_refused(folder, "resume", folder, says=f"Another process is writing {folder}: wait for it to end")
        assert_refused(folder, "train", *TINY, "--out", folder, says=f"The run folder {folder} exists")
    finally:
        nursery.wake(writing, signal.SIGKILL)
    assert_resumes_to(unbroken(*OFTEN), folder)


@pytest.mark.parametrize("name", ["tape.jsonl", "evals.jsonl"])
def test_a_tape_that_lost_lines_is_refused(name, tmp_path, nursery, unbroken):
    folder = killed(nursery, tmp_path / "run")
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: content.index(b"\n") + 1])
    assert_refused(folder, "resume", folder, says=f"{folder / name} is cut short")
    (folder / name).unlink()
    assert_refused(folder, "resume", folder, says=f"{folder / name} is cut short")
    (folder / name).write_bytes(content)
    assert_resumes_to(unbroken(*OFTEN), folder)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"format": 1}', "3"])
def test_a_damaged_run_json_is_refused(content, tmp_path, nursery):
    folder = killed(nursery, tmp_path / "run")
    (folder / "run.json").write_text(content)
    assert_refused(folder, "resume", folder, says=f"{folder / 'run.json'} ")


@pytest.fixture
def own_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_resume_computes_on_as_many_threads_as_the_run_began_with(tmp_path, nursery, own_threads):  # noqa: ARG001
    folder = killed(nursery, tmp_path / "run")
    assert json.loads((folder / "run.json").read_text())["threads"] == 1
    torch.set_num_threads(2)
    assert run(["resume", str(folder)]) == 0
    assert torch.get_num_threads() == 1
