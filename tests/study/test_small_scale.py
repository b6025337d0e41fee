"""`--scale small`, of studies of one's own."""

from heloco.study.grid import grid, total_steps
from heloco.study.spec import find_study
from support.runs import heloco

OWN = """
[settings]
inner_steps = 500
[rows]
"1,6" = { paces = [1, 6] }
[methods]
mla = {}
heloco-ramp = {}
[[tables]]
kind = "losses"
title = "Losses"
"""


def test_a_study_that_is_like_no_other_is_small_at_the_small_scale(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    result = heloco("study", path, "--scale", "small", "--seeds", "1", "--languages", "auren,zumeri", cwd=tmp_path)
    assert result.code == 0, result.err
    assert "2 runs, 0 of them there already" in result.out
    [small] = grid(find_study(str(path)), scale="small", seeds=1, methods=["mla"])
    table1 = grid(find_study("table1"), scale="small", seeds=1, methods=["mla"])[0].config
    assert total_steps(small.config) == total_steps(table1) == 320 and small.config.model == table1.model
    path.write_text(OWN + "[small]\narrivals = 10\n")
    [small] = grid(find_study(str(path)), scale="small", seeds=1, methods=["mla"])
    assert total_steps(small.config) == 40
    assert total_steps(grid(find_study(str(path)), scale="paper", seeds=1)[0].config) == 500 * 300


def test_the_small_scale_of_another_task_has_no_settings_of_language_models(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(OWN.replace("inner_steps = 500", 'task = "images"\npreset = "1m"\ntokenizer = "bytes"\neval_windows = 64'))
    config = grid(find_study(str(path)), scale="small")[0].config
    assert total_steps(config) == 320 and config.model.width == 0
