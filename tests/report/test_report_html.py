"""The report: its numbers against the tape, its page as one file that holds all it needs and takes no text for markup."""

import base64
import hashlib
import json
import math
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heloco.errors import UserError
from heloco.report import overview
from heloco.report.charts import correction_map, curves, worker_charts
from heloco.report.charts.chart import Heat, run_colours, worker_groups
from heloco.report.charts.figures import METHOD_COLOURS
from heloco.report.charts.sampling import thinned
from heloco.report.page_data import charts_of, page_data
from heloco.report.page_writer import as_json, render_report
from heloco.report.run_groups import RunGroup
from heloco.report.run_reader import Run, read_runs
from support.runs import evals, heloco, tape, train

HELOCO = ("--method", "heloco", "--paces", "1,2,3,4,5", "--arrivals", "20", "--eval-every", "4")
MLA = (*HELOCO, "--method", "mla")
MODULES_LIMIT = 400
"""For all modules of a process that has loaded the report: torch alone has twice as many."""
EVIL = "<script>alert('1')<!-- & \"co\""


@pytest.fixture(scope="module")
def folders(unbroken, tmp_path_factory) -> list[Path]:
    """Two runs under names of their own."""
    top = tmp_path_factory.mktemp("runs")
    return [Path(shutil.copytree(unbroken(*s), top / name)) for s, name in ((HELOCO, "heloco-001"), (MLA, "mla-001"))]


@pytest.fixture(scope="module")
def runs(folders) -> list[Run]:
    return read_runs(folders)


def page_json(html: str) -> dict:
    [content] = re.findall(r'<script id="data" type="application/json">(.*?)</script>', html, flags=re.DOTALL)
    return json.loads(content)


# ---- the numbers


def test_scores_are_the_evaluations_over_tokens_and_time_and_over_steps_on_demand(runs, folders):
    chart = curves.scores(runs)
    labels = ["loss", "bits per byte", "loss over outer steps", "bits per byte over outer steps"]
    assert [view.label for view in chart.views] == labels
    axes = [("units", "time_s")] * 2 + [("outer_step",)] * 2
    for view, measure, columns in zip(chart.views, ("loss", "bits_per_byte") * 2, axes, strict=True):
        for panel, x in zip(view.content.panels, columns, strict=True):
            assert [line.label for line in panel.lines] == ["heloco-001", "mla-001"]
            for line, folder in zip(panel.lines, folders, strict=True):
                assert list(line.x) == [e[x] for e in evals(folder)]
                assert list(line.y) == [e["mean"][measure] for e in evals(folder)]


def test_every_source_has_its_panel(runs, folders):
    chart = curves.sources(runs)
    names = list(evals(folders[0])[0]["scores"])
    assert [view.label for view in chart.views] == [
        f"{measure} over {x}" for measure in ("loss", "bits per byte") for x in ("tokens", "virtual time (s)", "outer step")
    ]
    for panel, name in zip(chart.views[4].content.panels, names, strict=True):
        for line, folder in zip(panel.lines, folders, strict=True):
            assert list(line.x) == [e["time_s"] for e in evals(folder)]
            assert list(line.y) == [e["scores"][name]["bits_per_byte"] for e in evals(folder)]


def test_norms_are_those_of_all_blocks(runs, folders):
    names = ("pseudo_gradient_norm", "momentum_norm", "movement")
    for view, x in zip(curves.norms(runs).views, ("time_s", "outer_step"), strict=True):
        for panel, name in zip(view.content.panels, names, strict=True):
            for line, folder in zip(panel.lines, folders, strict=True):
                assert list(line.x) == [a[x] for a in tape(folder)]
                assert list(line.y) == pytest.approx([math.hypot(*a["blocks"][name]) for a in tape(folder)])


def test_tokens_add_up_and_each_round_moves_two_models(runs, folders):
    tokens, moved = curves.traffic(runs).views[0].content.panels
    meta = json.loads((folders[0] / "run.json").read_text())
    for i, folder in enumerate(folders):
        assert tokens.lines[i].y[-1] == sum(a["units"] for a in tape(folder)) == evals(folder)[-1]["units"]
        assert moved.lines[i].y[-1] == pytest.approx(20 * 2 * 4 * meta["parameters"] / 1e6)
        assert list(moved.lines[i].x) == [0, *(a["time_s"] for a in tape(folder))]


def test_the_timeline_has_every_round_of_every_worker(runs, folders):
    spans = worker_charts.timeline(runs).views[0].content
    rounds = sorted(zip(spans.row, spans.start, spans.end, strict=True))
    assert rounds == sorted((a["worker"], a["start_s"], a["time_s"]) for a in tape(folders[0]))
    assert set(spans.count) == {1}
    first = tape(folders[0])[0]
    assert spans.hover[0] == f"round 0, 0 s to 2 s, staleness 0, training loss {first['loss']:.3f}"


