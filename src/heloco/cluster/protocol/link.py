"""The link between a machine or a person and a run: the same requests over HTTPS and over Ray."""

from collections.abc import Mapping
from typing import Protocol

import xxhash
from torch import Tensor

from heloco.cluster.protocol.messages import (
    Acknowledgement,
    BeatAnswer,
    ContributionReport,
    EvaluationJob,
    Joined,
    Right,
    RoundAnswer,
    RoundKey,
    RunInfo,
    Status,
    Ticket,
    TokenInfo,
    TokenList,
)
from heloco.cluster.protocol.score_messages import EvaluationResult, ScoreReport
from heloco.wire.layout import Layout, pieces


class LinkDown(Exception):
    """The run cannot be reached at the moment. Try again later: every request may be repeated."""


class Link(Protocol):
    """The requests that a machine makes. Each raises `Refused` if it is refused, and `LinkDown` if no answer comes.

    Beats must not wait for tensors. A transfer that was interrupted continues where it stopped when it is requested again."""

    address: str

    def describe(self) -> RunInfo:
        """The facts about the run that a machine needs before it joins. Needs no ticket."""

    def join(self, name: str, *, returning: Ticket | None, layout: Layout | None) -> Joined:
        """Joins the run, or comes back with an earlier ticket. `layout` describes the model that the machine brings."""

    def send_model(self, ticket: Ticket, layout: Layout, tensors: Mapping[str, Tensor], names: list[str]) -> None:
        """Sends the model to an external run that has none yet. `names` are its blocks' names in the machine's own code."""

    def next_round(self, ticket: Ticket, wait_s: float, *, evaluates: bool = False) -> RoundAnswer:
        """Waits up to `wait_s` for a round if there is none at once. `evaluates`: a model to evaluate is welcome too."""

    def fetch(self, ticket: Ticket, key: RoundKey, layout: Layout, digest: str) -> dict[str, Tensor]:
        """The tensors that the round begins with, checked. The next `fetch` may overwrite them."""

    def fetch_evaluated(self, ticket: Ticket, job: EvaluationJob, layout: Layout) -> dict[str, Tensor]:
        """The model that this machine is to evaluate, checked."""

    def send_scores(self, ticket: Ticket, result: EvaluationResult) -> None:
        """Hands in the scores of a model that this machine evaluated, or says why there are none."""

    def report_scores(self, ticket: Ticket, report: ScoreReport) -> None:
        """Hands in scores that the machine's training loop found in its current round."""

    def fetch_final(self, ticket: Ticket, layout: Layout) -> dict[str, Tensor]:
        """The model of a run that has ended."""

    def hand_in(
        self, ticket: Ticket, key: RoundKey, layout: Layout, tensors: Mapping[str, Tensor], report: ContributionReport
    ) -> Acknowledgement:
        """Sends a contribution and has it acknowledged. The link fills in the report's digest."""

    def beat(self, ticket: Ticket, steps: int) -> BeatAnswer:
        """Sends a sign of life with the inner steps done so far. The answer says whether the round is still worth continuing."""

    def abandon(self, ticket: Ticket, text: str) -> None:
        """Gives the machine's round back, so that its data goes to another round. `text` says why."""

    def leave(self, ticket: Ticket, text: str) -> None:
        """Takes leave of the run: the machine's round is given back and its seat is free. `text` says why."""

    def close(self) -> None:
        """Closes the connection. The machine stays in the run until it leaves or counts as lost."""


class AdminLink(Protocol):
    """The requests that people make: to look at a run, and to control it."""

    address: str

    def describe(self) -> RunInfo:
        """The facts about the run that a machine needs before it joins."""

    def status(self) -> Status:
        """What the run and each of its machines are doing now."""

    def read(self, name: str, offset: int) -> bytes:
        """The next part of one of the run's readable files, from byte `offset` on."""

    def stop(self, text: str) -> None:
        """Ends the run for all machines, which leave with its model. It is saved. `text` says why."""

    def suspend(self, text: str) -> None:
        """Saves the run and ends its process, to be served again. Machines keep their rounds and wait. `text` says why."""

    def pause(self, text: str) -> None:
        """Stops handing out rounds until `unpause`. Rounds under way are still taken in. `text` says why."""

    def unpause(self) -> None:
        """Hands out rounds again after `pause`."""

    def evict(self, machine: str, text: str) -> None:
        """Removes a machine, by id or by name, and does not let it come back. `text` says why."""

    def tokens(self) -> TokenList:
        """All tokens of the run without their secrets, the revoked ones too."""

    def new_token(self, right: Right, note: str) -> TokenInfo:
        """Makes a token with this right. Only this answer contains its secret."""

    def revoke_token(self, token_id: str) -> None:
        """Makes a token invalid. Machines that joined with it are evicted."""

    def close(self) -> None:
        """Closes the connection."""


class RunLink(Link, AdminLink, Protocol):
    """All requests. What the token does not allow is refused."""


def digest_of(layout: Layout, tensors: Mapping[str, Tensor]) -> str:
    """xxh3-128 of these tensors as a file."""
    digest = xxhash.xxh3_128()
    for piece in pieces(layout, tensors):
        digest.update(piece)
    return digest.hexdigest()
