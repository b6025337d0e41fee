"""Codes decide, sentences inform: with every sentence replaced, or empty, a run takes the same course."""

import dataclasses
import itertools
import math
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from rich.console import Console

import heloco
from heloco.cli.main import run as run_command
from heloco.cli.serve_view import RunView
from heloco.cli.watch import in_the_terminal
from heloco.cluster.client.obsolete_rounds import why_obsolete
from heloco.cluster.client.run_client import RunClient, RunEnded
from heloco.cluster.client.worker import Worker
from heloco.cluster.protocol.link import LinkDown
from heloco.cluster.protocol.messages import Paused
from heloco.cluster.protocol.refusals import Refused
from heloco.cluster.server.scorers import ScorerProcess
from heloco.cluster.server.service import Service
from heloco.errors import RunStopped, UserError
from heloco.records.journal_reader import FOLDER, read_events
from heloco.records.run_facts import read_facts
from heloco.records.run_files import META
from heloco.report.journal_summary import JournalSummary
from heloco.report.run_reader import read_runs
from heloco.report.run_state import LastStatus
from heloco.report.summary import read_summary
from heloco.wire.layout import Layout
from support.gateways import Machine, Serve, train
from support.local_link import LocalLink, Unreachable
from support.own_loops import adam, batches, external_runs, net, quiet, step, tape, values
from support.runs import lines
from support.sentences import reword_all, without_prose
from support.small_cluster import Clock, Hand, delta, join_request, opened

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
        self.service.housekeeping.save_if_due(wait=True)  # rates after a restart depend on the checkpoint it begins from
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
        other_model = (("parameter.0", "F32", (9, 9)),)
        self.see(self.service.members.join, join_request("stranger", layout=other_model))
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
        for end in ("stop", "suspend"):
            one.take()
            self.see(getattr(self.service.admin, end), self.reword("enough for today"))
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
    assert {"Part", "Pause", "Abandon", "Obsolete", "MachineRecord", "MachineEntry", "ScorerAnswer", "ReplayResult"} <= reworded
    assert {"RunEnded", "NotHeld", "LinkDown", "RunStopped", "UserError", "Abandoned"} <= reworded
    same_ids()
    other = history(tmp_path / "reworded", reword)
    for part, value in expected.items():
        assert other[part] == value, part


def assert_all_kinds(course: dict[str, Any]) -> None:
    refusals = {answer[1] for answer, _ in course["answers"] if isinstance(answer, tuple)}
    assert refusals == {"layout", "not-finite", "barred", "ended", "suspended"}
    statuses = [status for _, status in course["answers"]]
    assert {status["paused"]["kind"] for status in statuses if status["paused"]} == {"machines", "admin"}
    assert {status["ended"]["kind"] for status in statuses if status["ended"]} == {"stopped", "suspended", "finished"}
    assert {(line["verdict"], line.get("code", "")) for line in course["tape"]} == {("applied", ""), ("applied", "norm")}
    assert {event["kind"] for event in course["journal"] if event["event"] == "part"} == {"turned-away", "evicted", "left"}


def take_part(service: Service) -> dict[str, Any]:
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
        expected = take_part(start("as-it-is"))
        reword_all(monkeypatch, reword)
        assert take_part(start("reworded")) == expected
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


@with_other_sentences
def test_a_machine_says_that_its_run_is_out_of_reach_and_that_it_is_back(tmp_path, monkeypatch, reword):
    reword_all(monkeypatch, reword)
    service, messages = opened(tmp_path / "run", Clock()), []
    RunClient(Unreachable(service, 2), "m", tell=messages.append).describe()
    assert [message.endswith("Trying again.") for message in messages] == [True, False] and messages[-1] == "The run is back."
    with pytest.raises(RunStopped):
        RunClient(Unreachable(service, 9), "m", patience_s=0, tell=quiet).describe()
    model = net()
    with pytest.raises(UserError), heloco.join(Unreachable(service, 9), model, adam(model), patience_s=0, tell=quiet):
        raise AssertionError("it is in no run")
    service.close()


# ---- commands


@with_other_sentences
def test_a_pause_is_shown_when_its_kind_changes(tmp_path, monkeypatch, capsys, reword):
    reword_all(monkeypatch, reword)
    service = opened(tmp_path / "run", Clock(), min_workers=1)
    machine, view = Hand(service, "m"), RunView(tmp_path / "run", Console())
    for act in (lambda: None, lambda: service.pauses.pause("for a moment"), lambda: service.pauses.pause("for an hour")):
        act()
        view.tell(service.admin.status())
    for free_mb in (3.1, 3.0):
        full = Paused(kind="space", text=reword(f"there are {free_mb} MB left"))
        view.tell(structs.replace(service.admin.status(), paused=full))
    service.pauses.unpause()
    machine.beat()
    view.tell(service.admin.status())
    printed = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert printed == ["m is here (1 machine).", "The run pauses", "The run pauses", "The run goes on."]
    service.close()


