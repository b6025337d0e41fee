"""The names under which a model's blocks travel: the one place where they are spelt.

start          parameter.0, parameter.1, …, buffer.0, …         what a round begins with; a run's model
contribution   pseudo_gradient.0, …, buffer.0, …                what comes back
"""

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

PARAMETER, BUFFER, PSEUDO_GRADIENT = "parameter", "buffer", "pseudo_gradient"


def block_name(kind: str, index: int) -> str:
    return f"{kind}.{index}"


def parse_block_name(name: str) -> tuple[str, int]:
    """(kind, index)"""
    kind, _, index = name.partition(".")
    return kind, int(index)


def name_blocks(kind: str, tensors: Iterable[Tensor]) -> dict[str, Tensor]:
    return {block_name(kind, index): tensor for index, tensor in enumerate(tensors)}


def name_start(parameters: Iterable[Tensor], buffers: Iterable[Tensor]) -> dict[str, Tensor]:
    return name_blocks(PARAMETER, parameters) | name_blocks(BUFFER, buffers)


def name_contribution(pseudo_gradient: Iterable[Tensor], buffers: Iterable[Tensor]) -> dict[str, Tensor]:
    return name_blocks(PSEUDO_GRADIENT, pseudo_gradient) | name_blocks(BUFFER, buffers)


def blocks_of(kind: str, named: Mapping[str, Tensor]) -> list[Tensor]:
    """The tensors of one kind, in the order of their numbers."""
    return [named[block_name(kind, index)] for index in range(count_blocks(kind, named))]


def count_blocks(kind: str, names: Iterable[str]) -> int:
    return sum(name.startswith(f"{kind}.") for name in names)


def is_numbered(names: Sequence[str]) -> bool:
    """Whether these are parameter.0, parameter.1, …, buffer.0, …, each once, with at least one parameter."""
    expected = {block_name(kind, index) for kind in (PARAMETER, BUFFER) for index in range(count_blocks(kind, names))}
    return set(names) == expected and len(names) == len(expected) and block_name(PARAMETER, 0) in expected
