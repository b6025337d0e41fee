"""The rooms of the design: a room imports only from rooms above it, early or late."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from heloco.records import run_files
from support.rooms import MODULES, PACKAGE, aliases_of, definitions, imports_of, name_of, parse, places, room_of

FLOORS = [
    {"outer"},
    {"policy"},
    {"ledger", "buffers"},
    {"books"},
    {"rounds", "barrier"},
    {"rulings"},
    {"synchronizer", "methods"},
    {"records"},
    {"wire"},
    {"corpus"},
    {"task"},
    {"inner"},
    {"run"},
    {"engine"},
    {"cluster"},
    {"report"},
    {"study"},
    {"cli"},
]
"""From the top: a room may import from the floors above its own, and within itself."""
FOR_ALL = {
    "errors", "seeds", "disk", "dtypes", "finite", "places", "hosts", "verdicts", "knobs", "registry", "uvicorn_internals",
}  # fmt: skip
NAMES_FOR_ALL = "heloco.wire.blocks"
"""The names of tensors: every room may import this module, and it imports none of them."""
CLUSTER_FLOORS = [{"protocol"}, {"server", "client"}, {"gateway", "ray"}]
"""The same inside `cluster/`; rooms of one floor know nothing of each other."""
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def top(module: str) -> str:
    return module.partition(".")[0]


def inside(path: Path) -> Iterator[tuple[int, str]]:
    """(line, room) of each import from heloco; the package's own name stands for no room."""
    for line, module in imports_of(path):
        is_for_all = f"{module}.".startswith(f"{NAMES_FOR_ALL}.")
        if top(module) == "heloco" and module not in ("heloco", "heloco.__version__") and not is_for_all:
            yield line, module.split(".")[1]


def test_every_module_stands_in_a_room():
    rooms = {room_of(path) for path in MODULES} - {"__init__"}
    assert rooms <= FLOOR_OF.keys() | FOR_ALL


@pytest.mark.parametrize("path", [path for path in MODULES if path.parent != PACKAGE or path.name != "__init__.py"], ids=name_of)
def test_a_room_imports_only_from_rooms_above_it(path):
    room = room_of(path)
    for line, other in inside(path):
        if room in FOR_ALL:
            assert other in FOR_ALL, f"{path}:{line}: {room} is for all and may import none of them, but imports {other}"
        elif other not in FOR_ALL and other != room:
            assert other in FLOOR_OF, f"{path}:{line}: imports {other}, which is no room"
            assert FLOOR_OF[other] < FLOOR_OF[room], f"{path}:{line}: {room} imports {other}, which is not above it"


def test_the_names_of_tensors_are_for_all_and_know_no_room():
    assert not list(inside(PACKAGE / "wire" / "blocks.py"))


def test_tensors_are_named_in_one_module():
    """`parameter.3` and the like are put together and taken apart in wire/blocks.py alone."""
    spelling = re.compile(r"[\"'](parameter|buffer|pseudo_gradient|gathered|gathered_buffer|outer)\.(\{|[\"'])")
    spelt = [path.relative_to(PACKAGE) for path in MODULES if spelling.search(path.read_text(encoding="utf-8"))]
    assert spelt == []  # wire/blocks.py writes the kinds as constants


def test_files_of_a_run_are_named_in_one_module():
    names = set(run_files.NAMES)
    for path in MODULES:
        if path.name != "run_files.py":
            texts = {
                node.value for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Constant)
            }
            assert not texts & names, path


def cluster_room_of(module: str) -> str:
    return module.split(".")[2]


CLUSTER_MODULES = [path for path in MODULES if room_of(path) == "cluster" and path.parent != PACKAGE / "cluster"]


@pytest.mark.parametrize("path", CLUSTER_MODULES, ids=name_of)
def test_inside_the_cluster_protocol_comes_first_then_server_and_client_then_gateway_and_ray(path):
    floors = {room: floor for floor, rooms in enumerate(CLUSTER_FLOORS) for room in rooms}
    room = cluster_room_of(name_of(path))
    for line, module in imports_of(path):
        if module.startswith("heloco.cluster."):
            other = cluster_room_of(module)
            assert other == room or floors[other] < floors[room], f"{path}:{line}: {room} imports {other}"


