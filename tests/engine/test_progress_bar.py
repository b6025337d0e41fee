"""What `heloco.simulate` shows of a run that is going on: nothing, a bar in a terminal, a bar in a notebook."""

import re
from typing import Any

import pytest

import heloco
from heloco.engine.progress_bar import ProgressBar, is_notebook
from support.inner_rounds import mlp, task_of

pytestmark = pytest.mark.usefixtures("one_thread")
SETTINGS: dict[str, Any] = {"paces": [1, 2], "arrivals": 6, "inner_steps": 2, "batch_size": 2, "eval_every": 3, "device": "cpu"}


def test_a_script_shows_nothing_unless_it_asks(capsys):
    heloco.simulate(task_of(mlp()), **SETTINGS)
    assert capsys.readouterr() == ("", "") and not is_notebook()
    heloco.simulate(task_of(mlp()), progress=True, **SETTINGS)
    output = capsys.readouterr()
    assert output.out == "" and re.search(r"6 of 6 arrivals · \d:\d\d gone", " ".join(output.err.split()))


def test_every_arrival_is_drawn_unless_the_last_drawing_is_too_new():
    tape = heloco.simulate(task_of(mlp()), **SETTINGS).tape
    for interval_s, numbers in ((0.0, [1, 2, 3, 4, 5, 6]), (1e9, [1, 6])):
        drawings: list[tuple[int, str]] = []
        bar = ProgressBar(6, lambda *drawing, drawings=drawings: drawings.append(drawing), interval_s, drawn_s=-2e9)
        for record in tape:
            bar.on_arrival(record)
        assert [arrivals for arrivals, _ in drawings] == numbers
        assert drawings[0][1].startswith("1 of 6 arrivals · 0:00 gone")


NOTEBOOK = """
import torch
import heloco
from support.inner_rounds import mlp, task_of
result = heloco.simulate(task_of(mlp()), paces=[1, 2], arrivals=6, inner_steps=2, batch_size=2, eval_every=3, device="cpu")
result
"""


def test_a_notebook_has_a_bar_that_ends_full(monkeypatch):
    """In a real kernel: one output, which is replaced while the cell runs."""
    nbclient, nbformat = (pytest.importorskip(name, reason=f"{name} is not installed") for name in ("nbclient", "nbformat"))
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    monkeypatch.setenv("PYTHONPATH", __file__.rpartition("/engine/")[0] + ":" + heloco.__file__.rpartition("/heloco/")[0])
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(NOTEBOOK)])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    bar, result = notebook.cells[0].outputs
    assert re.match(r'<progress value="6" max="6" .*></progress> 6 of 6 arrivals · .* gone', bar["data"]["text/html"])
    assert result["data"]["text/plain"].startswith("<heloco.Result: heloco-adaptive, 6 arrivals")
