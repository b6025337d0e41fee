"""Simulated links: what travels is rounded as on real machines and takes its time, and workers may compute meanwhile."""

import pytest
import torch
from torch import Tensor

from heloco.cluster.server.open_run import check_servable
from heloco.engine.simulated_links import FileSizes, SimulatedLinks
from heloco.engine.simulation import Simulation
from heloco.errors import UserError
from heloco.ledger import Ledger
from heloco.methods import METHODS
from heloco.policy import make_choice, make_weight
from heloco.rounds import Contribution, Round
from heloco.run import RunConfig, resolve, with_fields
from heloco.synchronizer import Synchronizer
from heloco.wire.formats import decode_block, find_format
from heloco.wire.link_options import LinkOptions
from support.states import through_json

MB = 1_000_000
SIZES = FileSizes(contribution=MB, start=4 * MB, difference=MB // 2, blocks=(MB, MB, 2 * MB))
SHAPES = ((6, 40), (20,), (5, 200))


def books_only(paces, steps, arrivals, options, sizes=SIZES) -> Simulation:
    synchronizer = Synchronizer(
        None,
        inner_steps=[steps] * len(paces),
        windows_per_step=1,
        ledger=Ledger([1000] * len(paces)),
        choose_shard=make_choice("fixed", workers=len(paces), shards=len(paces), seed=0),
        weight=make_weight("average"),
    )
    links = SimulatedLinks(options, sizes, workers=len(paces), seed=0)
    return Simulation(synchronizer, paces_s=paces, arrivals=arrivals, links=links)


def history(simulation: Simulation) -> list[tuple[float, int, int, int]]:
    """(time, worker, version, staleness) of each arrival."""
    lines = []
    while not simulation.finished:
        if (arrived := simulation.advance()) is None:
            under_way = simulation.next_needed()
            simulation.give(Contribution(under_way.worker, under_way.index, under_way.version))
        else:
            lines.append((simulation.now_s, arrived[0].worker, arrived[0].version, arrived[0].staleness))
    return lines


def test_a_served_run_encodes_contributions_and_refuses_what_only_a_simulation_has_so_far():
    common = {"wire": "int4", "rounding": "stochastic", "error_feedback": False, "feedback_decay": 0.5, "paces": [1, 1]}
    for served in ({}, {"wire_down": "fp32"}):
        check_servable(resolve(with_fields(RunConfig(), common | served)))
    simulated = {"wire_down": "int8", "full_every": 3, "overlap": True, "latency_s": [0.1]}
    for options in (simulated, *({name: value} for name, value in simulated.items())):
        with pytest.raises(UserError, match=f"^{', '.join(options)} cannot be set in a served run yet: starts travel whole"):
            check_servable(resolve(with_fields(RunConfig(), common | options)))


# ---- time


def test_a_round_takes_as_long_as_its_start_its_steps_and_its_contribution():
    """Worker 0: 4 MB down at 32 Mbit/s and .5 s, 2 steps of 3 s, 1 MB up at 8 Mbit/s and .5 s: 1.5 + 6 + 1.5 = 9 s. Worker 1 has
    half the speed and no latency: 2 + 2 + 2 = 6 s."""
    options = LinkOptions(up_mbit_s=[8.0, 4.0], down_mbit_s=[32.0, 16.0], latency_s=[0.5, 0.0])
    assert history(books_only([3.0, 1.0], 2, 6, options)) == [
        (6.0, 1, 0, 0), (9.0, 0, 0, 1), (12.0, 1, 1, 1), (18.0, 0, 2, 1), (18.0, 1, 3, 1), (24.0, 1, 5, 0),
    ]  # fmt: skip


def test_differences_are_faster_and_every_so_often_a_start_is_whole():
    """4 MB take 4 s and .5 MB half a second; every third start is whole."""
    options = LinkOptions(wire="int4", down_mbit_s=[8.0], full_every=3)
    simulation = books_only([1.0], 1, 7, options)
    assert [time for time, *_ in history(simulation)] == [5.0, 6.5, 8.0, 13.0, 14.5, 16.0, 21.0]


def test_a_worker_that_overlaps_computes_while_bytes_travel():
    """Up 1 s, down .5 s, a step 1 s, 4 steps. The first start takes .5 s, then the worker never waits: it ends its steps at
    4.5, 8.5, …, and a contribution arrives a second later. The next start arrives 1.5 s after the steps ended, during the second
    step of the next round, so it is merged after one step."""
    options = LinkOptions(wire="int4", overlap=True, up_mbit_s=[8.0], down_mbit_s=[8.0], full_every=10**6)
    sizes = FileSizes(MB, MB // 2, MB // 2, blocks=(1, 1))
    simulation = books_only([1.0], 4, 4, options, sizes)
    merges = []
    while not simulation.finished:
        if (arrived := simulation.advance()) is None:
            under_way = simulation.next_needed()
            merges.append((under_way.overlap.merge_steps, under_way.overlap.parameters is not None))
            simulation.give(Contribution(under_way.worker, under_way.index, under_way.version, end=[torch.zeros(1)]))
        else:
            assert simulation.now_s == 1.5 + 4 * arrived[0].arrival
    assert merges == [([], False), ([1, 1], True), ([1, 1], True), ([1, 1], True)]


def test_fragments_are_merged_as_they_arrive():
    """A start of 4 s in two halves, each of a block: the first is there 2 s earlier."""
    options = LinkOptions(overlap=True, fragments=2, up_mbit_s=[8.0], down_mbit_s=[8.0])
    simulation = books_only([1.0], 20, 2, options, FileSizes(MB, 4 * MB, 4 * MB, blocks=(MB, MB)))
    assert simulation.advance() is None
    first = simulation.next_needed()
    simulation.give(Contribution(0, first.index, first.version, end=[torch.zeros(1)]))
    assert simulation.advance()[0].arrival == 1
    assert simulation.advance() is None
    assert simulation.next_needed().overlap.merge_steps == [3, 5]  # a second up, then 2 or 4 s down


def test_a_link_that_is_slower_than_the_worker_makes_it_wait():
    """Up 4 s, down 4 s, four steps of a second: the worker has done all of them when its start arrives."""
    options = LinkOptions(overlap=True, up_mbit_s=[2.0], down_mbit_s=[8.0])
    simulation = books_only([1.0], 4, 3, options, FileSizes(MB, 4 * MB, 4 * MB, blocks=(1,)))
    times, steps = [], []
    while not simulation.finished:
        if simulation.advance() is None and not simulation.finished:
            under_way = simulation.next_needed()
            steps.append(under_way.overlap.merge_steps)
            simulation.give(Contribution(0, under_way.index, under_way.version, end=[torch.zeros(1)]))
        else:
            times.append(simulation.now_s)
    assert steps == [[], [4], [4]]
    assert times[-1] == 4 + 4 + 4 + 2 * (4 + 4)  # whole first round, then a start and a contribution each


def test_data_is_handed_out_when_a_worker_needs_it():
    """With overlap the next round's data is taken when the last round's steps end, before others that arrive first then."""
    options = LinkOptions(overlap=True, up_mbit_s=[8.0], down_mbit_s=[8.0])
    simulation = books_only([1.0, 1.0], 3, 2, options, FileSizes(MB, 0, 0, blocks=(1,)))
    while simulation.synchronizer.arrivals == 0:
        if simulation.advance() is None:
            under_way = simulation.next_needed()
            simulation.give(Contribution(under_way.worker, under_way.index, under_way.version, end=[torch.zeros(1)]))
    assert sorted(simulation.synchronizer.reserved) == [0, 1]
    assert simulation.synchronizer.reserved[0].spans == ((3, 3),)


# ---- numbers


def training(options: LinkOptions, arrivals=9, method="heloco-ramp") -> Simulation:
    draw = torch.Generator().manual_seed(0)
    parameters = [torch.randn(shape, generator=draw) for shape in SHAPES]
    chosen = METHODS[method]
    synchronizer = Synchronizer(
        chosen.build(parameters, workers=3),
        inner_steps=[2, 2, 2],
        windows_per_step=1,
        ledger=Ledger([1000] * 3),
        choose_shard=make_choice("fixed", workers=3, shards=3, seed=0),
        weight=make_weight(chosen.weight),
        barrier=chosen.barrier,
    )
    links = SimulatedLinks(options, FileSizes.from_model(options, parameters, []), workers=3, seed=4)
    return Simulation(synchronizer, paces_s=[1.0, 2.0, 3.0], arrivals=arrivals, links=links)


def compute(worker_round: Round) -> Contribution:
    """A round as a function of what it was handed: each of two steps moves every block towards a point of the round's own."""
    draw = torch.Generator().manual_seed(100 * worker_round.worker + worker_round.index)
    targets = [torch.randn(shape, generator=draw) for shape in SHAPES]
    overlap = worker_round.overlap
    has_own = overlap is not None and overlap.parameters is not None
    blocks = [b.clone() for b in (overlap.parameters if has_own else worker_round.parameters)]
    for step in range(3):
        for i, start in enumerate(worker_round.parameters):
            if has_own and overlap.merge_steps[i] == step:
                blocks[i] = overlap.share * blocks[i] + (1 - overlap.share) * start
        if step < 2:
            blocks = [block + 0.1 * (target - block) for block, target in zip(blocks, targets, strict=True)]
    deltas = [start - block for start, block in zip(worker_round.parameters, blocks, strict=True)]
    end = blocks if overlap else None
    return Contribution(worker_round.worker, worker_round.index, worker_round.version, deltas, end=end)


def finish(simulation: Simulation, stop: int = 10**9) -> list[tuple[float, int, int]]:
    lines = []
    while not simulation.finished and len(lines) < stop:
        if (arrived := simulation.advance()) is None:
            simulation.give(compute(simulation.next_needed()))
        else:
            lines.append((simulation.now_s, arrived[0].worker, arrived[0].staleness))
    return lines


def outer_tensors(simulation: Simulation) -> list[Tensor]:
    return [t.clone() for t in simulation.synchronizer.tensors().values()]


def test_contributions_and_starts_are_rounded_as_their_formats_say():
    """By hand: the first round of each worker begins with the whole start and arrives as codes. The second begins with the
    first start plus the codes of the difference, and what the codes of the first left out is added to it."""
    simulation = training(LinkOptions(wire="int4", wire_down="int8"))
    up, down = find_format("int4"), find_format("int8")
    starts: dict[int, list[Tensor]] = {}
    residuals = {worker: [torch.zeros(shape) for shape in SHAPES] for worker in range(3)}
    while simulation.synchronizer.arrivals < 6:
        simulation.advance()
        under_way = simulation.next_needed()
        worker = under_way.worker
        if worker in starts:
            truth = simulation.synchronizer.outer.lookahead() if under_way.version == simulation.synchronizer.outer_step else None
            if truth is not None:
                for new, old, got in zip(truth, starts[worker], under_way.parameters, strict=True):
                    difference = decode_block(down.block(down.encode(new - old), new.shape), new.device)
                    assert torch.equal(got, old + difference)
        starts[worker] = under_way.parameters
        contribution = compute(under_way)
        expected = []
        for i, delta in enumerate(contribution.pseudo_gradient):
            is_coded = delta.dim() > 1
            total = residuals[worker][i] + delta if is_coded else delta
            expected.append(decode_block(up.block(up.encode(total), total.shape), total.device))
            residuals[worker][i] = total - expected[-1] if is_coded else torch.zeros(delta.shape)
        simulation.give(contribution)
        arrived = simulation.advance()
        assert all(torch.equal(a, b) for a, b in zip(arrived[1].pseudo_gradient, expected, strict=True))


OPTIONS = {
    "4 bits both ways": LinkOptions(wire="int4", full_every=2),
    "stochastic, upload only": LinkOptions(wire="e3m0", wire_down="fp32", rounding="stochastic", feedback_decay=0.9),
    "overlap in two fragments": LinkOptions(wire="int8", overlap=True, fragments=2, up_mbit_s=[0.05], down_mbit_s=[0.02]),
    "overlap as it is": LinkOptions(overlap=True, merge_share=0.0, latency_s=[0.7]),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("method", ["heloco-ramp", "sync-nesterov"])
@pytest.mark.parametrize("stop", [0, 1, 4, 7])
def test_saved_in_the_middle_it_goes_on_to_the_same_end(name, method, stop):
    unbroken = training(OPTIONS[name], method=method)
    expected = finish(unbroken)
    simulation = training(OPTIONS[name], method=method)
    first_part = finish(simulation, stop)
    simulation.advance()  # whoever may start has started
    if len(simulation.needed()) > 1:
        simulation.give(compute(simulation.needed()[1]))  # given, but its time has not come: it is asked for again
    resumed = training(OPTIONS[name], method=method)
    synchronizer = simulation.synchronizer
    tensors = {key: t.clone() for key, t in (synchronizer.tensors() | simulation.tensors()).items()}
    resumed.synchronizer.load(through_json(synchronizer.books()), tensors)
    resumed.load(through_json(simulation.clock()), tensors)
    assert first_part + finish(resumed) == expected
    assert all(torch.equal(a, b) for a, b in zip(outer_tensors(resumed), outer_tensors(unbroken), strict=True))


def test_a_refused_contribution_leaves_no_residual():
    simulation = training(LinkOptions(wire="int4"))
    simulation.advance()
    bad = compute(simulation.next_needed())
    bad.pseudo_gradient[0][0, 0] = torch.nan
    simulation.give(bad)
    assert simulation.advance()[0].verdict == "refused"
    arrived, sent = None, {}
    while arrived is None or arrived[0].worker != bad.worker:
        if (arrived := simulation.advance()) is None:
            under_way = simulation.next_needed()
            sent[under_way.worker] = compute(under_way)
            simulation.give(sent[under_way.worker])
    int4 = find_format("int4")
    for delta, got in zip(sent[bad.worker].pseudo_gradient, arrived[1].pseudo_gradient, strict=True):
        assert torch.equal(got, decode_block(int4.block(int4.encode(delta), delta.shape), delta.device))
