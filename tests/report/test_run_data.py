"""`heloco.load_run`: a run's folder as DataFrames, against its lines; and docs/tape.md, against the types."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import heloco
from heloco.errors import UserError
from heloco.records.evaluations import EvaluationRecord
from heloco.records.tape import CASES, ArrivalRecord, BlockColumns
from support.repository import REPOSITORY
from support.runs import TINY, evals, tape
from support.runs import heloco as heloco_command

pandas = pytest.importorskip("pandas", reason="pandas is not installed")


@pytest.fixture(scope="module")
def folder(unbroken) -> Path:
    return unbroken()


def test_the_tape_has_a_row_per_line(folder):
    frame, lines = heloco.load_run(folder).tape, tape(folder)
    shards = json.loads((folder / "run.json").read_text())["shards"]
    assert len(frame) == len(lines) == 8
    for (_, row), line in zip(frame.iterrows(), lines, strict=True):
        assert {name: row[name] for name in line if name not in ("blocks", "spans")} == {
            name: value for name, value in line.items() if name not in ("blocks", "spans")
        }
        assert [list(span) for span in row["spans"]] == line["spans"]
        assert row["shard_name"] == shards[line["shard"]]["name"]
    assert frame.groupby("worker").staleness.mean().to_dict() == {
        worker: pytest.approx(sum(values) / len(values))
        for worker in range(5)
        if (values := [line["staleness"] for line in lines if line["worker"] == worker])
    }
    assert (frame["loss"].dtype, frame["clipped"].dtype) == (float, float) and frame["clipped"].isna().all()


def test_the_evaluations_have_a_column_per_measure_and_source(folder):
    frame, lines = heloco.load_run(folder).evals, evals(folder)
    assert frame["loss"].tolist() == [line["mean"]["loss"] for line in lines]
    assert frame["time_s"].tolist() == [line["time_s"] for line in lines]
    for source in lines[0]["scores"]:
        for measure in ("loss", "bits_per_byte"):
            assert frame[f"{measure}/{source}"].tolist() == [line["scores"][source][measure] for line in lines]


def test_the_blocks_have_the_models_names(folder):
    run, lines = heloco.load_run(folder), tape(folder)
    names = [block["name"] for block in json.loads((folder / "run.json").read_text())["blocks"]]
    assert "token.weight" in names and len(run.blocks) == len(lines) * len(names)
    for line in lines:
        rows = run.blocks[run.blocks.arrival == line["arrival"]]
        assert rows["block"].tolist() == names
        assert rows["case"].tolist() == [CASES[letter] for letter in line["blocks"]["case"]]
        for name in ("cosine", "movement", "pseudo_gradient_norm"):
            expected = [math.nan if value is None else value for value in line["blocks"][name]]
            assert rows[name].tolist() == pytest.approx(expected, nan_ok=True)


def test_settings_facts_and_a_short_repr(folder):
    run = heloco.load_run(str(folder))
    assert run.settings["outer.method"] == run.facts.method == "heloco-ramp"
    assert run.settings["rounds.paces"] == run.facts.paces == [1, 1, 6, 6, 6]
    assert repr(run) == f"<heloco.RunData: heloco-ramp in {folder}>"


def test_a_run_that_was_killed_and_one_that_has_only_begun(folder, tmp_path):
    cut = Path(shutil.copytree(folder, tmp_path / "cut"))
    (cut / "tape.jsonl").write_text((folder / "tape.jsonl").read_text()[:-30])
    assert len(heloco.load_run(cut).tape) == 7
    for name in ("tape.jsonl", "evals.jsonl"):
        (cut / name).unlink()
    run = heloco.load_run(cut)
    assert (len(run.tape), len(run.evals), len(run.blocks)) == (0, 0, 0)
    assert "staleness" in run.tape and "time_s" in run.evals and "cosine" in run.blocks


def test_refused_contributions_have_rows_on_the_tape_and_none_among_the_blocks(tmp_path):
    result = heloco_command("train", *TINY, "--lr", "1e30", "--max-refusals", "2", "--out", tmp_path / "run")
    assert result.code == 2
    run = heloco.load_run(tmp_path / "run")
    assert len(run.tape) == len(tape(tmp_path / "run")) >= 2 and (run.tape.verdict == "refused").all()
    assert run.tape["loss"].isna().any() and len(run.blocks) == 0


def test_what_is_no_run_is_refused_and_so_is_a_machine_without_pandas(folder, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="is no run folder"):
        heloco.load_run(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr("heloco.report.run_data.find_spec", lambda _: None)
    with pytest.raises(UserError) as error:
        heloco.load_run(folder)
    assert str(error.value).endswith('pip install "heloco[pandas]"')


def test_a_run_is_loaded_without_torch_and_pandas_only_for_its_tables(folder):
    code = (
        f"import sys, heloco; run = heloco.load_run({str(folder)!r}); print('pandas' in sys.modules); "
        "print(len(run.tape), 'pandas' in sys.modules, 'torch' in sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.split() == ["False", "8", "True", "False"]


# ---- docs/tape.md


@pytest.mark.parametrize(
    ("heading", "kind"),
    [
        ("## tape.jsonl", ArrivalRecord),
        ("## The field `blocks` of tape.jsonl", BlockColumns),
        ("## evals.jsonl", EvaluationRecord),
    ],
    ids=lambda value: value.strip("# `") if isinstance(value, str) else "",
)
def test_the_documented_schema_is_that_of_the_types(heading, kind):
    page = (REPOSITORY / "docs" / "tape.md").read_text()
    section = page.partition(f"{heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|$", section, flags=re.MULTILINE)
    assert [name for name, _, _ in rows] == [field.name for field in msgspec.structs.fields(kind)]
    types = {"int": int, "float": float, "text": str}
    for name, written, _ in rows:
        declared = msgspec.structs.fields(kind)[[row[0] for row in rows].index(name)].type
        if written in types:
            assert types[written].__name__ in str(declared) or types[written] is str, (name, written, declared)
        assert ("null" in written) == ("| None" in str(declared).replace("dict[str, float | None]", "")), (
            name,
            written,
            declared,
        )
