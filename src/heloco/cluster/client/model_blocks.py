"""The part of somebody's own model that takes part in a run: which tensors, under which names, and into and out of them."""

from collections.abc import Iterator
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from heloco.dtypes import CAN_BE_TRAINED, TRAINABLE
from heloco.errors import UserError
from heloco.finite import all_finite
from heloco.wire import blocks
from heloco.wire.layout import Layout

FROZEN = "heloco.frozen"
"""The name of a digest that travels as one more buffer, where there are any."""


class ModelBlocks:
    """Trainable parameters, and the buffers that the model would save. Frozen parameters stay at home: they must be the same on
    every machine, which is checked. Tied parameters are one block. What is trainable is settled here."""

    def __init__(self, model: nn.Module, *, whole: bool) -> None:
        """`whole`: all parameters and all buffers, as a run has them that builds its model itself."""
        model = bare(model)
        named = {name: _usable(name, p) for name, p in model.named_parameters()}
        self.parameters = {name: p for name, p in named.items() if whole or p.requires_grad}
        if not self.parameters:
            raise UserError("The model has no trainable parameters: set requires_grad before joining.")
        for name, p in self.parameters.items():
            if p.dtype not in TRAINABLE:
                raise UserError(f"The parameter {name!r} is {p.dtype}: {CAN_BE_TRAINED} Freeze it, or convert it before joining.")
        self._frozen = {name: p for name, p in named.items() if name not in self.parameters}
        self._digest = _digest_of(self._frozen) if self._frozen else None
        self._buffers = dict(_buffers(model, whole))
        try:
            self.layout = Layout.of(self.named())
        except ValueError as error:
            kinds = {str(p.dtype): name for name, p in self.parameters.items()}
            raise UserError(f"The model cannot travel: {error} Its dtypes are {', '.join(kinds)}.") from error

    @property
    def names(self) -> list[str]:
        """The blocks' own names, in the order of their numbers."""
        return [*self.parameters, *self._buffers, *([FROZEN] if self._digest is not None else [])]

    def real_names(self) -> Iterator[tuple[str, str, str]]:
        """(name on the wire, parameter or buffer, own name)"""
        for kind, names in ((blocks.PARAMETER, list(self.parameters)), (blocks.BUFFER, self.names[len(self.parameters) :])):
            yield from ((blocks.block_name(kind, i), kind, name) for i, name in enumerate(names))

    def buffers(self) -> list[Tensor]:
        """As they are now: a module may put another tensor in a buffer's place."""
        kept = [module._buffers[key] for module, key in self._buffers.values()]
        assert all(buffer is not None for buffer in kept), "a buffer of the model is gone"
        return [buffer for buffer in kept if buffer is not None]

    def tensors(self) -> Iterator[Tensor]:
        yield from self.parameters.values()
        yield from self.buffers()

    def named(self) -> dict[str, Tensor]:
        """As a run's model travels."""
        buffers = self.buffers() + ([self._digest] if self._digest is not None else [])
        return blocks.name_start([p.detach() for p in self.parameters.values()], buffers)

    def trained_by(self, optimizer: torch.optim.Optimizer) -> bool:
        ours = {id(p) for p in self.parameters.values()}
        return any(id(p) in ours for group in optimizer.param_groups for p in group["params"])

    def check_finite(self) -> None:
        for name, parameter in self.parameters.items():
            if not all_finite([parameter]):
                raise UserError(f"The parameter {name!r} holds NaN or Inf: a run cannot begin with this model.")

    def wait_for_device(self) -> None:
        """Until all steps are done, for an honest pace."""
        device = next(iter(self.parameters.values())).device
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    # ---- in and out

    @torch.no_grad()
    def load(self, start: dict[str, Tensor]) -> None:
        """Into the model, in place."""
        if self._digest is not None and not torch.equal(
            start[blocks.block_name(blocks.BUFFER, len(self._buffers))], self._digest
        ):
            raise UserError(
                f"The frozen parameters here ({next(iter(self._frozen))!r} and so on) are not those of the run: load the same "
                "checkpoint on every machine before joining, or make them trainable."
            )
        for i, parameter in enumerate(self.parameters.values()):
            parameter.copy_(start[blocks.block_name(blocks.PARAMETER, i)])
        for i, buffer in enumerate(self.buffers()):
            buffer.copy_(start[blocks.block_name(blocks.BUFFER, i)])

    @torch.no_grad()
    def contribution(self, start: dict[str, Tensor]) -> dict[str, Tensor]:
        """Δ = start − parameters, in the start's own memory, a block at a time: the start is gone then."""
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise UserError(
                    f"The parameter {name!r} was frozen when the run was joined and is trained now: unfreeze it before joining."
                )
        pseudo_gradient: dict[str, Tensor] = {}
        for i, parameter in enumerate(self.parameters.values()):
            block = start.pop(blocks.block_name(blocks.PARAMETER, i))
            pseudo_gradient[blocks.block_name(blocks.PSEUDO_GRADIENT, i)] = block.sub_(parameter.detach().to(block.device))
        for i, (name, buffer) in enumerate(zip(self._buffers, self.buffers(), strict=True)):
            before = start[blocks.block_name(blocks.BUFFER, i)]
            if (buffer.shape, buffer.dtype) != (before.shape, before.dtype):
                was, now = (f"{t.dtype} {list(t.shape)}" for t in (before, buffer))
                raise UserError(
                    f"The buffer {name!r} was {was} and is now {now}: "
                    "register a buffer that changes its shape with persistent=False, and it stays out of the run."
                )
            before.copy_(buffer)
        return pseudo_gradient | start


def bare(model: nn.Module) -> nn.Module:
    """The model itself, out of torch.compile's and data parallelism's wrappers: their prefixes are no part of its names."""
    while True:
        inner: Any = getattr(model, "_orig_mod", None)
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _usable(name: str, parameter: nn.Parameter) -> nn.Parameter:
    if nn.parameter.is_lazy(parameter):
        raise UserError(f"The parameter {name!r} has no shape yet: send one batch through the model before joining.")
    if parameter.is_meta:
        raise UserError(f"The parameter {name!r} is on the meta device: give the model its values before joining.")
    if hasattr(parameter, "to_local"):
        raise UserError(
            f"The parameter {name!r} is spread over processes (FSDP, tensor parallel): heloco.join needs it whole on each one."
        )
    return parameter


def _buffers(model: nn.Module, whole: bool) -> Iterator[tuple[str, tuple[nn.Module, str]]]:
    """Where each buffer is; without `whole`, of those that the model would save: others are made from it, or are caches."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is None or id(buffer) in seen or not (whole or key not in module._non_persistent_buffers_set):
                continue
            seen.add(id(buffer))
            yield f"{prefix}.{key}" if prefix else key, (module, key)


def _digest_of(named: dict[str, nn.Parameter]) -> Tensor:
    found = xxhash.xxh3_128()
    for name, tensor in named.items():
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return torch.frombuffer(bytearray(found.digest()), dtype=torch.uint8)
