"""Whether the round that a machine works on is still worth finishing."""

from dataclasses import dataclass
from typing import Literal

from heloco.cluster.protocol.messages import BeatAnswer, RoundKey
from heloco.records.events import RESUMABLE


@dataclass(frozen=True)
class Obsolete:
    """Why a round is not worth finishing."""

    kind: Literal["ended", "too-stale", "not-held"]
    text: str


def why_obsolete(answer: BeatAnswer, round_key: RoundKey) -> Obsolete | None:
    """What a beat's answer says about the round that this machine works on."""
    if answer.ended is not None and answer.ended.kind not in RESUMABLE:
        return Obsolete("ended", f"the run has ended: {answer.ended.text}")
    if answer.too_stale:
        return Obsolete("too-stale", "its contribution would arrive too late to be used")
    if answer.round != round_key:
        return Obsolete("not-held", "it was given to another machine")
    return None
