"""A training loop evaluates the run's model, in the place of its own and between two rounds."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from heloco.cluster.client.model_blocks import ModelBlocks
from heloco.cluster.client.ranks import Ranks
from heloco.cluster.protocol.messages import SHORT_TEXT_LIMIT
from heloco.cluster.protocol.refusals import RefusalCode, Refused
from heloco.cluster.protocol.score_messages import SCORE_LIMIT
from heloco.records.json_numbers import finite_or_none

LoopScores = float | Tensor | Mapping[str, Any]
"""A loss; or losses by the names of validation sets; or measures by their names, `loss` among them; or measures of each set."""
LOSS, VALIDATION = "loss", "validation"
"""What a score is called that has no name."""
Scores = dict[str, dict[str, float | None]]


class LoopEvaluation:
    """Scores the run's model with the loop's own function, on all ranks. The loop's model is as before afterwards."""

    def __init__(self, evaluate: Callable[[nn.Module], LoopScores] | None, model: nn.Module, blocks: ModelBlocks, ranks: Ranks):
        self._evaluate, self._model, self._blocks, self._ranks = evaluate, model, blocks, ranks

    def score(self, tensors: dict[str, Tensor]) -> Scores:
        """On rank 0: the scores of the run's model with these tensors."""
        self._ranks.call_others()
        scores, failures = self._score_together(tensors)
        for rank, failure in enumerate(failures):
            if failure:
                where = f" on rank {rank}" if rank else ""
                raise Refused(RefusalCode.SCORES, f"evaluate failed{where} ({failure}).")
        return named_scores(scores)

    def take_part(self) -> None:
        """On the other ranks: evaluates the model that rank 0 sends."""
        self._score_together(None)

    def _score_together(self, tensors: dict[str, Tensor] | None) -> tuple[Any, list[str]]:
        """What the function returned here, and why it failed on each rank; empty where it did not."""
        scores, failure = None, ""
        with self._in_place(tensors):
            try:
                if self._evaluate is None:
                    raise TypeError("heloco.join got no evaluate here, but on rank 0")
                scores = self._evaluate(self._model)
            except Exception as error:  # the user's own code
                failure = f"{type(error).__name__}: {error}"
        return scores, self._ranks.gather(failure)

    @contextlib.contextmanager
    def _in_place(self, tensors: dict[str, Tensor] | None) -> Iterator[None]:
        """The model has these tensors, or without them those of rank 0, and is in eval mode. Then parameters, buffers, modes and
        torch's random numbers are as before. Rank 0 keeps its parameters where the others' were, so it needs no other memory."""
        parameters = list(self._blocks.parameters.values())
        own_parameters = [p.detach().clone() for p in parameters] if tensors is None else []
        with torch.random.fork_rng(_gpus(parameters)), _keep_modes(self._model), _keep_buffers(self._model), torch.no_grad():
            if tensors is not None:
                self._blocks.exchange_parameters(tensors)
                self._blocks.load_buffers(tensors)
            self._ranks.spread(self._blocks.tensors())
            self._model.eval()
            try:
                yield
            finally:
                if tensors is not None:
                    self._blocks.exchange_parameters(tensors)
                for parameter, value in zip(parameters, own_parameters, strict=False):
                    parameter.copy_(value)


def named_scores(scores: LoopScores) -> Scores:
    """The scores of a loop by source and measure. Raises `Refused` with the code SCORES if they are none."""
    by_name = scores if isinstance(scores, Mapping) else {LOSS: scores}
    by_source = {VALIDATION: by_name} if LOSS in by_name else by_name
    named: Scores = {}
    for source, measures in by_source.items():
        values = measures if isinstance(measures, Mapping) else {LOSS: measures}
        named[_name(source)] = {_name(measure): _number(value, measure) for measure, value in values.items()}
    if (count := sum(map(len, named.values()))) > SCORE_LIMIT:
        raise Refused(RefusalCode.SCORES, f"An evaluation has at most {SCORE_LIMIT} scores, and this one has {count}.")
    return named


def _name(name: Any) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= SHORT_TEXT_LIMIT:
        limits = f"a text of 1 to {SHORT_TEXT_LIMIT} characters"
        raise Refused(RefusalCode.SCORES, f"The name of a score is {name!r:.100}: give it {limits}.")
    return name


def _number(value: Any, name: str) -> float | None:
    """None if it is not finite: the run refuses it."""
    try:
        if isinstance(value, str | bytes | bool):
            raise TypeError
        return finite_or_none(float(value))
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise Refused(RefusalCode.SCORES, f"The score {name!r:.100} is {value!r:.100}, which is no number.") from None


def _gpus(tensors: list[nn.Parameter]) -> list[int]:
    return sorted({tensor.device.index or 0 for tensor in tensors if tensor.device.type == "cuda"})


@contextlib.contextmanager
def _keep_modes(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training


@contextlib.contextmanager
def _keep_buffers(model: nn.Module) -> Iterator[None]:
    """All buffers, also those that stay at home. A module may replace one by another tensor."""
    copies = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for module, name, buffer, copy in copies:
            module._buffers[name] = buffer
            buffer.detach().copy_(copy)
