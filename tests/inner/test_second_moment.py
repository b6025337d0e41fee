"""What workers share of AdamW's second moment."""

import pytest
import torch
from torch import Tensor

from heloco.cluster.server.open_run import check_servable
from heloco.engine.simulate import simulate
from heloco.errors import UserError
from heloco.inner.second_moment import SharedMoment, is_table
from heloco.run import RunConfig, resolve, with_fields

BETA2 = 0.9


def kept(seed: int, step: int) -> dict[str, Tensor]:
    """A table, a matrix and a bias."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(9, 2), (3, 2), (3,)]
    moments = {f"{i}.exp_avg_sq": torch.rand(shape, generator=draw, dtype=torch.float64) for i, shape in enumerate(shapes)}
    first = {f"{i}.exp_avg": torch.randn(shape, generator=draw, dtype=torch.float64) for i, shape in enumerate(shapes)}
    return moments | first | {f"{i}.step": torch.tensor(float(step)) for i in range(len(shapes))}


def corrected(memory: dict[str, Tensor], name: str) -> Tensor:
    """As AdamW uses it."""
    return memory[name] / (1 - BETA2 ** memory["0.step"].double())


def test_pooled_is_the_mean_of_the_corrected_moments() -> None:
    memories = [kept(0, 3), None, kept(1, 80)]
    for worker in (0, 2):
        before = {name: t.clone() for name, t in memories[worker].items()}
        pooled_memory = SharedMoment("pooled", BETA2)(worker, memories)
        for name, tensor in memories[worker].items():
            assert torch.equal(tensor, before[name])  # what the worker kept stays its own
            if name.endswith("exp_avg_sq"):
                mean = (corrected(memories[0], name) + corrected(memories[2], name)) / 2
                torch.testing.assert_close(corrected(pooled_memory, name), mean, rtol=1e-12, atol=0)
            else:
                assert torch.equal(pooled_memory[name], tensor)


def test_rows_of_a_table_are_raised_to_the_mean_and_nothing_else_changes() -> None:
    memories = [kept(0, 30), kept(1, 3), kept(2, 7)]
    raised_memory = SharedMoment("rows", BETA2)(1, memories)
    means = [corrected(memory, "0.exp_avg_sq").mean(1) for memory in memories]
    ours, mean = means[1], sum(means) / 3
    raised = corrected(raised_memory, "0.exp_avg_sq").mean(1)
    torch.testing.assert_close(raised, torch.maximum(ours, mean), rtol=1e-12, atol=0)
    assert (ours > mean).any() and (ours < mean).any()
    higher = raised_memory["0.exp_avg_sq"] - memories[1]["0.exp_avg_sq"]
    torch.testing.assert_close(higher[:, 0], higher[:, 1], rtol=1e-9, atol=1e-15)
    for name in memories[1].keys() - {"0.exp_avg_sq"}:
        assert torch.equal(raised_memory[name], memories[1][name])


@pytest.mark.parametrize("sharing", ["pooled", "rows"])
def test_who_is_alone_or_has_kept_nothing_starts_with_its_own(sharing: str) -> None:
    alone = kept(0, 3)
    assert SharedMoment(sharing, BETA2)(0, [alone, None]) is alone
    assert SharedMoment(sharing, BETA2)(1, [alone, None, kept(1, 3)]) is None


def test_a_model_without_a_table_shares_no_rows() -> None:
    memories = [{name: t for name, t in kept(seed, 3).items() if not name.startswith("0.")} for seed in (0, 1)]
    assert SharedMoment("rows", BETA2)(0, memories) is memories[0]


@pytest.mark.parametrize("sharing", ["pooled", "rows"])
def test_equal_workers_share_what_they_have(sharing: str) -> None:
    memories = [kept(0, 3), kept(0, 3)]
    for name, shared in SharedMoment(sharing, BETA2)(0, memories).items():
        torch.testing.assert_close(shared, memories[0][name], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("shape", "expected"), [((50257, 128), True), ((512, 128), False), ((513, 128), True), ((128,), False)])
def test_a_table_has_many_more_rows_than_columns(shape: tuple[int, ...], expected: bool) -> None:
    assert is_table(torch.empty(shape, device="meta")) is expected


def test_it_is_refused_where_it_has_no_meaning() -> None:
    with pytest.raises(UserError, match="give --keep-state too"):
        with_fields(RunConfig(), {"second_moment": "rows"})
    config = resolve(with_fields(RunConfig(), {"second_moment": "rows", "keep_state": True, "paces": [1, 1]}))
    with pytest.raises(UserError, match="real machines do not exchange AdamW's state"):
        check_servable(config)


def test_with_fixed_shards_the_other_languages_are_not_unlearnt() -> None:
    """The built-in languages, each with letters of its own: what the option is for."""
    settings = {"paces": [1, 1, 1], "languages": ["auren", "thelis", "vesnar"], "keep_state": True, "lr_position": "run"}
    settings |= {"width": 32, "layers": 1, "heads": 2, "context": 32, "inner_steps": 8, "arrivals": 60, "lr": 3e-3}
    settings |= {"eval_every": 0, "method": "heloco-adaptive", "recipe": "plain"}
    losses = {sharing: simulate(**settings, second_moment=sharing).loss for sharing in ("", "rows", "pooled")}
    assert losses["pooled"] < losses["rows"] < losses[""], losses