def test_staleness_over_time_and_counted_is_the_tapes(runs, folders):
    lines = worker_charts.staleness(runs).views[1].content.panels[0].lines
    counted = worker_charts.histogram(runs).views[1].content
    for worker, (line, series) in enumerate(zip(lines, counted.series, strict=True)):
        worker_lines = [a for a in tape(folders[1]) if a["worker"] == worker]
        assert list(zip(line.x, line.y, strict=True)) == [(a["time_s"], a["staleness"]) for a in worker_lines]
        counts = Counter(a["staleness"] for a in worker_lines)
        assert list(series.values) == [counts[int(name)] for name in counted.categories]


def test_shares_are_those_of_the_summary(runs, folders):
    arrivals, movement = worker_charts.shares(runs).views[0].content.series
    lines = tape(folders[0])
    assert list(arrivals.values) == [sum(a["worker"] == w for a in lines) / 20 for w in range(5)]
    moved = [sum(math.hypot(*a["blocks"]["movement"]) for a in lines if a["worker"] == w) for w in range(5)]
    assert list(movement.values) == pytest.approx([m / sum(moved) for m in moved])


def test_the_map_has_every_block_of_every_arrival(runs, folders):
    heat = correction_map.correction(runs).views[0].content
    lines = tape(folders[0])
    meta = json.loads((folders[0] / "run.json").read_text())
    assert heat.blocks == [block["name"] for block in meta["blocks"]]
    assert sum(heat.sizes) == meta["parameters"]
    assert heat.columns == [(a, a) for a in range(1, 21)]
    for block in range(len(heat.blocks)):
        assert heat.case[block] == "".join(a["blocks"]["case"][block] for a in lines)
        cosines = [None if cosine is None else float(f"{cosine:.6g}") for cosine in heat.cosine[block]]
        assert cosines == [a["blocks"]["cosine"][block] for a in lines]
    assert heat.about == [f"arrival {a['arrival']}, worker {a['worker']}, staleness {a['staleness']}" for a in lines]


def test_tables_name_the_runs_and_what_differs(runs, folders):
    table = overview.runs_table(runs)
    assert table.header[:3] == ["run", "loss", "bits per byte"], "scores stand first"
    assert [row[0].text for row in table.rows] == ["heloco-001", "mla-001"]
    losses = [evals(folder)[-1]["mean"]["loss"] for folder in folders]
    column = table.header.index("loss")
    assert [row[column].text for row in table.rows] == [f"{loss:.3f}" for loss in losses]
    assert table.rows[losses.index(min(losses))][column].tone == "best"
    differing = {row[0].text: [cell.text for cell in row[1:]] for row in overview.settings_table(runs).rows}
    assert differing["outer.method"] == ["heloco", "mla"]
    assert differing["outer.beta_max"] == ["0.5", "–"]
    assert "rounds.paces" not in differing
    alone = {row[0].text: row[1].text for row in overview.settings_table(runs[:1]).rows}
    assert alone["rounds.paces"] == "1, 2, 3, 4, 5"


def test_images_have_an_accuracy_and_no_bits(unbroken):
    [run] = read_runs([unbroken("--task", "images", "--arrivals", "4")])
    assert "accuracy" in [view.label for view in curves.scores([run]).views]
    assert "bits per byte" not in [view.label for view in curves.scores([run]).views]
    assert render_report(page_data([run]))


# ---- fewer points


@given(st.lists(st.floats(allow_infinity=False), max_size=400), st.integers(4, 60))
def test_a_thinned_line_keeps_its_ends_its_lowest_and_its_highest(values, limit):
    indices = thinned(values, limit)
    assert indices == sorted(set(indices)) and len(indices) <= max(limit, 4)
    finite_values = [value for value in values if math.isfinite(value)]
    if values:
        assert indices[0] == 0 and indices[-1] == len(values) - 1
    if finite_values:
        thinned_values = [values[i] for i in indices if math.isfinite(values[i])]
        assert (min(thinned_values), max(thinned_values)) == (min(finite_values), max(finite_values))


def test_a_thinned_map_has_means_and_most_frequent_cases(runs, folders):
    heat = correction_map.heat_of(runs[0], cells=5 * len(runs[0].facts.blocks)).content
    assert isinstance(heat, Heat)
    workers, stale = ({a[name] for a in tape(folders[0])[4:8]} for name in ("worker", "staleness"))
    names = ", ".join(map(str, sorted(workers)))
    assert heat.about[1] == f"arrivals 5 to 8, workers {names}, staleness {min(stale)} to {max(stale)}"
    assert heat.columns == [(1, 4), (5, 8), (9, 12), (13, 16), (17, 20)]
    part = tape(folders[0])[4:8]
    assert heat.cosine[0][1] == pytest.approx(sum(a["blocks"]["cosine"][0] for a in part) / 4, rel=1e-5)
    letters = Counter(a["blocks"]["case"][0] for a in part)
    assert letters[heat.case[0][1]] == max(letters.values())


