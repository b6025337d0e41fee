"""Our rules as the outer optimizer of torchft's DiLoCo: real lighthouse, managers and gloo on loopback, replicas in threads."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import TCPStore

from heloco.outer import MLA, HeLoCo, Nesterov
from support.equations import Equations, assert_near, assert_same

try:
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo
except ImportError as error:
    pytest.skip(f"torchft cannot be imported here: {error}", allow_module_level=True)

F64 = torch.float64
HOST, PATIENCE = "127.0.0.1", timedelta(seconds=30)
INNER_LR, SYNC_EVERY, SYNCS = 0.1, 3, 5
RULES: dict[str, tuple[Callable[..., torch.optim.Optimizer], str, dict[str, Any]]] = {
    "heloco": (HeLoCo, "heloco", {}),
    "heloco-ramp": (HeLoCo, "heloco", {"reorient": "ramp", "weigh": "before"}),
    "mla": (MLA, "mla", {}),
    "nesterov": (Nesterov, "nesterov", {}),
}


class Replica(NamedTuple):
    manager: Any
    model: nn.Sequential
    inner: torch.optim.Optimizer
    outer: list[Any]


@pytest.fixture
def lighthouse() -> Iterator[Callable[[int], str]]:
    """Starts a lighthouse that waits for so many replicas; its address."""
    servers = []

    def start(replicas: int) -> str:
        servers.append(LighthouseServer(bind=f"{HOST}:0", min_replicas=replicas, join_timeout_ms=10_000, quorum_tick_ms=10))
        return str(servers[-1].address())

    yield start
    for server in servers:
        server.shutdown()


@pytest.fixture
def manage() -> Iterator[Callable[..., Any]]:
    """Makes a replica group's manager."""
    managers: list[tuple[Any, Any]] = []

    def start(address: str, name: str, replicas: int) -> Any:
        store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        manager = Manager(
            pg=ProcessGroupGloo(timeout=PATIENCE),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=replicas,
            use_async_quorum=False,
            init_sync=False,
            replica_id=name,
            hostname=HOST,
            store_addr=HOST,
            store_port=store.port,
            rank=0,
            world_size=1,
            lighthouse_addr=address,
            timeout=PATIENCE,
            quorum_timeout=PATIENCE,
            connect_timeout=PATIENCE,
        )
        managers.append((manager, store))
        return manager

    yield start
    for manager, _ in managers:
        manager.shutdown(wait=False)


def model(seed: int = 0) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    network = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double()
    for p in network.parameters():
        p.data = torch.randn(p.shape, dtype=F64, generator=generator)
    return network


def replica(manager: Any, rule: str, fragments: int, seed: int = 0) -> Replica:
    network, (kind, _, settings) = model(seed), RULES[rule]
    parts = [network] if fragments == 1 else list(network)
    return Replica(
        manager, network, torch.optim.SGD(network.parameters(), lr=INNER_LR), [kind(x.parameters(), **settings) for x in parts]
    )


def diloco(one: Replica, sync_every: int) -> Any:
    fragments = [one.model] if len(one.outer) == 1 else list(one.model)
    return DiLoCo(one.manager, fragments, one.inner, one.outer, sync_every=sync_every)


def train(one: Replica, gradients: list[list[Tensor]]) -> None:
    """Inner steps with these gradients; DiLoCo synchronizes by its hooks."""
    for step in gradients:
        for p, gradient in zip(one.model.parameters(), step, strict=True):
            p.grad = gradient.clone()
        one.inner.step()


def inner_gradients(count: int, seed: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(p.shape, dtype=F64, generator=generator) for p in model().parameters()] for _ in range(count)]


def by_hand(rule: str, gradients: list[list[list[Tensor]]]) -> list[Equations]:
    """What synchronizing everything after every SYNC_EVERY inner steps leads to: Δ̄ is the mean of the replicas' θ − θ_H."""
    _, equation, settings = RULES[rule]
    blocks = [Equations(equation, p, **settings) for p in model().parameters()]
    for start in range(0, len(gradients[0]), SYNC_EVERY):
        for index, block in enumerate(blocks):
            moved = [
                INNER_LR * sum(step[index] for step in replica_gradients[start : start + SYNC_EVERY])
                for replica_gradients in gradients
            ]
            block.arrive(sum(moved) / len(moved))  # type: ignore[arg-type]
    return blocks


