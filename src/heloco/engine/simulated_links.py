"""The links of a simulation: what travels is encoded and decoded as on real machines, and takes as long as it would there.

    dispatch ──start──▶ worker ··· H inner steps ··· ──contribution──▶ arrival

A start travels whole, or as a difference from the start that the worker had before, in a format of few bits. The worker's new
start is then the old one plus what the difference decodes to. The synchronizer knows it exactly, so the next difference makes up
for what this one left out, and the worker's pseudo-gradient is exact.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import add

from msgspec import Struct
from torch import Tensor

from heloco.outer.kernels.windows import dense
from heloco.synchronizer import Arrival, Contribution, Round
from heloco.wire import blocks
from heloco.wire.encoder import NO_ROUND, ContributionEncoder, Residual
from heloco.wire.formats import FULL, decode_block, find_format, layout_of, read_block
from heloco.wire.fragments import share_after_fragments
from heloco.wire.layout import Layout
from heloco.wire.link_options import LinkOptions
from heloco.wire.start_differences import add_difference, encode_difference

NS = 1_000_000_000


class LinkState(Struct, frozen=True, kw_only=True):
    """What a checkpoint holds of the links, in addition to tensors. All by worker."""

    differences: list[int]
    """Starts that travelled as differences since the last whole one; -1: no start yet."""
    accepted: list[int]
    """The last round of each worker that was accepted, or -1."""
    residual_rounds: list[int]
    bytes_down: list[int]


@dataclass(frozen=True)
class FileSizes:
    """Bytes of what travels."""

    contribution: int
    start: int
    difference: int
    blocks: tuple[int, ...] = ()
    """Bytes of each block of a start."""

    @classmethod
    def from_model(cls, options: LinkOptions, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> "FileSizes":
        """The sizes that these formats give for a model with these parameters and buffers."""
        up, down = find_format(options.wire), find_format(options.down_format)
        return cls(
            layout_of(up, blocks.PSEUDO_GRADIENT, parameters, buffers).size,
            Layout.from_tensors(blocks.name_start(parameters, buffers)).size,
            layout_of(down, blocks.DIFFERENCE, parameters, buffers).size,
            tuple(p.numel() * p.element_size() for p in parameters),
        )


class SimulatedLinks:
    """One link for each worker."""

    def __init__(self, options: LinkOptions, sizes: FileSizes, *, workers: int, seed: int, taking_in_s: float = 0.0) -> None:
        """`taking_in_s`: how long the synchronizer is busy with each arrival; they wait for each other there."""
        self.options, self.sizes = options, sizes
        self.taking_in_ns = round(taking_in_s * NS)
        self.up, self.down = find_format(options.wire), find_format(options.down_format)
        self._encoders = [ContributionEncoder(self.up, options, seed=seed, worker=worker) for worker in range(workers)]
        self._starts: list[list[Tensor]] = [[] for _ in range(workers)]
        """The start that each worker has."""
        self._differences = [-1] * workers
        self._accepted = [NO_ROUND] * workers
        self.bytes_down = [0] * workers
        """For each worker: bytes of the start that its current round was sent."""
        self._share_after = share_after_fragments(sizes.blocks, options.fragments)

    def paces_with_travel(self, paces_s: Sequence[float], inner_steps: int) -> list[float]:
        """Seconds per inner step of each worker in rounds of this length, transfers included: what a synchronizer measures."""
        travel_ns = [self.upload_ns(w) + self.download_ns(w, self._usual_start) for w in range(len(paces_s))]
        travel_s = [ns / NS / inner_steps for ns in travel_ns]
        combine = max if self.options.overlap else add
        return [combine(pace, travel) for pace, travel in zip(paces_s, travel_s, strict=True)]

    @property
    def _usual_start(self) -> int:
        return self.sizes.difference if self.makes_starts else self.sizes.start

    @property
    def makes_starts(self) -> bool:
        """Whether each worker has a start of its own, because differences are rounded."""
        return self.down is not FULL

    # ---- times

    def upload_ns(self, worker: int) -> int:
        """How long the worker's contribution travels."""
        return self._ns(worker, self.sizes.contribution, self.options.up_mbit_s)

    def download_ns(self, worker: int, size: int) -> int:
        """How long a start of this size travels to the worker."""
        return self._ns(worker, size, self.options.down_mbit_s)

    def early_ns(self, worker: int) -> list[int]:
        """For each block: how much earlier its fragment arrives than the last fragment of the worker's start."""
        whole_ns = self.download_ns(worker, self.bytes_down[worker]) - self.download_ns(worker, 0)
        return [round(whole_ns * share) for share in self._share_after]

    def _ns(self, worker: int, size: int, speeds: Sequence[float]) -> int:
        mbit_s, latencies = speeds[worker % len(speeds)] if speeds else inf, self.options.latency_s
        latency_s = latencies[worker % len(latencies)] if latencies else 0.0
        return round((latency_s + size * 8e-6 / mbit_s) * NS)

    # ---- what travels

    def deliver(self, worker_round: Round) -> int:
        """Sends a round's start. Gives the round the start that the worker will have, and returns how long that takes."""
        worker = worker_round.worker
        is_whole = not self.makes_starts or self._differences[worker] in (-1, self.options.full_every - 1)
        self._differences[worker] = 0 if is_whole else self._differences[worker] + 1
        self.bytes_down[worker] = self.sizes.start if is_whole else self.sizes.difference
        if self.makes_starts:
            if not is_whole and worker_round.parameters:
                pairs = zip(worker_round.parameters, self._starts[worker], strict=True)
                worker_round.parameters = [self._follow(new, old) for new, old in pairs]
            self._starts[worker] = worker_round.parameters
        return self.download_ns(worker, self.bytes_down[worker])

    def _follow(self, new: Tensor, old: Tensor) -> Tensor:
        """A block of the worker's next start: the old one plus the difference as it arrives."""
        return add_difference(old, self.down.block(encode_difference(self.down, new, old), old.shape))

    def collect(self, contribution: Contribution) -> Contribution:
        """Encodes and decodes a contribution, and returns it as it arrives."""
        if self.up is FULL or not contribution.pseudo_gradient:
            return contribution
        deltas = [dense(block) for block in contribution.pseudo_gradient]
        encoder = self._encoders[contribution.worker]
        tensors = encoder.encode(contribution.index, deltas, last_accepted=self._accepted[contribution.worker])
        arriving = [
            decode_block(read_block(self.up, blocks.PSEUDO_GRADIENT, index, tensors, delta.shape), delta.device)
            for index, delta in enumerate(deltas)
        ]
        return replace(contribution, pseudo_gradient=arriving)

    def note(self, arrival: Arrival) -> None:
        """What became of a contribution."""
        if arrival.verdict != "refused":
            self._accepted[arrival.worker] = arrival.round

    # ---- state

    def state(self) -> LinkState:
        """A copy of the state without its tensors."""
        return LinkState(
            differences=list(self._differences), accepted=list(self._accepted), bytes_down=list(self.bytes_down),
            residual_rounds=[encoder.residual.round for encoder in self._encoders],
        )  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the state by name. They are no copies."""
        tensors: dict[str, Tensor] = {}
        for worker, (start, encoder) in enumerate(zip(self._starts, self._encoders, strict=True)):
            if self.makes_starts:
                tensors |= blocks.name_worker_blocks(blocks.OWN_START, worker, dict(enumerate(start)))
            tensors |= blocks.name_worker_blocks(blocks.RESIDUAL, worker, encoder.residual.blocks or {})
        return tensors

    def load(self, state: LinkState, tensors: Mapping[str, Tensor]) -> None:
        """Takes over a saved state."""
        self._differences, self._accepted = list(state.differences), list(state.accepted)
        self.bytes_down = list(state.bytes_down)
        for worker, encoder in enumerate(self._encoders):
            residual_blocks = blocks.worker_blocks(blocks.RESIDUAL, worker, tensors)
            encoder.residual = Residual(state.residual_rounds[worker], residual_blocks or None)
            start = blocks.worker_blocks(blocks.OWN_START, worker, tensors)
            self._starts[worker] = [start[index] for index in range(len(start))]

    def start_of(self, worker: int) -> list[Tensor]:
        """The start that the worker has."""
        return self._starts[worker]