@pytest.mark.parametrize(
    ("paces", "labels"),
    [
        ([1, 6], ["worker 0 (1 s)", "worker 1 (6 s)"]),
        ([1] * 30 + [6] * 10, ["30 workers (1 s)", "10 workers (6 s)"]),
    ],
)
def test_many_workers_are_drawn_together(paces, labels):
    assert [group.label for group in worker_groups(paces)] == labels


def test_any_number_of_workers_is_in_one_group_each():
    for count in (1, 12, 13, 100, 1000):
        groups = worker_groups([1 + i / 7 for i in range(count)])
        assert sorted(w for group in groups for w in group.workers) == list(range(count))
        assert len(groups) <= 12


def test_runs_of_one_method_have_colours_of_their_own(runs):
    looks = run_colours([RunGroup(run.name, [run]) for run in (*runs, *runs, *runs, *runs, *runs, *runs)])
    assert [colour for colour, _ in looks[:2]] == [METHOD_COLOURS["heloco"], METHOD_COLOURS["mla"]]
    assert len(set(looks)) == len(looks) == 12


# ---- the page


@pytest.fixture(scope="module")
def html(folders, tmp_path_factory) -> str:
    out = tmp_path_factory.mktemp("page") / "sub" / "report.html"
    result = heloco("report", *folders, "--out", out)
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(f"Wrote {out} (")
    return out.read_text(encoding="utf-8")


def test_the_page_holds_all_it_needs_and_lets_nothing_in(html):
    assert len(html) < 15e6
    markup = re.sub(r"<script>.*?</script>", "", html, flags=re.DOTALL)
    assert "://" not in markup
    assert not re.search(r'\b(src|action)=|href="(?!data:,)', re.sub(r"<script.*", "", markup, flags=re.DOTALL))
    [policy] = re.findall(r'Content-Security-Policy" content="([^"]*)"', html)
    allowed = re.findall(r"&#39;sha256-([^&]+)&#39;|'sha256-([^']+)'", policy)
    scripts = re.findall(r"<script>(.*?)</script>", html, flags=re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert [one or other for one, other in allowed] == digests
    assert len(digests) == 2
    assert "default-src 'none'" in policy.replace("&#39;", "'")


def test_the_pages_data_is_what_the_charts_say(html, runs):
    data = page_json(html)
    assert [chart["name"] for chart in data["charts"]] == [chart.name for chart in charts_of(runs)] == [
        "scores", "sources", "norms", "traffic", "timeline", "staleness", "histogram", "shares", "training", "correction",
    ]  # fmt: skip
    line = data["charts"][0]["views"][0]["panels"][1]["lines"][1]
    assert line["label"] == "mla-001"
    assert line["colour"] == METHOD_COLOURS["mla"]
    assert line["y"] == [float(f"{e.mean['loss']:.6g}") for e in runs[1].evals]
    for chart in data["charts"]:
        assert all(view["alt"].startswith(chart["title"]) for view in chart["views"])


@pytest.mark.parametrize("text", [EVIL, "</script><b>", "<!--", "\u2028'\"&amp;"])
def test_text_in_the_data_cannot_end_its_element(text):
    assert "<" not in as_json([text])
    assert json.loads(as_json([text])) == [text]


def test_a_run_named_like_markup_shows_its_name(tmp_path, folders):
    shutil.copytree(folders[0], tmp_path / EVIL)
    assert heloco("report", tmp_path / EVIL, "--out", tmp_path / "page.html").code == 0
    html = (tmp_path / "page.html").read_text()
    assert page_json(html)["runs"][0]["name"] == EVIL
    assert "alert('1')<" not in html
    assert "&lt;script&gt;alert(&#39;1&#39;)" in html


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path, folders):
    both = [shutil.copytree(folder, tmp_path / name / "run") for folder, name in zip(folders, "ab", strict=True)]
    assert [run.name for run in read_runs(both)] == ["a/run", "b/run"]
    assert [run.name for run in read_runs([both[0], both[0] / ".." / "run"])] == ["run"]


# ---- runs that are cut, broken, or still going


