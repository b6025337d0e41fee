"""Figures: what is drawn, what is left out and said so, and that the same figure gives the same bytes."""

import itertools
import math
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from heloco.errors import UserError
from heloco.report.charts.drawing import available, draw, spaced
from heloco.report.charts.figures import (
    METHOD_COLOURS,
    OTHER_COLOURS,
    PAPER_COLOUR,
    Figure,
    Line,
    Panel,
    caption_of,
    colours_of,
    method_of,
    staleness_colour,
    staleness_level,
    striped,
    y_range,
)

SVG = "{http://www.w3.org/2000/svg}"
STEPS = [800.0 * i for i in range(31)]
PAPER_ROWS = [(1,) * (5 - slow) + (pace,) * slow for pace in (2, 6, 15) for slow in range(1, 5)]


def falling(end: float, start: float = 10.9) -> list[float]:
    return [end + (start - end) * math.exp(-x / 1500) for x in STEPS]


def a_figure(lines: list[Line] | None = None, panels: int = 2, columns: int = 2) -> Figure:
    lines = lines or [Line("mla", STEPS, falling(6.7)), Line("heloco", STEPS, falling(6.5), spread=[0.05] * 31)]
    return Figure(
        "loss", "Loss", "Five languages.", [Panel(f"panel {i}", lines, "steps", "loss") for i in range(panels)], columns
    )


def one_panel(*lines: Line) -> Figure:
    return a_figure(list(lines), panels=1)


def texts(figure: Figure, folder) -> list[str]:
    return [element.text or "" for element in ET.parse(draw(figure, folder)[0]).iter(f"{SVG}text")]


def pieces(figure: Figure, folder, colour: str) -> int:
    """Of how many pieces the one curve of a colour is drawn; the legend's short line and the band are none."""
    paths = ET.parse(draw(figure, folder)[0]).iter(f"{SVG}path")
    curves = [path.get("d", "") for path in paths if f"fill: none; stroke: {colour}" in path.get("style", "")]
    (curve,) = (d for d in curves if d.count("L") > 5)
    return curve.count("M")


def test_draw_writes_both_files_into_a_folder_it_makes(tmp_path):
    svg, png = draw(a_figure(), tmp_path / "new" / "figures")
    assert (svg.name, png.name) == ("loss.svg", "loss.png")
    assert ET.parse(svg).getroot().tag == f"{SVG}svg"
    assert png.read_bytes().startswith(b"\x89PNG")


def test_the_same_figure_gives_the_same_bytes_whatever_the_users_settings(tmp_path):
    import matplotlib

    first = [path.read_bytes() for path in draw(a_figure(), tmp_path / "a")]
    with matplotlib.rc_context({"lines.linewidth": 9, "font.size": 30}):
        second = [path.read_bytes() for path in draw(a_figure(), tmp_path / "b")]
    assert first == second
    assert b"<dc:date>" not in first[0]


def test_drawing_leaves_matplotlib_as_it_was(tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    draw(a_figure(), tmp_path)
    assert dict(matplotlib.rcParams) == before
    code = f"""if True:
        import sys, pathlib
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import test_figures as module
        module.draw(module.a_figure(), pathlib.Path({str(tmp_path / "other")!r}))
        print("matplotlib.pyplot" in sys.modules, "torch" in sys.modules)
    """
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": "7"}
    )
    assert process.stdout.split() == ["False", "False"], process.stderr
    assert (tmp_path / "other" / "loss.svg").read_bytes() == (tmp_path / "loss.svg").read_bytes()


def test_every_label_is_written_and_what_panels_share_only_once(tmp_path):
    words = texts(a_figure(panels=5, columns=3), tmp_path)
    for word in ("mla", "heloco", "steps", "loss", *(f"panel {i}" for i in range(5))):
        assert words.count(word) == 1, word


def test_axes_that_differ_are_labelled_each(tmp_path):
    lines = [Line("mla", STEPS, falling(6.7))]
    panels = [Panel("left", lines, "steps", "loss"), Panel("right", lines, "seconds", "accuracy")]
    words = texts(Figure("two", "Two", "", panels), tmp_path)
    assert {"steps", "seconds", "loss", "accuracy"} <= set(words)


def test_names_are_taken_literally(tmp_path):
    words = texts(one_panel(Line("$\\frac{1}{0 & <b>", STEPS, falling(6.7))), tmp_path)
    assert "$\\frac{1}{0 & <b>" in words


def test_thirteen_rows_of_five_methods_and_thirteen_lines_in_one_panel(tmp_path):
    methods = [Line(name, STEPS, falling(6.5 + i / 10)) for i, name in enumerate(METHOD_COLOURS)]
    words = texts(a_figure(methods, panels=13, columns=4), tmp_path)
    assert all(words.count(name) == 1 for name in METHOD_COLOURS)
    rows = [Line(str(p), STEPS, falling(6.013 + i / 10), colour=staleness_colour(p)) for i, p in enumerate(PAPER_ROWS)]
    words = texts(a_figure(rows), tmp_path)
    assert all(words.count(str(paces)) == 1 for paces in PAPER_ROWS)
    assert not any(f"{row.last():.2f}" in words for row in rows)


