"""The tensors of a user's model that take part in a run, their names, and copying to and from them."""

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


class ModelBlocks:
    """Trainable parameters, and the buffers that the model would save. Frozen parameters are not sent: they must be the same on
    every machine, which is checked by a digest. Tied parameters are one block. Which parameters are trainable is fixed here."""

    def __init__(self, model: nn.Module, *, include_all: bool) -> None:
        """`include_all`: all parameters and all buffers, as in a run of a built-in task."""
        model = bare(model)
        by_name = {name: _usable(name, p) for name, p in model.named_parameters()}
        self.parameters = {name: p for name, p in by_name.items() if include_all or p.requires_grad}
        if not self.parameters:
            raise UserError("The model has no trainable parameters: set requires_grad before joining.")
        for name, p in self.parameters.items():
            if p.dtype not in TRAINABLE:
                raise UserError(f"The parameter {name!r} is {p.dtype}: {CAN_BE_TRAINED} Freeze it, or convert it before joining.")
        self._frozen = {name: p for name, p in by_name.items() if name not in self.parameters}
        self._digest = _digests_of(self._frozen) if self._frozen else None
        self._buffers = dict(_buffers(model, include_all))
        try:
            self.layout = Layout.from_tensors(self.name_tensors())
        except ValueError as error:
            kinds = {str(p.dtype): name for name, p in self.parameters.items()}
            raise UserError(f"The model cannot travel: {error} Its dtypes are {', '.join(kinds)}.") from error

    @property
    def names(self) -> list[str]:
        """The blocks' names in the model, ordered by index."""
        return [*self.parameters, *self._buffers, *([blocks.FROZEN] if self._digest is not None else [])]

    def labels(self) -> dict[str, str]:
        """Name on the wire -> what it is called in a sentence: "parameter" or "buffer", and its name in the model."""
        labels: dict[str, str] = {}
        for kind, names in ((blocks.PARAMETER, list(self.parameters)), (blocks.BUFFER, list(self._buffers))):
            labels |= {blocks.block_name(kind, i): f"{kind} {name!r}" for i, name in enumerate(names)}
        if self._frozen:
            names = [repr(name) for name in self._frozen]
            others = f" and {len(names) - 3} others" if names[3:] else ""
            frozen_label = f"the list of the {len(names)} frozen parameters here ({', '.join(names[:3])}{others})"
            labels[blocks.block_name(blocks.BUFFER, len(self._buffers))] = frozen_label
        return labels

    def buffers(self) -> list[Tensor]:
        """The current buffers. A module may have replaced a buffer by another tensor."""
        current = [module._buffers[key] for module, key in self._buffers.values()]
        assert all(buffer is not None for buffer in current), "a buffer of the model is gone"
        return [buffer for buffer in current if buffer is not None]

    def tensors(self) -> Iterator[Tensor]:
        """All parameters, then all buffers, as they are now."""
        yield from self.parameters.values()
        yield from self.buffers()

    def name_tensors(self) -> dict[str, Tensor]:
        """The tensors by their names on the wire."""
        buffers = self.buffers() + ([self._digest] if self._digest is not None else [])
        return blocks.name_start([p.detach() for p in self.parameters.values()], buffers)

    def trained_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer moves at least one parameter of the model."""
        block_ids = {id(p) for p in self.parameters.values()}
        return any(id(p) in block_ids for group in optimizer.param_groups for p in group["params"])

    def check_finite(self) -> None:
        """Raises UserError if a parameter holds NaN or Inf."""
        for name, parameter in self.parameters.items():
            if not all_finite([parameter]):
                raise UserError(f"The parameter {name!r} holds NaN or Inf: a run cannot begin with this model.")

    def wait_for_device(self) -> None:
        """Waits until all steps are done on the GPU, so that the measured pace is right."""
        device = next(iter(self.parameters.values())).device
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    # ---- in and out

    @torch.no_grad()
    def load(self, start: dict[str, Tensor]) -> None:
        """Copies a start into the model, in place."""
        self._check_frozen(start)
        for i, parameter in enumerate(self.parameters.values()):
            parameter.copy_(start[blocks.block_name(blocks.PARAMETER, i)])
        self.load_buffers(start)

    @torch.no_grad()
    def load_buffers(self, start: dict[str, Tensor]) -> None:
        """Copies the buffers of a start into the model, in place."""
        for i, buffer in enumerate(self.buffers()):
            buffer.copy_(start[blocks.block_name(blocks.BUFFER, i)])

    @torch.no_grad()
    def exchange_parameters(self, start: dict[str, Tensor]) -> None:
        """The model and the start exchange their parameters, in place and block by block. A second time undoes it."""
        for i, parameter in enumerate(self.parameters.values()):
            block = start[blocks.block_name(blocks.PARAMETER, i)]
            parameter_before = parameter.detach().to(block.device, copy=True)
            parameter.copy_(block)
            block.copy_(parameter_before)

    def _check_frozen(self, start: dict[str, Tensor]) -> None:
        if self._digest is None:
            return
        differs = (start[blocks.block_name(blocks.BUFFER, len(self._buffers))] != self._digest).any(1).tolist()
        if names := [name for name, is_other in zip(self._frozen, differs, strict=True) if is_other]:
            others = f" and {len(names) - 1} others" if names[1:] else ""
            raise UserError(
                f"The frozen parameter {names[0]!r}{others} here is not that of the run: load the same checkpoint on every "
                "machine before joining, or make it trainable."
            )

    @torch.no_grad()
    def contribution(self, start: dict[str, Tensor]) -> dict[str, Tensor]:
        """Δ = start − parameters, one block at a time and at least in float32. Where the start is in float32, Δ is in its memory;
        the start is consumed."""
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise UserError(
                    f"The parameter {name!r} was frozen when the run was joined and is trained now: unfreeze it before joining."
                )
        pseudo_gradient: dict[str, Tensor] = {}
        for i, parameter in enumerate(self.parameters.values()):
            block = start.pop(blocks.block_name(blocks.PARAMETER, i))
            block = block.to(torch.promote_types(block.dtype, torch.float32))
            pseudo_gradient[blocks.block_name(blocks.PSEUDO_GRADIENT, i)] = block.sub_(parameter.detach().to(block))
        for i, (name, buffer) in enumerate(zip(self._buffers, self.buffers(), strict=True)):
            start_buffer = start[blocks.block_name(blocks.BUFFER, i)]
            if (buffer.shape, buffer.dtype) != (start_buffer.shape, start_buffer.dtype):
                was, now = (f"{t.dtype} {list(t.shape)}" for t in (start_buffer, buffer))
                raise UserError(
                    f"The buffer {name!r} was {was} and is now {now}: "
                    "register a buffer that changes its shape with persistent=False, and it stays out of the run."
                )
            start_buffer.copy_(buffer)
        return pseudo_gradient | start


def bare(model: nn.Module) -> nn.Module:
    """The model without the wrappers of torch.compile and data parallelism, whose prefixes are not part of its names."""
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


def _buffers(model: nn.Module, include_all: bool) -> Iterator[tuple[str, tuple[nn.Module, str]]]:
    """(name, (module, key)) of each buffer. Without `include_all`, only buffers that the model
    would save: the others are caches or derived."""
    buffer_ids: set[int] = set()
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is None or id(buffer) in buffer_ids or not (include_all or key not in module._non_persistent_buffers_set):
                continue
            buffer_ids.add(id(buffer))
            yield f"{prefix}.{key}" if prefix else key, (module, key)


def _digests_of(parameters: dict[str, nn.Parameter]) -> Tensor:
    """A row of 16 bytes for each parameter."""
    digests = bytearray()
    for name, parameter in parameters.items():
        digest = xxhash.xxh3_128(f"{name} {parameter.dtype} {list(parameter.shape)};".encode())
        digest.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        digests += digest.digest()
    return torch.frombuffer(digests, dtype=torch.uint8).view(len(parameters), -1)
