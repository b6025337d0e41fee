"""The account of a run that has ended: it has every acknowledged contribution once, no window was skipped or repeated, and the
replay is equal."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heloco.books import Books


def account(run: Path, acks: Path, arrivals: int) -> dict[str, Any]:
    """Checks the run's folder against the acknowledgements that workers wrote to `acks`. `arrivals` is the expected number."""
    from heloco.cluster.client.worker import task_of
    from heloco.cluster.protocol.messages import RunInfo
    from heloco.cluster.server.replay import replay
    from heloco.run import RunFolder, checkpoint
    from heloco.run.checkpoint import CheckpointState

    folder = RunFolder.open(run)
    tape = [json.loads(line) for line in (run / "tape.jsonl").read_text().splitlines()]
    accepted = [line for line in tape if line["verdict"] != "refused"]
    check_arrivals(accepted, arrivals)
    acknowledged = check_acks(tape, acks)
    state = checkpoint.load_state(checkpoint.list_checkpoints(run / "checkpoints")[-1], CheckpointState)
    assert state.arrival == arrivals
    check_ledger(accepted, state.books)
    config, digest = (run / "config.toml").read_text(), folder.facts().task_digest
    info = RunInfo(run="", heloco="", config=config, task_digest=digest, model_digest="", external=False)
    replayed = replay(folder, task_of(info, device="cpu")[0])
    assert replayed.difference is None and replayed.lines == len(tape) - lines_until(tape, replayed.begun_at), replayed
    return {"arrivals": len(accepted), "acknowledged": acknowledged, "replayed": asdict(replayed)}


def lines_until(tape: list[dict[str, Any]], arrival: int) -> int:
    """Lines of the tape up to an arrival. On a full disk, events that checkpoints cover were pruned from the journal."""
    return next((i + 1 for i, line in enumerate(tape) if line["arrival"] == arrival and line["verdict"] != "refused"), 0)


def check_arrivals(accepted: list[dict[str, Any]], planned: int) -> None:
    assert [line["arrival"] for line in accepted] == list(range(1, planned + 1))
    rounds = [(line["worker"], line["round"]) for line in accepted]
    assert len(rounds) == len(set(rounds)), "a contribution counts twice"


def check_acks(tape: list[dict[str, Any]], folder: Path) -> int:
    """Checks that every acknowledgement that a worker got is on the tape once, with the same numbers. Returns their count."""
    lines = {(line["worker"], line["round"], line["version"]): line for line in tape}
    assert len(lines) == len(tape)
    keys = set()
    for path in folder.glob("acks-*"):
        for text in path.read_text().splitlines():
            ack = json.loads(text)
            key = (ack["worker"], ack["round"], ack["version"])
            line = lines[key]
            assert (line["verdict"], line["arrival"], line["outer_step"]) == (ack["verdict"], ack["arrival"], ack["outer_step"])
            keys.add(key)
    return len(keys)


def check_ledger(accepted: list[dict[str, Any]], books: "Books") -> None:
    """Checks that no window of data was skipped or used twice: each was used, is under way, or waits to be handed out again."""
    for shard, page in enumerate(books.ledger):
        spans = [tuple(span) for line in accepted if line["shard"] == shard for span in line["spans"]]
        spans += [
            span for round_under_way in books.rounds_under_way if round_under_way.shard == shard for span in round_under_way.spans
        ]
        spans += page.returned_spans
        at = 0
        for first, count in sorted(spans):
            assert first == at, f"shard {shard}: window {at} {'was skipped' if first > at else 'was used twice'}"
            at += count
        assert at == page.cursor
