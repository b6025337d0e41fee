"""A link to a service in the same process, without a network."""

from collections.abc import Mapping

from torch import Tensor

import heloco
from heloco.cluster.protocol.link import LinkDown, digest_of
from heloco.cluster.protocol.messages import (
    Acknowledgement,
    BeatAnswer,
    ContributionReport,
    EvaluationJob,
    Joined,
    JoinRequest,
    ModelCommit,
    RoundAnswer,
    RoundKey,
    RunInfo,
    Ticket,
)
from heloco.cluster.protocol.score_messages import EvaluationResult, ScoreReport
from heloco.cluster.server.service import Service, wait_for_round
from heloco.wire.layout import Layout, pieces_after, view


class LocalLink:
    """A `Link` that calls the service directly, for workers in its process."""

    def __init__(self, service: Service) -> None:
        self.address = "this process"
        self.service = service

    def describe(self) -> RunInfo:
        return self.service.describe()

    def join(self, name: str, *, returning: Ticket | None, layout: Layout | None) -> Joined:
        entries = layout.entries if layout else None
        return self.service.members.join(JoinRequest(name=name, version=heloco.__version__, layout=entries), returning)

    def send_model(self, ticket: Ticket, layout: Layout, tensors: Mapping[str, Tensor], names: list[str]) -> None:
        upload = self.service.models.upload(ticket, layout)
        turn = upload.begin(upload.size)
        for piece in pieces_after(upload.size, layout, tensors):
            upload.write(turn, piece)
        self.service.models.commit(ticket, ModelCommit(names=tuple(names), digest=digest_of(layout, tensors)))

    def next_round(self, ticket: Ticket, wait_s: float, *, evaluates: bool = False) -> RoundAnswer:
        return wait_for_round(self.service, ticket, wait_s, evaluates)

    def fetch(self, ticket: Ticket, key: RoundKey, layout: Layout, digest: str) -> dict[str, Tensor]:  # noqa: ARG002
        content = bytearray(self.service.rounds.start(ticket, key).read_bytes())
        self.service.state.note_transfer(ticket.machine)
        return view(layout, content)

    def fetch_evaluated(self, ticket: Ticket, job: EvaluationJob, layout: Layout) -> dict[str, Tensor]:
        return view(layout, bytearray(self.service.evaluation.model(ticket, job.arrival).read_bytes()))

    def send_scores(self, ticket: Ticket, result: EvaluationResult) -> None:
        self.service.evaluation.take_in(ticket, result)

    def report_scores(self, ticket: Ticket, report: ScoreReport) -> None:
        self.service.evaluation.take_report(ticket, report)

    def fetch_final(self, ticket: Ticket, layout: Layout) -> dict[str, Tensor]:
        return view(layout, bytearray(self.service.rounds.final(ticket).read_bytes()))

    def hand_in(
        self, ticket: Ticket, key: RoundKey, layout: Layout, tensors: Mapping[str, Tensor], report: ContributionReport
    ) -> Acknowledgement:
        progress = self.service.contributions.progress(ticket, key)
        if progress.ack is not None:
            return progress.ack
        upload = self.service.contributions.upload(ticket, key)
        turn = upload.begin(progress.size)
        for piece in pieces_after(progress.size, layout, tensors):
            upload.write(turn, piece)
        return self.service.contributions.commit(ticket, key, digest_of(layout, tensors), report)

    def beat(self, ticket: Ticket, steps: int) -> BeatAnswer:
        return self.service.members.beat(ticket, steps)

    def abandon(self, ticket: Ticket, text: str) -> None:
        self.service.rounds.abandon(ticket, text)

    def leave(self, ticket: Ticket, text: str) -> None:
        self.service.members.leave(ticket, text)

    def close(self) -> None:
        """There is nothing to close."""


class Unreachable(LocalLink):
    """A link that is down for its first requests."""

    def __init__(self, service: Service, failures: int) -> None:
        super().__init__(service)
        self.failures = failures

    def describe(self) -> RunInfo:
        self.failures -= 1
        if self.failures >= 0:
            raise LinkDown("The gateway does not answer.")
        return super().describe()
