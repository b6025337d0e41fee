"""The arrivals of a run without its training: the synchronizer's books and the virtual clock alone."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from heloco.engine.simulated_links import FileSizes, SimulatedLinks
from heloco.engine.simulation import Simulation
from heloco.ledger import Ledger
from heloco.methods import get_method
from heloco.policy import inner_steps, make_choice, make_weight
from heloco.run import RunConfig
from heloco.synchronizer import Arrival, Contribution, Synchronizer

ENDLESS = 1 << 62


@dataclass(slots=True)
class WorkerShare:
    """One worker's part in a schedule."""

    inner_steps: int
    arrivals: int = 0
    share: float = 0.0
    mean_staleness: float = 0.0
    max_staleness: int = 0


def schedule(
    *,
    paces_s: Sequence[float],
    inner_steps: Sequence[int],
    arrivals: int,
    barrier: bool = False,
    grace_s: float = 0.0,
    links: SimulatedLinks | None = None,
) -> Iterator[tuple[float, Arrival]]:
    """(virtual time in seconds, arrival) of each arrival in order."""
    workers = len(paces_s)
    synchronizer = Synchronizer(
        None,
        inner_steps=inner_steps,
        windows_per_step=1,
        ledger=Ledger([ENDLESS] * workers),
        choose_shard=make_choice("fixed", workers=workers, shards=workers, seed=0),
        weight=make_weight("average"),
        barrier=barrier,
    )
    simulation = Simulation(synchronizer, paces_s=paces_s, arrivals=arrivals, grace_s=grace_s, links=links)
    while not simulation.finished:
        if (outcome := simulation.advance()) is not None:
            yield simulation.now_s, outcome[0]
        else:
            under_way = simulation.next_needed()
            simulation.give(Contribution(under_way.worker, under_way.index, under_way.version, end=[]))


def planned_arrivals(
    config: RunConfig, arrivals: int | None = None, sizes: FileSizes | None = None
) -> Iterator[tuple[float, Arrival]]:
    """The arrivals of a simulation with this config, or this many of them. Without the `sizes` of what travels, links take no
    time."""
    rounds = config.rounds
    links = None if sizes is None else SimulatedLinks(config.links, sizes, workers=len(rounds.paces), seed=config.run.seed)
    return schedule(
        paces_s=rounds.paces, inner_steps=steps_of_workers(config, links),
        arrivals=config.run.arrivals if arrivals is None else arrivals,
        barrier=get_method(config.outer.method).barrier, grace_s=rounds.grace_s, links=links,
    )  # fmt: skip


def steps_of_workers(config: RunConfig, links: SimulatedLinks | None = None) -> list[int]:
    """The inner steps of each worker's rounds. Under DyLU a worker with a slow link counts as slow."""
    rounds = config.rounds
    paces = rounds.paces if links is None else links.paces_with_travel(rounds.paces, rounds.inner_steps)
    return inner_steps(rounds.steps, rounds.inner_steps, paces)


def chains(events: Iterable[tuple[float, Arrival]]) -> dict[tuple[int, int], int]:
    """(worker, round) -> inner steps that must follow one upon the other from this round to the last arrival, its own included.

    A round waits for all arrivals before its start, so chain(A) = steps(A) + the longest chain of a round that starts after A.
    """
    by_start: dict[int, list[tuple[tuple[int, int], int, int]]] = {}
    for _, a in events:
        seen_from = a.outer_step + (
            a.verdict == "gathered"
        )  # what is gathered takes effect with the step that closes the barrier
        by_start.setdefault(a.version, []).append(((a.worker, a.round), seen_from, a.inner_steps))
    chains: dict[tuple[int, int], int] = {}
    last = max(by_start, default=0)
    longest = [0] * (last + 2)  # [v]: of the rounds that start at version v or later
    for version in range(last, -1, -1):
        for key, seen_from, steps in by_start.get(version, []):
            chains[key] = steps + longest[min(seen_from, last + 1)]
            longest[version] = max(longest[version], chains[key])
        longest[version] = max(longest[version], longest[version + 1])
    return chains


def summarize(events: Iterator[tuple[float, Arrival]], inner_steps: Sequence[int]) -> tuple[float, list[WorkerShare]]:
    """(time of the last arrival, each worker's part), in constant memory."""
    workers = [WorkerShare(steps) for steps in inner_steps]
    last_s, total = 0.0, 0
    for time_s, arrival in events:
        last_s = time_s
        worker = workers[arrival.worker]
        worker.arrivals += 1
        worker.mean_staleness += arrival.staleness
        worker.max_staleness = max(worker.max_staleness, arrival.staleness)
        total += 1
    for worker in workers:
        worker.share = worker.arrivals / total if total else 0.0
        worker.mean_staleness = worker.mean_staleness / worker.arrivals if worker.arrivals else 0.0
    return last_s, workers