BASES = {
    "heloco.cluster.protocol.messages.Message",
    "heloco.cluster.protocol.messages.ContributionReport",  # a commit is a report with the round and the digest
    "heloco.cluster.protocol.link.Link",
    "heloco.cluster.protocol.link.AdminLink",
    "heloco.cluster.gateway.api.Key",  # of a query
    "heloco.run.checkpoint.CheckpointState",
}
"""Types of values, and protocols."""


def bases_in(path: Path) -> Iterator[str]:
    """The classes of the package, by their full names, that classes in this file inherit from."""
    aliases = {alias: name for _, name, alias in aliases_of(path)}
    for node in ast.walk(parse(path)):
        for base in node.bases if isinstance(node, ast.ClassDef) else ():
            first, _, rest = ast.unparse(base).partition("[")[0].partition(".")
            full = ".".join(filter(None, (aliases.get(first, f"{name_of(path)}.{first}"), rest)))
            if (full := places().get(full, full)) in definitions():
                yield full


def test_the_cluster_is_composed_and_inherits_nothing_but_types_of_values():
    """No class of it is spread over several files."""
    assert {base for path in CLUSTER_MODULES for base in bases_in(path)} == BASES


def loaded_by(code: str) -> list[str]:
    """The modules of ours that a fresh process has loaded after this code."""
    code = f"{code}\nimport sys; print(*sorted(m for m in sys.modules if m.startswith('heloco')))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process.stdout.split()


RUNS_SIDE = ("heloco.cluster.server", "heloco.run", "heloco.engine", "heloco.records.journal", "heloco.task.gpt")
"""What a machine that only joins a run does not load: server, config, journal, TinyGPT."""
OTHER_SIDES = ("heloco.cluster.gateway", "heloco.cluster.ray", "heloco.task", "heloco.outer")


def test_the_three_lines_load_no_server_no_journal_no_config_and_no_model_of_ours():
    loaded = loaded_by("import heloco; heloco.join")
    assert not [module for module in loaded if module.startswith((*RUNS_SIDE, *OTHER_SIDES))]
    assert len(loaded) <= 33, loaded


def test_no_module_of_the_client_loads_the_runs_side():
    names = [name_of(path) for path in CLUSTER_MODULES if path.parent.name == "client"]
    loaded = loaded_by(f"import {', '.join(names)}")
    assert set(names) <= {*loaded}
    assert not [module for module in loaded if module.startswith((*RUNS_SIDE, "heloco.cluster.gateway", "heloco.cluster.ray"))]


@pytest.mark.parametrize(("link", "limit"), [("gateway.https_link", 22), ("ray.ray_link", 24)])
def test_a_link_loads_little_more_than_the_protocol(link, limit):
    room = f"heloco.cluster.{link.partition('.')[0]}"
    loaded = loaded_by(f"import heloco.cluster.{link}")
    others = [each for each in OTHER_SIDES if each != room]
    assert not [module for module in loaded if module.startswith((*RUNS_SIDE, *others, "heloco.cluster.client"))]
    assert len(loaded) <= limit, loaded


def test_no_two_modules_or_packages_share_a_name():
    """`heloco` is the package and its main rule, `outer/heloco.py`."""
    stems = [path.parent.name if path.stem == "__init__" else path.stem for path in MODULES if path.stem != "__main__"]
    assert {stem for stem in stems if stems.count(stem) > 1} == {"heloco"}


