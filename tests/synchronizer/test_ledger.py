"""The ledger: under any sequence of rounds every position is handed out and kept exactly once, in order, without a gap."""

import copy

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from heloco.ledger import Ledger, ShardPage, Span

SHARDS = 3


def positions(spans: tuple[Span, ...]) -> list[int]:
    return [p for start, count in spans for p in range(start, start + count)]


class Books(RuleBasedStateMachine):
    """Rounds are taken, kept and given back as hypothesis likes; beside the ledger a model of sets and sums."""

    under_way = Bundle("under_way")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger([10, 20, 30])
        self.out: list[set[int]] = [set() for _ in range(SHARDS)]  # handed out and not given back
        self.waiting: list[set[int]] = [set() for _ in range(SHARDS)]  # given back, to be handed out again
        self.visits = [0] * SHARDS
        self.steps = [0] * SHARDS

    @rule(target=under_way, shard=st.integers(0, SHARDS - 1), count=st.integers(1, 12), steps=st.integers(1, 5))
    def take(self, shard: int, count: int, steps: int) -> tuple[int, tuple[Span, ...], int]:
        fresh = max(self.out[shard] | self.waiting[shard], default=-1) + 1
        expected = sorted(self.waiting[shard])[:count]
        expected += range(fresh, fresh + count - len(expected))
        spans = self.ledger.take(shard, count, steps)
        assert positions(spans) == expected
        self.waiting[shard] -= set(expected)
        assert not self.out[shard] & set(expected)
        self.out[shard] |= set(expected)
        self.visits[shard] += 1
        self.steps[shard] += steps
        return shard, spans, steps

    @rule(portion=consumes(under_way))
    def give_back(self, portion: tuple[int, tuple[Span, ...], int]) -> None:
        shard, spans, steps = portion
        self.ledger.give_back(shard, spans, steps)
        self.out[shard] -= set(positions(spans))
        self.waiting[shard] |= set(positions(spans))
        self.visits[shard] -= 1
        self.steps[shard] -= steps

    @rule(portion=consumes(under_way))
    def keep(self, portion: tuple[int, tuple[Span, ...], int]) -> None:
        """The round was accepted: nothing is to be done, and nothing can give its positions back any more."""

    @rule()
    def save_and_load(self) -> None:
        pages = msgspec.json.decode(msgspec.json.encode(self.ledger.copy_pages()), type=list[ShardPage])
        assert pages == self.ledger.pages
        self.ledger = Ledger([10, 20, 30])
        self.ledger.load(pages)
        assert self.ledger.pages == pages

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        for shard, page in enumerate(self.ledger.pages):
            all_positions = self.out[shard] | self.waiting[shard]
            assert all_positions == set(range(page.cursor))
            assert page.windows_taken == len(self.out[shard])
            assert (page.visits, page.steps) == (self.visits[shard], self.steps[shard])


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=150, stateful_step_count=40)


def test_rounds_get_the_next_positions_of_their_own_shard():
    ledger = Ledger([5, 5])
    assert ledger.take(0, 4, 2) == ((0, 4),)
    assert ledger.take(1, 4, 2) == ((0, 4),)
    assert ledger.take(0, 4, 2) == ((4, 4),)
    assert [page.windows_taken for page in ledger.pages] == [8, 4]


def test_what_was_given_back_comes_first_and_in_pieces():
    ledger = Ledger([100])
    first, second, third = (ledger.take(0, 4, 2) for _ in range(3))
    ledger.give_back(0, third, 2)
    ledger.give_back(0, first, 2)
    assert second == ((4, 4),)
    assert ledger.pages[0].windows_taken == 4
    assert ledger.take(0, 3, 2) == ((0, 3),)
    assert ledger.take(0, 4, 2) == ((3, 1), (8, 3))
    assert ledger.take(0, 4, 2) == ((11, 1), (12, 3))
    assert ledger.take(0, 4, 2) == ((15, 4),)
    assert (ledger.pages[0].visits, ledger.pages[0].steps) == (5, 10)


def test_a_saved_state_does_not_change_when_the_ledger_goes_on():
    ledger = Ledger([100])
    ledger.give_back(0, ledger.take(0, 4, 2), 2)
    pages = ledger.copy_pages()
    before = copy.deepcopy(pages)
    ledger.take(0, 2, 1)
    assert pages == before
    ledger.load(pages)
    ledger.take(0, 2, 1)
    assert pages == before


def test_a_state_of_other_shards_is_not_loaded():
    with pytest.raises(AssertionError, match="another set of shards"):
        Ledger([5, 6]).load(Ledger([5, 5]).copy_pages())
