"""The scores that machines of an external run report: which are taken, and the line that each becomes.

Scores can be compared with each other only if they have the same names, so the first ones settle the names for the run. The
run's model is scored at one arrival after the other, and of several scores at one arrival the first stand: they are one curve."""

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from heloco.cluster.protocol.refusals import RefusalCode, Refused
from heloco.cluster.protocol.score_messages import SCORE_LIMIT
from heloco.engine.local import evaluation_record
from heloco.errors import UserError
from heloco.records.evaluations import EvaluationRecord
from heloco.records.events import Evaluate
from heloco.task import Scores, check_scores


class MachineScores(Struct, frozen=True):
    """What the run knows of the scores that it has taken in so far."""

    arrival: int = -1
    """The newest arrival at which the run's model was evaluated; -1 before the first evaluation."""
    sources: tuple[str, ...] = ()
    measures: tuple[str, ...] = ()

    def after(self, event: Evaluate) -> "MachineScores":
        """The same after one more evaluation."""
        sources, measures = names_of(event.scores)
        arrival = self.arrival if event.own_steps else event.arrival
        return replace(self, arrival=arrival, sources=sources, measures=measures)

    def check(self, scores: Mapping[str, Mapping[str, float | None]]) -> Scores:
        """The scores as numbers. Raises `Refused` if they are none, or not like those before."""
        for source, measures in scores.items():
            for name, value in measures.items():
                if not (source.isprintable() and name.isprintable()):
                    raise _refused("The name of a score has characters that cannot be shown: give it another name.")
                if value is None:
                    raise _refused(f"The score {name!r} of {source!r} is not finite, so it is not recorded.")
        count = sum(map(len, scores.values()))
        if not 0 < count <= SCORE_LIMIT:
            raise _refused(f"An evaluation has 1 to {SCORE_LIMIT} scores, and this one has {count}.")
        try:
            checked = check_scores(scores)
        except UserError as error:
            raise _refused(str(error)) from error
        if self.sources and names_of(checked) != (self.sources, self.measures):
            raise _refused(
                f"The run's evaluations have the scores {_in_words(self.sources, self.measures)}, and these are "
                f"{_in_words(*names_of(checked))}: give them the same names, so that they can be compared."
            )
        return checked


def names_of(scores: Mapping[str, Mapping[str, float]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the sources and of the measures, which all sources share."""
    return tuple(sorted(scores)), tuple(sorted(next(iter(scores.values()), {})))


def record_of(event: Evaluate) -> EvaluationRecord:
    """The line of an evaluation. The time is that of the parameters: a machine's own are as old as the report."""
    return evaluation_record(
        event.scores, arrival=event.arrival, outer_step=event.outer_step, inner_steps=event.inner_steps, units=event.units,
        time_s=event.time_s if event.own_steps else event.arrival_s, machine=event.machine, own_steps=event.own_steps,
    )  # fmt: skip


def _refused(text: str) -> Refused:
    return Refused(RefusalCode.SCORES, text)


def _in_words(sources: tuple[str, ...], measures: tuple[str, ...]) -> str:
    return f"{', '.join(measures)} of {', '.join(sources)}"[:200]
