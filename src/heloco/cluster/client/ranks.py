"""An island: the processes that train one model together with torch.distributed, as one machine of a run."""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from heloco.errors import RunStopped

T = TypeVar("T")


class Ranks:
    """Rank 0 talks to the run for all ranks. Without torch.distributed there is one rank."""

    def __init__(self) -> None:
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.size = torch.distributed.get_world_size() if is_distributed else 1
        self.rank = torch.distributed.get_rank() if is_distributed else 0

    def ask(self, talk: Callable[[], T], take_part: Callable[[], object] = lambda: None) -> T:
        """Calls `talk` on rank 0 and returns its result on every rank. An error on rank 0 is raised on every rank. Meanwhile the
        other ranks call `take_part` each time `talk` calls them with `call_others`."""
        if self.size == 1:
            return talk()
        if self.rank:
            answer_of_first: T = self._listen(take_part)
            return answer_of_first
        answer: list[Any] = [None, "", False]
        failure: Exception | None = None
        try:
            answer[0] = talk()
        except Exception as error:
            failure, answer[1] = error, f"{type(error).__name__}: {error}"
        torch.distributed.broadcast_object_list(answer, src=0)
        if failure is not None:
            raise failure
        value: T = answer[0]
        return value

    def _listen(self, take_part: Callable[[], object]) -> Any:
        while True:
            answer: list[Any] = [None, "", False]
            torch.distributed.broadcast_object_list(answer, src=0)
            value, failure, is_call = answer
            if is_call:
                take_part()
                continue
            if failure:
                raise RunStopped(f"Rank 0 could not go on with the run: {failure}")
            return value

    def call_others(self) -> None:
        """Within `talk`, on rank 0: the other ranks call `take_part` now."""
        if self.size > 1:
            torch.distributed.broadcast_object_list([None, "", True], src=0)

    def gather(self, text: str) -> list[str]:
        """The texts of all ranks, on every rank."""
        texts = [text] * self.size
        if self.size > 1:
            torch.distributed.all_gather_object(texts, text)
        return texts

    def spread(self, tensors: Iterator[Tensor]) -> None:
        """Copies these tensors of rank 0 to all other ranks, in place."""
        if self.size > 1:
            for tensor in tensors:
                torch.distributed.broadcast(tensor.detach(), src=0)
