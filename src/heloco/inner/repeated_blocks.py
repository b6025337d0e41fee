"""The repeated blocks of a model: compiled once for all of them, or computed again in the backward pass."""

from collections.abc import Callable
from typing import Any

from torch import nn


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The longest list of modules of one class inside the model, such as a transformer's blocks."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    uniform = [blocks for blocks in lists if len(blocks) > 1 and len({type(block) for block in blocks}) == 1]
    return max(uniform, key=len, default=[])


def compile_model(model: nn.Module) -> None:
    """Compiles the repeated blocks in their places; the whole model if it has none. The blocks share their code, so the compiler
    sees it once, and it takes a fraction of the time."""
    for part in repeated_blocks(model) or [model]:
        part.compile()


def undo_compilation(model: nn.Module) -> None:
    """After `compile_model`: the model computes as it did before."""
    for module in model.modules():
        module._compiled_call_impl = None


def recompute_blocks(model: nn.Module) -> bool:
    """Has each repeated block keep its inputs alone for the backward pass, and compute what else that needs again. Returns False
    for a model without such blocks."""
    blocks = repeated_blocks(model)
    for block in blocks:
        block.forward = _recomputed(block.forward)
    return bool(blocks)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    from torch.utils.checkpoint import checkpoint

    def forward_again(*inputs: Any, **keywords: Any) -> Any:
        return checkpoint(forward, *inputs, use_reentrant=False, **keywords)

    return forward_again