@with_other_sentences
def test_a_run_that_is_watched_is_given_up_for_whatever_reason(tmp_path, reword):
    service = opened(tmp_path / "run", Clock(), **SETTINGS)
    last_status = LastStatus()
    service.admin.stop(reword("it is gone"))
    last_status.take(service.admin.status())
    with pytest.raises(RunStopped):
        in_the_terminal(read_runs([tmp_path / "run"]), {tmp_path / "run": last_status})
    service.close()


@with_other_sentences
def test_a_replay_that_differs_exits_with_1(tmp_path, monkeypatch, capsys, reword):
    folder = tmp_path / "run"
    service = opened(folder, Clock(), min_workers=1)
    machine = Hand(service, "m")
    for seed in range(3):
        machine.work(seed)
    service.close()
    reword_all(monkeypatch, reword)
    assert run_command(["replay", str(folder)]) == 0
    path = folder / "tape.jsonl"
    path.write_text(path.read_text().replace(lines(path)[1]["digest"], "0" * 16))
    assert run_command(["replay", str(folder)]) == 1
    capsys.readouterr()


def test_an_evaluation_that_fails_in_another_process_is_no_evaluation(tmp_path, tiny):
    scorer = ScorerProcess(tiny[1])
    for reword in REWORDINGS.values():
        with pytest.MonkeyPatch.context() as patch:
            reword_all(patch, reword)
            with pytest.raises(UserError):
                scorer(tmp_path / "no-such-model")
    scorer.close()


# ---- over HTTPS


class Course:
    """A run over a gateway, with machines one after the other, and what became visible of it."""

    def __init__(self, serve: Serve, tiny: Any, reword: Callable[[str], str]) -> None:
        self.served, self.tiny, self.reword = serve(arrivals=4, eval_every=4, checkpoint_every=2), tiny, reword
        self.admin = self.served.link(right="admin")
        self.seen: list[Any] = []

    def see(self, ask: Callable[..., Any], *values: Any) -> None:
        """Notes the code of a refusal, and then the status as an admin sees it."""
        code = None
        try:
            ask(*values)
        except Refused as refused:
            code = refused.code
        status = self.admin.status()
        kinds = [each.kind if each is not None else None for each in (status.paused, status.ended)]
        self.seen.append((code, *kinds, status.arrivals, len(status.machines)))

    def play(self) -> None:
        with self.served.service.state.changed:
            self.served.service.pauses.consider()  # otherwise the first pause begins at the housekeeping's next look
        stranger = self.served.link()
        stranger.describe()
        self.see(lambda: stranger.join("stranger", returning=None, layout=Layout((("parameter.0", "F32", (9, 9)),))))
        bad = Machine(self.served.other_link(), "bad")
        self.see(self.admin.evict, bad.ticket.machine, self.reword("it is too slow"))
        self.see(bad.take)
        self.give_back()
        self.see(self.admin.pause, self.reword("for a moment"))
        self.see(self.admin.unpause)
        self.see(lambda: train(self.tiny, self.served.link(), "last"))
        self.see(lambda: stranger.join("late", returning=None, layout=None))
        self.served.service.finish_evaluations()

    def give_back(self) -> None:
        """A machine loses its link for a moment, and is stopped in its second round."""
        link, worker = self.served.link(), Worker(*self.tiny, tell=lambda _: None)
        fetch, fetches = link.fetch, 0

        def fetch_badly(*values: Any) -> Any:
            nonlocal fetches
            fetches += 1
            if fetches == 1:
                raise LinkDown("The start of the round is lost.")
            if fetches == 3:
                worker.stop_requested = self.reword("stopped by SIGTERM")
            return fetch(*values)

        link.fetch = fetch_badly
        self.see(lambda: worker.run(link, "first", link.describe().run))

    def result(self) -> dict[str, Any]:
        events = [type(event).__name__ + getattr(event, "kind", "") for event, _ in read_events(self.served.folder / FOLDER)]
        tape_lines = [
            (line["worker"], line["round"], line["verdict"], line["digest"]) for line in lines(self.served.folder / "tape.jsonl")
        ]
        return {"seen": self.seen, "events": events, "tape": tape_lines}


@pytest.mark.usefixtures("one_thread")
def test_a_run_over_https_takes_the_same_course_whatever_its_sentences_say(serve, tiny):
    def course(reword: Callable[[str], str]) -> dict[str, Any]:
        run = Course(serve, tiny, reword)
        run.play()
        return run.result()

    expected = course(lambda text: text)
    assert [code for code, *_ in expected["seen"]] == ["layout", None, "barred", None, None, None, None, "ended"]
    assert expected["events"].count("Abandongiven-back") == 1 and len(expected["tape"]) == 4
    for reword in REWORDINGS.values():
        with pytest.MonkeyPatch.context() as patch:
            reword_all(patch, reword)
            assert course(reword) == expected
