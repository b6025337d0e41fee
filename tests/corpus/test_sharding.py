"""Dealing windows to shards: every window exactly once, always the same way, never an empty shard."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heloco.corpus.prepare import Corpus, Source
from heloco.corpus.sharding import EpochOrder, split, windows
from heloco.errors import UserError


def corpus(*lengths: int) -> Corpus:
    """Sources whose every token is unlike all others: 10 000 s + position."""
    tokens = [np.arange(length, dtype=np.uint32) + 10_000 * s for s, length in enumerate(lengths)]
    sources = tuple(Source(f"s{i}", t, t[:2], len(t), 2, 1, 1) for i, t in enumerate(tokens))
    return Corpus(sources, "bytes", 1 << 20, 256, "d")


def firsts(shard) -> list[int]:
    return shard.gather(np.arange(shard.windows))[:, 0].tolist()


@pytest.mark.parametrize("length, context, count", [(0, 4, 0), (4, 4, 0), (5, 4, 1), (8, 4, 1), (9, 4, 2), (101, 10, 10)])
def test_windows_counts_whole_ones(length, context, count):
    assert windows(np.zeros(length), context) == count


def test_by_source_every_shard_is_a_source_in_order():
    shards = split(corpus(9, 14), scheme="source", context=4, seed=0)
    assert [(s.name, s.windows) for s in shards] == [("s0", 2), ("s1", 3)]
    rows = shards[1].gather(np.array([2, 0, 2]))
    assert rows.dtype == np.int64
    assert rows.tolist() == [list(range(10008, 10013)), list(range(10000, 10005)), list(range(10008, 10013))]


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(12, 400), min_size=1, max_size=5),
    context=st.integers(1, 11),
    shards=st.integers(1, 6),
    scheme=st.sampled_from(["iid", "dirichlet"]),
    alpha=st.sampled_from([1e-300, 1e-3, 0.1, 0.5, 1.0, 100.0]),
    seed=st.integers(0, 2**32),
)
def test_every_window_is_in_exactly_one_shard(lengths, context, shards, scheme, alpha, seed):
    data = corpus(*lengths)
    all_windows = sorted(10_000 * s + context * w for s, n in enumerate(lengths) for w in range((n - 1) // context))
    if shards > len(all_windows):
        with pytest.raises(UserError, match="cannot be dealt"):
            split(data, scheme=scheme, shards=shards, context=context, alpha=alpha, seed=seed)
        return
    dealt = split(data, scheme=scheme, shards=shards, context=context, alpha=alpha, seed=seed)
    assert len(dealt) == shards and min(shard.windows for shard in dealt) > 0
    assert sorted(first for shard in dealt for first in firsts(shard)) == all_windows
    second_deal = split(data, scheme=scheme, shards=shards, context=context, alpha=alpha, seed=seed)
    assert [firsts(shard) for shard in second_deal] == [firsts(shard) for shard in dealt]
    for shard in dealt:
        rows = shard.gather(np.arange(shard.windows))
        assert rows.shape == (shard.windows, context + 1)
        assert (np.diff(rows, axis=1) == 1).all()
    if scheme == "iid":
        assert max(s.windows for s in dealt) - min(s.windows for s in dealt) <= 1


def shares(alpha: float, scheme: str = "dirichlet") -> np.ndarray:
    """Fraction of each source (rows) in each shard (columns)."""
    dealt = split(corpus(8001, 8001, 8001), scheme=scheme, shards=3, context=4, alpha=alpha, seed=1)
    return np.array([[sum(first // 10_000 == s for first in firsts(shard)) / 2000 for shard in dealt] for s in range(3)])


def test_alpha_goes_from_one_shard_each_to_all_alike():
    assert shares(0.01).max(axis=1) == pytest.approx(1.0, abs=0.02)
    assert 0.4 < shares(0.5).max() < 1
    assert shares(1e4) == pytest.approx(1 / 3, abs=0.02)
    assert shares(1.0, "iid") == pytest.approx(1 / 3, abs=0.04)


def test_another_seed_deals_otherwise():
    one, other = (split(corpus(400), scheme="iid", shards=2, context=4, seed=seed) for seed in (0, 1))
    assert firsts(one[0]) != firsts(other[0])


def test_what_cannot_be_split_is_refused():
    with pytest.raises(UserError, match=r"'s1' has 4 training tokens, too few for one window of 4 \+ 1"):
        split(corpus(100, 4), scheme="iid", shards=2, context=4, seed=0)
    for alpha in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match="alpha above 0"):
            split(corpus(100), scheme="dirichlet", shards=2, context=4, alpha=alpha, seed=0)
    with pytest.raises(UserError, match="did you mean 'dirichlet'"):
        split(corpus(100), scheme="dirichelt", shards=2, context=4, seed=0)
    with pytest.raises(UserError, match="1 sources make 1 shards, not 2"):
        split(corpus(100), scheme="source", shards=2, context=4, seed=0)
    with pytest.raises(UserError, match="context of 0"):
        split(corpus(100), scheme="source", context=0, seed=0)


def test_an_index_past_the_end_is_refused():
    (shard,) = split(corpus(100), scheme="source", context=4, seed=0)
    for index in (-1, shard.windows):
        with pytest.raises(IndexError, match="windows 0 to 23"):
            shard.gather(np.array([index]))


def test_every_epoch_is_all_windows_in_an_order_of_its_own():
    order = EpochOrder(50, seed=3, shard=1)
    stream = order.locate(np.arange(200)).reshape(4, 50)
    assert [sorted(epoch) for epoch in stream.tolist()] == [list(range(50))] * 4
    assert len({tuple(epoch) for epoch in stream.tolist()}) == 4
    assert EpochOrder(50, seed=3, shard=2).locate(np.arange(50)).tolist() != stream[0].tolist()
    assert EpochOrder(50, seed=4, shard=1).locate(np.arange(50)).tolist() != stream[0].tolist()


@given(st.lists(st.integers(0, 700), min_size=1, max_size=30))
def test_the_stream_does_not_depend_on_how_it_is_asked(positions):
    stream = EpochOrder(7, seed=0, shard=0).locate(np.arange(701))
    order = EpochOrder(7, seed=0, shard=0)
    assert [int(order.locate(np.array([p]))[0]) for p in positions] == stream[positions].tolist()
    assert order.locate(np.array(positions)).tolist() == stream[positions].tolist()
