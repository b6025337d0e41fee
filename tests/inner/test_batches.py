"""The batches of a round: in their order, made beforehand by one thread or when they are needed."""

import threading
from typing import Any

import numpy as np
import pytest

from heloco.inner.batches import batches_of

STEPS = [np.arange(2 * h, 2 * h + 2).reshape(2, 1) for h in range(6)]


class Counting:
    """A task that remembers which batches were asked for, and by which thread."""

    def __init__(self, fails_at: int = -1) -> None:
        self.asked, self.threads, self.fails_at = list[int](), set[int](), fails_at

    def batch(self, shard: int, positions: Any) -> tuple[int, int]:
        self.asked.append(int(positions[0]))
        self.threads.add(threading.get_ident())
        if self.asked[-1] == self.fails_at:
            raise OSError("no such sample")
        return shard, int(positions[0])


@pytest.mark.parametrize("ahead", [0, 1, 2, 20])
def test_all_batches_come_in_their_order_from_one_thread(ahead: int) -> None:
    task = Counting()
    steps = list(batches_of(task, 3, STEPS, ahead=ahead))  # type: ignore[arg-type]
    assert steps == [[(3, 2 * h), (3, 2 * h + 1)] for h in range(6)]
    assert task.asked == list(range(12)) and len(task.threads) == 1
    assert (threading.get_ident() in task.threads) == (not ahead)


def test_without_a_thread_a_batch_is_made_when_it_is_needed() -> None:
    task = Counting()
    batches = batches_of(task, 0, STEPS, ahead=0)  # type: ignore[arg-type]
    next(batches)
    assert task.asked == [0, 1]


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_error_of_the_task_comes_at_its_batch(ahead: int) -> None:
    batches = batches_of(Counting(fails_at=5), 0, STEPS, ahead=ahead)  # type: ignore[arg-type]
    assert [next(batches), next(batches)] == [[(0, 0), (0, 1)], [(0, 2), (0, 3)]]
    with pytest.raises(OSError, match="no such sample"):
        next(batches)


def test_a_round_that_is_given_up_ends_its_thread() -> None:
    task, before = Counting(), threading.active_count()
    batches = batches_of(task, 0, STEPS, ahead=2)  # type: ignore[arg-type]
    next(batches)
    batches.close()
    assert threading.active_count() == before
    assert len(task.asked) <= 6