def test_few_lines_have_their_last_values_beside_them_and_the_papers_has_none(tmp_path):
    lines = [
        Line("mla", STEPS, [*falling(6.7)[:-1], None]),
        Line("heloco", STEPS, falling(6.512)),
        Line("x", [24000], [6.98], paper=True),
    ]
    words = texts(one_panel(*lines), tmp_path)
    assert {"6.70", "6.51", "x (paper)"} <= set(words)
    assert "6.98" not in words


def test_missing_values_leave_gaps(tmp_path):
    whole = falling(6.7, start=7)
    lines = [Line("sync-nesterov", STEPS, whole)]
    for name, nothing in (("mla", None), ("heloco", math.nan), ("heloco-ramp", math.inf)):
        holed = [nothing if 10 <= i < 14 else y for i, y in enumerate(whole)]
        lines.append(Line(name, STEPS, holed, spread=[y and y / 50 for y in holed]))
    figure = one_panel(*lines)
    assert [pieces(figure, tmp_path, METHOD_COLOURS[line.label]) for line in lines] == [1, 2, 2, 2]


def test_a_value_without_neighbours_is_a_mark(tmp_path):
    def marks(y: list[float | None]) -> int:
        svg = draw(one_panel(Line("mla", [0, 1, 2], y)), tmp_path)[0].read_text()
        return len(re.findall(rf"<use [^>]*fill: {METHOD_COLOURS['mla']}", svg))

    assert marks([3.0, 2.0, 1.0]) == 0
    assert marks([3.0, None, 1.0]) >= 2


def test_lines_without_values_and_figures_without_lines_are_drawn_all_the_same(tmp_path):
    for figure in (one_panel(Line("mla", STEPS, [None] * 31)), one_panel(Line("mla", [], [])), Figure("none", "", "", [])):
        assert all(path.stat().st_size for path in draw(figure, tmp_path))
        assert caption_of(figure) == figure.caption


def test_a_steep_start_is_cut_off_and_the_caption_says_so(tmp_path):
    figure = a_figure([Line("mla", STEPS, falling(6.7)), Line("heloco", STEPS, falling(6.5))])
    y_axis = y_range(figure.panels[0].lines)
    assert y_axis.low < 6.5
    assert 6.7 < y_axis.high < 7
    assert caption_of(figure).startswith("Five languages. Early values up to 10.9 lie above the y axis")
    assert texts(figure, tmp_path).count("↑ to 10.9") == 2


def test_a_rising_curve_is_cut_at_the_bottom():
    rising = [1 - y / 20 for y in falling(6.7, start=20)]
    assert "down to 0 lie below" in caption_of(one_panel(Line("mla", STEPS, rising)))


def test_what_fits_is_not_cut():
    for lines in (
        [Line("mla", STEPS, falling(6.7, start=7)), Line("x", STEPS, falling(5.9, start=7))],
        [Line("mla", [0, 1], [10.9, 6.5])],
    ):
        y_axis = y_range(lines)
        values = [y for line in lines for y in line.y]
        assert y_axis.low < min(values)
        assert max(values) < y_axis.high
        assert caption_of(one_panel(*lines)) == "Five languages."


def test_a_late_rise_is_never_cut():
    y = [*falling(6.5)[:-1], 30.0]
    y_axis = y_range([Line("mla", STEPS, y)])
    assert y_axis.high > 30
    assert y_axis.highest is None


def test_panels_of_one_measure_share_a_range_and_the_band_counts():
    low, high = y_range([Line("a", [0, 1], [1, 2], spread=[0.5, None])]), y_range([Line("a", [0, 1], [1, 2])])
    assert low.low < 0.5 < high.low


def test_lines_on_each_other_are_drawn_in_turns(tmp_path):
    same, near = falling(6.5), [y + 1e-4 for y in falling(6.5)]
    lines = striped(
        [Line("a", STEPS, same), Line("b", STEPS, falling(6.7)), Line("c", STEPS, near), Line("d", STEPS[:9], same[:9])]
    )
    assert [line.stripe for line in lines] == [(0, 3), None, (1, 3), (2, 3)]
    assert not any(line.stripe for line in striped([Line("a", [0, 1], [1, 2]), Line("b", [0, 2], [1, 2])]))
    empty = [Line(name, STEPS, [None] * 31) for name in "ab"]
    assert not any(line.stripe for line in striped(empty))
    svg = draw(one_panel(*lines), tmp_path)[0].read_text()
    assert len(set(re.findall(r"stroke-dasharray: [\d. ,]+", svg))) >= 2