def test_the_packages_face_imports_nothing_when_it_is_loaded():
    """It names every room, for type checkers and on demand, but importing it costs nothing."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    eager = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert eager == ["from importlib import import_module", "from typing import TYPE_CHECKING, Any"]


def test_whoever_imports_the_package_itself_wants_its_version_alone():
    """`import heloco` inside the package would reach every room by the back door."""
    for path in MODULES:
        if not any(module == "heloco" for _, module in imports_of(path)):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "heloco"}
        assert used <= {"__version__"}, path


@pytest.mark.parametrize(
    ("where", "banned"),
    [
        ("policy", {"torch", "numpy"}),
        ("ledger.py", {"torch", "numpy"}),
        ("books.py", {"torch", "numpy"}),
        ("report", {"torch", "numpy"}),
        ("records", {"torch", "numpy"}),
        ("places.py", {"torch", "numpy"}),
        ("verdicts.py", {"torch", "numpy"}),
        ("corpus", {"torch"}),
        ("errors.py", {"torch", "numpy"}),
        ("seeds.py", {"torch", "numpy"}),
        ("cli", {"numpy"}),
    ],
)
def test_what_a_room_knows_nothing_of_it_does_not_import(where, banned):
    paths = [path for path in MODULES if path.relative_to(PACKAGE).as_posix().startswith(where)]
    assert paths
    for path in paths:
        for line, module in imports_of(path):
            assert top(module) not in banned, f"{path}:{line}: imports {module}"


def test_time_threads_files_and_networks_stay_out_of_the_synchronizer():
    clocks = {
        "time",
        "datetime",
        "threading",
        "asyncio",
        "socket",
        "http",
        "os",
        "pathlib",
        "io",
        "random",
        "ray",
        "multiprocessing",
    }
    for name in ("synchronizer.py", "rounds.py", "rulings.py", "books.py", "barrier.py", "buffers.py", "ledger.py", "methods.py"):
        assert not {top(module) for _, module in imports_of(PACKAGE / name)} & clocks


def test_no_room_uses_a_wall_clock_but_the_ones_that_show_or_keep_it():
    allowed = {"report", "corpus", "study", "cli"}
    for path in MODULES:
        real = path.is_relative_to(PACKAGE / "cluster")  # runs on real machines take real time
        if room_of(path) not in allowed and not real and path != PACKAGE / "engine" / "progress_bar.py":
            assert not {top(module) for _, module in imports_of(path)} & {"time", "datetime"}, path


def loads_torch(code: str) -> bool:
    process = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print('torch' in sys.modules)"], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.split()[-1] == "True"


LIGHT = ("", ".errors", ".seeds", ".policy", ".ledger", ".corpus", ".report.terminal", ".report.live", ".cli.main", ".cli.flags")


@pytest.mark.parametrize("module", [f"heloco{name}" for name in LIGHT])
def test_these_load_without_torch(module):
    assert not loads_torch(f"import {module}")


@pytest.mark.parametrize("path", [path for path in MODULES if room_of(path) == "records"], ids=name_of)
def test_records_load_without_torch(path):
    assert not loads_torch(f"import {name_of(path)}")


def test_a_report_is_made_without_torch(unbroken):
    """From reading a run's folder to the page, the comparison and the tables of the terminal."""
    code = f"""
from pathlib import Path
from heloco.report import compare, page_data, page_writer, run_reader, terminal
runs = run_reader.read_runs([Path({str(unbroken())!r})])
assert page_writer.render_report(page_data.page_data(runs)) and compare.tables_at(runs) and list(terminal.tables(runs[0].summary))
"""
    assert not loads_torch(code)


REPORT_FLOORS = [("wording", "table_data", "summary", "journal_summary"), ("run_reader",), ("run_groups",), ("charts",)]
"""Inside `report/`: charts are made from runs and know nothing of pages, terminals and servers."""


@pytest.mark.parametrize("path", [path for path in MODULES if path.parent.name == "charts"], ids=name_of)
def test_charts_know_nothing_of_pages_and_terminals(path):
    names = {name for floor in REPORT_FLOORS for name in floor}
    for line, module in imports_of(path):
        if module.startswith("heloco.report."):
            assert module.split(".")[2] in names, f"{path}:{line}: imports {module}"


def test_the_probe_would_see_torch():
    assert loads_torch("import heloco; heloco.HeLoCo")


def test_modules_and_functions_are_short_enough_to_be_read_at_once():
    for path in MODULES:
        text = path.read_text()
        assert len(text.splitlines()) <= 400, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno - node.lineno < 50, f"{path}: {node.name}"
