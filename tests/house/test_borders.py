"""What crosses a border between rooms has a type of its own."""

import ast
import re
from collections.abc import Iterator
from typing import TypeGuard

import pytest

from support.rooms import crossing_names, definitions

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
SIGNATURES_OF_OTHERS = {
    "heloco.cluster.client.hf_callback.HeLoCoCallback",  # the Trainer's callbacks
    "heloco.outer.heloco.HeLoCo",  # torch's optimizers: parameter groups and states
    "heloco.outer.optimizer.OuterOptimizer",
    "heloco.uvicorn_internals.Http",  # uvicorn's protocols
}
"""Classes whose methods another library calls."""


def annotations_of(node: FunctionNode | ast.ClassDef) -> Iterator[str]:
    """The types of what a function, or the public part of a class, takes and gives."""
    if isinstance(node, FunctionNode):
        signature = node.args
        for argument in (*signature.posonlyargs, *signature.args, *signature.kwonlyargs):
            yield from _texts(argument.annotation)
        if signature.vararg is not None:
            yield from (f"tuple[{text}, ...]" for text in _texts(signature.vararg.annotation))
        if signature.kwarg is not None:
            yield from (f"dict[str, {text}]" for text in _texts(signature.kwarg.annotation))
        yield from _texts(node.returns)
        return
    for part in node.body:
        if isinstance(part, FunctionNode) and (part.name == "__init__" or not part.name.startswith("_")):
            yield from annotations_of(part)
            yield from (ast.unparse(line.annotation) for line in ast.walk(part) if _is_public_attribute(line))
        elif isinstance(part, ast.AnnAssign) and not ast.unparse(part.target).startswith("_"):
            yield ast.unparse(part.annotation)


def _is_public_attribute(line: ast.AST) -> TypeGuard[ast.AnnAssign]:
    """Whether the line says of which type a public attribute of `self` is."""
    return (
        isinstance(line, ast.AnnAssign)
        and isinstance(line.target, ast.Attribute)
        and ast.unparse(line.target.value) == "self"
        and not line.target.attr.startswith("_")
    )


def _texts(annotation: ast.expr | None) -> Iterator[str]:
    if annotation is not None:
        yield ast.unparse(annotation)


ANYTHING = re.compile(r"(dict|Mapping|MutableMapping)\[str, (Any|object)\]|\bSettings\b")
"""`Settings` is such a mapping: what flags, TOML files and Python say, before it is checked."""
BY_NAME = {
    "heloco.knobs.fill_knobs": "knobs by name, those of a user's own rule too",
    "heloco.knobs.declared_knobs": "defaults of knobs by name",
    "heloco.policy.weight.make_weight": "options by name, those of a user's own arrival weight too",
    "heloco.engine.simulate.simulate": "settings by name, as Python gives them: `with_fields` checks them",
    "heloco.methods.Method": "the same",
    "heloco.methods.register_method": "the same",
    "heloco.run.settings.with_fields": "settings by name, as flags, TOML files and Python give them: this function checks them",
    "heloco.run.settings.setting_types": "the types of settings by name",
    "heloco.run.settings.read_toml": "settings by name, before `with_fields` checks them",
    "heloco.run.settings.parse_toml": "the same",
    "heloco.run.settings.with_recipe": "the same",
    "heloco.run.config.by_section": "all settings of a checked config, to be shown and written as TOML",
    "heloco.run.config.deciding_settings": "those that a digest is made from",
    "heloco.run.config.outer_knobs": "knobs by name, those of a user's own rule too",
    "heloco.run.config.weight_options": "options by name, those of a user's own arrival weight too",
    "heloco.records.config_facts.read_all_settings": "a run's config, which pages show and compare as it is",
    "heloco.study.spec.Study": "settings by name, and the paper's numbers, before they are checked",
    "heloco.study.plan.make_plan": "settings by name",
    "heloco.report.mirrors.open_mirrors": "a run's config, which TensorBoard and others only show",
    "heloco.task.datasets.DatasetTask": "datasets by name, of any kind",
    "heloco.wire.blocks.name_outer_states": "the state of torch's optimizers by name",
}
"""Where a mapping from names to anything crosses a border, and what it holds."""


def test_what_crosses_a_border_has_a_type_of_its_own():
    """No function or class that another room imports takes or gives a mapping from names to anything."""
    crossing, nodes = crossing_names() | crossing_names(inside_cluster=True), definitions()
    assert len(crossing) > 250
    untyped = {name for name in crossing if any(ANYTHING.search(text) for text in annotations_of(nodes[name][1]))}
    assert untyped - SIGNATURES_OF_OTHERS == BY_NAME.keys()


@pytest.mark.parametrize(
    "source",
    [
        "def one(a, /, values: dict[str, Any]): ...",
        "def one(values: dict[str, object], /): ...",
        "async def one() -> Mapping[str, Any]: ...",
        "def one(*values: dict[str, Any]): ...",
        "def one(**values: Any): ...",
        "class One:\n    async def one(self, *, values: Settings): ...",
        "class One:\n    def one(self, **values: object): ...",
    ],
)
def test_the_search_sees_every_kind_of_argument(source):
    node = ast.parse(source).body[0]
    assert isinstance(node, FunctionNode | ast.ClassDef) and any(ANYTHING.search(text) for text in annotations_of(node))