def test_points_are_not_joined_and_counts_have_whole_ticks(tmp_path):
    panel = Panel("", [Line("mla", [0, 100, 200, 300], [0, 1, 0, 2])], "seconds", "staleness", True, True, True)
    words = texts(Figure("points", "", "", [panel]), tmp_path)
    ticks = [word.replace("−", "-") for word in words if re.fullmatch(r"[-−]?\d+(\.\d+)?", word)]
    assert ticks and not any("." in tick for tick in ticks)
    svg = (tmp_path / "points.svg").read_text()
    assert len(re.findall(rf"<use [^>]*fill: {METHOD_COLOURS['mla']}", svg)) >= 4
    axis = y_range(panel.lines, True, True)
    assert (axis.low, axis.high) == (-0.6, 2.6)


def test_a_method_has_its_colour_under_every_name_that_begins_with_it():
    assert [method_of(label) for label in ("mla", "mla, dropped", "mla (paper)", "heloco-ramp", "heloco")] == [
        "mla", "mla", "mla", "heloco-ramp", "heloco",
    ]  # fmt: skip
    assert [method_of(label) for label in ("mla-lookahead", "helocolor", "a heloco", "")] == [None] * 4
    lines = [Line(label, [0], [1]) for label in ("new", "heloco", "mla-lookahead", "heloco, dropped")]
    colours = colours_of(one_panel(Line("new", [0], [1], paper=True), Line("old", [0], [1], paper=True), *lines))
    assert colours == {
        "new": OTHER_COLOURS[0],
        "mla-lookahead": OTHER_COLOURS[1],
        "heloco": METHOD_COLOURS["heloco"],
        "heloco, dropped": METHOD_COLOURS["heloco"],
        "old": PAPER_COLOUR,
    }
    assert len(set(METHOD_COLOURS.values()) | set(OTHER_COLOURS)) == len(METHOD_COLOURS) + len(OTHER_COLOURS)


def rgb(colour: str) -> tuple[int, ...]:
    assert re.fullmatch("#[0-9a-f]{6}", colour)
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


def test_staleness_goes_from_green_over_yellow_to_red():
    red, green, blue = rgb(staleness_colour([1] * 5))
    assert green > red
    red, green, blue = rgb(staleness_colour([1, 1, 1, 1, 6]))
    assert min(red, green) > 120 > blue
    red, green, blue = rgb(staleness_colour([1, 15, 15, 15, 15]))
    assert red > 3 * green
    assert staleness_colour([1, 1000, 1000]) == staleness_colour([1, 1, 10000, 10000]) == "#a50f2b"


def test_the_staleness_of_a_row_of_paces():
    assert staleness_level([0.3] * 7) == pytest.approx(0, abs=1e-12)
    for paces in PAPER_ROWS:
        shares = [1 / pace / sum(1 / p for p in paces) for pace in paces]
        typical = math.prod(1 / share for share in shares) ** (1 / 5)  # 1 + staleness, over workers
        assert staleness_level(paces) == pytest.approx(math.log(typical / 5))
        assert staleness_level([7 * pace for pace in reversed(paces)]) == pytest.approx(staleness_level(paces))
    for slow in range(1, 5):
        levels = [staleness_level([1] * (5 - slow) + [pace] * slow) for pace in (1, 2, 6, 15)]
        assert levels == sorted(levels)


def test_the_staleness_scale_is_continuous():
    colours = [rgb(staleness_colour([1, 1, 1, 1 + i / 100, 1 + i / 100])) for i in range(4000)]
    assert max(abs(a - b) for one, other in itertools.pairwise(colours) for a, b in zip(one, other, strict=True)) <= 4


def test_labels_are_pushed_apart_and_stay_near():
    assert spaced([0.1, 0.5, 0.9], 0.1) == [0.1, 0.5, 0.9]
    assert spaced([0.5, 0.5, 0.5], 0.1) == pytest.approx([0.4, 0.5, 0.6])
    assert spaced([], 0.1) == []
    placed = spaced([0.0, 0.01, 0.08, 0.3, 0.31], 0.05)
    assert all(b - a >= 0.05 - 1e-9 for a, b in itertools.pairwise(placed))


def test_without_matplotlib_there_is_a_sentence(tmp_path):
    code = """if True:
        import sys, pathlib
        class Blocker:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] == "matplotlib":
                    raise ModuleNotFoundError(name)
        sys.meta_path.insert(0, Blocker())
        from heloco.errors import UserError
        from heloco.report.charts.drawing import available, draw
        from heloco.report.charts.figures import Figure
        assert not available()
        try:
            draw(Figure("a", "", "", []), pathlib.Path(sys.argv[1]) / "never")
        except UserError as error:
            print(error)
    """
    process = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert 'pip install "heloco[figures]"' in process.stdout, process.stderr
    assert not (tmp_path / "never").exists()
    assert available()
    assert issubclass(UserError, ValueError)
