"""Every method: its rule, weight and settings, its knobs, and how the methods are related."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from heloco.errors import UserError
from heloco.ledger import Ledger
from heloco.methods import METHODS, get_method
from heloco.outer import MLA, DelayedNesterov, HeLoCo, Nesterov
from heloco.policy import ArrivalCounts, make_choice
from heloco.synchronizer import Contribution, Synchronizer
from support.synchronizers import WORKERS, build, initial, random_deltas, same

PRESETS: dict[str, tuple[type, str, bool, dict[str, Any]]] = {
    "sync-nesterov": (Nesterov, "average", True, {"lr": 0.7, "momentum": 0.9}),
    "async-nesterov": (Nesterov, "base", False, {"lr": 0.07, "momentum": 0.9}),
    "delayed-nesterov": (DelayedNesterov, "constant", False, {"lr": 0.7, "momentum": 0.9, "delay": WORKERS, "c": 0.0}),
    "mla": (MLA, "base", False, {"lr": 0.7, "momentum": 0.9, "lookahead": False}),
    "mla-lookahead": (MLA, "base", False, {"lr": 0.7, "momentum": 0.9, "lookahead": True}),
    "heloco": (
        HeLoCo, "base", False,
        {"lr": 0.7, "momentum": 0.9, "lookahead": True, "reorient": "printed", "weigh": "after", "c_ok": 0.2, "k_s": 0.5,
         "k_d": 1.0, "kappa": 3.0, "beta_max": 0.5, "eps": 1e-8},
    ),
    "heloco-ramp": (
        HeLoCo, "base", False,
        {"lr": 0.7, "momentum": 0.9, "lookahead": True, "reorient": "ramp", "weigh": "before", "c_ok": 0.2, "k_s": 0.5,
         "k_d": 1.0, "kappa": 3.0, "beta_max": 0.5, "eps": 1e-8, "c_bad": -0.2},
    ),
    "heloco-adaptive": (
        HeLoCo, "annealed", False,
        {"lr": 1.0, "momentum": 0.9, "lookahead": True, "reorient": "ramp", "weigh": "before", "c_ok": 0.2, "k_s": 0.5,
         "k_d": 1.0, "kappa": 3.0, "beta_max": 0.5, "eps": 1e-8, "c_bad": -0.2},
    ),
}  # fmt: skip


def test_every_method_is_listed_here():
    assert PRESETS.keys() == METHODS.keys()
    assert all(METHODS[name].name == name and METHODS[name].about and METHODS[name].equation for name in METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_the_rule_the_weight_and_the_settings_of_its_paper(name):
    rule, weight, barrier, settings_ = PRESETS[name]
    method = get_method(name)
    assert (method.rule, method.weight, method.barrier) == (rule, weight, barrier)
    built = method.build(initial(), workers=WORKERS)
    assert type(built) is rule
    [group] = built.param_groups
    assert {key: group[key] for key in settings_} == settings_


@pytest.mark.parametrize("name", METHODS)
def test_a_methods_knobs_are_what_it_can_be_built_with(name):
    method = get_method(name)
    knobs = method.knobs()
    [group] = method.build(initial(), workers=5, **knobs).param_groups
    assert {key: group[key] for key in knobs} == knobs
    [group] = method.build(initial(), workers=5, lr=0.123, momentum=0.5).param_groups
    assert (group["lr"], group["momentum"]) == (0.123, 0.5)


@pytest.mark.parametrize(
    ("attempt", "sentence"),
    [
        (lambda: get_method("helco"), "There is no method 'helco' here; did you mean 'heloco'?"),
        (lambda: build("mla", k_s=1.0), "mla has no knob 'k_s'; known: lr, momentum, lookahead."),
        (lambda: build("heloco", c_okk=1.0), "heloco has no knob 'c_okk'; did you mean 'c_ok'?"),
        (lambda: build("heloco", lr=-1.0), "heloco: lr is -1.0: it must lie in [0, ∞). η, the outer learning rate."),
        (lambda: build("heloco", reorient="flat"), "heloco: reorient is 'flat': choose one of printed, ramp."),
    ],
)
def test_an_unknown_method_or_knob_is_answered_with_a_sentence(attempt: Callable[[], object], sentence):
    with pytest.raises(UserError) as error:
        attempt()
    assert str(error.value).startswith(sentence)


def trajectory(method: str, **knobs: Any) -> list[Tensor]:
    """All starts and parameters over ten arrivals of unequal workers."""
    draw = torch.Generator().manual_seed(4)
    synchronizer, tensors = build(method, **knobs), []
    for worker in range(WORKERS):
        synchronizer.dispatch(worker)
    for worker in (0, 0, 1, 0, 2, 1, 0, 0, 1, 2):
        current_round = synchronizer.rounds_under_way[worker]
        synchronizer.receive(Contribution(worker, current_round.index, current_round.version, random_deltas(draw)))
        tensors += [p.clone() for p in (*synchronizer.dispatch(worker).parameters, *synchronizer.parameters)]
    return tensors


def test_heloco_is_mla_with_look_ahead_and_correction():
    keep_all = {"c_ok": -1.0}
    assert same(trajectory("heloco", **keep_all), trajectory("mla-lookahead"))
    assert same(trajectory("heloco", **keep_all, lookahead=False), trajectory("mla"))
    assert same(trajectory("mla-lookahead", lookahead=False), trajectory("mla"))
    assert same(trajectory("heloco", reorient="ramp", weigh="before"), trajectory("heloco-ramp"))
    four = [trajectory("mla"), trajectory("mla-lookahead"), trajectory("heloco", lookahead=False), trajectory("heloco")]
    assert not any(same(a, b) for i, a in enumerate(four) for b in four[:i])


def test_a_weight_is_told_the_workers_share_of_the_inner_steps():
    """Two workers with rounds of 6 and 2 steps that take turns: after the arrival of each, three quarters and one quarter."""
    counts_list = []

    def weight(counts: ArrivalCounts) -> float:
        counts_list.append(counts)
        return 1.0

    synchronizer = Synchronizer(
        None,
        inner_steps=[6, 2],
        windows_per_step=1,
        ledger=Ledger([1000, 1000]),
        choose_shard=make_choice("fixed", workers=2, shards=2, seed=0),
        weight=weight,
    )
    for _ in range(2):
        rounds = [synchronizer.dispatch(worker) for worker in range(2)]
        for each in rounds:
            synchronizer.receive(Contribution(each.worker, each.index, each.version))
    # one more round of each is counted: 12 of 14, 4 of 16, then 18 of 22, 6 of 24
    assert [s.step_share for s in counts_list] == pytest.approx([12 / 14, 4 / 16, 18 / 22, 6 / 24])
