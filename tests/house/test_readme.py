"""The README keeps its word: its commands parse, its tree and its links exist, its Python is the package's."""

import ast
import inspect
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import heloco as package
from heloco.cli.flags import given_fields
from heloco.cli.main import parser
from heloco.cli.study_command import split_names
from heloco.engine.simulate import simulate
from heloco.run import RunConfig, resolve, with_fields
from heloco.run.config import RECIPES
from heloco.run.settings import setting_sections
from heloco.study.grid import grid
from heloco.study.spec import find_study, names
from support.repository import REPOSITORY
from support.runs import evals, heloco

ROOT = REPOSITORY
README = ROOT / "README.md"
GLYPHS = str.maketrans("│├└─┬┐┌", "       ")


@dataclass(frozen=True)
class Code:
    language: str
    text: str


def code_blocks(markdown: str) -> list[Code]:
    """The fenced blocks, and those indented by four spaces."""
    blocks: list[Code] = []
    lines = iter([*markdown.splitlines(), "the end"])
    indented: list[str] = []
    for line in lines:
        if line.startswith("    ") or (indented and not line.strip()):
            indented.append(line[4:])
            continue
        if indented:
            blocks.append(Code("", "\n".join(indented).rstrip()))
            indented = []
        if fence := re.match(r" {0,3}(`{3,}|~{3,})\s*(\w*)", line):
            inside = []
            for inner in lines:
                if inner.strip().startswith(fence[1]):
                    break
                inside.append(inner)
            blocks.append(Code(fence[2], "\n".join(inside)))
    return blocks


def inline_code(markdown: str) -> list[str]:
    without_blocks = re.sub(r"^(```|~~~).*?^\1", "", markdown, flags=re.MULTILINE | re.DOTALL)
    prose = "\n".join(line for line in without_blocks.splitlines() if not line.startswith("    "))
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]


def commands(markdown: str, program: str) -> list[list[str]]:
    """The arguments of every command line of `program`, in blocks and in the prose, without comments, prompts and pipes."""
    lines = [
        line.strip().removeprefix("$ ")
        for block in code_blocks(markdown)
        if block.language in ("", "sh", "bash", "console", "shell")
        for line in block.text.replace("\\\n", " ").splitlines()
    ]
    lines += [code for code in inline_code(markdown) if " " in code]
    return [shlex.split(re.split(r"\s[|>&]", line)[0], comments=True)[1:] for line in lines if line.split(" ")[0] == program]


def tree(markdown: str) -> list[Path]:
    """The paths of the annotated tree: a block whose first line is a folder's name."""
    paths: list[Path] = []
    for block in code_blocks(markdown):
        if not re.match(r"\s*[\w./-]+/(\s|$)", block.text.translate(GLYPHS)):
            continue
        parents: list[tuple[int, Path]] = []
        for line in block.text.translate(GLYPHS).splitlines():
            if not line.strip():
                continue
            column, name = len(line) - len(line.lstrip()), line.split()[0]
            while parents and parents[-1][0] >= column:
                parents.pop()
            paths.append((parents[-1][1] if parents else Path()) / name)
            parents.append((column, paths[-1]))
    return paths


@pytest.fixture(scope="module")
def readme() -> str:
    return README.read_text(encoding="utf-8")


# ---- reading markdown

SAMPLE = """# Title

Type `heloco methods` or:

    heloco train     # the default
    $ heloco schedule --paces 1,2 | head

```sh
heloco train \\
  --seed 3
```

```python
heloco = 3
```

    top/
      a.py       first
      sub/       second, with
        b.py
    other/
"""


def test_commands_are_found_wherever_they_stand():
    assert commands(SAMPLE, "heloco") == [["train"], ["schedule", "--paces", "1,2"], ["train", "--seed", "3"], ["methods"]]


@pytest.mark.parametrize("drawn", [False, True])
def test_a_tree_is_read_by_its_columns(drawn):
    sample = SAMPLE.replace("      a.py", "    ├─a.py").replace("        b.py", "    │ └─b.py") if drawn else SAMPLE
    assert [str(path) for path in tree(sample)] == ["top", "top/a.py", "top/sub", "top/sub/b.py", "other"]


# ---- the README


def test_the_two_commands_are_there_and_make_knows_them(readme):
    targets = {words[0] for words in commands(readme, "make")}
    assert {"train", "test"} <= targets
    make_targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert targets <= set(make_targets)


def test_every_command_parses(readme):
    command_lines = commands(readme, "heloco")
    named = {"train", "resume", "eval", "export", "report", "watch", "compare", "schedule", "methods", "study"}
    assert {words[0] for words in command_lines} >= named
    for words in command_lines:
        if "--help" in words:
            assert heloco(*words).code == 0
            continue
        parsed = parser().parse_all(words)
        if words[0] == "train":  # and its values are possible; the file of --config is the reader's own
            resolve(with_fields(RunConfig(), RECIPES[parsed.recipe] | given_fields(parsed)))


