"""Rules, weights, shard policies and tasks from outside, registered in this process."""
# ruff: noqa: ARG005

from importlib.metadata import EntryPoint
from typing import Annotated, Any

import pytest
import torch
from torch import Tensor

import heloco as package
from heloco.errors import UserError
from heloco.knobs import Knob
from heloco.methods import METHODS, get_method
from heloco.outer import MLA, DelayedNesterov, HeLoCo, Nesterov, OuterOptimizer
from heloco.outer.heloco import heloco_step
from heloco.outer.mla import mla_step
from heloco.outer.nesterov import nesterov_step
from heloco.policy import SHARD_POLICIES, ArrivalCounts, make_choice, make_weight
from heloco.registry import NotInstalled, Registry
from heloco.run import RunConfig, resolve, with_fields
from heloco.run.config import outer_knobs
from heloco.run.settings import knob_settings, to_toml
from heloco.task import TASKS
from support.extensions import Block, Fading, build_sums, sign_step, simulated
from support.repository import REPOSITORY
from support.runs import TINY, heloco
from support.small_cluster import Hand, opened

pytestmark = pytest.mark.usefixtures("nothing_stays_registered")


def counting_step(theta: Tensor, m: Tensor, delta: Tensor, rho: float, state: dict[str, Any], *, lr: float = 0.1) -> Block:
    """A rule with a state of its own: the mean of all that arrived."""
    state["arrivals"] = state.get("arrivals", 0) + 1
    state["total"] = state.get("total", torch.zeros_like(m)) + rho * delta
    return theta - lr * state["total"] / state["arrivals"], m


# ---- outer rules


