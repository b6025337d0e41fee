"""The names under which a model's blocks travel and are stored. They are spelled here and nowhere else, so every room may
import this module, and it imports none of them.

start          parameter.0, parameter.1, …, buffer.0, …         the tensors that a round begins with
contribution   pseudo_gradient.0, …, buffer.0, …                the tensors that a machine sends back
               scale.0, …                                       the scales of blocks that travel as codes
difference     difference.0, …, scale.0, …, buffer.0, …         what leads from a worker's last start to its next
checkpoint     parameter.0, …, buffer.0, …                      the outer model
               outer.0.momentum_buffer, …                       what the outer rule keeps of block 0
               gathered.0, …, gathered_buffer.0, …              what waits at the barrier
               residual.0.1, …                                  what the codes of worker 0 left out of block 1
               own_start.0.1, …                                 block 1 of the start that worker 0 has
               end.0.1, …                                       block 1 of worker 0's own parameters after its last round
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

PARAMETER, BUFFER, PSEUDO_GRADIENT, SCALE = "parameter", "buffer", "pseudo_gradient", "scale"
DIFFERENCE, RESIDUAL, OWN_START, END = "difference", "residual", "own_start", "end"
FROZEN = "heloco.frozen"
"""The digests of a model's frozen parameters. They travel as one more buffer with this name, if there are any."""
GATHERED, GATHERED_BUFFER, OUTER_STATE = "gathered", "gathered_buffer", "outer"


def block_name(kind: str, index: int) -> str:
    """The name of a tensor in a file: `kind` is one of the constants above, and `index` counts the blocks of that kind."""
    return f"{kind}.{index}"


def parse_block_name(name: str) -> tuple[str, int]:
    """(kind, index)"""
    kind, _, index = name.partition(".")
    return kind, int(index)


def name_blocks(kind: str, tensors: Iterable[Tensor]) -> dict[str, Tensor]:
    """The tensors by name, numbered from 0 in their order."""
    return {block_name(kind, index): tensor for index, tensor in enumerate(tensors)}


def name_start(parameters: Iterable[Tensor], buffers: Iterable[Tensor]) -> dict[str, Tensor]:
    """The tensors of a start by name: parameters, then buffers."""
    return name_blocks(PARAMETER, parameters) | name_blocks(BUFFER, buffers)


def name_contribution(pseudo_gradient: Iterable[Tensor], buffers: Iterable[Tensor]) -> dict[str, Tensor]:
    """The tensors of a contribution by name: the pseudo-gradient's blocks, then buffers."""
    return name_blocks(PSEUDO_GRADIENT, pseudo_gradient) | name_blocks(BUFFER, buffers)


def blocks_of(kind: str, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """The tensors of one kind, ordered by index."""
    return [tensors[block_name(kind, index)] for index in range(count_blocks(kind, tensors))]


def parts_of(kind: str, index: int, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """The tensors of a file that stand for a block: its numbers, or its codes and scales."""
    names = (block_name(part_kind, index) for part_kind in (kind, SCALE))
    return [tensors[name] for name in names if name in tensors]


def is_of_kind(kind: str, name: str) -> bool:
    """Whether this is the name of a block of this kind."""
    return name.startswith(f"{kind}.")


def count_blocks(kind: str, names: Iterable[str]) -> int:
    """How many of these are names of blocks of this kind."""
    return sum(is_of_kind(kind, name) for name in names)


def name_outer_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Tensor]:
    """The tensors among what the outer rule keeps, from one mapping per block."""
    each = ((index, name, value) for index, state in enumerate(states) for name, value in state.items())
    return {f"{OUTER_STATE}.{index}.{name}": value for index, name, value in each if isinstance(value, Tensor)}


def outer_states_in(names: Iterable[str]) -> dict[int, dict[str, str]]:
    """The inverse for names: a block's index -> the parts of the outer rule's state of it, each with the name of its tensor."""
    states: dict[int, dict[str, str]] = {}
    for tensor_name in names:
        if is_of_kind(OUTER_STATE, tensor_name):
            _, index, part = tensor_name.split(".", 2)
            states.setdefault(int(index), {})[part] = tensor_name
    return states


def name_worker_blocks(kind: str, worker: int, tensors: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """Blocks that belong to a worker, by their index."""
    return {f"{kind}.{worker}.{index}": tensor for index, tensor in tensors.items()}


def worker_blocks(kind: str, worker: int, tensors: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """The inverse."""
    prefix = f"{kind}.{worker}."
    return {int(name.removeprefix(prefix)): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def is_numbered(names: Sequence[str]) -> bool:
    """Whether these are parameter.0, parameter.1, …, buffer.0, …, each once, with at least one parameter."""
    expected = {block_name(kind, index) for kind in (PARAMETER, BUFFER) for index in range(count_blocks(kind, names))}
    return set(names) == expected and len(names) == len(expected) and block_name(PARAMETER, 0) in expected
