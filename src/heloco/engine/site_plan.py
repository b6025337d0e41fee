"""What a run on real machines needs, before there is one: from the model, the links and the workers to rounds, formats and load.

    travel = upload + taking in + download          of a round, in seconds
    round  = H · step + travel                      a worker waits for its start,
             max(H · step, travel)                  or computes meanwhile (overlap)
    utilisation = H · step / round
    load   = workers · taking in / round            the share of its time in which the synchronizer is busy

The constants of the synchronizer were measured with `benchmarks/arrival.py` on two cores and hold for one like it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from heloco.engine.schedule import schedule
from heloco.engine.simulated_links import FileSizes, SimulatedLinks
from heloco.errors import UserError
from heloco.wire.formats import FormatName, find_format
from heloco.wire.link_options import LinkOptions

APPLY_NS, START_NS, RECEIVE_NS = 4.0, 5.0, 3.0
"""The synchronizer's time per parameter for an outer step and for the next start, and per byte of a contribution."""
HAND_OVER_NS = 4.0
"""A worker's time per parameter between two rounds: Δ, its codes, and the new start."""
LOAD_LIMIT = 0.7
"""A synchronizer that is busier makes workers queue."""
DELAY_SHARE = 0.1
"""A start may arrive after this share of a round's steps: the loss does not suffer from so little (Streaming DiLoCo)."""
USUAL_STEPS, STEPS_LIMIT = 100, 500
CHOICES: tuple[FormatName, ...] = ("fp32", "bf16", "int8", "int4")
"""From wide to narrow: the first that is fast enough is chosen."""
PROCESS_BYTES = 330_000_000
"""Python, torch and the gateway."""
DAY_S = 86_400.0


@dataclass(frozen=True, kw_only=True)
class Site:
    """The given side of a plan: the model, the workers and their links."""

    parameters: int
    workers: int
    step_s: float
    """Seconds per inner step."""
    up_mbit_s: float
    down_mbit_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("parameters", "workers", "step_s", "up_mbit_s", "down_mbit_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name} is {getattr(self, name)}: give a finite number above 0.")
        if not 0 <= self.latency_s < math.inf:
            raise UserError(f"latency_s is {self.latency_s}: give seconds ≥ 0.")


@dataclass(frozen=True, kw_only=True)
class SitePlan:
    """A way to run on a site, and what is to be expected of it."""

    site: Site
    inner_steps: int
    wire: FormatName
    overlap: bool

    @property
    def sizes(self) -> FileSizes:
        """Bytes of what travels."""
        code_bytes = round(self.site.parameters * find_format(self.wire).bits / 8)
        return FileSizes(code_bytes, 4 * self.site.parameters, code_bytes)

    @property
    def upload_s(self) -> float:
        """Seconds from sending a contribution to the arrival of its last byte."""
        return self.site.latency_s + self.sizes.contribution * 8e-6 / self.site.up_mbit_s

    @property
    def download_s(self) -> float:
        """Seconds from sending the difference to the next start to the arrival of its last byte."""
        return self.site.latency_s + self.sizes.difference * 8e-6 / self.site.down_mbit_s

    @property
    def taking_in_s(self) -> float:
        """How long the synchronizer is busy with an arrival."""
        return ((APPLY_NS + START_NS) * self.site.parameters + RECEIVE_NS * self.sizes.contribution) * 1e-9

    @property
    def travel_s(self) -> float:
        """Seconds from the end of a round to the arrival of the next start: upload, outer step and download."""
        return self.upload_s + self.taking_in_s + self.download_s

    @property
    def computing_s(self) -> float:
        """Seconds that a worker needs for the inner steps of a round."""
        return self.inner_steps * self.site.step_s

    @property
    def round_s(self) -> float:
        """Seconds from one round of a worker to its next. With overlap, computing and travel take place at the same time."""
        busy_s = self.computing_s + HAND_OVER_NS * 1e-9 * self.site.parameters
        alone_s = max(busy_s, self.travel_s) if self.overlap else busy_s + self.travel_s
        return max(alone_s, self.site.workers * self.taking_in_s)  # many workers wait for each other at the synchronizer

    @property
    def utilisation(self) -> float:
        """The share of a worker's time in inner steps."""
        return self.computing_s / self.round_s

    @property
    def load(self) -> float:
        """The share of its time in which the synchronizer is busy."""
        return self.site.workers * self.taking_in_s / self.round_s

    @property
    def delay_steps(self) -> float:
        """Inner steps that a worker makes before a start arrives."""
        return self.travel_s / self.site.step_s if self.overlap else 0.0

    @property
    def shards(self) -> int:
        """Processes that the outer state should be spread over, so that none is too busy."""
        one_worker_round_s = replace(self, site=replace(self.site, workers=1)).round_s
        return max(1, math.ceil(self.site.workers * self.taking_in_s / one_worker_round_s / LOAD_LIMIT))

    @property
    def bytes_per_day(self) -> float:
        """Bytes that all workers together send and receive in a day."""
        return self.site.workers * DAY_S / self.round_s * (self.sizes.contribution + self.sizes.difference)

    @property
    def synchronizer_bytes(self) -> int:
        """Memory of the synchronizer: parameters, momentum, a window, and the process itself."""
        return 8 * self.site.parameters + PROCESS_BYTES

    @property
    def disk_bytes(self) -> int:
        """Room for the starts that the workers have, and two checkpoints; contributions are kept as `journal_gb` says."""
        return 4 * self.site.parameters * (self.site.workers + 4)

    @property
    def warnings(self) -> Iterator[str]:
        """Sentences about what will not go well with this plan."""
        if self.delay_steps > DELAY_SHARE * self.inner_steps:
            yield (
                f"A start arrives after {self.delay_steps:.0f} of {self.inner_steps} inner steps. Up to a tenth is known to do "
                "no harm: longer rounds, a narrower format or a faster link help."
            )
        if self.shards > 1:
            yield (
                f"One synchronizer would be too busy: the load needs {self.shards} of them. Longer rounds, a narrower format or "
                "fewer workers reduce it."
            )
        if self.utilisation < 0.9:
            yield f"Workers compute only {self.utilisation:.0%} of the time."