def test_a_tape_cut_in_the_middle_of_a_line_shows_what_is_there_and_says_so(tmp_path, folders):
    folder = shutil.copytree(folders[0], tmp_path / "run")
    content = (folder / "tape.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "tape.jsonl").write_bytes(b"".join(content[:7]) + content[7][:50])
    assert heloco("report", folder, "--out", tmp_path / "page.html").code == 0
    data = page_json((tmp_path / "page.html").read_text())
    assert data["notes"] == [
        "run: tape.jsonl ends in the middle of a line, as a killed run leaves it. What is whole is shown.",
        "run stands at arrival 7 of 20.",
    ]
    assert sum(data["charts"][4]["views"][0]["count"]) == 7


def test_a_run_is_read_on_as_it_grows_and_anew_where_it_was_cut_back(tmp_path, folders):
    folder = shutil.copytree(folders[0], tmp_path / "run")
    content = (folder / "tape.jsonl").read_bytes()
    lines = content.splitlines(keepends=True)
    (folder / "tape.jsonl").write_bytes(b"".join(lines[:3]) + lines[3][:9])
    run = Run(folder)
    assert (len(run.tape), run.cut_files, run.refresh()) == (3, ["tape.jsonl"], False)
    (folder / "tape.jsonl").write_bytes(content)
    assert run.refresh() and not run.cut_files
    assert (repr(run.tape), run.summary) == (repr(Run(folder).tape), Run(folder).summary)  # NaN is no NaN's equal
    (folder / "tape.jsonl").write_bytes(b"".join(lines[:5]))
    assert run.refresh()
    assert run.tape.arrival == [1, 2, 3, 4, 5] and run.summary.arrivals == 5


@pytest.mark.parametrize("line", ["{", "[]", '{"arrival": 1}', "3", '"x"'])
def test_an_edited_tape_is_named_by_its_line(line, tmp_path, folders):
    folder = shutil.copytree(folders[0], tmp_path / "run")
    content = (folder / "tape.jsonl").read_text().splitlines()
    (folder / "tape.jsonl").write_text("\n".join([*content[:4], line, *content[5:]]) + "\n")
    with pytest.raises(UserError, match=r"tape\.jsonl: line 5 was edited and is no record"):
        Run(folder)


def test_a_run_that_diverged_has_gaps_and_a_note(tmp_path, folders):
    folder = shutil.copytree(folders[0], tmp_path / "run")
    lines = evals(folder)
    lines[-1]["mean"]["loss"] = None
    (folder / "evals.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    [run] = read_runs([folder])
    data = page_data([run])
    assert "run: the last evaluation has no finite loss." in data["notes"]
    assert page_json(render_report(data))["charts"][0]["views"][0]["panels"][0]["lines"][0]["y"][-1] is None


def test_a_run_that_has_only_begun_can_be_drawn_alone_and_beside_another(tmp_path, folders):
    folder = Path(shutil.copytree(folders[0], tmp_path / "begun"))
    (folder / "tape.jsonl").unlink()
    (folder / "evals.jsonl").write_text((folder / "evals.jsonl").read_text().splitlines(keepends=True)[0])
    assert [chart["name"] for chart in page_data(read_runs([folder]))["charts"]] == ["scores", "sources"]
    data = page_data(read_runs([folder, folders[1]]))
    assert data["notes"] == ["begun stands at arrival 0 of 20."]
    assert [view["label"] for view in data["charts"][-1]["views"]] == ["mla-001"]
    table = overview.runs_table(read_runs([folder, folder.parent / "begun", folders[0]]))
    assert [row[table.header.index("arrivals")].text for row in table.rows] == ["0 of 20", "20"]


def test_a_barrier_dropping_and_many_workers_can_be_drawn(tmp_path):
    more = ("--assign", "flexible", "--arrivals", "30", "--drop", "skip", "--drop-above", "3")
    folder = train(tmp_path / "run", "--paces", ",".join(str(1 + i % 14) for i in range(28)), *more)
    data = page_data(read_runs([folder]))
    assert data["charts"][4]["views"][0]["rows"][0] == "worker 0 (1 s)"
    assert len(data["charts"][6]["views"][0]["series"]) == 12


# ---- the room


def test_the_report_reads_plain_records_and_loads_fast():
    code = """if True:
        import sys
        import heloco.report.page_data, heloco.report.page_writer, heloco.report.compare, heloco.report.table_text
        print(len(sys.modules), sorted({"torch", "numpy", "plotly", "jinja2", "matplotlib"} & set(sys.modules)))
    """
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    modules, heavy = process.stdout.split(maxsplit=1)
    assert heavy.strip() == "[]"
    assert int(modules) < MODULES_LIMIT


@pytest.mark.parametrize("missing", ["plotly"])
def test_without_its_extra_there_is_a_sentence(missing, monkeypatch, tmp_path, folders):
    monkeypatch.setitem(sys.modules, missing, None)
    result = heloco("report", folders[0], "--out", tmp_path / "page.html")
    assert (result.code, result.sentence) == (2, f'A report needs {missing}: pip install "heloco[report]"')
    assert not (tmp_path / "page.html").exists()