def blocks(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((3, 4), (5,), (), (0, 2))
    return [[torch.randn(shape, generator=generator).to(dtype) for shape in shapes] for _ in range(count)]


def own_nesterov(theta: Tensor, m: Tensor, delta: Tensor, rho: float, *, lr: float = 0.7, momentum: float = 0.9) -> Block:
    return nesterov_step(theta, m, delta, rho, lr=lr, momentum=momentum)


def own_mla(theta: Tensor, m: Tensor, delta: Tensor, rho: float, *, lr: float = 0.7, momentum: float = 0.9) -> Block:
    return mla_step(theta, m, delta, rho, lr=lr, momentum=momentum)


def own_heloco(
    theta: Tensor, m: Tensor, delta: Tensor, rho: float, *, lr: float = 0.7, momentum: float = 0.9, k_d: float = 2.0
) -> Block:
    return heloco_step(theta, m, delta, rho, lr=lr, momentum=momentum, reorient="ramp", k_d=k_d)


PAIRS = [
    (own_nesterov, lambda params: Nesterov(params)),
    (own_mla, lambda params: MLA(params)),
    (own_heloco, lambda params: HeLoCo(params, reorient="ramp", k_d=2.0)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("function", "built_in"), PAIRS, ids=["nesterov", "mla", "heloco"])
def test_a_pure_function_as_a_rule_of_ones_own_does_what_the_built_in_optimizer_does(function, built_in, dtype):
    package.register_method("own", function, options={"lookahead": True})
    start, *arrivals = blocks(5, dtype=dtype)
    ours, theirs = ([torch.nn.Parameter(x.clone()) for x in start] for _ in range(2))
    rule, other = METHODS["own"].build(ours, workers=2), built_in(theirs)
    for deltas in arrivals:
        for optimizer in (rule, other):
            optimizer.step(weight=0.4, pseudo_gradients=deltas, scale=lambda squares: [0.5] * len(squares))
        for x, y in zip(rule.thetas(), other.thetas(), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
        assert rule.movements == pytest.approx(other.movements, rel=1e-4, abs=1e-6)
        ours_seen, theirs_seen = ([x.cosine or 0.0 for x in optimizer.outcomes] for optimizer in (rule, other))
        assert ours_seen == pytest.approx(theirs_seen, rel=1e-3, abs=1e-6)
    state = [rule.state[p]["momentum_buffer"] for p in ours]
    ahead = [theta - 0.7 * 0.9 * m for theta, m in zip(rule.thetas(), state, strict=True)]
    for x, y in zip(rule.lookahead(), ahead, strict=True):
        torch.testing.assert_close(x, y.to(dtype))


def test_its_parameters_are_knobs_settings_and_flags():
    def scaled(
        theta: Tensor, m: Tensor, delta: Tensor, rho: float, *, lr: float = 0.5,
        boost: Annotated[float, Knob(1.5, "How much more the step is than Δ.", "[0, 9]")] = 2.0, seed: int = 3,
    ) -> Block:  # fmt: skip
        """Scaled descent."""
        return theta - lr * boost * rho * delta + 0 * seed, m

    package.register_method("scaled", scaled, weight="average", equation="θ ← θ − ηbρΔ")
    method = METHODS["scaled"]
    assert (method.about, method.weight, method.knobs()) == ("Scaled descent.", "average", {"lr": 0.5, "boost": 2.0, "seed": 3})
    knob = knob_settings()["boost"]
    assert (knob.about, knob.default, knob.kind) == ("How much more the step is than Δ.", 2.0, float)
    config = resolve(with_fields(RunConfig(), {"method": "scaled", "boost": 1, "outer_seed": 5, "seed": 7}))
    assert config.outer.knobs == {"outer_lr": 0.5, "boost": 1.0, "outer_seed": 5} and config.run.seed == 7
    assert resolve(config) == config and "boost = 1.0" in to_toml(config)
    assert "--boost X" in heloco("train", "--help").out
    assert "θ ← θ − ηbρΔ" in heloco("methods").out
    with pytest.raises(UserError, match=r"boost is 10.0: it must lie in \[0, 9\]"):
        simulated(method="scaled", boost=10)
    with pytest.raises(UserError, match="heloco-ramp has no knob 'boost'"):
        simulated(boost=1)
    assert set(simulated(method="scaled", boost=0.0).tape[-1].blocks.movement) == {0.0}


def test_a_knob_that_is_called_as_a_setting_of_real_machines_is_not_mistaken_for_it():
    def cautious(theta: Tensor, m: Tensor, delta: Tensor, rho: float, *, lr: float = 0.1, patience: float = 4.0) -> Block:
        """Cautious descent."""
        return theta - lr * rho * delta / patience, m

    package.register_method("cautious", cautious)
    with pytest.raises(UserError, match=r"^patience is a setting of runs on real machines: the knob of cautious is outer_pat"):
        simulated(method="cautious", patience=8.0)
    flags = ("train", *TINY, "--method", "cautious", "--patience", "8")
    assert heloco(*flags).sentence.endswith("the knob of cautious is --outer-patience.")
    assert simulated(method="cautious", outer_patience=8.0).config.outer.knobs["outer_patience"] == 8.0
    simulated(patience=8.0)  # no knob of the default method
    assert "cautious\n    Cautious descent.\n    ρ:" in heloco("methods").out


def test_a_rules_own_delay_stays_what_the_rule_says():
    """Only the delay that is declared as a number of workers follows the number of workers."""

    def late(theta: Tensor, m: Tensor, delta: Tensor, rho: float, *, lr: float = 0.1, delay: int = 3) -> Block:
        return theta - lr * rho * delta / delay, m

    package.register_method("late", late)
    package.register_method("every-third", DelayedNesterov, options={"delay": 3})
    package.register_method("every-nth", DelayedNesterov)

    def delays(method: str, **settings: Any) -> tuple[object, object]:
        config = resolve(with_fields(RunConfig(), {"method": method, "paces": [1.0] * 4, **settings}))
        outer = METHODS[method].build([torch.nn.Parameter(torch.zeros(2))], workers=4, **outer_knobs(config.outer))
        assert outer.defaults["delay"] == config.outer.knobs["delay"]
        return config.outer.knobs["delay"], METHODS[method].build([torch.zeros(2)], workers=4).defaults["delay"]

    assert delays("late") == delays("every-third") == (3, 3)
    assert delays("every-nth") == delays("delayed-nesterov") == (4, 4)
    assert delays("every-nth", delay=2) == (2, 4)


def test_a_class_can_be_registered_too():
    class Slow(MLA):
        """MLA, slowly."""

        def __init__(self, params: Any, lr: float = 0.001, momentum: float = 0.9) -> None:
            OuterOptimizer.__init__(self, params, {"lr": lr, "momentum": momentum})

    package.register_method("slow", Slow)
    assert METHODS["slow"].knobs() == {"lr": 0.001, "momentum": 0.9}
    assert simulated(method="slow").config.outer.knobs["outer_lr"] == 0.001


def test_the_state_of_a_rule_is_kept_with_a_served_run(tmp_path):
    package.register_method("counting", counting_step)
    service = opened(tmp_path / "run", method="counting", norm_limit="off")
    hand = Hand(service, "m")
    for seed in range(6):
        hand.work(seed)
    outer = service.state.run.synchronizer.outer
    before = [x.clone() for x in outer.thetas()]
    service.close()
    successor = opened(tmp_path / "run", method="counting", norm_limit="off")
    outer = successor.state.run.synchronizer.outer
    assert all(map(torch.equal, before, outer.thetas()))
    assert {state["arrivals"] for state in outer.state.values()} == {6}
    successor.close()


def test_a_rule_that_waits_for_all_gets_their_sum():
    package.register_method("together", own_mla, weight="average", barrier=True)
    tape_lines = simulated(method="together").tape
    assert [line.verdict for line in tape_lines] == ["gathered", "gathered", "applied"] * 2


WRONG = [
    (lambda theta, m, delta: (theta, m), "must take θ, m, Δ and ρ"),
    (lambda theta, m, delta, rho, lr: (theta, m), "have a default for every other parameter"),
    (7, "must take θ, m, Δ and ρ"),
    (lambda theta, m, delta, rho, *, delay=0.5: (theta, m), "the knob 'delay' of delayed-nesterov is of another type"),
]


@pytest.mark.parametrize(("rule", "says"), WRONG)
def test_what_is_no_rule_is_refused_when_it_is_registered(rule, says):
    with pytest.raises(ValueError, match=says):
        package.register_method("wrong", rule)
    assert "wrong" not in METHODS


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (lambda theta, m, delta, rho: theta, r"must return \(θ, m\)"),
        (lambda theta, m, delta, rho: (theta.sum(), m), r"must return \(θ, m\)"),
        (lambda theta, m, delta, rho: (theta.sub_(delta), m), "changed θ or m in place"),
    ],
)
def test_what_a_rule_must_not_do_is_said_at_its_first_step(rule, says):
    package.register_method("wrong", rule)
    with pytest.raises(TypeError, match=says):
        simulated(method="wrong")


# ---- names


@pytest.mark.parametrize("name", ["", "1st", "a b", "a/b", "-x"])
def test_a_name_must_fit_flags_and_folders(name):
    with pytest.raises(UserError, match="cannot be called"):
        package.register_method(name, sign_step)


def test_what_is_built_in_cannot_be_replaced_and_ones_own_can():
    for register, name in (
        (package.register_method, "mla"), (package.register_weight, "base"), (package.register_shards, "fixed"),
        (package.register_task, "external"), (package.register_inner_optimizer, "muon"),
    ):  # fmt: skip
        with pytest.raises(UserError, match="is built in: choose another name"):
            register(name, sign_step)
    package.register_method("sign", sign_step)
    package.register_method("sign", sign_step, weight="average")
    assert METHODS["sign"].weight == "average" and list(METHODS).count("sign") == 1


def test_an_unknown_name_says_what_to_install():
    with pytest.raises(NotInstalled, match=r"no method 'sgin' here; .* install its package .*heloco\.methods") as raised:
        get_method("sgin")
    assert (raised.value.kind, raised.value.name) == ("method", "sgin")
    assert METHODS.get("sgin") is None


def test_a_name_that_two_packages_offer_cannot_be_used_and_one_that_is_found_twice_can(monkeypatch):
    offers = [EntryPoint("sign", f"test_extend:{rule}", "heloco.methods") for rule in ("sign_step", "own_mla", "sign_step")]
    registry: Registry[Any] = Registry("method", "heloco.methods", lambda _, item: item, {"mla": MLA})
    monkeypatch.setattr("heloco.registry.entry_points", lambda group: offers)
    with pytest.raises(UserError, match="'sign' is offered by the module test_extend and the module test_extend: uninstall"):
        registry.find("sign")
    assert list(registry) == ["mla"] and len(registry.problems()) == 1
    monkeypatch.setattr("heloco.registry.entry_points", lambda group: offers[::2])
    registry = Registry("method", "heloco.methods", lambda _, item: item, {"mla": MLA})
    assert list(registry) == ["mla", "sign"] and registry["sign"].__name__ == "sign_step" and not registry.problems()


# ---- weights, shard policies, tasks


def test_a_weight_with_options():
    package.register_weight("fading", Fading)
    lines = simulated(weight="fading", weight_power=2.0).tape
    assert [line.weight for line in lines] == pytest.approx([(1 - t / 12) ** 2 for t in range(1, 7)])
    with pytest.raises(UserError, match="The base weight has no weight_power"):
        simulated(weight_power=2.0)


def test_a_weight_that_is_a_function_and_what_it_must_not_give():
    package.register_weight("halved", lambda counts: 0.5 / counts.workers)
    assert {line.weight for line in simulated(weight="halved").tape} == {0.5 / 3}
    for number in (-1.0, float("nan"), None):
        package.register_weight("wrong", lambda _, number=number: number)
        with pytest.raises(UserError, match="The arrival weight 'wrong' gave"):
            make_weight("wrong")(ArrivalCounts(0, 1, 1, 1))
    with pytest.raises(UserError, match=r"give a function \(counts\) -> ρ"):
        package.register_weight("wrong", 3.0)


class Backwards:
    def __init__(self, *, workers: int, shards: int, seed: int) -> None:  # noqa: ARG002
        self.last = shards - 1

    def __call__(self, worker: int, round_index: int, shards: Any) -> int:
        return self.last - (worker + round_index) % len(shards)


def test_shard_policies():
    package.register_shards("rotating", lambda worker, round_index, shards: (worker + round_index) % len(shards))
    package.register_shards("backwards", Backwards)
    lines, others = (simulated(assign=name).tape for name in ("rotating", "backwards"))
    shards = len(simulated().config.input.languages) or 5
    assert [line.shard for line in lines] == [(line.worker + line.round) % shards for line in lines]
    assert [line.shard for line in others] == [shards - 1 - line.shard for line in lines]
    package.register_shards("wrong", lambda *_: 99)
    with pytest.raises(UserError, match="The shard policy 'wrong' chose 99: shards are numbered from 0 to"):
        make_choice("wrong", workers=1, shards=2, seed=0)(0, 0, [None, None])


def test_a_task_by_its_name():
    package.register_task("sums", build_sums)
    result = package.simulate("sums", paces=[1, 3], arrivals=10, inner_steps=3, batch_size=4, lr=0.05)
    assert result.config.input.task == "sums" and result.evals[-1].mean["loss"] < result.evals[0].mean["loss"]
    with pytest.raises(UserError, match="There is no task 'sum' here; did you mean 'sums'"):
        package.simulate("sum")


def test_machines_that_join_need_the_task_and_not_the_rule():
    from heloco.cluster.client.worker import task_of
    from heloco.cluster.protocol.messages import RunInfo

    package.register_method("mine", sign_step)
    package.register_task("sums", build_sums)
    package.register_shards("backwards", Backwards)
    config = resolve(with_fields(RunConfig(), {"task": "sums", "method": "mine", "assign": "backwards", "paces": [1.0, 1.0]}))
    digest = build_sums(config).digest
    info = RunInfo(run="", heloco="", config=to_toml(config), task_digest=digest, model_digest="", external=False)
    METHODS.registered.clear()
    SHARD_POLICIES.registered.clear()
    assert task_of(info, device="cpu")[0].digest == digest
    TASKS.registered.clear()
    with pytest.raises(NotInstalled, match="There is no task 'sums' here"):
        task_of(info, device="cpu")


# ---- the documents


def test_the_page_on_extending_runs_and_so_does_the_example(monkeypatch):
    root = REPOSITORY
    text = (root / "docs" / "extend.md").read_text()
    code = [block.partition("```")[0] for block in text.split("```python\n")[1:]]
    assert len(code) == 7
    small = {"inner_steps": 1, "batch_size": 1, "eval_every": 0, "eval_windows": 1, "preset": "1m"}
    simulate = package.simulate

    def simulate_small(*task: Any, **settings: Any) -> Any:
        sizes = {} if task else {"width": 32, "layers": 1, "heads": 2, "context": 16}
        overrides = {name: value for name, value in small.items() if not task or name not in ("eval_windows", "preset")}
        return simulate(*task, **{**settings, "arrivals": min(6, settings.get("arrivals", 6)), **overrides, **sizes})

    monkeypatch.setattr(package, "simulate", simulate_small)
    exec("\n".join(code), {})
    example = root / "examples" / "own_rule" / "own_rule.py"
    exec(compile(example.read_text(), str(example), "exec"), {"__name__": "__main__"})
