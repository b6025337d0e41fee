"""The account of a run that has ended: every acknowledged contribution once, no window skipped or repeated, replay equal."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any


def account(run: Path, acks: Path, arrivals: int) -> dict[str, Any]:
    """Of the run's folder, with the acknowledgements that workers wrote down in `acks`; `arrivals`: as many as there must be."""
    from heloco.cluster.client.worker import task_of
    from heloco.cluster.protocol.messages import RunInfo
    from heloco.cluster.server.replay import replay
    from heloco.run import RunFolder, checkpoint
    from heloco.run.lines import read_lines

    folder = RunFolder.open(run)
    tape = list(read_lines(run / "tape.jsonl"))
    accepted = [line for line in tape if line["verdict"] != "refused"]
    check_arrivals(accepted, arrivals)
    acknowledged = check_acks(tape, acks)
    state = checkpoint.load_state(checkpoint.list_checkpoints(run / "checkpoints")[-1])
    assert state["arrival"] == arrivals
    check_ledger(accepted, state["books"])
    config, digest = (run / "config.toml").read_text(), folder.meta()["task_digest"]
    info = RunInfo(run="", heloco="", config=config, task_digest=digest, model_digest="", external=False)
    replayed = replay(folder, task_of(info, device="cpu")[0])
    assert replayed.difference == "" and replayed.lines == len(tape) - lines_until(tape, replayed.begun_at), replayed
    return {"arrivals": len(accepted), "acknowledged": acknowledged, "replayed": asdict(replayed)}


def lines_until(tape: list[dict[str, Any]], arrival: int) -> int:
    """Lines of the tape up to an arrival: a journal on a disk that was full has lost what checkpoints stand for."""
    return next((i + 1 for i, line in enumerate(tape) if line["arrival"] == arrival and line["verdict"] != "refused"), 0)


def check_arrivals(accepted: list[dict[str, Any]], planned: int) -> None:
    assert [line["arrival"] for line in accepted] == list(range(1, planned + 1))
    rounds = [(line["worker"], line["round"]) for line in accepted]
    assert len(rounds) == len(set(rounds)), "a contribution counts twice"


def check_acks(tape: list[dict[str, Any]], folder: Path) -> int:
    """Every acknowledgement that a worker got is on the tape, once, as it was told; how many contributions that were."""
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


def check_ledger(accepted: list[dict[str, Any]], books: dict[str, Any]) -> None:
    """No window of data was skipped or used twice: what was used, is under way or waits to be handed out again is all of it."""
    for shard, page in enumerate(books["ledger"]):
        spans = [tuple(span) for line in accepted if line["shard"] == shard for span in line["spans"]]
        spans += [tuple(span) for held in books["held"] if held[3] == shard for span in held[4]]
        spans += [tuple(span) for span in page["returned"]]
        at = 0
        for first, count in sorted(spans):
            assert first == at, f"shard {shard}: window {at} {'was skipped' if first > at else 'was used twice'}"
            at += count
        assert at == page["cursor"]