def test_every_study_has_the_rows_and_methods_that_are_asked_for(readme):
    studies = [parser().parse_all(words) for words in commands(readme, "heloco") if words[0] == "study"]
    named = [parsed for parsed in studies if parsed.study in names()]
    assert named
    for parsed in named:
        rows, methods = split_names(parsed.rows, ";"), split_names(parsed.methods, ",")
        assert grid(find_study(parsed.study), scale=parsed.scale, rows=rows, methods=methods)


def test_a_study_of_ones_own_runs(readme, tmp_path):
    [config_text] = [block.text for block in code_blocks(readme) if block.language == "toml"]
    path = tmp_path / "mine.toml"
    path.write_text(config_text)
    study = find_study(str(path))
    assert grid(study, scale="paper", seeds=1)
    result = heloco("study", path, "--scale", "small", "--seeds", "1", cwd=tmp_path)
    assert result.code == 0, result.err
    folder = tmp_path / "results-small" / "mine"
    assert (folder / "index.html").exists()
    losses: dict[str, dict[str, str]] = {}
    for record in json.loads((folder / "mine.json").read_text())["records"]:
        losses.setdefault(record["row"], {})[record["method"]] = f"{record['loss']:.3f}"
    assert list(losses) == list(study.rows)
    for row in losses.values():
        assert list(row) == list(study.methods) and len(set(row.values())) == len(row), "methods without a difference"
        assert min(row, key=lambda method: float(row[method])) == "flexible"


def test_commands_that_need_nothing_run(readme):
    for words in commands(readme, "heloco"):
        if words[0] in ("schedule", "methods") or "--list" in words:
            assert heloco(*words).code == 0, words


@pytest.mark.long
def test_the_default_command_runs_and_every_language_is_learnt(readme, tmp_path):
    assert ["train"] in commands(readme, "heloco")
    result = heloco("train", cwd=tmp_path, threads=2)
    assert result.code == 0, result.err
    assert result.out.splitlines()[-1] == "The run's folder: runs/heloco-adaptive-001"
    first, *_, last = evals(tmp_path / "runs" / "heloco-adaptive-001")
    assert last["arrival"] == 120
    assert all(last["scores"][name]["loss"] < first["scores"][name]["loss"] - 1 for name in first["scores"])


def test_every_path_of_the_tree_exists(readme):
    paths = tree(readme)
    assert len(paths) > 5, "the annotated tree was not found"
    missing = [str(path) for path in paths if not (ROOT / path).exists()]
    assert not missing
    rooms_in_tree = {path.name for path in paths if path.parent == Path("src/heloco")}
    hidden = {"__init__.py", "__pycache__", "py.typed", "errors.py", "seeds.py"}
    rooms = {path.name for path in (ROOT / "src" / "heloco").iterdir() if not path.name.startswith(".")} - hidden
    assert rooms <= rooms_in_tree, "rooms that the tree does not show"


def test_every_link_to_a_file_leads_somewhere(readme):
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", readme)
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]


def test_nothing_is_left_to_be_filled_in(readme):
    assert not re.findall(r"@@\w+@@|TODO|FIXME|XXX", readme)


def python_blocks(markdown: str) -> list[str]:
    return [block.text for block in code_blocks(markdown) if block.language == "python"]


def test_the_python_uses_what_the_package_has(readme):
    blocks = python_blocks(readme)
    assert blocks
    for node in (node for block in blocks for node in ast.walk(ast.parse(block))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "heloco":
            assert hasattr(package, node.attr), f"heloco.{node.attr}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            keywords = {keyword.arg for keyword in node.keywords}
            callee = getattr(package, node.func.attr, None) if ast.unparse(node.func).startswith("heloco.") else None
            if callee is simulate:
                assert keywords <= setting_sections().keys()
            elif callee is not None:
                assert keywords <= set(inspect.signature(callee).parameters)


@pytest.mark.long
def test_the_python_runs(readme):
    """With a model, a loss and datasets of our own for the names that the README leaves to the reader."""
    model = nn.Linear(3, 1)
    data = [(torch.randn(3), torch.randn(1)) for _ in range(64)]
    names = {
        "model": model,
        "loss": lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        "dataset_a": data[:32],
        "dataset_b": data[32:],
        "dataset_val": data[::4],
        "heloco": package,
        "address": None,
        "loader": [(torch.randn(4, 3), torch.randn(4, 1))],
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    for block in python_blocks(readme):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        exec(block, names)
    assert names["result"].tape[0].staleness == 0
