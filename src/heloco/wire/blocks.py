"""The names under which a model's blocks travel. They are spelled here and nowhere else.

start          parameter.0, parameter.1, …, buffer.0, …         the tensors that a round begins with
contribution   pseudo_gradient.0, …, buffer.0, …                the tensors that a machine sends back
"""

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

PARAMETER, BUFFER, PSEUDO_GRADIENT = "parameter", "buffer", "pseudo_gradient"


def block_name(kind: str, index: int) -> str:
    return f"{kind}.{index}"


def name_blocks(kind: str, tensors: Iterable[Tensor]) -> dict[str, Tensor]:
    return {block_name(kind, index): tensor for index, tensor in enumerate(tensors)}


def name_start(parameters: Iterable[Tensor], buffers: Iterable[Tensor]) -> dict[str, Tensor]:
    return name_blocks(PARAMETER, parameters) | name_blocks(BUFFER, buffers)


def name_contribution(pseudo_gradient: Iterable[Tensor], buffers: Iterable[Tensor]) -> dict[str, Tensor]:
    return name_blocks(PSEUDO_GRADIENT, pseudo_gradient) | name_blocks(BUFFER, buffers)


def blocks_of(kind: str, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """The tensors of one kind, ordered by index."""
    return [tensors[block_name(kind, index)] for index in range(count_blocks(kind, tensors))]


def count_blocks(kind: str, names: Iterable[str]) -> int:
    return sum(name.startswith(f"{kind}.") for name in names)


def is_numbered(names: Sequence[str]) -> bool:
    """Whether these are parameter.0, parameter.1, …, buffer.0, …, each once, with at least one parameter."""
    expected = {block_name(kind, index) for kind in (PARAMETER, BUFFER) for index in range(count_blocks(kind, names))}
    return set(names) == expected and len(names) == len(expected) and block_name(PARAMETER, 0) in expected