def assert_at(expected: list[Equations], *replicas: Replica) -> None:
    """All replicas have the parameters and the outer momentum that the equations lead to, and the same bits."""
    for one in replicas:
        momenta = [one.outer[0].state[p]["momentum_buffer"] for p in one.model.parameters()]
        assert_near([p.detach() for p in one.model.parameters()], [x.theta for x in expected])
        assert_near(momenta, [x.m for x in expected])
        assert_same(list(one.model.parameters()), list(replicas[0].model.parameters()))


@pytest.mark.parametrize("rule", RULES)
def test_diloco_with_our_rule_is_our_rule(rule: str, lighthouse: Any, manage: Any) -> None:
    address = lighthouse(replicas=2)
    gradients = [inner_gradients(SYNC_EVERY * SYNCS, seed) for seed in (0, 1)]

    def work(index: int) -> tuple[Replica, set[str]]:
        one, cases = replica(manage(address, f"replica{index}", replicas=2), rule, fragments=1), set()
        with diloco(one, SYNC_EVERY):
            for t in range(SYNCS):
                train(one, gradients[index][t * SYNC_EVERY : (t + 1) * SYNC_EVERY])
                cases |= {outcome.case for outcome in one.outer[0].outcomes}
        assert one.manager.current_step() == SYNCS
        return one, cases

    with ThreadPoolExecutor(2) as pool:
        (first, cases), (second, _) = pool.map(work, (0, 1))
    assert_at(by_hand(rule, gradients), first, second)
    if rule.startswith("heloco"):
        assert {"kept", "damped"} <= cases


def test_fragments_with_an_outer_optimizer_each(lighthouse: Any, manage: Any) -> None:
    """Streaming DiLoCo: the two layers are synchronized in turn, each by its own HeLoCo."""
    one = replica(manage(lighthouse(replicas=1), "replica0", replicas=1), "heloco", fragments=2)
    blocks = [Equations("heloco", p) for p in model().parameters()]
    local = [x.theta.clone() for x in blocks]
    with diloco(one, sync_every=2 * SYNC_EVERY):
        for t in range(SYNCS):
            gradients = inner_gradients(SYNC_EVERY, seed=t)
            train(one, gradients)
            local = [x - INNER_LR * sum(step[i] for step in gradients) for i, x in enumerate(local)]
            for i in (0, 1) if t % 2 == 0 else (2, 3):
                blocks[i].arrive(blocks[i].theta - local[i])
                local[i] = blocks[i].theta
            assert_near([p.detach() for p in one.model.parameters()], local)


def test_a_replica_that_joins_takes_over_parameters_and_momentum(lighthouse: Any, manage: Any) -> None:
    """The first works alone for two synchronizations. The second brings a model of its own, which its first synchronization
    replaces, momentum and all, by what the first has then; from there on both do the same."""
    gradients = inner_gradients(SYNC_EVERY * SYNCS, seed=0)
    alone = 2 * SYNC_EVERY
    first = replica(manage(lighthouse(replicas=1), "replica0", replicas=1), "heloco", fragments=1)
    with diloco(first, SYNC_EVERY):
        train(first, gradients[:alone])

    address = lighthouse(replicas=2)
    successor = first._replace(manager=manage(address, "replica0", replicas=2))
    successor.manager.load_state_dict(first.manager.state_dict())
    joining = replica(manage(address, "replica1", replicas=2), "heloco", fragments=1, seed=99)

    def work(one: Replica) -> None:
        one.manager.register_state_dict_fn("model", one.model.load_state_dict, one.model.state_dict)
        with diloco(one, SYNC_EVERY):
            train(one, gradients[alone:])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, (successor, joining)))
    assert_at(by_hand("heloco", [gradients]), successor, joining)
