"""The messages with which a machine hands in the scores of models."""

from typing import Annotated, TypeAlias

from msgspec import Meta

from heloco.cluster.protocol.messages import Message, Natural, ShortText, Text

SCORE_LIMIT = 100
"""Numbers in one evaluation of an external run: sources times measures."""
Measures: TypeAlias = Annotated[dict[ShortText, float | None], Meta(max_length=100)]
SourceScores: TypeAlias = Annotated[dict[ShortText, Measures], Meta(max_length=10_000)]
"""Source -> the name and the value of each measure; None if it is not finite."""


class EvaluationResult(Message, frozen=True, kw_only=True):
    """The scores of a model that the run handed to the machine, or why there are none."""

    arrival: Natural
    scores: SourceScores
    has_failed: bool = False
    """Whether the machine could not evaluate the model. Then there are no scores, and the text says why."""
    text: Text = ""


class ScoreReport(Message, frozen=True, kw_only=True):
    """Scores that a training loop found by itself, in the round that it holds."""

    worker: Natural
    round: Natural
    version: Natural
    own_steps: Natural
    """Inner steps of the round that were done before. With 0 the model is the round's start, otherwise the machine's own."""
    scores: SourceScores
