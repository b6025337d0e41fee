"""Codes decide, sentences inform: with every sentence replaced, or empty, a run takes the same course."""

import dataclasses
import itertools
import math
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import heloco
from heloco.cluster.client.run_client import RunClient, RunEnded, why_obsolete
from heloco.cluster.protocol.refusals import Refused
from heloco.cluster.server.service import Service
from heloco.records.journal_reader import FOLDER, read_events
from heloco.records.run_facts import read_facts
from heloco.records.run_files import META
from heloco.report.journal_summary import JournalSummary
from heloco.report.summary import read_summary
from support.local_link import LocalLink
from support.own_loops import adam, batches, external_runs, net, quiet, step, tape, values
from support.runs import lines
from support.sentences import reword_all, without_prose
from support.small_cluster import Clock, Hand, delta, opened

SETTINGS = {"arrivals": 16, "min_workers": 2, "participation": 100, "max_refusals": 2, "norm_limit": 10.0}
REWORDINGS: dict[str, Callable[[str], str]] = {
    "empty": lambda _: "",
    "another": lambda _: "all is well",
    "longer": lambda text: f"the run has ended: {text}",
}
with_other_sentences = pytest.mark.parametrize("reword", REWORDINGS.values(), ids=REWORDINGS)


@pytest.fixture
def same_ids(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Calling it makes ids and secrets begin again at 0, so that two runs have the same."""

    def begin() -> None:
        numbers = itertools.count()
        monkeypatch.setattr(secrets, "token_hex", lambda size: f"{next(numbers):0{2 * size}x}")
        monkeypatch.setattr(secrets, "token_urlsafe", lambda size: f"{next(numbers):0{size}d}")

    return begin


class Script:
    """A run with every kind of trouble, and what became visible of it."""

    def __init__(self, folder: Path, reword: Callable[[str], str]) -> None:
        self.folder, self.reword, self.clock = folder, reword, Clock()
        self.seen: list[Any] = []
        self.service = self.open()

    def open(self) -> Service:
        return opened(self.folder, self.clock, **SETTINGS)

    def see(self, ask: Callable[..., Any], *values: Any) -> None:
        """Notes an answer or the code of a refusal, and then the status."""
        self.clock.now += 1.0
        try:
            answer = without_prose(ask(*values))
        except Refused as refused:
            answer = ("refused", refused.code, refused.size)
        self.service.housekeeping.tick()
        self.seen.append((answer, without_prose(self.service.admin.status())))

    def restart(self, *hands: Hand) -> None:
        self.service.close()
        self.service = self.open()
        for hand in hands:
            hand.service = self.service
            self.see(hand.join)

    def join(self, name: str) -> Hand:
        self.clock.now += 1.0
        return Hand(self.service, name)

    def play(self) -> None:
        one = self.join("one")
        self.see(one.take)  # too few machines
        two, bad = self.join("two"), self.join("bad")
        for seed in range(9):
            self.see((one, two, bad)[seed % 3].work, seed)
        self.spoil(bad)
        self.restart(one, two, bad)
        self.pause(one, two)
        self.evict(one, two)
        self.stop(one)
        self.finish(one)
        self.service.close()

    def spoil(self, bad: Hand) -> None:
        """A contribution that is clipped, and then two that are not finite: the machine is turned away."""
        bad.take()
        self.see(bad.hand_in, delta(9, 1e6))
        for _ in range(2):
            bad.take()
            self.see(bad.hand_in, delta(10, math.nan))
        for ask in (bad.take, bad.join, bad.beat):
            self.see(ask)

    def pause(self, one: Hand, two: Hand) -> None:
        """An admin's pause outlasts a restart."""
        one.take()
        self.see(self.service.pauses.pause, self.reword("for a moment"))
        for ask in (two.take, two.beat):
            self.see(ask)
        self.restart(one, two)
        self.see(two.take)
        self.see(self.service.pauses.unpause)
        self.see(one.hand_in, delta(11))

    def evict(self, one: Hand, two: Hand) -> None:
        self.see(self.service.members.evict, two.id, self.reword("it is too slow"))
        for ask in (two.take, two.join, one.take):
            self.see(ask)
        self.three = self.join("three")
        self.see(self.three.take)
        self.see(self.three.abandon, self.reword("it gave up"))
        self.see(one.work, 12)

    def stop(self, one: Hand) -> None:
        one.take()
        self.see(self.service.admin.stop, self.reword("enough for today"))
        for ask in (one.take, one.join, one.beat):
            self.see(ask)
        self.restart(one, self.three)

    def finish(self, one: Hand) -> None:
        for seed in range(20, 24):
            self.see((one, self.three)[seed % 2].work, seed)
        for ask in (one.take, one.beat):
            self.see(ask)
        self.see(self.three.leave, self.reword("it is done"))


def history(folder: Path, reword: Callable[[str], str]) -> dict[str, Any]:
    """The whole course of the scripted run, as machines, files and reports show it, without its sentences."""
    script = Script(folder, reword)
    script.play()
    journal = JournalSummary()
    events = [event for event, _ in read_events(folder / FOLDER)]
    for event in events:
        journal.follow(event)
    return {
        "answers": script.seen,
        "tape": without_prose(lines(folder / "tape.jsonl")),
        "journal": without_prose(events),
        "summary": dataclasses.asdict(read_summary(folder, read_facts(folder / META))),
        "pauses": without_prose([dataclasses.asdict(pause) for pause in journal.pauses]),
        "partings": without_prose({machine: dataclasses.asdict(parting) for machine, parting in journal.departures.items()}),
    }


@with_other_sentences
def test_a_run_takes_the_same_course_whatever_its_sentences_say(tmp_path, monkeypatch, same_ids, reword):
    same_ids()
    expected = history(tmp_path / "as-it-is", lambda text: text)
    assert_all_kinds(expected)
    reworded = reword_all(monkeypatch, reword)
    assert {"Refusal", "Ended", "Paused", "Wait", "Ruling", "Judgement", "Arrival", "Acknowledgement"} <= reworded
    assert {"Part", "Pause", "Abandon", "Obsolete", "RunEnded", "NotHeld"} <= reworded
    same_ids()
    other = history(tmp_path / "reworded", reword)
    for part, value in expected.items():
        assert other[part] == value, part


def assert_all_kinds(course: dict[str, Any]) -> None:
    """The script has what it is for."""
    refusals = {answer[1] for answer, _ in course["answers"] if isinstance(answer, tuple)}
    assert refusals == {"not-finite", "barred", "ended"}
    statuses = [status for _, status in course["answers"]]
    assert {status["paused"]["kind"] for status in statuses if status["paused"]} == {"machines", "admin"}
    assert {status["ended"]["kind"] for status in statuses if status["ended"]} == {"stopped", "finished"}
    assert {(line["verdict"], line.get("code", "")) for line in course["tape"]} == {("applied", ""), ("applied", "norm")}
    assert {event["kind"] for event in course["journal"] if event["event"] == "part"} == {"turned-away", "evicted", "left"}


def train(service: Service) -> dict[str, Any]:
    """A loop of one's own, until its run has ended."""
    model = net()
    optimizer = adam(model)
    with heloco.join(LocalLink(service), model, optimizer, tell=quiet) as run:
        for batch in batches():
            step(model, optimizer, batch)
    return {
        "loop": (run.ended, run.arrivals, [p.tolist() for p in values(model)]),
        "tape": [(line["verdict"], line["arrival"], line["digest"]) for line in tape(service)],
    }


@with_other_sentences
def test_a_loop_of_ones_own_ends_with_its_run_whatever_its_sentences_say(tmp_path, monkeypatch, reword):
    with external_runs(tmp_path) as start:
        expected = train(start("as-it-is"))
        reword_all(monkeypatch, reword)
        assert train(start("reworded")) == expected
        assert expected["loop"][:2] == (True, 4)


@with_other_sentences
def test_a_machine_knows_how_its_run_ended_and_which_round_is_obsolete(tmp_path, monkeypatch, reword):
    reword_all(monkeypatch, reword)
    service = opened(tmp_path / "run", Clock())
    client = RunClient(LocalLink(service), "m", tell=quiet)
    client.join()
    taken_round = client.take()
    assert taken_round is not None and client.obsolete is None and client.waiting is None
    service.pauses.pause("")
    service.admin.stop("")
    assert why_obsolete(client.link.beat(client.joined.ticket, 0), taken_round.key).kind == "ended"
    with pytest.raises(RunEnded) as end:
        client.take()
    assert end.value.ended.kind == "stopped"
    client.leave()
    service.close()