def plan_site(site: Site, *, inner_steps: int | None = None, wire: FormatName | None = None, overlap: bool = True) -> SitePlan:
    """The plan with what is given, and the rest chosen: the widest format whose transfers take a tenth of a round, at 100 inner
    steps if that is possible, else the narrowest one and rounds that are long enough, up to 500 steps."""
    formats = (wire,) if wire else CHOICES
    steps = inner_steps or USUAL_STEPS
    for name in formats:
        plan = SitePlan(site=site, inner_steps=steps, wire=name, overlap=overlap)
        if plan.travel_s <= DELAY_SHARE * plan.computing_s:
            return plan
    if inner_steps is not None:
        return plan
    steps_needed = math.ceil(plan.travel_s / (DELAY_SHARE * site.step_s))
    return replace(plan, inner_steps=min(STEPS_LIMIT, max(steps, -(-steps_needed // 10) * 10)))


@dataclass(frozen=True)
class Rehearsal:
    """What the virtual clock says about a plan."""

    utilisation: float
    load: float
    arrivals_per_hour: float
    mean_staleness: float
    most_stale: int


def rehearse(plan: SitePlan, paces_s: Sequence[float] = (), rounds: int = 20) -> Rehearsal:
    """Runs the plan's schedule with the virtual clock. `paces_s`: seconds per inner step of each worker, in turn. Without them
    all workers have the site's."""
    site = plan.site
    paces = [(paces_s or [site.step_s])[w % max(1, len(paces_s))] for w in range(site.workers)]
    options = LinkOptions(
        wire=plan.wire, overlap=plan.overlap, full_every=10**9,
        up_mbit_s=[site.up_mbit_s], down_mbit_s=[site.down_mbit_s], latency_s=[site.latency_s],
    )  # fmt: skip
    sizes = replace(plan.sizes, start=plan.sizes.difference)
    links = SimulatedLinks(options, sizes, workers=site.workers, seed=0, taking_in_s=plan.taking_in_s)
    arrivals, half = rounds * site.workers, rounds * site.workers // 2
    computed_s, staleness, half_s, last_s = 0.0, 0, 0.0, 0.0
    stale: list[int] = []
    for number, (time_s, arrival) in enumerate(
        schedule(paces_s=paces, inner_steps=[plan.inner_steps] * site.workers, arrivals=arrivals, links=links)
    ):
        last_s = time_s
        if number < half:  # until then everybody still comes at once
            half_s = time_s
            continue
        computed_s += arrival.inner_steps * paces[arrival.worker]
        stale.append(arrival.staleness)
    passed_s, staleness = last_s - half_s, sum(stale)
    return Rehearsal(
        utilisation=computed_s / (passed_s * site.workers), load=min(1.0, len(stale) * plan.taking_in_s / passed_s),
        arrivals_per_hour=3600 * len(stale) / passed_s, mean_staleness=staleness / len(stale), most_stale=max(stale),
    )  # fmt: skip
