"""What must be true of a run's folder after a restart: nothing that was acknowledged is lost."""

from pathlib import Path

from heloco.cluster.server.replay import replay
from heloco.run import RunFolder
from support.runs import tape
from support.small_cluster import Hand, opened


def check_account(folder: Path, acks: list, **options) -> None:
    """Every acknowledged contribution counts, once, and the journal gives the same again."""
    service = opened(folder, **options)
    on_tape = [(line["worker"], line["round"], line["version"], line["arrival"], line["outer_step"]) for line in tape(folder)]
    assert on_tape[: len(acks)] == [(a.worker, a.round, a.version, a.arrival, a.outer_step) for a in acks]
    assert len(on_tape) <= len(acks) + 1  # one more may be durable without an answer
    hand = Hand(service, "another")
    assert hand.work(1000).arrival == len(on_tape) + 1
    digest = service.state.run.digest()
    service.close()
    replayed = replay(RunFolder.open(folder), None)
    assert (replayed.difference, replayed.digest) == (None, digest)
    assert replayed.begun_at + replayed.lines == len(on_tape) + 1
