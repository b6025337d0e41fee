"""Records: what is written is what is read, and what does not fit the schema is neither."""

import json
import math
from pathlib import Path

import msgspec
import pytest

from heloco.errors import UserError
from heloco.records.evaluations import EvaluationRecord
from heloco.records.json_numbers import finite_measures, finite_or_none, shorten_number
from heloco.records.lines import Lines, Tail, read_records
from heloco.records.machine_ids import make_id, name_of
from heloco.records.run_facts import read_facts
from heloco.records.tape import ArrivalRecord
from support.runs import evals, tape

LINE = {"arrival": 1, "outer_step": 1, "time_s": 2.0, "inner_steps": 4, "units": 8, "mean": {"loss": None}, "scores": {}}


def test_records_hold_all_that_a_run_wrote(unbroken):
    folder: Path = unbroken()
    assert [msgspec.to_builtins(r) for r in read_records(folder / "evals.jsonl", EvaluationRecord)] == evals(folder)
    records = [json.loads(msgspec.json.encode(record)) for record in read_records(folder / "tape.jsonl", ArrivalRecord)]
    assert records == tape(folder)
    assert json.loads(read_facts(folder / "run.json").to_json()) == json.loads((folder / "run.json").read_text())


def test_what_could_not_be_read_again_is_not_written(tmp_path):
    lines = Lines(tmp_path / "evals.jsonl", 0, EvaluationRecord)
    with pytest.raises(msgspec.ValidationError, match=r"Expected `int`, got `float` - at `\$\.units`"):
        lines.append(EvaluationRecord(**LINE | {"units": 8.5}))
    lines.close()
    assert not (tmp_path / "evals.jsonl").read_bytes()


def test_a_measure_that_is_no_number_is_written_as_null(tmp_path):
    lines = Lines(tmp_path / "evals.jsonl", 0, EvaluationRecord)
    lines.append(msgspec.convert(LINE | {"mean": {"loss": float("nan")}, "time_s": 3.0}, EvaluationRecord))
    lines.close()
    [record] = read_records(tmp_path / "evals.jsonl", EvaluationRecord)
    assert (record.mean, record.time_s) == ({"loss": None}, 3.0)


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (b'{"arrival":2', "malformed|truncated"),
        (msgspec.json.encode(LINE | {"units": "x"}), r"Expected `int`, got `str` - at `\$\.units`"),
        (b"{}", "missing required field `arrival`"),
    ],
)
def test_an_edited_line_is_reported_with_its_number_and_its_field(tmp_path, edit, why):
    path = tmp_path / "evals.jsonl"
    path.write_bytes(msgspec.json.encode(LINE) + b"\n" + edit + b"\n")
    tail = Tail(path, EvaluationRecord)
    with pytest.raises(UserError, match=rf"evals\.jsonl: line 2 was edited and is no record \(.*({why})"):
        list(tail.more())


def test_a_tail_reads_each_line_once_and_can_begin_near_the_end(tmp_path):
    path = tmp_path / "evals.jsonl"
    lines = [msgspec.json.encode(LINE | {"arrival": i}) + b"\n" for i in range(5)]
    path.write_bytes(b"".join(lines[:3]) + lines[3][:9])
    whole, end = Tail(path, EvaluationRecord), Tail(path, EvaluationRecord, last_bytes=len(lines[2]) + 9)
    assert [record.arrival for record in whole.more()] == [0, 1, 2] and whole.has_cut_line
    assert [record.arrival for record in end.more()] == [2]
    path.write_bytes(b"".join(lines))
    assert [[r.arrival for r in tail.more()] for tail in (whole, end)] == [[3, 4], [3, 4]]
    path.write_bytes(lines[0])
    assert whole.was_cut() and end.was_cut()


@pytest.mark.parametrize("name", ["m", "gpu-7", "a#b"])
def test_a_machines_name_comes_back_from_its_id(name):
    assert name_of(make_id(name, "0a1b")) == name
    assert name_of("m") == "m"


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_what_json_cannot_hold_is_none(value):
    assert finite_or_none(value) is shorten_number(value, 6) is None
    assert finite_or_none(0.5) == 0.5 and shorten_number(2 / 3, 3) == 0.667
    assert finite_measures({"loss": 1.0, "accuracy": math.nan}) == {"loss": 1.0, "accuracy": None}
