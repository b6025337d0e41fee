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
    EvaluationResult,
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
from heloco.wire.layout import Layout, pieces


class LinkDown(Exception):
    """The run cannot be reached at the moment. Try again later: every request may be repeated."""


class Link(Protocol):
    """The requests that a machine makes. Each raises `Refused` if it is refused, and `LinkDown` if no answer comes.

    Beats must not wait for tensors. A transfer that was interrupted continues where it stopped when it is requested again."""

    address: str

    def describe(self) -> RunInfo: ...
    def join(self, name: str, *, returning: Ticket | None, layout: Layout | None) -> Joined: ...
    def send_model(self, ticket: Ticket, layout: Layout, tensors: Mapping[str, Tensor], names: list[str]) -> None: ...
    def next_round(self, ticket: Ticket, wait_s: float, *, evaluates: bool = False) -> RoundAnswer:
        """Waits up to `wait_s` for a round if there is none at once. `evaluates`: a model to evaluate is welcome too."""

    def fetch(self, ticket: Ticket, key: RoundKey, layout: Layout, digest: str) -> dict[str, Tensor]:
        """The tensors that the round begins with, checked. The next `fetch` may overwrite them."""

    def fetch_evaluated(self, ticket: Ticket, job: EvaluationJob, layout: Layout) -> dict[str, Tensor]:
        """The model that this machine is to evaluate, checked."""

    def send_scores(self, ticket: Ticket, result: EvaluationResult) -> None: ...

    def fetch_final(self, ticket: Ticket, layout: Layout) -> dict[str, Tensor]:
        """The model of a run that has ended."""

    def hand_in(
        self, ticket: Ticket, key: RoundKey, layout: Layout, tensors: Mapping[str, Tensor], report: ContributionReport
    ) -> Acknowledgement:
        """Sends a contribution and has it acknowledged. The link fills in the report's digest."""

    def beat(self, ticket: Ticket, steps: int) -> BeatAnswer: ...
    def abandon(self, ticket: Ticket, text: str) -> None: ...
    def leave(self, ticket: Ticket, text: str) -> None: ...
    def close(self) -> None: ...


class AdminLink(Protocol):
    """The requests that people make: to look at a run, and to control it."""

    address: str

    def describe(self) -> RunInfo: ...
    def status(self) -> Status: ...
    def read(self, name: str, offset: int) -> bytes:
        """The next part of one of the run's readable files, from byte `offset` on."""

    def stop(self, text: str) -> None: ...
    def pause(self, text: str) -> None: ...
    def unpause(self) -> None: ...
    def evict(self, machine: str, text: str) -> None: ...
    def tokens(self) -> TokenList: ...
    def new_token(self, right: Right, note: str) -> TokenInfo: ...
    def revoke_token(self, token_id: str) -> None: ...
    def close(self) -> None: ...


class RunLink(Link, AdminLink, Protocol):
    """All requests. What the token does not allow is refused."""


def digest_of(layout: Layout, tensors: Mapping[str, Tensor]) -> str:
    """xxh3-128 of these tensors as a file."""
    digest = xxhash.xxh3_128()
    for piece in pieces(layout, tensors):
        digest.update(piece)
    return digest.hexdigest()
